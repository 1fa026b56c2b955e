"""Scale and softcap."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device.scores import cap, fold_sign


@triton.jit
def _cap_probe(out_ptr, s_ptr, inverse_cap, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, cap(tl.load(s_ptr + offs), inverse_cap))


@triton.jit
def _sign_probe(out_ptr, factor_ptr, q_ptr, scale_log2, N: tl.constexpr):
    offs = tl.arange(0, N)
    q, factor = fold_sign(tl.load(q_ptr + offs), scale_log2)
    tl.store(out_ptr + offs, q)
    tl.store(factor_ptr, factor)


def test_softcap_is_within_a_few_ulp_of_tanh(device):
    magnitudes = torch.logspace(-20, 3, 512)
    s = torch.cat([magnitudes, -magnitudes]).to(device)
    out = torch.full_like(s, float("nan"))
    _cap_probe[(1,)](out, s, 0.37, N=1024)
    exact = torch.tanh(s.double().cpu() * torch.tensor(0.37).double())
    assert ((out.cpu() - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact.abs()).all()


def test_without_softcap_scores_stay_raw(device):
    s = torch.randn(64, device=device)
    out = torch.empty_like(s)
    _cap_probe[(1,)](out, s, None, N=64)
    assert out.equal(s)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_the_sign_moves_into_the_queries(device, dtype, scale):
    q = torch.randn(64, device=device).to(dtype)
    out, factor = torch.empty_like(q), torch.zeros(1, device=device)
    _sign_probe[(1,)](out, factor, q, scale, N=64)
    assert out.equal(q if scale > 0 else -q) and factor.item() == 0.5


def test_a_scale_of_zero_moves_as_a_whole(device):
    q, factor = torch.ones(64, device=device), torch.zeros(1, device=device)
    out = torch.full_like(q, float("nan"))
    _sign_probe[(1,)](out, factor, q, 0.0, N=64)
    assert out.eq(0).all() and factor.item() > 0
