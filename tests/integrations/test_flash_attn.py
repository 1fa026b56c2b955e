"""The functions of flash-attn against a formula written in its layouts, and what they refuse."""

import math

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

DOUBLE, E4M3 = torch.float64, torch.float8_e4m3fn


def formula(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, chunk=0,
            sink=None, scale=None, first=0):  # fmt: skip
    """One sequence, [S, H, D]: out and lse [H, Sq]; query i sits at i + Sk - Sq."""
    sq, heads, dim = q.shape
    sk, group = k.shape[0], heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or 1 / math.sqrt(dim))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    p = torch.arange(sq)[:, None] + sk - sq
    j = torch.arange(sk)[None, :]
    seen = j >= first
    if causal:
        seen = seen & (j <= p)
    if window[0] is not None and window[0] >= 0:
        seen = seen & (j >= p - window[0])
    if window[1] is not None and window[1] >= 0:
        seen = seen & (j <= p + window[1])
    if chunk:
        seen = seen & (j // chunk == p // chunk)
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype)[:, None, None] * (p - j).abs()
    scores = scores.masked_fill(~seen, -torch.inf)
    column = torch.full((heads, sq, 1), -torch.inf, dtype=scores.dtype)
    if sink is not None:
        column = sink.to(scores.dtype).view(-1, 1, 1).expand(heads, sq, 1)
    lse = torch.cat([scores, column], -1).logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def batched(q, k, v, slopes=None, **options):
    each = slopes if slopes is not None and slopes.dim() == 2 else [slopes] * len(q)
    made = [formula(*x, slopes=s, **options) for *x, s in zip(q, k, v, each, strict=True)]
    return tuple(torch.stack(x) for x in zip(*made, strict=True))


def qkv(batch=2, sq=19, sk=33, heads=4, kv=2, dims=(16, 24), dtype=DOUBLE):
    return (
        normal(batch, sq, heads, dims[0], seed=1, dtype=dtype),
        normal(batch, sk, kv, dims[0], seed=2, dtype=dtype),
        normal(batch, sk, kv, dims[1], seed=3, dtype=dtype),
    )


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


SLOPES = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
SINK = torch.randn(4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options, meaning", [
    ({}, {}), ({"causal": True}, {"causal": True}),
    ({"window_size": (5, 3)}, {"window": (5, 3)}),
    ({"window_size": (None, 3)}, {"window": (-1, 3)}),
    ({"causal": True, "window_size": (5, 3)}, {"causal": True, "window": (5, -1)}),
    ({"softcap": 2.0, "softmax_scale": 0.7}, {"softcap": 2.0, "scale": 0.7}),
    ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
    ({"alibi_slopes": SLOPES[0]}, {"slopes": SLOPES[0]}),
    ({"attention_chunk": 8, "causal": True}, {"chunk": 8, "causal": True}),
    ({"learnable_sink": SINK}, {"sink": SINK}),
    ({"num_splits": 3, "pack_gqa": True, "sm_margin": 4, "deterministic": True}, {}),
])  # fmt: skip
def test_func(options, meaning):
    tensors = qkv()
    out, lse, probs = flash_attn_func(*tensors, **options, return_attn_probs=True)
    want = batched(*tensors, **meaning)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse.to(DOUBLE), want[1])
    assert probs is None
    assert flash_attn_func(*tensors, **options).equal(out)
    for name in ("return_softmax_lse", "return_lse"):
        assert flash_attn_func(*tensors, **options, **{name: True})[1].equal(lse)


def test_positions_of_arguments_are_those_of_flash_attn_2():
    tensors = qkv()
    got = flash_attn_func(*tensors, 0.0, 0.5, True, (4, 4), 3.0, None, False, False)
    want = batched(*tensors, scale=0.5, causal=True, window=(4, -1), softcap=3.0)
    torch.testing.assert_close(got, want[0])


@pytest.mark.parametrize("slopes", [None, SLOPES])
def test_gradients(slopes):
    ours, theirs = (tuple(x.requires_grad_() for x in qkv()) for _ in range(2))
    out, lse = flash_attn_func(*ours, causal=True, alibi_slopes=slopes, return_softmax_lse=True)
    want, want_lse = batched(*theirs, causal=True, slopes=slopes)
    weight = normal(*out.shape, seed=9, dtype=DOUBLE)
    ((out * weight).sum() + lse.sum()).backward()
    ((want * weight).sum() + want_lse.sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    packed = [x.detach().flatten(0, 1).requires_grad_() for x in qkv()]
    offsets = int32(0, 19, 38), int32(0, 33, 66)
    out = flash_attn_varlen_func(*packed, *offsets, 19, 33, causal=True, alibi_slopes=slopes)
    out.backward(weight.flatten(0, 1))
    again = tuple(x.requires_grad_() for x in qkv())
    (batched(*again, causal=True, slopes=slopes)[0] * weight).sum().backward()
    for a, b in zip(packed, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad.flatten(0, 1))


def test_only_the_sink_is_learned():
    """Queries without a gradient do not choose the kernels without one."""
    tensors, sinks = qkv(), [normal(4, seed=5, dtype=DOUBLE).requires_grad_() for _ in range(2)]
    out = flash_attn_func(*tensors, causal=True, alibi_slopes=SLOPES, learnable_sink=sinks[0])
    weight = normal(*out.shape, seed=9, dtype=DOUBLE)
    out.backward(weight)
    batched(*tensors, causal=True, slopes=SLOPES, sink=sinks[1])[0].backward(weight)
    torch.testing.assert_close(sinks[0].grad, sinks[1].grad)
    out = flash_attn_func(*tensors, attention_chunk=8, learnable_sink=sinks[0])
    with pytest.raises(Unsupported, match="attention_chunk has no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": SLOPES}, {"attention_chunk": 8}])
def test_autocast(options):
    tensors = qkv(dtype=torch.float32)
    packed, offsets = [x.flatten(0, 1) for x in tensors], (int32(0, 19, 38), int32(0, 33, 66))
    low = [x.bfloat16() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(*tensors, causal=True, **options)
        of_packed = flash_attn_varlen_func(*packed, *offsets, 19, 33, causal=True, **options)
    want = flash_attn_func(*low, causal=True, **options)
    assert out.equal(want)
    assert of_packed.equal(want.flatten(0, 1))


def test_gradients_that_do_not_exist_are_refused():
    """Where a backward asks for them, as in flash-attn; the results are there."""
    q, k, v = qkv()
    want = flash_attn_func(q, k, v, attention_chunk=8)
    asking = q.clone().requires_grad_()
    out, lse = flash_attn_func(asking, k, v, attention_chunk=8, return_softmax_lse=True)
    assert out.equal(want)
    for result in (out, lse):
        with pytest.raises(Unsupported, match="flash_attn_func: attention_chunk has no gradient"):
            result.sum().backward(retain_graph=True)
    packed = [x.flatten(0, 1) for x in (asking, k, v)]
    offsets = (int32(0, 19, 38), int32(0, 33, 66), 19, 33)
    for option, name in (({"attention_chunk": 8}, "attention_chunk"),
                         ({"seqused_k": int32(33, 20)}, "seqused_k")):  # fmt: skip
        out = flash_attn_varlen_func(*packed, *offsets, **option)
        with torch.no_grad():
            assert out.equal(flash_attn_varlen_func(*packed, *offsets, **option))
        with pytest.raises(Unsupported, match=f"flash_attn_varlen_func: {name} has no gradient"):
            out.sum().backward()
        with pytest.raises(Unsupported, match="q requires a gradient"):
            flash_attn_varlen_func(*packed, *offsets, **option, out=torch.empty_like(out))
    with pytest.raises(Unsupported, match="alibi_slopes requires a gradient"):
        flash_attn_func(q, k, v, alibi_slopes=SLOPES.clone().requires_grad_())


def test_varlen():
    q, k, v = (x.flatten(0, 1) for x in qkv())
    cu_q, cu_k = int32(0, 5, 38), int32(0, 40, 66)
    for options, meaning in (
        ({"causal": True, "window_size": (9, 0)}, {"causal": True, "window": (9, -1)}),
        ({"alibi_slopes": SLOPES[0]}, {"slopes": SLOPES[0]}),
    ):
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 33, 40, **options, return_softmax_lse=True
        )
        for b, (rows, keys) in enumerate(
            ((slice(0, 5), slice(0, 40)), (slice(5, 38), slice(40, 66)))
        ):
            want = formula(q[rows], k[keys], v[keys], **meaning)
            torch.testing.assert_close(out[rows], want[0], msg=f"sequence {b}")
            torch.testing.assert_close(lse[:, rows].to(DOUBLE), want[1])
    used = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 33, 40, seqused_q=int32(2, 33), seqused_k=int32(7, 20), causal=True
    )
    torch.testing.assert_close(used[:2], formula(q[:2], k[:7], v[:7], causal=True)[0])
    torch.testing.assert_close(used[5:], formula(q[5:], k[40:60], v[40:60], causal=True)[0])
    assert used[2:5].eq(0).all()


@pytest.mark.parametrize("name", ["block_table", "page_table"])
@pytest.mark.parametrize("by", ["cu_seqlens_k", "seqused_k"])
def test_varlen_over_pages(name, by):
    q, k, v = qkv(batch=2, sk=32)
    table = int32(3, 0, 2, 1).view(2, 2)
    pages = []
    for x in (k, v):
        pool = torch.empty(4, 16, *x.shape[2:], dtype=DOUBLE)
        pool[table.flatten().long()] = x.reshape(4, 16, *x.shape[2:])
        pages.append(pool)
    lengths = int32(32, 20)
    cu_k, used = (int32(0, 32, 52), None) if by == "cu_seqlens_k" else (None, lengths)
    out = torch.empty(38, 4, 24, dtype=DOUBLE)
    got = flash_attn_varlen_func(
        q.flatten(0, 1), *pages, int32(0, 19, 38), cu_k, 19, 32, causal=True, seqused_k=used,
        out=out, **{name: table},
    )  # fmt: skip
    assert got is out
    for b, n in enumerate(lengths.tolist()):
        want = formula(q[b], k[b, :n], v[b, :n], causal=True)[0]
        torch.testing.assert_close(out[19 * b : 19 * b + 19], want)


def rotate(x, cos, sin, first, interleaved, moving=True):
    """[S, H, D] from position `first` on."""
    out, half = x.clone(), cos.shape[1]
    for i in range(x.shape[0]):
        p = first + (i if moving else 0)
        a = x[i, :, 0 : 2 * half : 2] if interleaved else x[i, :, :half]
        b = x[i, :, 1 : 2 * half : 2] if interleaved else x[i, :, half : 2 * half]
        c, s = cos[p].to(x.dtype), sin[p].to(x.dtype)
        if interleaved:
            out[i, :, 0 : 2 * half : 2], out[i, :, 1 : 2 * half : 2] = a * c - b * s, b * c + a * s
        else:
            out[i, :, :half], out[i, :, half : 2 * half] = a * c - b * s, b * c + a * s
    return out


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "new, rotary",
    [(0, None), (1, None), (3, None), (1, "interleaved"), (3, "interleaved"), (3, "halves")],
)
@pytest.mark.parametrize("causal", [False, True])
def test_with_kvcache(paged, new, rotary, causal):
    """Append, rotate, attend: against the same steps written out for each sequence."""
    sq = new or 2
    q = normal(2, sq, 4, 16, seed=1, dtype=DOUBLE)
    cache = [normal(3, 32, 2, d, seed=i, dtype=DOUBLE) for i, d in ((2, 16), (3, 24))]
    k, v = (normal(2, new, 2, d, seed=i, dtype=DOUBLE) for i, d in ((4, 16), (5, 24)))
    lengths, rows = int32(13, 29), int32(2, 0)
    angles = torch.rand(40, 6, generator=torch.Generator().manual_seed(7))
    cos, sin = angles.cos(), angles.sin()
    table, given, where = None, [x.clone() for x in cache], {"cache_batch_idx": rows}
    if paged:
        table = int32(1, 4, 5, 0).view(2, 2)
        given = [torch.zeros(6, 16, *x.shape[2:], dtype=DOUBLE) for x in cache]
        for pool, x in zip(given, cache, strict=True):
            pool[table.flatten().long()] = x[rows.long()].reshape(4, 16, *x.shape[2:])
        where = {"block_table": table}
    options = {"causal": causal, **where}
    if new:
        options.update(k=k, v=v)
    if rotary:
        options.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=rotary == "interleaved")
    out, lse = flash_attn_with_kvcache(
        q, *given, cache_seqlens=lengths, return_softmax_lse=True, **options
    )
    for b, n in enumerate(lengths.tolist()):
        q_b, k_b = q[b], k[b]
        if rotary:
            q_b = rotate(q_b, cos, sin, n, rotary == "interleaved", causal)
            k_b = rotate(k_b, cos, sin, n, rotary == "interleaved")
        keys = torch.cat([cache[0][rows[b], :n], k_b])
        values = torch.cat([cache[1][rows[b], :n], v[b]])
        want = formula(q_b, keys, values, causal=causal)
        torch.testing.assert_close(out[b], want[0])
        torch.testing.assert_close(lse[b].to(DOUBLE), want[1])
        if not paged and new:
            torch.testing.assert_close(given[0][rows[b], n : n + new], k_b)
            torch.testing.assert_close(given[1][rows[b], n : n + new], v[b])


def test_with_kvcache_of_ragged_queries():
    q = normal(7, 4, 16, seed=1, dtype=DOUBLE)
    k, v = normal(2, 2, 20, 2, 16, seed=2, dtype=DOUBLE)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(20, 9), cu_seqlens_q=int32(0, 1, 7), max_seqlen_q=6,
        cache_leftpad=int32(3, 2), causal=True, return_softmax_lse=True,
    )  # fmt: skip
    for rows, b, n, first in ((slice(0, 1), 0, 20, 3), (slice(1, 7), 1, 9, 2)):
        want = formula(q[rows], k[b, :n], v[b, :n], causal=True, first=first)
        torch.testing.assert_close(out[rows], want[0])
        torch.testing.assert_close(lse[:, rows].to(DOUBLE), want[1])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed_q", [False, True])
def test_with_kvcache_of_packed_keys(paged, causal, packed_q):
    """New keys of other numbers than queries, rotated at positions of their own, left padding, rows
    of the cache or the page table, and a token behind the last sequence."""
    q_lens, new, lengths, turns = (3, 3) if not packed_q else (1, 3), (4, 0), (13, 29), (6, 11)
    rows, first = int32(2, 0), int32(3, 1)
    q = normal(sum(q_lens), 4, 16, seed=1, dtype=DOUBLE)
    cache = [normal(3, 32, 2, d, seed=i, dtype=DOUBLE) for i, d in ((2, 16), (3, 24))]
    k, v = (normal(sum(new) + 1, 2, d, seed=i, dtype=DOUBLE) for i, d in ((4, 16), (5, 24)))
    angles = torch.rand(40, 6, generator=torch.Generator().manual_seed(7))
    given, options = [x.clone() for x in cache], {"cache_batch_idx": rows}
    if paged:
        table = int32(1, 4, 5, 0, 2, 3).view(3, 2)
        for i, x in enumerate(cache):
            given[i] = torch.empty(6, 16, *x.shape[2:], dtype=DOUBLE)
            given[i][table.flatten().long()] = x.reshape(6, 16, *x.shape[2:])
        options["page_table"] = table
    if packed_q:
        options.update(cu_seqlens_q=int32(0, 1, 4), max_seqlen_q=3)
    out, lse = flash_attn_with_kvcache(
        q if packed_q else q.view(2, 3, 4, 16), *given, k, v, angles.cos(), angles.sin(),
        int32(*lengths), cache_leftpad=first, rotary_interleaved=False, causal=causal,
        cu_seqlens_k_new=int32(0, 4, 4), rotary_seqlens=int32(*turns), return_softmax_lse=True,
        **options,
    )  # fmt: skip
    out = out if packed_q else out.flatten(0, 1)
    lse = lse if packed_q else lse.transpose(0, 1).flatten(1)
    rotation = (angles.cos(), angles.sin())
    q_rows = q.split(q_lens)
    for b, keys in enumerate(k[:-1].split(new)):
        q_b = rotate(q_rows[b], *rotation, turns[b], False, causal)
        k_b = rotate(keys, *rotation, turns[b], False)
        past = [x[rows[b], : lengths[b]] for x in cache]
        want = formula(
            q_b, torch.cat([past[0], k_b]), torch.cat([past[1], v[:-1].split(new)[b]]),
            causal=causal, first=int(first[b]),
        )  # fmt: skip
        begin = sum(q_lens[:b])
        torch.testing.assert_close(out[begin : begin + q_lens[b]], want[0])
        torch.testing.assert_close(lse[:, begin : begin + q_lens[b]].to(DOUBLE), want[1])
    if not paged:
        for now, before in zip(given, cache, strict=True):
            written = (now != before).flatten(-2).any(-1)
            assert written.sum() == 4 and written[2, 13:17].all()


def test_a_row_of_the_page_table_that_does_not_exist():
    q, k, v = qkv()
    pages = [x.flatten(0, 1)[:64].view(4, 16, *x.shape[2:]) for x in (k, v)]
    with pytest.raises(InvalidInput, match="page_table"):
        flash_attn_with_kvcache(
            q, *pages, cache_seqlens=20, page_table=TABLE, cache_batch_idx=int32(0, 7)
        )


def test_fp8_inputs():
    """A factor for each sequence and KV head, also of queries."""
    made = [
        normal(2, 40, h, 64, seed=i).to(torch.float8_e4m3fn) for i, h in ((1, 4), (2, 2), (3, 2))
    ]
    factors = [torch.rand(2, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    out = flash_attn_func(*made, causal=True, **named)
    assert out.dtype == torch.bfloat16
    offsets = (int32(0, 40, 80), int32(0, 40, 80), 40, 40)
    packed = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in made), *offsets, causal=True, **named
    )
    for b in range(2):
        exact, plain = (
            formula(
                *(
                    x[b].to(dtype) * f[b].repeat_interleave(x.shape[2] // 2).to(dtype)[:, None]
                    for x, f in zip(made, factors, strict=True)
                ),
                causal=True,
            )[0]
            for dtype in (DOUBLE, torch.bfloat16)
        )
        assert_within_budget(out[b], exact, plain)
        assert_within_budget(packed[40 * b : 40 * b + 40], exact, plain)
    with pytest.raises(InvalidInput, match="q requires gradients"):
        flash_attn_func(made[0].requires_grad_(), *made[1:], **named)


@pytest.mark.parametrize("batch, sq", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"attention_chunk": 4}, {"alibi_slopes": SLOPES[0]}])
def test_nothing_to_attend_with(batch, sq, options):
    q, k, v = qkv(batch=batch, sq=sq)
    for out, lse in (
        flash_attn_func(q, k, v, return_lse=True, **options),
        flash_attn_with_kvcache(q, k, v, cache_seqlens=3, return_softmax_lse=True, **options),
    ):
        assert out.shape == (batch, sq, 4, 24) and lse.shape == (batch, 4, sq)


def test_a_window_may_be_a_tensor():
    tensors = qkv()
    out = flash_attn_func(*tensors, window_size=torch.tensor([5, 3]))
    assert out.equal(flash_attn_func(*tensors, window_size=(5, 3)))


def test_with_kvcache_of_fp8():
    q = normal(2, 1, 4, 16, seed=1, dtype=torch.bfloat16)
    cache = normal(2, 2, 20, 2, 16, seed=2).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0]])
    new = normal(2, 2, 1, 2, 16, seed=3, dtype=torch.bfloat16)
    out = flash_attn_with_kvcache(
        q, *cache, *new, cache_seqlens=5, k_descale=scale, v_descale=scale[0], causal=True
    )
    for b in range(2):
        exact, plain = (
            formula(q[b].to(dtype), *(cache.to(dtype) * scale.to(dtype).view(2, 1))[:, b, :6])[0]
            for dtype in (DOUBLE, torch.bfloat16)
        )
        assert_within_budget(out[b], exact, plain)


@pytest.mark.parametrize("options", [
    {"attention_chunk": 8}, {"alibi_slopes": torch.ones(4)}, {"seqused_q": int32(3, 3)},
    {"seqused_k": int32(3, 3)},
])  # fmt: skip
@pytest.mark.parametrize("factor", [None, torch.ones(2, 2)])
def test_what_inputs_in_fp8_do_not_go_with(options, factor):
    """It is named, rather than a factor that would be in order without it."""
    (name,) = options
    tensors = [x.to(E4M3) for x in qkv(sk=19, dtype=torch.float32)]
    refused = pytest.raises(Unsupported, match=f"{name} is not supported with q, k and v in .*e4m3")
    if not name.startswith("seqused"):
        with refused:
            flash_attn_func(*tensors, **options, q_descale=factor)
    packed, offsets = [x.flatten(0, 1) for x in tensors], int32(0, 19, 38)
    with refused:
        flash_attn_varlen_func(*packed, offsets, offsets, 19, 19, **options, q_descale=factor)


def quantised_cache(dim=16):
    """Keys and values `[2, B, S, Hkv, D]` of three sequences in fp8."""
    return normal(2, 3, 32, 2, dim, seed=2).to(E4M3)


FACTORS = {
    "one": (torch.tensor([0.5]), torch.tensor(2.0), torch.tensor([1.5])),
    "heads": (torch.tensor([0.5, 1.3]), torch.tensor([[0.7, 2.0]]), torch.tensor([1.5, 0.3])),
    "expanded": tuple(torch.tensor([[x]]).expand(3, 2) for x in (0.5, 0.7, 1.5)),
    "sequences": tuple(normal(3, 2, seed=7 + i).abs() + 0.3 for i in range(3)),
    "none": (None, None, None),
}


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize(
    "form, paged",
    [("steps", False), ("steps", True), ("packed", False), ("packed", True), ("varlen", True)],
)
def test_fp8_queries_over_a_cache(form, paged, factors):
    """Beside fp64 on what the numbers stand for; plain is the same in bf16."""
    q = normal(3, 5, 4, 16, seed=1).to(E4M3)
    k, v = quantised_cache()
    held, new = int32(9, 4, 20), normal(2, 3, 5, 2, 16, seed=3).to(E4M3)
    given = dict(zip(("q_descale", "k_descale", "v_descale"), FACTORS[factors], strict=True))
    options = {"causal": True, "softcap": 20.0, **given}
    caches, table = [k.clone(), v.clone()], None
    if paged:
        table = torch.randperm(6, generator=torch.Generator().manual_seed(0)).view(3, 2).int()
        for i, x in enumerate((k, v)):
            pages = torch.empty(6, 16, *x.shape[2:]).to(E4M3)
            pages[table.long()] = x.unflatten(1, (2, 16))
            caches[i] = pages
        options["page_table"] = table
    for b, n in enumerate(held.tolist()):
        k[b, n : n + 5], v[b, n : n + 5] = new[:, b]
    offsets = int32(0, 5, 10, 15)
    if form == "steps":
        out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=held, **options)
    elif form == "packed":
        sizes = {"cu_seqlens_q": offsets, "max_seqlen_q": 5, "cu_seqlens_k_new": offsets}
        packed = (q.flatten(0, 1), *caches, *new.flatten(1, 2))
        out = flash_attn_with_kvcache(*packed, cache_seqlens=held, **sizes, **options)
    else:
        flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=held, **options)
        sizes = {"max_seqlen_q": 5, "max_seqlen_k": 32, "seqused_k": held + 5}
        out = flash_attn_varlen_func(
            q.flatten(0, 1), *caches, cu_seqlens_q=offsets, cu_seqlens_k=None, **sizes, **options
        )
    assert out.dtype == torch.bfloat16
    out = out.view(3, 5, 4, 16)
    whole = [torch.ones(3, 2) if x is None else x.expand(3, 2) for x in FACTORS[factors]]
    for b, n in enumerate(held.tolist()):
        exact, plain = (
            formula(
                *(
                    x.to(dtype) * f[b].repeat_interleave(x.shape[1] // 2)[:, None].to(dtype)
                    for x, f in zip((q[b], k[b, : n + 5], v[b, : n + 5]), whole, strict=True)
                ),
                causal=True, softcap=20.0,
            )[0]
            for dtype in (DOUBLE, torch.bfloat16)
        )  # fmt: skip
        assert_within_budget(out[b], exact, plain)


@pytest.mark.parametrize("options, error, match", [
    ({"q_descale": torch.ones(2, 2)}, InvalidInput, r"q_descale has a wrong shape; .*\[3, 2\]"),
    ({"k_descale": torch.ones(3, 4)}, InvalidInput, "k_descale has a wrong shape"),
    ({"v_descale": 2.0}, InvalidType, "v_descale"),
    ({"k_descale": torch.ones(1, 1).expand(7, 5)}, InvalidInput, "k_descale has a wrong shape"),
    ({"v_descale": torch.ones(1, 3, 2)}, InvalidInput, "v_descale has a wrong shape"),
    ({"k_descale": torch.ones(3, 2, dtype=torch.float64)}, InvalidType, "k_descale .*float32"),
    ({"q_descale": int32(2)}, InvalidType, "q_descale has an unsupported dtype"),
    ({"q": torch.zeros(3, 1, 3, 16).to(E4M3), "q_descale": torch.ones(3, 2)}, InvalidInput,
     "q has a wrong number of heads; expected a multiple of 2"),
    ({"v_cache": quantised_cache()[1].half()}, InvalidType, "v_cache has another dtype than q"),
    ({"k": torch.zeros(3, 1, 2, 16), "v": torch.zeros(3, 1, 2, 16)}, InvalidType,
     "k has another dtype than q"),
])  # fmt: skip
def test_refusals_of_fp8_queries(options, error, match):
    k, v = quantised_cache()
    q, v_cache = torch.zeros(3, 1, 4, 16).to(E4M3), options.get("v_cache", v)
    others = {arg: x for arg, x in options.items() if arg not in ("q", "v_cache")}
    with pytest.raises(error, match="flash_attn_with_kvcache: .*" + match):
        flash_attn_with_kvcache(options.get("q", q), k, v_cache, cache_seqlens=7, **others)


@pytest.mark.parametrize("changes, error, match", [
    ({"v": quantised_cache()[1].half()}, InvalidType, "v has another dtype than q"),
    ({"k": quantised_cache()[0][0]}, InvalidInput, "k has a wrong rank"),
    ({"q": torch.zeros(4, 16).to(E4M3)}, InvalidInput, "q has a wrong rank"),
    ({"cu_seqlens_q": torch.tensor(3)}, InvalidType, "cu_seqlens_q"),
])  # fmt: skip
def test_refusals_of_fp8_queries_over_pages(changes, error, match):
    """By the names that this function has for its arguments."""
    k, v = quantised_cache()
    given = {"q": torch.zeros(3, 4, 16).to(E4M3), "k": k, "v": v, "cu_seqlens_q": int32(0, 1, 3)}
    sizes = {"cu_seqlens_k": None, "max_seqlen_q": 2, "max_seqlen_k": 32, "seqused_k": int32(7, 9)}
    with pytest.raises(error, match="flash_attn_varlen_func: " + match):
        flash_attn_varlen_func(**{**given, **changes}, **sizes, page_table=int32(0, 1).view(2, 1))


def test_factors_of_a_cache_for_queries_in_16_bits():
    """An expanded factor of another cache is not cut down to fit."""
    k, v = quantised_cache()
    q = normal(3, 1, 4, 16, seed=1, dtype=torch.bfloat16)
    for sizes in ((7, 5), (3, 4), (2, 2)):
        with pytest.raises(InvalidInput, match="v_descale has a wrong shape; expected one element"):
            flash_attn_with_kvcache(q, k, v, v_descale=torch.ones(1, 1).expand(sizes))


def test_all_of_a_cache_by_default():
    q, k, v = qkv()
    out = flash_attn_with_kvcache(q, k, v)
    torch.testing.assert_close(out, batched(q, k, v)[0])


@pytest.mark.parametrize("options, match", [
    ({"dropout_p": 0.1}, "dropout_p is not supported; attention dropout"),
    ({"qv": 1}, "qv is not supported"), ({"q_descale": 1}, "q_descale is not supported"),
    ({"k_descale": 1}, "k_descale is not supported; only float8_e4m3fn has factors"),
    ({"mask_mod": 1}, "BlockMask"),
    ({"score_mod": 1}, "score_mod"), ({"block_sparse_tensors": 1}, "block_sparse_tensors"),
    ({"aux_tensors": 1}, "aux_tensors"), ({"v_descale": 1}, "v_descale"),
    ({"score_mod_bwd": 1}, "score_mod_bwd"), ({"aux_scalars": 1}, "aux_scalars"),
    ({"gather_kv_indices": 1}, "KeySelection"),
])  # fmt: skip
def test_refusals(options, match):
    tensors = qkv()
    with pytest.raises(Unsupported, match="flash_attn_func: .*" + match):
        flash_attn_func(*tensors, **options)
    packed = [x.flatten(0, 1) for x in tensors]
    with pytest.raises(Unsupported, match="flash_attn_varlen_func: .*" + match):
        flash_attn_varlen_func(*packed, int32(0, 38), int32(0, 66), 38, 66, **options)


def test_refusals_of_packed_inputs():
    packed, cu = [x.flatten(0, 1) for x in qkv()], (int32(0, 38), int32(0, 66), 38, 66)
    with pytest.raises(InvalidType, match="q is not a tensor"):
        flash_attn_varlen_func([1.0], *packed[1:], *cu, seqused_k=int32(60))
    pages = [x[None] for x in packed[1:]]
    with pytest.raises(InvalidType, match="cu_seqlens_k is not a tensor"):
        flash_attn_varlen_func(packed[0], *pages, cu[0], [0, 66], 38, 66, block_table=int32([0]))


TABLE = torch.zeros(2, 2, dtype=torch.int32)
NEW = {"k": torch.zeros(2, 1, 2, 16, dtype=DOUBLE), "v": torch.zeros(2, 1, 2, 24, dtype=DOUBLE)}
COS = torch.ones(40, 4)


@pytest.mark.parametrize("options, error, match", [
    ({"qv": 1}, Unsupported, "qv"), ({"scheduler_metadata": 1}, Unsupported, "scheduler_metadata"),
    ({"q_descale": 1}, Unsupported, "q_descale"),
    ({"attention_chunk": 8, "cache_leftpad": int32(0, 1)}, Unsupported, "from which flash-attn"),
    ({**NEW, "cu_seqlens_k_new": int32(0, 1, 2), "cache_seqlens": 3}, InvalidInput,
     r"k has a wrong rank; expected \[T, Hkv, D\]"),
    ({"block_table": TABLE, "page_table": TABLE}, InvalidInput, "are both given"),
    ({"page_table": TABLE[0]}, InvalidInput,
     r"block_table/page_table has a wrong rank; expected \[B, max_pages\]"),
    ({**NEW}, InvalidInput, "cache_seqlens is missing"),
    ({"k": NEW["k"], "cache_seqlens": 3}, InvalidInput, "v is missing"),
    ({"rotary_cos": COS, "rotary_sin": COS, "cache_seqlens": 3}, InvalidInput, "k is missing"),
    ({**NEW, "rotary_cos": COS, "cache_seqlens": 3}, InvalidInput, "rotary_sin is missing"),
    ({**NEW, "cache_seqlens": 33}, InvalidInput,
     r"cache_seqlens\[0\] leaves no room for k and v; expected 0 to 32, for 1 more in the 33 s"),
    ({"cu_seqlens_k_new": int32(0, 1, 2)}, InvalidInput, "cu_seqlens_k_new goes with k and v"),
    ({"max_seqlen_q": 19}, InvalidInput,
     "max_seqlen_q goes with cu_seqlens_q; expected None without cu_seqlens_q, got 19$"),
    ({"return_softmax_lse": "yes"}, InvalidType, "return_softmax_lse is not a bool"),
    ({"k_descale": torch.ones(2, 2)}, Unsupported, "k_descale per sequence is supported with"),
    ({"window_size": 3}, InvalidInput, "window_size is malformed"),
    ({"window_size": (3.5, 0)}, InvalidInput, "window_size is malformed"),
    ({"cache_seqlens": 34}, InvalidInput, "cache_seqlens is out of range; expected at most 33"),
    ({"cache_seqlens": -1}, InvalidInput, "cache_seqlens is too small"),
    ({"cache_seqlens": 5.7}, InvalidType, "cache_seqlens is not an int"),
    ({"cache_seqlens": [5, 7]}, InvalidType, "cache_seqlens is not an int"),
    ({"cu_seqlens_q": int32(0, 19, 38)}, InvalidInput, r"q has a wrong rank; expected \[T, H, D\]"),
    ({"k": NEW["k"].to("meta"), "v": NEW["v"], "cache_seqlens": 3}, InvalidInput, "k on meta"),
])  # fmt: skip
def test_refusals_with_kvcache(options, error, match):
    with pytest.raises(error, match=match):
        flash_attn_with_kvcache(*qkv(), **options)


@pytest.mark.parametrize("change, error, match", [
    (lambda q: q.to(torch.float8_e5m2), InvalidType, "q has an unsupported dtype"),
    (lambda q: q[..., :8], InvalidInput, "q/k_cache have different head dims"),
])  # fmt: skip
def test_queries_that_do_not_fit_the_cache(change, error, match):
    q, *caches = qkv()
    turned = {"rotary_cos": COS, "rotary_sin": COS, "cache_seqlens": 3}
    with pytest.raises(error, match=match):
        flash_attn_with_kvcache(change(q), *caches, **NEW, **turned)


PACKED_NEW = {name: x.flatten(0, 1) for name, x in NEW.items()}
TURNS = {"rotary_cos": COS, "rotary_sin": COS}
NO_PAGES = {"page_table": TABLE[:, :0]}


@pytest.mark.parametrize("options, error, match", [
    ({"cache_seqlens": int32(5)}, InvalidInput, r"cache_seqlens has a wrong shape; expected \[2\]"),
    ({"cache_seqlens": int32(5, 7, 9)}, InvalidInput, "cache_seqlens has a wrong shape"),
    ({"cache_seqlens": torch.tensor([5.0, 7.0])}, InvalidType, "cache_seqlens"),
    ({**TURNS, "rotary_seqlens": int32(1, 2, 3)}, InvalidInput, "rotary_seqlens has a wrong shape"),
    ({**TURNS, "rotary_seqlens": torch.tensor([1.7, 2.2])}, InvalidType, "rotary_seqlens"),
    ({"cache_leftpad": int32(1)}, InvalidInput, "cache_leftpad has a wrong shape"),
    ({"cache_batch_idx": int32(0, 1, 0)}, InvalidInput, "cache_batch_idx has a wrong shape"),
    ({"page_table": TABLE, "cache_batch_idx": torch.tensor([1.2, 0.0])}, InvalidType,
     "cache_batch_idx"),
    ({"page_table": TABLE[:1]}, InvalidInput, r"page_table has a wrong shape; expected \[2, max_p"),
    ({"page_table": TABLE.float()}, InvalidType, "page_table"),
    ({**NO_PAGES, "cache_seqlens": int32(0, 0)}, InvalidInput,
     r"cache_seqlens\[0\] leaves no room for k and v; expected at most 0 new keys"),
    ({"cache_seqlens": int32(5, 33)}, InvalidInput, r"cache_seqlens\[1\] leaves no room"),
    ({"cache_seqlens": int32(-1, 5)}, InvalidInput, r"cache_seqlens\[0\] leaves no .* got -1"),
    ({"cache_batch_idx": int32(0, 2)}, InvalidInput, r"cache_batch_idx\[1\] is out of range; "
     "expected 0 to 1, got 2"),
    ({"page_table": TABLE - 1}, InvalidInput,
     r"block_table/page_table\[0, 0\] is out of range; expected 0 to 5, got -1"),
    ({"page_table": TABLE + 6, "cache_seqlens": int32(12, 0)}, InvalidInput,
     r"block_table/page_table\[0, 1\] is out of range; expected 0 to 5, got 6"),
    ({**TURNS, "cache_seqlens": int32(5, 7), "rotary_seqlens": int32(3, 40)}, InvalidInput,
     "rotary_cos does not reach all positions of k; expected rows for positions 3 to 40, got 40"),
    ({**PACKED_NEW, "cu_seqlens_k_new": int32(0, 0, 2), "cache_seqlens": int32(90, 32)},
     InvalidInput, r"cache_seqlens\[1\] leaves .*expected 0 to 31, for 2 more in the 33 slots"),
    ({"k": NEW["k"][:1]}, InvalidInput, r"k has a wrong shape; expected \[2, 1, 2, 16\]"),
    ({"v": NEW["v"][:1]}, InvalidInput, r"v has a wrong shape; expected \[2, 1, 2, 24\]"),
    ({**PACKED_NEW, "cu_seqlens_k_new": int32(0, 2)}, InvalidInput,
     r"cu_seqlens_k_new has a wrong shape; expected \[3\]"),
    ({**PACKED_NEW, "cu_seqlens_k_new": int32(0, 1, 1, 2)}, InvalidInput, "cu_seqlens_k_new"),
    ({**PACKED_NEW, "cu_seqlens_k_new": int32(1, 1, 2)}, InvalidInput, r"cu_seqlens_k_new\[0\]"),
    ({**PACKED_NEW, "cu_seqlens_k_new": int32(0, 2, 1)}, InvalidInput, r"k_new\[2\] falls"),
    ({**PACKED_NEW, "cu_seqlens_k_new": int32(0, 1, 3)}, InvalidInput,
     r"cu_seqlens_k_new\[2\] is out of range; expected at most 2"),
])  # fmt: skip
def test_numbers_are_checked_before_they_are_used(options, error, match):
    """Nothing is written to the cache, and nothing is looked up that is not there."""
    q, *caches = qkv()
    if "page_table" in options:
        caches = [x.reshape(6, 11, *x.shape[2:]) for x in caches]
    before = [x.clone() for x in caches]
    with pytest.raises(error, match=match):
        flash_attn_with_kvcache(q, *caches, **{**NEW, "cache_seqlens": int32(5, 7), **options})
    assert all(x.equal(y) for x, y in zip(caches, before, strict=True))


@pytest.mark.parametrize("options, match", [
    ({"softmax_scale": "a"}, "softmax_scale is not a number"),
    ({"softcap": -1.0}, "softcap is not positive"),
    ({"learnable_sink": torch.zeros(3)}, r"learnable_sink has a wrong shape; expected \[4\]"),
    ({"attention_chunk": -1}, "attention_chunk is too small"),
    ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes has a wrong shape"),
    ({"return_softmax_lse": 1}, "return_softmax_lse is not a bool"),
])  # fmt: skip
def test_errors_have_the_names_of_the_caller(options, match):
    tensors = qkv(dtype=torch.float32)
    with pytest.raises(InvalidInput, match=f"^flash_attn_func: {match}"):
        flash_attn_func(*tensors, **options)
    packed = [x.flatten(0, 1) for x in tensors]
    with pytest.raises(InvalidInput, match=f"^flash_attn_varlen_func: {match}"):
        flash_attn_varlen_func(*packed, int32(0, 38), int32(0, 66), 38, 66, **options)
    with pytest.raises(InvalidInput, match=f"^flash_attn_with_kvcache: {match}"):
        flash_attn_with_kvcache(*tensors, **options)


def test_errors_about_caches_have_the_names_of_the_caller():
    q, k, v = qkv()
    with pytest.raises(InvalidInput, match=r"^flash_attn_with_kvcache: k_cache/v_cache do not"):
        flash_attn_with_kvcache(q, k[:1], v)
    odd = {"rotary_cos": torch.ones(40, 4), "rotary_sin": torch.ones(41, 4)}
    with pytest.raises(InvalidInput, match=r"^flash_attn_with_kvcache: rotary_sin has a wrong"):
        flash_attn_with_kvcache(q, k, v, **NEW, **odd, cache_seqlens=3)
    pages = [x.reshape(6, 11, *x.shape[2:]) for x in (k, v)]
    over = {"cu_seqlens_q": int32(0, 19, 38), "max_seqlen_q": 19}
    for options, match in (
        ({"seqused_k": int32(3)}, r"seqused_k has a wrong shape; expected \[2\]"),
        ({"seqused_k": int32(3, 30)}, r"seqused_k\[1\] is out of range; expected 0 to 22"),
        ({"seqused_k": int32(3, 5), "page_table": TABLE + 6},
         r"block_table/page_table\[0, 0\] is out of range"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=f"^flash_attn_varlen_func: {match}"):
            flash_attn_varlen_func(
                q.flatten(0, 1), *pages, **over, **{"page_table": TABLE, **options}
            )


def misfits():
    """Tensors that do not go together, and what an error says about them."""
    q, k, v = qkv()
    # tokens are last in memory, so that the last of all strides is not 1
    columns = q.transpose(1, 3).contiguous().transpose(1, 3)
    return {
        "head dims": ((q, k[..., :8], v), r"have different head dims; .*\[2, 33, 2, 8\]"),
        "keys": ((q, k, v[:, :32]), r"\[2, 33, 2, .*\[2, 32, 2, 24\]"),
        "heads": ((q, k, v[:, :, :1]), r"do not match; .*\[2, 33, 1, 24\]"),
        "groups": ((q[:, :, :3], k, v), "3 query heads not divisible by 2 kv heads"),
        "strides": ((columns, k, v), rf"q .*strides \({columns.stride(0)}, 1, 19, "),
    }


@pytest.mark.parametrize("name", misfits())
@pytest.mark.parametrize("options", [{}, {"attention_chunk": 8}], ids=str)
def test_errors_about_shapes_tell_those_of_the_caller(name, options):
    """Inside, heads come before tokens, and sequences are packed."""
    tensors, match = misfits()[name]
    with pytest.raises(InvalidInput, match=f"^flash_attn_func: .*{match}"):
        flash_attn_func(*tensors, **options)
    with pytest.raises(InvalidInput, match=f"^flash_attn_varlen_func: .*{match}"):
        flash_attn_varlen_func(*tensors, **options)
    if name != "strides":
        with pytest.raises(InvalidInput, match=f"^flash_attn_with_kvcache: .*{match}"):
            flash_attn_with_kvcache(*tensors, **options)


def test_errors_about_batches_of_one_call_tell_shapes_of_the_caller():
    q, k, v = qkv()
    shapes = r"q \[2, 19, 4, 16\], k \[1, 33, 2, 16\]"
    with pytest.raises(InvalidInput, match=f"q/k/v have different batch sizes; .*{shapes}"):
        flash_attn_func(q, k[:1], v[:1])
    packed, offsets = [x.flatten(0, 1) for x in (k, v)], int32(0, 30, 66)
    with pytest.raises(InvalidInput, match=r"q \[2, 19, 4, 8\], k \[66, 2, 16\]"):
        flash_attn_varlen_func(q[..., :8].contiguous(), *packed, None, offsets)
    pages = [x.reshape(6, 11, *x.shape[2:]) for x in (k, v)]
    with pytest.raises(InvalidInput, match=r"q \[2, 19, 4, 8\], k \[6, 11, 2, 16\]"):
        flash_attn_varlen_func(
            q[..., :8].contiguous(), *pages, seqused_k=int32(3, 5), page_table=TABLE
        )
    with pytest.raises(InvalidInput, match=r"out has .*\[2, 19, 4, 24\], got \[2, 19, 4, 16\]"):
        flash_attn_varlen_func(q, k, v, out=torch.empty_like(q))
    columns = k.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(InvalidInput, match=rf"k_cache is not .*strides \({k.stride(0)}, 1, 33, "):
        flash_attn_with_kvcache(q, columns, v)


@pytest.mark.parametrize("new, match", [
    ({"k": NEW["k"].repeat(1, 1, 2, 1)}, r"k has .*\[2, 1, 2, 16\], got \[2, 1, 4, 16\]"),
    ({"v": NEW["v"][..., :16]}, r"v has .*\[2, 1, 2, 24\], got \[2, 1, 2, 16\]"),
])  # fmt: skip
def test_errors_about_new_keys_tell_shapes_of_the_caller(new, match):
    with pytest.raises(InvalidInput, match=f"^flash_attn_with_kvcache: {match}"):
        flash_attn_with_kvcache(*qkv(), **{**NEW, **new}, cache_seqlens=3)


def test_queries_over_a_cache_that_want_a_gradient():
    """The results are there, with or without new keys; only a backward raises."""
    q, *caches = qkv()
    turned = {"rotary_cos": COS, "rotary_sin": COS, "cache_seqlens": 3, "causal": True}
    new = {name: x + 1 for name, x in NEW.items()}
    for options in ({}, {**new, **turned}):
        plain, asking = ([x.clone() for x in caches] for _ in range(2))
        want, want_lse = flash_attn_with_kvcache(q, *plain, **options, return_softmax_lse=True)
        given = {name: x.clone().requires_grad_() for name, x in new.items() if name in options}
        leaf = q.clone().requires_grad_()
        options = {**options, **given}
        out, lse = flash_attn_with_kvcache(leaf, *asking, **options, return_softmax_lse=True)
        assert out.equal(want) and lse.equal(want_lse)
        assert all(x.equal(y) for x, y in zip(asking, plain, strict=True))
        for result in (out, lse):
            with pytest.raises(Unsupported, match="read from a KV cache has no gradient"):
                result.sum().backward(retain_graph=True)
    factor = {"k_descale": torch.ones(2, requires_grad=True)}
    k, v = quantised_cache()
    for alone in (
        flash_attn_with_kvcache(q.clone().requires_grad_(), *caches),
        flash_attn_with_kvcache(torch.zeros(3, 1, 4, 16).to(E4M3), k, v, **factor),
    ):
        with pytest.raises(Unsupported, match="read from a KV cache has no gradient"):
            alone.sum().backward()


USED = {"seqused_q": int32(19, 7), "seqused_k": int32(33, 20)}


@pytest.mark.parametrize("packed", ["", "q", "k"])
@pytest.mark.parametrize("used", [{}, USED])
def test_varlen_of_tensors_that_are_not_packed(packed, used):
    """As in flash-attn 4: without offsets, each row of tokens is a sequence."""
    q, k, v = qkv()
    out = torch.full((2, 19, 4, 24), torch.nan, dtype=DOUBLE)
    given, options = [q, k, v], {"causal": True, **used, "return_lse": True}
    if packed == "q":
        given[0], options["cu_seqlens_q"] = q.flatten(0, 1), int32(0, 19, 38)
        out = out.flatten(0, 1)
    if packed == "k":
        given[1:], options["cu_seqlens_k"] = [x.flatten(0, 1) for x in (k, v)], int32(0, 33, 66)
    result, lse = flash_attn_varlen_func(*given, **options, out=out)
    assert result is out
    fresh, fresh_lse = flash_attn_varlen_func(*given, max_seqlen_q=19, max_seqlen_k=33, **options)
    assert fresh.equal(out) and fresh_lse.equal(lse)
    if packed == "q":
        assert lse.shape == (4, 38)
        out, lse = out.unflatten(0, (2, 19)), lse.unflatten(1, (2, 19)).transpose(0, 1)
    assert lse.shape == (2, 4, 19)
    for b, (rows, keys) in enumerate(((19, 33), (7, 20) if used else (19, 33))):
        want, want_lse = formula(q[b, :rows], k[b, :keys], v[b, :keys], causal=True)
        torch.testing.assert_close(out[b, :rows], want)
        torch.testing.assert_close(lse[b, :, :rows].to(DOUBLE), want_lse)
        assert out[b, rows:].eq(0).all()


def test_gradients_of_tensors_that_are_not_packed():
    q, k, v = (x.requires_grad_() for x in qkv())
    cotangent = normal(2, 19, 4, 24, seed=9, dtype=DOUBLE)
    made = [
        torch.autograd.grad((function(q, k, v, causal=True) * cotangent).sum(), (q, k, v))
        for function in (flash_attn_varlen_func, flash_attn_func)
    ]
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got, want)


def test_varlen_over_pages_of_queries_that_are_not_packed():
    q, k, v = qkv(sk=32)
    pages = [x.reshape(4, 16, *x.shape[2:]) for x in (k, v)]
    table, lengths = int32(0, 1, 2, 3).view(2, 2), int32(32, 20)
    out, lse = flash_attn_varlen_func(
        q, *pages, seqused_k=lengths, page_table=table, causal=True, return_lse=True
    )
    assert lse.shape == (2, 4, 19)
    for b, n in enumerate(lengths.tolist()):
        want, want_lse = formula(q[b], k[b, :n], v[b, :n], causal=True)
        torch.testing.assert_close(out[b], want)
        torch.testing.assert_close(lse[b].to(DOUBLE), want_lse)


def test_longest_lengths_are_optional():
    q, k, v = (x.flatten(0, 1) for x in qkv())
    offsets = int32(0, 5, 38), int32(0, 40, 66)
    want = flash_attn_varlen_func(q, k, v, *offsets, 33, 40, causal=True)
    assert flash_attn_varlen_func(q, k, v, *offsets, causal=True).equal(want)


@pytest.mark.parametrize("change, options, match", [
    (lambda q, k, v: (q.flatten(0, 1), k, v), {}, r"cu_seqlens_q is missing; expected int32 \[B"),
    (lambda q, k, v: (q, k.flatten(0, 1), v), {}, "cu_seqlens_k is missing"),
    (lambda q, k, v: (q, k, v[:, :5]), {}, r"v has a wrong shape; expected \[2, 33, 2, 24\]"),
    (lambda q, k, v: (q, k[:1], v[:1]), {}, r"q/k have different batch sizes; .*\[2, 1\]"),
    (lambda q, k, v: (q, k, v), {"max_seqlen_q": 18}, "max_seqlen_q is too small; expected at l"),
    (lambda q, k, v: (q, k, v), {"max_seqlen_k": 3.0}, "max_seqlen_k is not an int"),
    (lambda q, k, v: (q[:, :9], k, v), {}, r"q has gaps between sequences; .*call .contiguous"),
    (lambda q, k, v: (q, k, v), {"out": torch.zeros(38, 4, 24)}, "out has a wrong rank"),
    (lambda q, k, v: (q, k, v), {"scheduler_metadata": 1}, "scheduler_metadata is not supported"),
])  # fmt: skip
def test_refusals_of_tensors_that_are_not_packed(change, options, match):
    with pytest.raises((InvalidInput, Unsupported), match=f"^flash_attn_varlen_func: {match}"):
        flash_attn_varlen_func(*change(*qkv()), **options)
