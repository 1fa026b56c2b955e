"""The softmax arithmetic alone, through probe kernels."""

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device.softmax import (
    merge_partials,
    merge_weights,
    raise_maximum,
    weights_of,
)
from blackwell_sparsek.testing.inputs import normal

INF = math.inf


@triton.jit
def _weights_probe(out_ptr, lse_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    weight_a, weight_b, lse = merge_weights(tl.load(lse_ptr + offs), tl.load(lse_ptr + N + offs))
    tl.store(out_ptr + offs, weight_a)
    tl.store(out_ptr + N + offs, weight_b)
    tl.store(out_ptr + 2 * N + offs, lse)


@triton.jit
def _partials_probe(out_ptr, o_ptr, weight_ptr, N: tl.constexpr, D: tl.constexpr):
    rows = tl.arange(0, N)
    offs = rows[:, None] * D + tl.arange(0, D)[None, :]
    out = merge_partials(
        tl.load(o_ptr + offs),
        tl.load(weight_ptr + rows),
        tl.load(o_ptr + N * D + offs),
        tl.load(weight_ptr + N + rows),
    )
    tl.store(out_ptr + offs, out)


@triton.jit
def _shares_probe(
    s_ptr, m_ptr, weights_ptr, state_ptr, scale_log2,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEADROOM: tl.constexpr,
):  # fmt: skip
    """One tile of scores through the two functions that kernels call one after the other."""
    rows = tl.arange(0, ROWS)
    offs = rows[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    s = tl.load(s_ptr + offs)
    m, shift, rescale = raise_maximum(
        tl.load(m_ptr + rows), tl.max(s, 1), scale_log2, HEADROOM=HEADROOM
    )
    tl.store(weights_ptr + offs, weights_of(s, scale_log2, shift))
    tl.store(state_ptr + rows, m)
    tl.store(state_ptr + ROWS + rows, rescale)


@pytest.mark.parametrize("headroom", [0, 8])
def test_weights_of_scores_below_a_shift(headroom, device):
    s = 4 * normal(8, 16, seed=1)
    s[:, 3], s[5] = -INF, -INF
    # the last rows saw larger scores before, and the first one none
    before = torch.tensor([-INF, -9.0, -9.0, -9.0, 0.5, -INF, 90.0, 90.0])
    scale = 0.3
    weights, state = torch.full((8, 16), math.nan), torch.full((2, 8), math.nan)
    made = weights, state = weights.to(device), state.to(device)
    _shares_probe[(1,)](s.to(device), before.to(device), *made, scale, 8, 16, headroom)
    exact = s.double() * scale
    peak = torch.maximum(before.double(), exact.amax(1) - headroom)
    # rows that have seen no key subtract nothing, so that no weight is NaN
    shift = torch.where(peak == -INF, 0.0, peak)
    close = {"rtol": 1e-5, "atol": 1e-30, "check_dtype": False}
    torch.testing.assert_close(weights.cpu(), (exact - shift[:, None]).exp2(), **close)
    expected = torch.stack([peak, (before.double() - shift).exp2()])
    torch.testing.assert_close(state.cpu(), expected, **close)


@pytest.mark.parametrize(
    ("lse_a", "lse_b", "expected"),
    [
        (0.0, 0.0, (0.5, 0.5, math.log(2))),
        (math.log(3), 0.0, (0.75, 0.25, math.log(4))),
        (-INF, 2.0, (0.0, 1.0, 2.0)),
        (2.0, -INF, (1.0, 0.0, 2.0)),
        (-INF, -INF, (0.0, 0.0, -INF)),
        (1e4, -1e4, (1.0, 0.0, 1e4)),
        (-1e6, -1e6, (0.5, 0.5, -1e6 + math.log(2))),
    ],
)
def test_weights(lse_a, lse_b, expected, device):
    lse = torch.tensor([[lse_a] * 4, [lse_b] * 4], device=device)
    out = torch.full((3, 4), math.nan, device=device)
    _weights_probe[(1,)](out, lse, 4)
    wanted = torch.tensor(expected, device=device)[:, None].expand(3, 4)
    torch.testing.assert_close(out, wanted, rtol=3e-7, atol=0.0)


def test_nan_stays_visible(device):
    lse = torch.tensor([[math.nan, 0.0], [0.0, math.nan]], device=device)
    out = torch.zeros(3, 2, device=device)
    _weights_probe[(1,)](out, lse, 2)
    assert out.isnan().all()


def test_an_empty_partial_is_not_looked_at(device):
    o = torch.tensor([[[math.nan] * 4, [1.0] * 4], [[2.0] * 4, [math.inf] * 4]], device=device)
    weight = torch.tensor([[0.0, 1.0], [1.0, 0.0]], device=device)
    out = torch.full((2, 4), math.nan, device=device)
    _partials_probe[(1,)](out, o, weight, 2, 4)
    assert out.tolist() == [[2.0] * 4, [1.0] * 4]
