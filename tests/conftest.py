"""What every test stands on: where kernels run, one seed, checks in the interpreter.

Triton decides at import whether kernels are interpreted, so this file decides before anything
imports it. Without a GPU kernels run in the interpreter on the CPU; with one they are compiled,
and every test that takes the `device` fixture counts as a `gpu` test there. A test marked `sm90`
is a `gpu` test that needs Hopper.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

if "triton" in sys.modules:
    raise RuntimeError("triton was imported before tests/conftest.py could choose the interpreter")
HAS_GPU = torch.cuda.is_available()
if os.environ.get("BSK_REQUIRE_GPU") and not HAS_GPU:
    # a worker that lost its GPU to another one's fault must not go on and skip
    raise RuntimeError("BSK_REQUIRE_GPU is set, but PyTorch sees no CUDA GPU")
# Seed of the emulator, in which tests of Hopper kernels then run: see `make emulate`.
EMULATED = os.environ.get("BSK_EMULATE", "")
if not HAS_GPU and not EMULATED:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# JAX reads these when it first computes: devices to shard over, and memory of a GPU left to torch
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# nearly all time of a test of JAX is spent in the compiler
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from blackwell_sparsek.core.env import environment_for_compiler, triton_interpreted  # noqa: E402
from blackwell_sparsek.testing.interpreter import interpreter_checks  # noqa: E402
from blackwell_sparsek.testing.interpreter_speed import quick_interpreter  # noqa: E402

# Workers of pytest-xdist share the cores: if each took all of them, they would wait for each other.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))

SEED = 20240229
ON_GPU = HAS_GPU and not triton_interpreted()
# files of tests that take minutes, most of it for compiling
LONG = (
    ("test_fuzz", "test_soak", "test_canaries")
    if ON_GPU
    else ("test_all_kernels", "test_releases", "test_sizes_of_one")
)

if ON_GPU and hasattr(torch.compiler.config, "force_cudagraph_gc"):
    # A graph of an earlier test that Python destroys during a capture makes the capture fail, and
    # since 2.9 torch does not collect garbage before it.
    torch.compiler.config.force_cudagraph_gc = True

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
        with_kernels = ON_GPU and "device" in getattr(item, "fixturenames", ())
        if with_kernels or item.get_closest_marker("sm90"):
            item.add_marker("gpu")
        if (reason := _missing_gpu(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    # first, so that the last of them does not run alone
    items.sort(key=lambda item: not item.path.name.startswith(LONG))


def _missing_gpu(item):
    """Which GPU a test needs that this machine does not have; None if it can run."""
    if EMULATED:
        return None if item.get_closest_marker("sm90") else "not for the emulator"
    if not HAS_GPU and item.get_closest_marker("gpu"):
        return "needs a CUDA GPU"
    if item.get_closest_marker("sm90") and torch.cuda.get_device_capability() != (9, 0):
        return "needs sm_90"
    return None


@pytest.fixture
def device():
    """Where kernels run here: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def interpreted():
    """Skip where kernels are compiled: for tests of kernels on host memory or other constants."""
    if not triton_interpreted() or importlib.util.find_spec("triton") is None:
        pytest.skip("needs the Triton interpreter")


@pytest.fixture
def choosing_with(monkeypatch):
    """Have products of blocks chosen as with some release of Triton, whichever is installed."""
    from blackwell_sparsek.core import compat
    from blackwell_sparsek.matmul import choice
    from blackwell_sparsek.matmul.sm90.tuning import narrow_sm90_config, strips_config

    kept = (narrow_sm90_config, strips_config)
    kept += (choice._slower_than_triton, choice._slower_than_dense)

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


# launches that take longer than this in the emulator are too large for it
EMULATED_SECONDS = 60


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    if not EMULATED:
        return (yield)
    try:
        return (yield)
    except TimeoutError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _emulated():
    if not EMULATED:
        yield
        return
    from blackwell_sparsek.testing.emulator.gpu_tests import emulated_gpu

    with emulated_gpu(seed=int(EMULATED), seconds=EMULATED_SECONDS):
        yield


@pytest.fixture(autouse=True, scope="session")
def _interpreter_checks():
    if importlib.util.find_spec("triton") is None:
        yield
        return
    with interpreter_checks(), quick_interpreter():
        yield


# For scripts that count the variants that launches would compile: with the keys of Triton's own
# front end, in a process that does not interpret kernels. Nothing is compiled or run.
RECORDER = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from blackwell_sparsek.calls.attention import (
    AttentionCall, AttnGradients, AttnSpec, BackwardCall, empty_lse, empty_out)
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.block_mask import BlockMask

launches = []


class Recorder:
    def __init__(self, kernel):
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid):
        assert len(grid) == 1 and grid[0] > 0

        def run(*args, **options):
            launches.append((grid, args, str(self.bind(*args, **options)[1:])))

        return run


def variants(calls):
    launches.clear()
    for call in calls:
        call()
    return len({key for _, _, key in launches})


def inputs(sq, sk, batch, heads, kv_heads, dim, bshd):
    shapes = (batch, heads, sq, dim), (batch, kv_heads, sk, dim), (batch, kv_heads, sk, dim)
    if bshd:
        return [torch.empty(b, s, h, d, dtype=torch.float16).transpose(1, 2)
                for b, h, s, d in shapes]
    return [torch.empty(s, dtype=torch.float16) for s in shapes]


def blocks(sq, sk, batch=1, heads=1, keep=0.5):
    shape = (batch, heads, -(-sq // 64), -(-sk // 32))
    return BlockMask.from_dense(torch.rand(shape) < keep, (64, 32), (sq, sk))


# of calls that differ only in what is known at run time
def variants_by_data(call, varlen):
    lengths = [(a, b) for a in LENGTHS for b in LENGTHS]
    masks = [(n, blocks(n, n, b, h, keep))
             for b in (1, 2) for h in (1, 4) for n in (65, 1024) for keep in (0.1, 1.0)]
    packed = [((1,), (1,)), ((5, 0, 16), (16, 1, 2)), ((100, 28), (64, 64))]
    return {
        "lengths": variants([lambda a=a, b=b: call(a, b) for a, b in lengths]),
        "lengths, heads inner": variants([lambda a=a, b=b: call(a, b, bshd=True)
                                          for a, b in lengths if a > 1 and b > 1]),
        "batch": variants([lambda b=b: call(batch=b) for b in (1, 2, 3, 16, 33)]),
        "bands": variants([lambda b=b: call(band=b) for b in BANDS]),
        "scales": variants([lambda s=s: call(scale=s) for s in (1.0, 0.5, -1.0, 0.0, 16.0)]),
        "softcaps": variants([lambda s=s: call(softcap=s) for s in (1.0, 16.0, 30.0)]),
        "masks": variants([lambda n=n, mask=mask: call(n, n, mask=mask) for n, mask in masks]),
        "packed": variants([lambda a=a, b=b: varlen(a, b) for a, b in packed]),
    }


LENGTHS = (1, 2, 15, 16, 17, 64, 100, 128, 1000)
BANDS = (Band(None, None), Band(None, 0), Band(0, 0), Band(1, 0), Band(16, 3), Band(17, None))
"""


@pytest.fixture(scope="session")
def run_recorder():
    """Run a script after RECORDER; returns the JSON in the last line that it prints."""

    def run(script):
        done = subprocess.run(
            [sys.executable, "-c", RECORDER + script],
            env=environment_for_compiler(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
