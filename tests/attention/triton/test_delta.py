"""delta: one number per query, for every layout."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.triton.delta import launch_attn_delta
from blackwell_sparsek.testing import guard, layouts
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.poison import nan_like
from blackwell_sparsek.testing.tolerance import assert_within_budget


def exact_delta(out, dout, dlse):
    delta = (out.double() * dout.double()).sum(-1)
    delta = delta.transpose(-1, -2) if out.dim() == 3 else delta
    return delta if dlse is None else delta - dlse.double()


def check(out, dout, dlse, seed=0):
    shape = (out.shape[1], out.shape[0]) if out.dim() == 3 else out.shape[:3]
    lse = normal(*shape, seed=seed + 3, device=out.device)
    delta = nan_like(lse)
    launch_attn_delta(delta, dout, out, dlse, lse)
    plain = exact_delta(out.float(), dout.float(), dlse).float()
    assert_within_budget(delta, exact_delta(out, dout, dlse), plain, what="delta")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 3, 33, 16), (1, 1, 1, 1), (2, 1, 100, 72), (50, 3, 40)])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_layouts(dtype, shape, with_dlse, device):
    out, dout = (normal(*shape, seed=i, dtype=dtype, device=device) for i in range(2))
    dlse = None
    if with_dlse:
        lse_shape = (shape[1], shape[0]) if len(shape) == 3 else shape[:3]
        dlse = layouts.strided_like(normal(*lse_shape, seed=2, device=device), "outer_gap")
    check(*layouts.different_layouts(out, dout, start=len(shape)), dlse)


def test_expanded_dlse(device):
    out = normal(2, 2, 20, 8, seed=5, device=device)
    check(out, out, torch.ones((), device=device).expand(2, 2, 20))


def test_rows_that_see_nothing(device):
    out = torch.zeros(1, 1, 20, 8, device=device)
    lse, dlse = torch.zeros(1, 1, 20, device=device), torch.ones(1, 1, 20, device=device)
    lse[..., 3], dlse[..., 3] = -torch.inf, torch.nan
    delta = nan_like(lse)
    launch_attn_delta(delta, out, out, dlse, lse)
    assert delta[..., 3].item() == 0
    assert delta.sum().item() == -19


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 2, 0, 8)])
def test_nothing_to_compute(shape, device):
    out, delta = torch.empty(shape, device=device), torch.empty(shape[:3], device=device)
    launch_attn_delta(delta, out, out, None, delta)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_past_32_bits(which, dim, interpreted):
    pair = [normal(2, 2, 2, 8, seed=i, dtype=torch.float16) for i in range(2)]
    strides = [64, 32, 8, 1]
    strides[dim] = 2**31 + 64
    pair[which] = guard.huge_zeros(pair[which].shape, torch.float16, strides).copy_(pair[which])
    check(*pair, None)
