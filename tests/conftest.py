"""What every test stands on: where kernels run, one seed, checks in the interpreter.

Triton decides at import whether kernels are interpreted, so this file decides before anything
imports it. Without a GPU kernels run in the interpreter on the CPU; with one they are compiled,
and every test that takes the `device` fixture counts as a `gpu` test there.
"""

import importlib.util
import os
import sys

import pytest
import torch

if "triton" in sys.modules:
    raise RuntimeError("triton was imported before tests/conftest.py could choose the interpreter")
HAS_GPU = torch.cuda.is_available()
if os.environ.get("BSK_REQUIRE_GPU") and not HAS_GPU:
    # a worker that lost its GPU to another one's fault must not go on and skip
    raise RuntimeError("BSK_REQUIRE_GPU is set, but PyTorch sees no CUDA GPU")
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from blackwell_sparsek.core.env import triton_interpreted  # noqa: E402
from blackwell_sparsek.testing.interpreter import interpreter_checks  # noqa: E402

# Workers of pytest-xdist share the cores: if each took all of them, they would wait for each other.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))

SEED = 20240229
ON_GPU = HAS_GPU and not triton_interpreted()

try:
    import hypothesis
except ImportError:
    pass  # machines where nothing can be installed run the gpu tests, which do without it
else:
    hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("repeatable")


# before pytest applies -m
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if ON_GPU and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device():
    """Where kernels run here: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def interpreted():
    """Skip where kernels are compiled: for tests that need host memory under the kernel."""
    if not triton_interpreted() or importlib.util.find_spec("triton") is None:
        pytest.skip("needs the Triton interpreter")


@pytest.fixture
def choosing_with(monkeypatch):
    """Have products of blocks chosen as with some release of Triton, whichever is installed."""
    from blackwell_sparsek.core import compat
    from blackwell_sparsek.ops import bsr_dense
    from blackwell_sparsek.tuning.bsr_sm90 import narrow_sm90_config
    from blackwell_sparsek.tuning.bsr_strips import strips_config

    kept = (narrow_sm90_config, strips_config, bsr_dense._sm90_for_triton)
    kept += (bsr_dense._sm90_for_dense, bsr_dense._triton_for_dense)

    def forget():
        for answers in kept:
            answers.cache_clear()

    def choose(release):
        monkeypatch.setattr(compat, "triton_version", lambda: release)
        forget()

    yield choose
    forget()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_checks():
    if importlib.util.find_spec("triton") is None:
        yield
        return
    with interpreter_checks():
        yield
