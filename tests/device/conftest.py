import importlib.util

import pytest

from blackwell_sparsek.testing.interpreter_speed import quick_device_calls


@pytest.fixture(autouse=True, scope="session")
def _quick_device_calls():
    if importlib.util.find_spec("triton") is None:
        yield
        return
    with quick_device_calls():
        yield
