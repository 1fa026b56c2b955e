import subprocess
import sys

import pytest

from blackwell_sparsek import integrations

_FRESH = """
import sys
import blackwell_sparsek as bsk
assert "blackwell_sparsek.integrations.huggingface" not in sys.modules
assert callable(bsk.integrations.huggingface.register)
print("transformers" in sys.modules)
"""


def test_bridges_are_found_without_an_import_and_import_nothing():
    done = subprocess.run(
        [sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="has no attribute 'tensorflow'"):
        _ = integrations.tensorflow
