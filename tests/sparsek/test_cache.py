"""`SparsekCache`: decoding token by token equals attention over all tokens."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.testing import inputs


@pytest.mark.parametrize("keep", [0.0, 2.5, 6.0, 1000.0])
def test_decoding_equals_attention_over_all_tokens(keep):
    batch, heads, tokens = 2, (4, 2), 60
    q, k, v = inputs.qkv(batch, *heads, tokens, tokens, 8, seed=1, dtype=torch.float64)
    u = inputs.normal(batch, 2, tokens, seed=9, dtype=torch.float64)
    tau = bsk.sparsek_causal(u, keep)
    expected = bsk.attention(q, k, v, causal=True, key_gate=(u, tau), impl="reference")
    cache = bsk.SparsekCache(keep)
    # a prompt, then token by token
    cache.append(k[:, :, :17], v[:, :, :17], u[:, :, :17])
    for t in range(16, tokens):
        if t > 16:
            cache.append(*(x[:, :, t : t + 1] for x in (k, v, u)))
        torch.testing.assert_close(cache.tau[..., 0], tau[..., t])
        out = bsk.attention(q[:, :, t : t + 1], cache.k, cache.v, key_gate=cache.gate)
        torch.testing.assert_close(out, expected[:, :, t : t + 1])
    assert cache.tokens == tokens


def test_tokens_without_weight_leave_the_memory():
    cache = bsk.SparsekCache(3)
    sizes = []
    for step in range(400):
        k, v = inputs.normal(2, 1, 1, 1, 4, seed=step)
        cache.append(k, v, torch.full((1, 1, 1), 0.6 * step))
        sizes.append(cache.k.shape[2])
    # at most five tokens have a weight, and half of the places may hold dropped ones
    assert max(sizes) <= 16 and cache.tokens == 400
    assert cache.memory_bytes < 16 * 4 * (4 + 4 + 1) + 8


def test_heads_with_fewer_tokens_have_places_without_one():
    cache = bsk.SparsekCache(1)
    u = torch.zeros(1, 2, 40)
    u[0, 0] = torch.arange(40.0) * 3
    k = inputs.normal(1, 2, 40, 4, seed=1)
    cache.append(k, k, u)
    # the first head needs one token, the second shares its weight among all
    assert cache.k.shape[2] == 40 and (cache.u[0, 0] > -torch.inf).sum() == 1
    out = bsk.attention(torch.zeros(1, 2, 1, 4), cache.k, cache.v, key_gate=cache.gate)
    torch.testing.assert_close(out[0, 0, 0], k[0, 0, 39])
    torch.testing.assert_close(out[0, 1, 0], k[0, 1].mean(0))


def test_refusals():
    with pytest.raises(bsk.InvalidType, match="k is not a number"):
        bsk.SparsekCache("3")
    with pytest.raises(bsk.InvalidInput, match="k is negative or NaN"):
        bsk.SparsekCache(float("nan"))
    cache = bsk.SparsekCache(3)
    with pytest.raises(bsk.InvalidInput, match="gate needs a token"):
        _ = cache.gate
    k, u = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(bsk.InvalidInput, match="k/v/u do not match"):
        cache.append(k, k, u[..., :2])
    cache.append(k, k, u)
    with pytest.raises(bsk.InvalidInput, match="k has a wrong shape"):
        cache.append(k[:, :1], k, u)
    with pytest.raises(bsk.InvalidInput, match="u"):
        cache.append(k, k, u.double())


def test_scores_that_are_refused_leave_the_cache_as_it_was():
    cache = bsk.SparsekCache(3)
    k = inputs.normal(1, 2, 4, 8, seed=1)
    with pytest.raises(bsk.InvalidType, match="append: u has an unsupported dtype"):
        cache.append(k, k, torch.ones(1, 2, 4, dtype=torch.int64))
    assert cache.tokens == 0 and cache.k is None
    # scores of a projection lie the other way around
    cache.append(k, k, torch.ones(1, 4, 2).transpose(1, 2))
    assert cache.tokens == 4
