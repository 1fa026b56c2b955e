"""Random calls of what a serving engine makes: ragged queries over caches, and writes to slots."""

import math
from typing import Any

import torch
from torch import Tensor

from ..kv_cache import append as append_api
from ..kv_cache.slots import Rotary
from ..ragged import api as ragged_api
from . import naive
from .fuzz_attention import check_forward, drawn_cache, drawn_options, drawn_shape
from .fuzz_draw import DTYPES, LENGTHS, Draw, assert_within_twice_the_budget

# With options from tables and draws, whose types no checker can know.
attention_varlen: Any = ragged_api.attention_varlen
kv_append: Any = append_api.kv_append


def _seen(sq: int, sk: int, options: dict[str, Any], first: int, heads: int) -> Tensor:
    """bool [1, Hq, Sq, Sk]: band, chunk and the first key, element by element."""
    seen = naive.in_band(sq, sk, options["causal"], options["window"])
    chunk = options.get("chunk")
    for i in range(sq):
        for j in range(sk):
            position = i + sk - sq
            same = chunk is None or position // chunk == j // chunk
            seen[i, j] = seen[i, j] and same and j >= first
    return seen.expand(1, heads, sq, sk)


def ragged_attention(draw: Draw) -> None:
    """`attention_varlen` over contiguous and paged caches."""
    shape, rng, form = drawn_shape(draw)._replace(masked="none"), draw.rng, draw.form
    (hq, hkv), (d, dv) = shape.heads, shape.dims
    page_size = form.choice([None, 16, 16, 17, 64])
    chunked, padded, invariant = (form.random() < 0.25 for _ in range(3))
    lengths = [rng.choice((0, *LENGTHS, 130)) for _ in range(rng.choice([1, 2, 4]))]
    queries = [rng.choice([0, 1, 1, 2, 7, min(n, 20), n]) for n in lengths]
    slots = max(*lengths, 1) + rng.choice([0, 1, 37])
    rows_behind = rng.choice([0, 0, 3])
    draw.note(page_size=page_size, lengths=lengths, queries=queries, slots=slots)
    options, softmax = drawn_options(draw, shape)
    if chunked:
        options["chunk"] = rng.choice([1, 16, 23])
    if invariant:
        options["batch_invariant"] = True
    first = [rng.randint(0, n) if padded else 0 for n in lengths]
    if padded:
        options["leftpad_k"] = torch.tensor(first, dtype=torch.int32, device=draw.device)
    draw.note(chunk=options.get("chunk"), first=first, invariant=invariant)
    q = draw.normal(sum(queries) + rows_behind, hq, d, dtype=shape.dtype)
    k, v, table = drawn_cache(draw, lengths, hkv, (d, dv), slots, page_size)
    k, v = (x.to(shape.dtype) for x in (k, v))
    if table is not None:
        dtype = rng.choice([torch.int32, torch.int64])
        options["page_table"] = table.to(draw.device, dtype)
    given = [draw.laid_out(x) for x in (q, k, v)]
    offsets = torch.tensor([0, *queries]).cumsum(0).int().to(draw.device)
    options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
    options["max_seqlen_q"] = max(queries) + rng.choice([0, 3])
    into = rng.random() < 0.3

    def call(impl: str) -> Any:
        out = torch.full((*q.shape[:2], dv), math.nan, dtype=q.dtype, device=q.device)
        more = {"out": out} if into else {}
        return attention_varlen(*given, offsets, **options, **more, return_lse=True, impl=impl)

    out, lse = draw.twice(call, draw.impl())
    at = 0
    for b, (sq, sk) in enumerate(zip(queries, lengths, strict=True)):
        pages = None if table is None else table[b].tolist()
        keys, values = (
            torch.stack([naive.cached(x.cpu(), sk, pages, b, h) for h in range(hkv)])[None]
            for x in (k, v)
        )
        rows = slice(at, at + sq)
        seen = _seen(sq, sk, options, first[b], hq)
        own = q[rows].transpose(0, 1)[None]
        check_forward(
            out[rows].transpose(0, 1)[None], lse[None, :, rows], (own, keys, values), seen, softmax
        )
        at += sq
    assert not out[at:].any() and (lse[:, at:] == -math.inf).all(), "rows behind are not empty"


def slot_appending(draw: Draw) -> None:
    """`kv_append` by `slot_mapping`, with and without a rotary embedding."""
    rng, form = draw.rng, draw.form
    dtype, heads, group = form.choice(DTYPES), form.choice([1, 2, 3]), form.choice([1, 4])
    dim, page_size = form.choice([8, 24, 64, 128]), form.choice([16, 17, 64])
    rotates, interleaved = form.random() < 0.7, form.random() < 0.5
    turned = form.choice([dim, dim // 2])
    tokens, pages = rng.choice((0, *LENGTHS)), rng.choice([5, 9])
    draw.note(dtype=dtype, heads=heads, dim=dim, page_size=page_size, tokens=tokens)
    draw.note(rotates=rotates, interleaved=interleaved, turned=turned)
    generator = torch.Generator().manual_seed(draw.seed)
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    positions = torch.randint(0, 40, (tokens,), generator=generator)
    q = draw.normal(tokens, heads * group, dim, dtype=dtype)
    k, v = (draw.normal(tokens, heads, dim, dtype=dtype) for _ in range(2))
    before = [draw.normal(pages, page_size, heads, dim, dtype=dtype) for _ in range(2)]
    queries, keys, values = (draw.laid_out(x) for x in (q, k, v))
    angles = draw.normal(40, turned // 2)
    cos, sin = angles.cos(), angles.sin()
    options: dict[str, Any] = {"slot_mapping": slots.to(draw.device)}
    if rotates:
        options["rotary"] = Rotary(cos, sin, interleaved)
        options |= {"positions": positions.to(draw.device), "q": queries}

    def call(impl: str) -> Any:
        caches = [draw.laid_out(x) for x in before]
        turned_queries = kv_append(*caches, keys, values, **options, impl=impl)
        return (*caches, turned_queries) if rotates else tuple(caches)

    k_cache, v_cache, *more = draw.twice(call, draw.impl(("auto", "triton", "eager")))
    written = [int(s) for s in slots.tolist()]
    for cache, old, new in ((v_cache, before[1], v), (k_cache, before[0], None)):
        expected = old.clone().flatten(0, 1)
        for t, slot in enumerate(written):
            if slot >= 0:
                expected[slot] = cache.flatten(0, 1)[slot] if new is None else new[t]
        assert cache.flatten(0, 1).equal(expected), "a slot holds something else"
    kept = torch.tensor([t for t, slot in enumerate(written) if slot >= 0], dtype=torch.int64)
    stored = k_cache.flatten(0, 1)[[written[t] for t in kept.tolist()]]
    turning = [("keys", stored, k[kept.to(k.device)], positions[kept])]
    if rotates:
        turning.append(("queries", more[0], q, positions))
    for what, got, x, places in turning:
        if not rotates:
            assert got.equal(x), "keys are not those that were given"
            continue
        exact, plain = (
            _rotated(x.cpu().to(kind), cos.cpu(), sin.cpu(), places, interleaved)
            for kind in (torch.float64, torch.float32)
        )
        assert_within_twice_the_budget(got, exact, plain.to(got.dtype), what=what)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """[T, H, D], pair by pair."""
    out = x.clone()
    half = cos.shape[1]
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = cos[position, i].to(x.dtype), sin[position, i].to(x.dtype)
            out[t, :, a] = x[t, :, a] * c - x[t, :, b] * s
            out[t, :, b] = x[t, :, b] * c + x[t, :, a] * s
    return out


KINDS = {"ragged": ragged_attention, "slots": slot_appending}
