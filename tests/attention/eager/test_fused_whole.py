"""Whole squares and triangles on a CPU run through PyTorch's fused attention."""

import pytest
import torch

from blackwell_sparsek.attention.eager import forward as eager
from blackwell_sparsek.calls.attention import AttnSpec, empty_out
from blackwell_sparsek.masks.band import CAUSAL, EVERYTHING, Band
from blackwell_sparsek.testing.attention_cases import check_attention
from blackwell_sparsek.testing.inputs import qkv
from blackwell_sparsek.testing.layouts import different_layouts


@pytest.fixture
def fused_calls(monkeypatch):
    calls, fused = [], eager._FUSED

    def counted(q, k, v, *args, **kwargs):
        calls.append((q.shape, k.data_ptr()))
        return fused(q, k, v, *args, **kwargs)

    monkeypatch.setattr(eager, "_FUSED", counted)
    return calls


def spec_of(q, k, band, **options):
    return AttnSpec(0.3, band=band, max_q=q.shape[2], max_k=k.shape[2], **options)


CASES = {
    "square": (2, 3, 3, 37, 37, 24, EVERYTHING),
    "triangle": (2, 3, 3, 65, 65, 24, CAUSAL),
    "more keys": (1, 4, 4, 5, 70, 32, EVERYTHING),
    "groups": (2, 6, 2, 33, 33, 16, CAUSAL),
    "one KV head": (1, 5, 1, 9, 40, 8, EVERYTHING),
}


@pytest.mark.parametrize("case", CASES)
def test_results(case, fused_calls):
    batch, heads, kv_heads, sq, sk, dim, band = CASES[case]
    q, k, v = different_layouts(*qkv(batch, heads, kv_heads, sq, sk, dim, seed=sk), start=sq)
    spec = spec_of(q, k, band)
    out, lse = eager.attention(q, k, v, spec)
    check_attention(out, lse, q, k, v, spec)
    assert out.stride() == empty_out(q, dim).stride() and lse.is_contiguous()
    # keys are read where they are: one call for each query head of a group
    assert [pointer for _, pointer in fused_calls] == [k.data_ptr()] * (heads // kv_heads)


def test_what_the_fused_kernel_cannot_do_goes_the_other_way(fused_calls):
    q, k, v = qkv(1, 2, 2, 16, 16, 8, seed=3)
    sinks = torch.zeros(2)
    for options in ({"softcap": 5.0}, {"sinks": sinks}):
        eager.attention(q, k, v, spec_of(q, k, CAUSAL, **options))
    eager.attention(q[:, :, :7], k, v, spec_of(q[:, :, :7], k, CAUSAL))
    eager.attention(q, k, v, spec_of(q, k, Band(None, 1)))
    eager.attention(q, k, v[..., :4], spec_of(q, k, CAUSAL))
    half = [x.bfloat16() for x in (q, k, v)]
    eager.attention(*half, spec_of(q, k, CAUSAL))
    assert not fused_calls


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("band", [CAUSAL, EVERYTHING])
def test_scales_that_are_not_positive(scale, band):
    """torch's fused kernel multiplies the scores that it has hidden with -inf by the scale."""
    q, k, v = qkv(1, 2, 2, 33, 33, 16, seed=4)
    spec = spec_of(q, k, band)._replace(scale=scale)
    check_attention(*eager.attention(q, k, v, spec), q, k, v, spec)


def test_a_hidden_value_that_is_not_finite_stays_hidden(fused_calls):
    q, k, v = qkv(1, 2, 2, 16, 16, 8, seed=3)
    v[:, :, 10] = torch.nan
    out, _ = eager.attention(q, k, v, spec_of(q, k, CAUSAL))
    assert out[:, :, :10].isfinite().all() and out[:, :, 10:].isnan().all()
    assert not fused_calls
