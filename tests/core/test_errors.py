import pytest

import blackwell_sparsek as bsk
from blackwell_sparsek import BskError, InvalidInput, InvalidType, Unsupported


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (InvalidInput, (BskError, ValueError)),
        (InvalidType, (BskError, InvalidInput, ValueError, TypeError)),
        (Unsupported, (BskError, NotImplementedError)),
    ],
)
def test_errors_are_caught_as_what_they_are(error, bases):
    for base in bases:
        with pytest.raises(base, match=r"^said$"):
            raise error("said")


def test_what_cannot_run_is_no_wrong_input():
    assert not issubclass(Unsupported, ValueError | TypeError | InvalidInput)
    assert not issubclass(InvalidInput, TypeError | NotImplementedError)
    assert not issubclass(BskError, ValueError | RuntimeError)


def test_all_are_public():
    for error in (BskError, InvalidInput, InvalidType, Unsupported):
        assert getattr(bsk, error.__name__) is error
