import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device.fp8 import e4m3_bits, e4m3_values

FP8 = torch.float8_e4m3fn


@triton.jit
def _there_kernel(out_ptr, x_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(out_ptr + offs, e4m3_bits(tl.load(x_ptr + offs)))


@triton.jit
def _back_kernel(out_ptr, x_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(out_ptr + offs, e4m3_values(tl.load(x_ptr + offs)))


def test_all_values_come_back(device):
    bits = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, device=device)
    _back_kernel[(1,)](out, bits, 256)
    expected = bits.view(FP8).float()
    assert torch.equal(out.nan_to_num(999), expected.nan_to_num(999))


def test_rounds_as_torch_does_but_saturates(device):
    x = (torch.randn(4096) * 10.0 ** torch.randint(-4, 4, (4096,))).to(device)
    out = torch.empty(4096, dtype=torch.uint8, device=device)
    _there_kernel[(1,)](out, x, 4096)
    assert torch.equal(out, x.clamp(-448, 448).to(FP8).view(torch.uint8))
    assert (x.abs() > 448).any() and (x.abs() < 2**-7).any()
