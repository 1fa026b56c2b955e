"""The oracle against a loop written from the specification, and against torch where they agree."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from blackwell_sparsek.calls.attention import AttnSpec
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.reference.attention import attention, attention_backward, mask_elements
from blackwell_sparsek.testing.inputs import qkv


def by_hand(q, k, v, *, left, right, scale, softcap=0.0, sinks=None, seen=None):
    """One number at a time: no tensors, no masks, no broadcasting."""
    batch, heads, sq, dim = q.shape
    heads_kv, sk = k.shape[1:3]
    out = torch.zeros(batch, heads, sq, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, sq), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // heads_kv)
            for i in range(sq):
                p = i + sk - sq
                terms = [] if sinks is None else [(sinks[h].item(), None)]
                for j in range(sk):
                    if left is not None and j < p - left:
                        continue
                    if right is not None and j > p + right:
                        continue
                    if seen is not None and not seen[b % len(seen)][h % len(seen[0])][i][j]:
                        continue
                    s = scale * sum((q[b, h, i, d] * k[b, kv, j, d]).item() for d in range(dim))
                    terms.append((softcap * math.tanh(s / softcap) if softcap else s, j))
                if not terms:
                    continue
                total = math.fsum(math.exp(s) for s, _ in terms)
                lse[b, h, i] = math.log(total)
                for s, j in terms:
                    if j is not None:
                        out[b, h, i] += math.exp(s) / total * v[b, kv, j]
    return out, lse


CASES = [
    {"sq": 5, "sk": 5, "band": Band(None, None)},
    {"sq": 5, "sk": 5, "band": Band(None, 0)},
    {"sq": 3, "sk": 7, "band": Band(None, 0)},
    {"sq": 7, "sk": 3, "band": Band(None, 0)},
    {"sq": 6, "sk": 6, "band": Band(0, 0)},
    {"sq": 6, "sk": 6, "band": Band(1, 2)},
    {"sq": 7, "sk": 4, "band": Band(1, 0)},
    {"sq": 4, "sk": 7, "band": Band(2, None)},
    {"sq": 1, "sk": 6, "band": Band(3, 0)},
    {"sq": 3, "sk": 0, "band": Band(None, None)},
]


@pytest.mark.parametrize("extras", ["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_oracle_equals_hand_written_loop(case, extras):
    q, k, v = (x.double() for x in qkv(2, 4, 2, case["sq"], case["sk"], 3, seed=1, v_dim=2))
    softcap = 1.5 if extras in ("softcap", "both") else 0.0
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).double() if extras in ("sinks", "both") else None
    spec = AttnSpec(scale=0.7, band=case["band"], softcap=softcap, sinks=sinks)
    out, lse = attention(q, k, v, spec)
    left, right = case["band"]
    expected = by_hand(q, k, v, left=left, right=right, scale=0.7, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("planes", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_oracle_with_block_mask(planes):
    q, k, v = (x.double() for x in qkv(2, 4, 2, 18, 20, 3, seed=2))
    seen = torch.rand(*planes, 18, 20) > 0.6
    seen[..., 4, :] = False
    mask = BlockMask.from_element_mask(seen, 16)
    assert torch.equal(mask_elements(mask), seen)
    out, lse = attention(q, k, v, AttnSpec(scale=0.5, band=Band(None, 0), block_mask=mask))
    expected = by_hand(q, k, v, left=None, right=0, scale=0.5, seen=seen.tolist())
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-13)
    assert (out[:, :, 4] == 0).all() and (lse[:, :, 4] == -torch.inf).all()


def test_oracle_equals_sdpa():
    q, k, v = (x.double() for x in qkv(2, 6, 2, 9, 9, 8, seed=3))
    out, _ = attention(q, k, v, AttnSpec(scale=8**-0.5, band=Band(None, 0)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_oracle_equals_flex_with_softcap():
    q, k, v = (x.double() for x in qkv(1, 2, 2, 16, 16, 8, seed=4))

    def cap(score, b, h, q_idx, kv_idx):
        return 2.0 * torch.tanh(score / 2.0)

    expected, expected_lse = flex_attention(q, k, v, score_mod=cap, scale=0.5, return_lse=True)
    out, lse = attention(q, k, v, AttnSpec(scale=0.5, softcap=2.0))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse.double(), rtol=1e-6, atol=1e-6)


def test_packed_sequences_are_separate_problems():
    q, k, v = (x[0].transpose(0, 1).double() for x in qkv(1, 4, 2, 9, 11, 4, seed=5))
    cu_q = torch.tensor([0, 0, 4, 9], dtype=torch.int32)
    cu_k = torch.tensor([0, 3, 5, 11], dtype=torch.int32)
    spec = AttnSpec(
        scale=0.5, band=Band(2, 0), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_q=5, max_k=6
    )
    out, lse = attention(q, k, v, spec)
    assert out.shape == (9, 4, 4) and lse.shape == (4, 9)
    for a, b, c, d in ((0, 4, 3, 5), (4, 9, 5, 11)):
        parts = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        expected = by_hand(*parts, left=2, right=0, scale=0.5)
        torch.testing.assert_close(out[a:b].transpose(0, 1)[None], expected[0])
        torch.testing.assert_close(lse[None, :, a:b], expected[1])


def test_gradients_are_finite_and_zero_for_empty_rows():
    q, k, v = (x.double().requires_grad_() for x in qkv(1, 2, 1, 6, 3, 4, seed=6))
    out, lse = attention(q, k, v, AttnSpec(scale=0.5, band=Band(None, 0)))
    (out.square().sum() + lse[lse.isfinite()].sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (q.grad[:, :, :3] == 0).all() and (q.grad[:, :, 3:] != 0).any()


@pytest.mark.parametrize("poisoned", ["k", "v"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_unseen_nan_reaches_nobody_and_seen_nan_only_its_readers(poisoned, softcap):
    q, k, v = (x.double() for x in qkv(1, 1, 1, 6, 6, 4, seed=7))
    spec = AttnSpec(scale=0.5, band=Band(None, 0), softcap=softcap)
    clean_out, _ = attention(q, k, v, spec)
    (k if poisoned == "k" else v)[0, 0, 3] = torch.nan
    q.requires_grad_()
    out, _ = attention(q, k, v, spec)
    assert torch.equal(out[0, 0, :3], clean_out[0, 0, :3]) and out[0, 0, 3:].isnan().all()
    out[0, 0, :3].sum().backward()
    assert q.grad[0, 0, :3].isfinite().all()


def test_backward_by_vjp_equals_autograd():
    q, k, v = (x.double().requires_grad_() for x in qkv(1, 4, 2, 5, 7, 4, seed=8))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    spec = AttnSpec(scale=0.5, band=Band(2, 0), softcap=3.0, sinks=sinks)
    out, lse = attention(q, k, v, spec)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v, sinks), (dout, dlse))
    got = attention_backward(
        dout, dlse, *(x.detach() for x in (q, k, v)), spec._replace(sinks=sinks.detach())
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
