"""One step of the backward pass: probabilities and gradients of the products."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device.backprop import (
    probabilities,
    score_gradients,
    shift_of_rows,
    sink_gradients,
)
from blackwell_sparsek.device.records import Score
from blackwell_sparsek.testing.tolerance import assert_within_budget

LOG2_E = 1.4426950408889634


@triton.jit
def _step_probe(
    p_ptr, ds_ptr, s_ptr, dp_ptr, visible_ptr, lse_ptr, delta_ptr, score,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """Queries are rows, or columns when TRANSPOSED."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    query = tl.arange(0, COLUMNS)[None, :] if TRANSPOSED else tl.arange(0, ROWS)[:, None]
    shift = shift_of_rows(tl.load(lse_ptr + query), NATURAL)
    visible = None
    if visible_ptr is not None:
        visible = tl.load(visible_ptr + at) != 0
    p, capped = probabilities(tl.load(s_ptr + at), visible, shift, score, NATURAL)
    ds = score_gradients(p, capped, tl.load(dp_ptr + at), tl.load(delta_ptr + query), score)
    tl.store(p_ptr + at, p)
    tl.store(ds_ptr + at, ds)


@triton.jit
def _sink_probe(out_ptr, sink_ptr, lse_ptr, delta_ptr, N: tl.constexpr):
    """The terms of N queries."""
    offs = tl.arange(0, N)
    lse, delta = tl.load(lse_ptr + offs), tl.load(delta_ptr + offs)
    terms = sink_gradients(tl.load(sink_ptr), lse, delta)
    tl.store(out_ptr + offs, terms)


def formula(raw, visible, dp, lse, delta, scale, softcap):
    """p and ds / scale, from raw products; the queries are rows."""
    x = raw * scale
    slope = torch.ones_like(x)
    if softcap:
        tanh = torch.tanh(x / softcap)
        x, slope = softcap * tanh, 1 - tanh**2
    p = torch.exp(x - lse[:, None])
    p = torch.where(visible & (lse > -torch.inf)[:, None], p, 0.0)
    return p, p * (dp - delta[:, None]) * slope


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("scale", [0.4, -0.4])
@pytest.mark.parametrize("natural", [False, True])
def test_step(transposed, masked, softcap, scale, natural, device):
    rows, columns = 16, 32
    raw, dp = torch.randn(rows, columns), torch.randn(rows, columns)
    visible = torch.rand(rows, columns) < 0.6 if masked else torch.ones(rows, columns).bool()
    lse, delta = torch.randn(rows) + 3, torch.randn(rows)
    lse[5] = -torch.inf
    exact = formula(*(x.double() for x in (raw,)), visible, dp.double(), lse.double(),
                    delta.double(), scale, softcap)  # fmt: skip
    plain = formula(raw, visible, dp, lse, delta, scale, softcap)

    tiles = [x.mT.contiguous() if transposed else x for x in (raw, dp, visible.int())]
    s, dp, shown = (x.to(device) for x in tiles)
    p, ds = torch.full_like(s, torch.nan), torch.full_like(s, torch.nan)
    unit = 1.0 if natural else LOG2_E
    score = Score(softcap * unit, scale / softcap) if softcap else Score(scale * unit, None)
    _step_probe[(1,)](
        p, ds, s, dp, shown if masked else None, lse.to(device), delta.to(device), score,
        ROWS=s.shape[0], COLUMNS=s.shape[1], TRANSPOSED=transposed, NATURAL=natural,
    )  # fmt: skip
    for got, want, low, what in zip((p, ds), exact, plain, ("p", "ds"), strict=True):
        got = (got.mT if transposed else got).cpu()
        assert_within_budget(got, want, low, what=what)
        assert got[5].eq(0).all() and got[~visible].eq(0).all()


def test_sinks(device):
    lse, delta, sink = torch.randn(16), torch.randn(16), torch.tensor([0.7])
    lse[3], delta[3] = -torch.inf, 0.0
    out = torch.full((16,), torch.nan, device=device)
    _sink_probe[(1,)](out, sink.to(device), lse.to(device), delta.to(device), N=16)
    exact = -torch.exp(sink.double() - lse.double()) * delta.double()
    exact[3] = 0.0
    assert_within_budget(out.cpu(), exact, exact.float())
