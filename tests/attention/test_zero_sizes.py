"""Calls without queries, keys, heads or sequences: empty results, zeros where no key is seen."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.core.errors import InvalidInput

IMPLS = ("reference", "eager", "triton", "auto")
DENSE = {
    "no queries": ((2, 4, 0, 8), (2, 2, 5, 8)),
    "no keys": ((2, 4, 3, 8), (2, 2, 0, 8)),
    "neither": ((2, 4, 0, 8), (2, 2, 0, 8)),
    "no query heads": ((2, 0, 3, 8), (2, 2, 5, 8)),
    "no heads": ((2, 0, 3, 8), (2, 0, 5, 8)),
    "no batch": ((0, 4, 3, 8), (0, 2, 5, 8)),
}


def check(run, q, k):
    """`run` gives zeros and lse -inf, or nothing at all, and gradients of zero."""
    inputs = [x.clone().requires_grad_() for x in (q, k, k)]
    out, lse = run(*inputs)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", DENSE)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(sizes, impl, causal, device):
    q, k = (torch.randn(shape, device=device) for shape in DENSE[sizes])
    options = {"causal": causal, "impl": impl, "return_lse": True}
    check(lambda *x: bsk.attention(*x, **options), q, k)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", DENSE)
def test_attention_with_sinks(sizes, impl, device):
    q, k = (torch.randn(shape, device=device) for shape in DENSE[sizes])
    sinks = torch.randn(q.shape[1], requires_grad=True, device=device)
    out, lse = bsk.attention(q, k, k, sinks=sinks, impl=impl, return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    torch.testing.assert_close(lse, sinks.detach()[None, :, None].expand_as(lse))
    (gradient,) = torch.autograd.grad(out.sum(), sinks)
    assert torch.equal(gradient, torch.zeros_like(sinks))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("q", "k", "cu_q", "cu_k"),
    [
        ((0, 4, 8), (0, 2, 8), [0, 0, 0], [0, 0, 0]),
        ((0, 4, 8), (0, 2, 8), [0], [0]),
        ((0, 4, 8), (5, 2, 8), [0, 0], [0, 5]),
        ((3, 4, 8), (0, 2, 8), [0, 3], [0, 0]),
        ((3, 0, 8), (5, 2, 8), [0, 3], [0, 5]),
        ((3, 0, 8), (5, 0, 8), [0, 3], [0, 5]),
    ],
)
def test_attention_varlen(q, k, cu_q, cu_k, impl, device):
    offsets = [torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_q, cu_k)]
    options = {"max_seqlen_q": q[0], "max_seqlen_k": k[0], "impl": impl, "return_lse": True}
    q, k = (torch.randn(shape, device=device) for shape in (q, k))
    check(lambda *x: bsk.attention_varlen(*x, *offsets, **options), q, k)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("q", "cache", "length"),
    [
        ((2, 4, 0, 8), (2, 2, 5, 8), 5),
        ((2, 4, 1, 8), (2, 2, 5, 8), 0),
        ((2, 4, 0, 8), (2, 2, 5, 8), 0),
        ((2, 0, 1, 8), (2, 2, 5, 8), 5),
        ((2, 0, 1, 8), (2, 0, 5, 8), 5),
        ((0, 4, 1, 8), (0, 2, 5, 8), 5),
    ],
)
def test_attention_decode(q, cache, length, paged, impl, device):
    q, cache = (torch.randn(shape, device=device) for shape in (q, cache))
    lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "impl": impl, "return_lse": True}
    if paged:
        cache = cache.transpose(1, 2).contiguous()
        options["page_table"] = lengths.new_tensor(range(q.shape[0]))[:, None]
    out, lse = bsk.attention_decode(q, cache, cache, **options)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert lse.shape == q.shape[:3]


def test_decode_from_a_cache_without_slots():
    q, cache = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 0, 8)
    out = bsk.attention_decode(q, cache, cache, cache_seqlens=torch.zeros(2, dtype=torch.int32))
    assert torch.equal(out, torch.zeros_like(q))


def test_query_heads_need_key_heads():
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 0, 5, 8)
    with pytest.raises(InvalidInput, match="4 query heads not divisible by 0 kv heads"):
        bsk.attention(q, k, k)
    lengths = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(InvalidInput, match="4 query heads not divisible by 0 kv heads"):
        bsk.attention_decode(q, k, k, cache_seqlens=lengths)
