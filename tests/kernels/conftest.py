import importlib.util
import json
import subprocess
import sys

import pytest

from blackwell_sparsek.core.env import environment_for_compiler
from blackwell_sparsek.testing.interpreter_speed import quick_device_calls


@pytest.fixture(autouse=True, scope="session")
def _quick_device_calls():
    if importlib.util.find_spec("triton") is None:
        yield
        return
    with quick_device_calls():
        yield


# For scripts that count the variants that launches would compile: with the keys of Triton's own
# front end, in a process that does not interpret kernels. Nothing is compiled or run.
RECORDER = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from blackwell_sparsek.formats.attention_spec import AttnSpec, empty_lse, empty_out
from blackwell_sparsek.formats.band import EVERYTHING, Band
from blackwell_sparsek.formats.block_mask import BlockMask

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
