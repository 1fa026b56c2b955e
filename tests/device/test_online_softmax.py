"""The online softmax, step by step, against a softmax over everything at once."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device.softmax import (
    add_sink,
    finalise,
    init_state,
    join_state,
    softmax_step,
)

INF = float("inf")


@triton.jit
def _softmax_probe(
    p_ptr, lse_ptr, s_ptr, sinks_ptr, scale_log2, steps, parts, M: tl.constexpr, N: tl.constexpr,
    SLACK: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, M)
    offs_n = tl.arange(0, N)
    m_log2, row_sum = init_state(offs_m)
    weight_sum = tl.zeros([M], tl.float32)  # accumulator with values of 1
    for part in range(parts):
        m_part, sum_part = init_state(offs_m)
        weight_part = tl.zeros([M], tl.float32)
        for step in range(part * steps // parts, (part + 1) * steps // parts):
            s = tl.load(s_ptr + offs_m[:, None] * (steps * N) + step * N + offs_n[None, :])
            m_part, sum_part, p, rescale = softmax_step(m_part, sum_part, s, scale_log2, SLACK)
            weight_part = weight_part * rescale + tl.sum(p, 1)
        m_log2, row_sum, rescale, factor = join_state(m_log2, row_sum, m_part, sum_part)
        weight_sum = weight_sum * rescale + weight_part * factor
    if sinks_ptr is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, tl.load(sinks_ptr + offs_m))
        weight_sum *= rescale
    inverse, lse = finalise(m_log2, row_sum)
    tl.store(p_ptr + offs_m, weight_sum * inverse)
    tl.store(lse_ptr + offs_m, lse)


def run(s, sinks, scale, device, steps=4, parts=1, slack=0):
    rows = s.shape[0]
    weight = torch.full((rows,), float("nan"), device=device)
    lse = torch.full((rows,), float("nan"), device=device)
    scale_log2 = scale * 1.4426950408889634
    sinks = None if sinks is None else sinks.to(device)
    tile = s.shape[1] // steps
    _softmax_probe[(1,)](
        *(weight, lse, s.to(device), sinks, scale_log2, steps, parts), M=rows, N=tile, SLACK=slack
    )
    return weight.cpu(), lse.cpu()


def exact(s, sinks, scale):
    logits = s.double() * scale
    column = (
        torch.full((s.shape[0], 1), -INF).double() if sinks is None else sinks.double()[:, None]
    )
    lse = torch.cat([logits, column], 1).logsumexp(1)
    weight = (logits - torch.where(lse == -INF, 0.0, lse)[:, None]).exp().sum(1)
    return weight, lse


def scores(kind):
    s = torch.randn(16, 64)
    if kind == "huge":
        s *= 1e6
    elif kind == "equal":
        s = torch.full_like(s, 3.0)
    elif kind == "growing":
        # by less than a slack of 8 allows, by more, and back
        s += torch.linspace(-40, 40, 64) * torch.linspace(-2, 2, 16)[:, None]
    elif kind == "masked":
        s[torch.rand_like(s) < 0.7] = -INF
        s[0] = -INF  # sees nothing
        s[1, 1:] = -INF  # sees only the first
        s[2, :-1] = -INF  # sees only the last
        s[3, :48] = -INF  # sees nothing for three steps
    return s


@pytest.mark.parametrize("slack", [0, 8])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ["normal", "huge", "equal", "growing", "masked"])
def test_steps_and_parts_add_up(device, kind, with_sinks, parts, slack):
    s = scores(kind)
    sinks = torch.randn(16) if with_sinks else None
    weight, lse = run(s, sinks, 0.3, device, parts=parts, slack=slack)
    exact_weight, exact_lse = exact(s, sinks, 0.3)
    # a logit of 1e6 has an ulp of 1/16, which moves lse and not the normalised weights
    bound = 1e-6 * exact_lse.abs().nan_to_num(posinf=0.0).clamp(min=1.0) + 1e-6
    assert ((lse - exact_lse).abs() <= bound)[exact_lse > -INF].all()
    assert (lse == -INF).equal(exact_lse == -INF)
    assert torch.allclose(weight.double(), exact_weight, rtol=0, atol=2e-6)


def test_empty_rows_end_as_zero_and_minus_infinity(device):
    weight, lse = run(torch.full((16, 64), -INF), None, 0.3, device)
    assert weight.eq(0).all() and lse.eq(-INF).all()


def test_empty_rows_with_a_sink_have_its_lse(device):
    sinks = torch.linspace(-5, 5, 16)
    weight, lse = run(torch.full((16, 64), -INF), sinks, 0.3, device)
    assert weight.eq(0).all()
    assert torch.allclose(lse, sinks, atol=1e-6)


def test_sinks_of_any_size(device):
    sinks = torch.tensor([-INF, -1e6, 1e6, 0.0]).repeat(4)
    s = torch.randn(16, 64)
    weight, lse = run(s, sinks, 1.0, device)
    _, exact_lse = exact(s, sinks, 1.0)
    assert torch.allclose(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    assert weight[2::4].eq(0).all()
    assert torch.allclose(weight[:2], torch.ones(2), atol=1e-6)
