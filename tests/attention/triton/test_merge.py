"""The merge kernel against the formula in fp64; the same bodies run interpreted and compiled."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.triton.merge import launch_merge_states
from blackwell_sparsek.testing import guard, inputs, layouts, poison
from blackwell_sparsek.testing.tolerance import assert_within_budget


def merged(o_a, lse_a, o_b, lse_b, dtype):
    """The formula, computed in `dtype`; rows that are empty on both sides give 0 and -inf."""
    o_a, lse_a, o_b, lse_b = (x.to(dtype) for x in (o_a, lse_a, o_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    at = torch.where(lse.isinf(), 0, lse)
    weight_a, weight_b = (lse_a - at).exp()[..., None], (lse_b - at).exp()[..., None]
    o_a, o_b = o_a.where(weight_a > 0, 0), o_b.where(weight_b > 0, 0)
    return weight_a * o_a + weight_b * o_b, lse


def states(*shape, dtype=torch.float32, device="cpu", seed=0, empty=True):
    """Two partial results with lse far apart in some rows and empty in others."""
    o_a, o_b = (inputs.normal(*shape, seed=seed + i, dtype=dtype, device=device) for i in (0, 1))
    lse_a, lse_b = (
        inputs.normal(*shape[:-1], seed=seed + i, device=device, scale=4.0) for i in (2, 3)
    )
    if empty and lse_a.numel() > 4:
        flat_a, flat_b = lse_a.view(-1), lse_b.view(-1)
        flat_a[0] = flat_b[1] = flat_a[2] = flat_b[2] = -torch.inf
        o_a.view(-1, shape[-1])[0] = torch.nan  # of an empty partial nothing may be read
        flat_a[3] = 1e4
    return o_a, lse_a, o_b, lse_b


def check(args, out=None, lse=None):
    o_a, lse_a = args[:2]
    out = poison.nan_like(o_a) if out is None else out
    lse = poison.nan_like(lse_a) if lse is None else lse
    launch_merge_states(out, lse, *args)
    exact, exact_lse = merged(*args, torch.float64)
    plain, plain_lse = merged(*args, torch.float32)
    assert_within_budget(out, exact, plain.to(out.dtype), what="out")
    assert_within_budget(lse, exact_lse, plain_lse, what="lse")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (2, 3, 17, 15), (1, 2, 63, 64), (3, 1, 65, 72), (1, 5, 33, 256), (1, 1, 9, 300)],
)
def test_matches_the_formula(shape, dtype, device):
    check(states(*shape, dtype=dtype, device=device))


@pytest.mark.parametrize("shape", [(17, 24), (3, 17, 24)])
def test_fewer_dimensions(shape, device):
    check(states(*shape, device=device))


@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_every_tensor_with_strides_of_its_own(start, device):
    o_a, lse_a, o_b, lse_b = states(2, 3, 19, 24, device=device)
    out, lse = poison.nan_like(o_a), poison.nan_like(lse_a)
    out, o_a, o_b = layouts.different_layouts(out, o_a, o_b, start=start)
    lse, lse_a, lse_b = layouts.different_layouts(lse, lse_a, lse_b, start=start + 1)
    check((o_a, lse_a, o_b, lse_b), out, lse)
    layouts.assert_gaps_untouched(out)
    layouts.assert_gaps_untouched(lse)


def test_lse_may_lie_in_any_order(device):
    o_a, lse_a, o_b, lse_b = states(2, 3, 19, 8, device=device)
    lse = poison.nan_like(lse_a).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    check((o_a, lse_a.mT.contiguous().mT, o_b, lse_b), lse=lse)
    check((o_a, lse_a, o_b, lse_b[:1].clone().expand(2, 3, 19)))


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_nothing_to_merge(shape, device):
    check(states(*shape, device=device, empty=False))


def test_without_values_the_lse_is_still_written(device):
    check(states(1, 2, 7, 0, device=device, empty=False))


def test_one_empty_side_returns_the_other_exactly(device):
    o_a, lse_a, o_b, lse_b = states(1, 2, 16, 8, device=device, dtype=torch.float16, empty=False)
    out, lse = poison.nan_like(o_a), poison.nan_like(lse_a)
    launch_merge_states(
        out, lse, poison.nan_like(o_a), torch.full_like(lse_a, -torch.inf), o_b, lse_b
    )
    assert torch.equal(out, o_b) and torch.equal(lse, lse_b)


def test_equal_halves_average(device):
    o_a, o_b = (inputs.integers(1, 1, 5, 8, seed=i, device=device) for i in (0, 1))
    zero = torch.zeros(1, 1, 5, device=device)
    out, lse = poison.nan_like(o_a), poison.nan_like(zero)
    launch_merge_states(out, lse, o_a, zero, o_b, zero)
    assert torch.equal(out, (o_a + o_b) / 2)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", [(2, 3, 17, 15), (1, 1, 129, 40), (1, 1, 1, 257)])
def test_touches_nothing_outside(shape, side, interpreted):
    args = states(*shape)
    out, lse = poison.nan_like(args[0]), poison.nan_like(args[1])
    check(guard.guard_pages(*args, side=side), *guard.guard_pages(out, lse, side=side))


@pytest.mark.parametrize("which", range(6))
def test_offsets_past_two_to_the_31(which, interpreted):
    """One tensor at a time gets a batch stride past int32: a product in 32 bits would wrap."""
    o_a, lse_a, o_b, lse_b = states(3, 2, 5, 8)
    tensors = [poison.nan_like(o_a), poison.nan_like(lse_a), o_a, lse_a, o_b, lse_b]
    small = tensors[which]
    far = guard.huge_zeros(small.shape, small.dtype, (2**30 + 8, *small.stride()[1:]))
    far.copy_(small)
    tensors[which] = far
    check(tensors[2:], *tensors[:2])
