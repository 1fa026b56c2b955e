"""Answers that are found once."""

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing.kept import kept


@pytest.fixture
def found(monkeypatch, tmp_path):
    """What was asked, in the order in which answers were found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return []


def ask(found, what, kind="kind"):
    return kept(kind, what, lambda: (found.append(what), {"answer": [what, 1]})[1])


def test_an_answer_is_found_once(found):
    assert ask(found, "x") == ask(found, "x") == {"answer": ["x", 1]}
    assert ask(found, "y") == {"answer": ["y", 1]}
    assert found == ["x", "y"]
    ask(found, "x", kind="another")
    assert found == ["x", "y", "x"]


def test_a_damaged_answer_is_found_again(found, tmp_path):
    ask(found, "x")
    (place,) = (tmp_path / "kind").iterdir()
    place.write_text(place.read_text()[:5])
    assert ask(found, "x") == {"answer": ["x", 1]} and found == ["x", "x"]
    ask(found, "x")
    assert found == ["x", "x"]


def test_an_error_is_no_answer(found, tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kept("kind", "x", lambda: 1 / 0)
    assert not (tmp_path / "kind").exists()
