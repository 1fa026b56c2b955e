import os
import pathlib
import resource
import signal
import subprocess
import sys

import pytest
import torch

from blackwell_sparsek.testing import guard, layouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps pages through libc")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", layouts.KINDS)
@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 1025)])
def test_same_values_and_strides(shape, kind, side):
    x = layouts.strided_like(torch.randn(shape), kind)
    y = guard.guarded(x, side)
    assert torch.equal(x, y) and x.stride() == y.stride()
    y.fill_(1.0)


def test_empty_tensors_and_unknown_sides():
    assert guard.guarded(torch.zeros(2, 0)).shape == (2, 0)
    with pytest.raises(ValueError, match="guard side is 'top'"):
        guard.guarded(torch.zeros(1), "top")


_PROBE = """
import sys, torch, triton, triton.language as tl
from blackwell_sparsek.testing.guard import guarded

@triton.jit
def probe(x_ptr, out_ptr, offset, n, MASKED: tl.constexpr):
    offs = tl.arange(0, 8) + offset
    mask = (offs >= 0) & (offs < n)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0) if MASKED else tl.load(x_ptr + offs)
    tl.store(out_ptr + tl.arange(0, 8), x)

side, offset, masked = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "masked"
x = guarded(torch.ones(8), side)
out = torch.zeros(8)
probe[(1,)](x, out, offset, 8, masked)
print(int(out.sum()))
"""


@pytest.mark.parametrize(
    ("side", "offset", "masked", "expected"),
    [
        ("right", 0, "unmasked", "8"),
        ("right", 1, "masked", "7"),
        ("right", 1, "unmasked", None),
        ("left", -1, "masked", "7"),
        ("left", -1, "unmasked", None),
    ],
)
def test_an_access_outside_kills_the_process(tmp_path, side, offset, masked, expected):
    pytest.importorskip("triton")
    script = tmp_path / "probe.py"
    script.write_text(_PROBE)
    env = dict(os.environ, TRITON_INTERPRET="1")
    command = [sys.executable, str(script), side, str(offset), masked]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    if expected is None:
        assert done.returncode == -signal.SIGSEGV
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == expected


def test_huge_tensors_occupy_nothing():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = guard.huge_zeros((2**16, 2**16 + 1), torch.float32)
    assert x.numel() > 2**32
    x[-1, -1] = 3.0
    assert x[-1, -1] == 3.0 and x[-1, -2] == 0.0
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024


def test_huge_stride_with_few_elements():
    x = guard.huge_zeros((3, 4), torch.float16, (2**31, 1))
    x[2] = 1.0
    assert x.numel() == 12 and x.sum() == 4


def test_memory_is_given_back():
    for _ in range(200):  # 16 GiB of address space each: a leak ends in MemoryError
        guard.huge_zeros((2**32,), torch.float32)[-1].fill_(1.0)
    pages = pathlib.Path("/proc/self/statm").read_text().split()[0]
    assert int(pages) * resource.getpagesize() < 100 * 2**34
