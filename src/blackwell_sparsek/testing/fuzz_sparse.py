"""Random calls of what chooses keys and attends to them, and of fp8, against the second oracle."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention import api as attention_api
from ..calls.fp8 import SCALES
from ..core.errors import Unsupported
from ..decode import api as decode_api
from ..fp8 import api as quantize_api
from ..fp8 import attend as fp8_attend
from ..fp8 import multiply as fp8_multiply
from ..masks.key_selection import KeySelection
from ..select_keys import api as select_api
from ..sparse.matrix import BSRMatrix
from ..sparse_attention import api as sparse_api
from ..sparsek import api as sparsek_api
from ..sparsek.cache import SparsekCache
from . import naive
from .fuzz_attention import check_forward, drawn_cache, drawn_options, drawn_shape, gradients_of
from .fuzz_draw import DTYPES, LENGTHS, Draw, assert_within_twice_the_budget, same_bits
from .inputs import integers
from .naive import Softmax

# With options from tables and draws, whose types no checker can know.
attention: Any = attention_api.attention
attention_decode: Any = decode_api.attention_decode
sparse_attention: Any = sparse_api.sparse_attention
select_keys: Any = select_api.select_keys
sparsek: Any = sparsek_api.sparsek
sparsek_causal: Any = sparsek_api.sparsek_causal
quantize: Any = quantize_api.quantize
fp8_attention: Any = fp8_attend.attention
fp8_matmul: Any = fp8_multiply.matmul

FP64 = torch.float64
PORTABLE = ("auto", "triton", "eager")


# Chosen keys.


def _drawn_lists(draw: Draw, sizes: list[int], entries: int, most: int) -> Tensor:
    """int64 [B, lists, Tq, most]: different entries in any order, -1 in places without one."""
    chosen = torch.full((*sizes, most), -1)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in sizes)).tolist():
        some = draw.rng.sample(range(entries), draw.rng.randint(0, min(most, entries)))
        places = draw.rng.sample(range(most), len(some))
        chosen[tuple(at)][places] = torch.tensor(some, dtype=torch.int64)
    return chosen


def chosen_keys(draw: Draw) -> None:
    """`sparse_attention` over dense keys, and its gradients where there is no gate."""
    shape, rng, form = drawn_shape(draw)._replace(masked="none"), draw.rng, draw.form
    (hq, hkv), (d, dv) = shape.heads, shape.dims
    granularity, lists = form.choice([1, 4, 16, 64]), form.choice([1, hkv, hq])
    gated = form.random() < 0.4
    batch, sq = rng.choice([1, 1, 2]), rng.choice((1, 2, 15, 17))
    sk = rng.choice([sq, rng.choice(LENGTHS)])
    entries, most = -(-sk // granularity), rng.choice([1, 2, 5])
    draw.note(batch=batch, sq=sq, sk=sk, lists=lists, granularity=granularity, gated=gated)
    options, softmax = drawn_options(draw, shape)
    lists_of = _drawn_lists(draw, [batch, lists, sq], entries, most)
    chosen = KeySelection.from_indices(lists_of.to(draw.device), granularity=granularity, kv_len=sk)
    gate = draw.normal(*chosen.ids.shape).clamp(0, 2) if gated else None
    band = naive.in_band(sq, sk, options["causal"], None)
    near = torch.zeros(sq, sk, dtype=torch.bool)
    if options["window"] is not None:
        near = naive.in_band(sq, sk, options["causal"], options["window"])
    factors = torch.zeros(batch, hq, sq, sk)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in (batch, hq, sq))).tolist():
        b, h, i = at
        own = (b, h * lists // hq, i)
        for place in range(int(chosen.counts[own])):
            first = int(chosen.ids[own][place]) * granularity
            weight = 1.0 if gate is None else float(gate[own][place])
            factors[b, h, i, first : first + granularity] = weight
    factors = torch.where(near, 1.0, factors)
    seen = band & (factors > 0)
    q = draw.normal(batch, hq, sq, d, dtype=shape.dtype)
    k, v = (draw.normal(batch, hkv, sk, dim, dtype=shape.dtype) for dim in (d, dv))
    given: Any = tuple(draw.laid_out(x) for x in (q, k, v))
    impl = draw.impl()

    def call(name: str) -> Any:
        return sparse_attention(*given, chosen, **options, gate=gate, return_lse=True, impl=name)

    out, lse = draw.twice(call, impl)
    check_forward(out, lse, (q, k, v), seen, softmax, factors)
    if not gated and rng.random() < 0.3:
        gradients_of(draw, call, impl, given, (q, k, v), options["sinks"], seen, softmax)


def choosing_keys(draw: Draw) -> None:
    """`select_keys`, with whole numbers, so that every score is exact."""
    rng, form = draw.rng, draw.form
    dtype, dim = form.choice(DTYPES), form.choice([8, 24, 64])
    kv_heads, group, granularity = form.choice([1, 2]), form.choice([1, 2]), form.choice([1, 4, 16])
    weighted, activation = form.random() < 0.5, form.choice([None, "relu"])
    heads, batch = kv_heads * group, rng.choice([1, 2])
    lists = rng.choice([n for n in (1, 2, heads) if heads % n == 0])
    sq, sk = rng.choice((1, 2, 15, 17)), rng.choice(LENGTHS)
    causal, top_k = rng.random() < 0.6, rng.randint(1, 6)
    first = rng.randint(0, min(2, top_k))
    last = rng.randint(0, min(2, top_k - first))
    draw.note(dtype=dtype, dim=dim, heads=heads, kv_heads=kv_heads, granularity=granularity)
    draw.note(weighted=weighted, activation=activation, lists=lists, sq=sq, sk=sk, causal=causal)
    draw.note(top_k=top_k, force_first=first, force_last=last)
    q = integers(batch, heads, sq, dim, seed=draw.seed).to(draw.device, dtype)
    k = integers(batch, kv_heads, sk, dim, seed=draw.seed + 1).to(draw.device, dtype)
    weights = integers(batch, heads, sq, seed=draw.seed + 2).to(draw.device) if weighted else None
    options = {"weights": weights, "activation": activation, "granularity": granularity}
    options |= {"top_k": top_k, "force_first": first, "force_last": last, "causal": causal}
    options |= {"lists": lists, "pool": None if granularity == 1 else "max"}
    given = (draw.laid_out(q), draw.laid_out(k))

    def call(name: str) -> Any:
        made = select_keys(*given, **options, impl=name)
        # what places without an entry hold is not part of the result
        used = torch.arange(made.ids.shape[-1], device=q.device) < made.counts[..., None]
        return torch.where(used, made.ids, -1), made.counts

    ids, counts = draw.twice(call, draw.impl(PORTABLE))
    each = heads // lists
    for at in torch.cartesian_prod(*(torch.arange(n) for n in (batch, lists, sq))).tolist():
        b, own, i = at
        keys = min(max(i + sk - sq + 1, 0), sk) if causal else sk
        scores = torch.zeros(keys, dtype=FP64)
        for h in range(own * each, (own + 1) * each):
            score = k[b, h // group, :keys].cpu().double() @ q[b, h, i].cpu().double()
            score = score.clamp(min=0) if activation else score
            scores += score if weights is None else score * float(weights[b, h, i])
        best = [float(x.max()) for x in torch.split(scores, granularity)] if keys else []
        want = _highest(best, top_k, first, last)
        got = ids[b, own, i, : int(counts[b, own, i])].tolist()
        assert got == want, f"query {i} of list {own} of sequence {b}: {got}, expected {want}"


def _highest(scores: list[float], most: int, first: int, last: int) -> list[int]:
    """Entries to take: the first, the last, then the best, the lower one of equal ones."""
    count = len(scores)
    forced = {c for c in range(count) if c < first or c >= count - last}
    order = sorted(range(count), key=lambda c: (c not in forced, -scores[c], c))
    return sorted(order[:most])


# SparseK.


def weights_of_rows(draw: Draw) -> None:
    """`sparsek`: weights and thresholds of rows of any length."""
    rng, form = draw.rng, draw.form
    dtype, rows, size = form.choice(DTYPES), rng.choice([1, 3]), rng.choice((*LENGTHS, 200))
    k = rng.choice([0, 0.5, 1, 2.25, 7, size, size + 3])
    lengths = [rng.randint(0, size) for _ in range(rows)] if rng.random() < 0.4 else [size] * rows
    draw.note(dtype=dtype, size=size, k=k, lengths=lengths)
    z = draw.normal(rows, size, dtype=dtype)
    counts = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
    given = draw.laid_out(z)

    def call(name: str) -> Any:
        return sparsek(given, k, lengths=counts, return_threshold=True, impl=name)

    p, tau = draw.twice(call, draw.impl(PORTABLE))
    for row, length in enumerate(lengths):
        own = z[row, :length]
        _check_threshold(tau[row], own, k, float(z.abs().max()))
        weights = (own.float() - tau[row]).clamp(0, 1).to(dtype)
        assert same_bits(p[row, :length], weights), "not the weights above tau"
        assert not p[row, length:].any(), "a weight past the end of a row"


def _check_threshold(tau: Tensor, z: Tensor, k: float, size: float) -> None:
    """By the weights that it gives: where all of them are 0 or 1, other thresholds give the same.

    `size` is that of the largest score, a rounding of which is one of a weight.
    """
    exact, plain = (naive.sparsek_row(z, k, precision) for precision in (FP64, torch.float32))
    assert tau.isinf().equal(exact.tau.isinf().to(tau.device)), f"{float(tau)}, {float(exact.tau)}"
    weights = (z.float() - tau).clamp(0, 1)
    assert_within_twice_the_budget(
        weights, exact.weights, plain.weights, roundings=max(1.0, size), what="weights above tau"
    )


def thresholds_of_prefixes(draw: Draw) -> None:
    """`sparsek_causal`: thresholds of every prefix."""
    rng, dtype = draw.rng, draw.form.choice(DTYPES)
    size, k = rng.choice((1, 2, 15, 16, 17, 33)), rng.choice([0.5, 1, 2.25, 7])
    draw.note(dtype=dtype, size=size, k=k)
    u = draw.normal(2, size, dtype=dtype)
    given = draw.laid_out(u)
    tau = draw.twice(lambda name: sparsek_causal(given, k, impl=name), draw.impl(PORTABLE))
    for row in range(2):
        for t in range(size):
            _check_threshold(tau[row, t], u[row, : t + 1], k, float(u.abs().max()))


def _factors(u: Tensor, tau: Tensor, heads: int) -> Tensor:
    """clip(u - tau, 0, 1) for each query head: [B, Hq, Sq, Sk]."""
    difference = u.cpu()[:, :, None, :].double() - tau.cpu()[..., None].double()
    return difference.clamp(0, 1).repeat_interleave(heads // u.shape[1], 1)


def gated_keys(draw: Draw) -> None:
    """`attention` with `key_gate`."""
    shape, rng = drawn_shape(draw)._replace(masked="none"), draw.rng
    (hq, hkv), (d, dv) = shape.heads, shape.dims
    gates = draw.form.choice([1, hkv, hq])
    batch, sq = rng.choice([1, 2]), rng.choice((1, 2, 15, 17, 33))
    sk = rng.choice([sq, rng.choice(LENGTHS)])
    draw.note(batch=batch, sq=sq, sk=sk, gates=gates)
    options, softmax = drawn_options(draw, shape)
    q = draw.normal(batch, hq, sq, d, dtype=shape.dtype)
    k, v = (draw.normal(batch, hkv, sk, dim, dtype=shape.dtype) for dim in (d, dv))
    # whole and quarter factors, which are the same in every precision
    u, tau = ((draw.normal(batch, gates, n) * 4).round() / 4 for n in (sk, sq))
    given = [draw.laid_out(x) for x in (q, k, v)]

    def call(name: str) -> Any:
        return attention(*given, **options, key_gate=(u, tau), return_lse=True, impl=name)

    out, lse = draw.twice(call, draw.impl())
    seen = naive.in_band(sq, sk, options["causal"], options["window"]).expand(batch, hq, sq, sk)
    check_forward(out, lse, (q, k, v), seen, softmax, _factors(u, tau, hq))


def dropped_tokens(draw: Draw) -> None:
    """`SparsekCache`: attention over what is left is that over all tokens so far."""
    rng, dtype = draw.rng, draw.form.choice(DTYPES)
    heads, dim, weight = draw.form.choice([1, 2]), draw.form.choice([8, 24]), rng.choice([1, 3.5])
    draw.note(dtype=dtype, heads=heads, dim=dim, weight=weight)
    cache = SparsekCache(weight)
    keys, values = (torch.zeros(1, heads, 0, dim, dtype=dtype) for _ in range(2))
    scores = torch.zeros(1, heads, 0)
    for _step in range(rng.randint(1, 6)):
        tokens = rng.choice([1, 1, 5, 17])
        k, v = (draw.normal(1, heads, tokens, dim, dtype=dtype) for _ in range(2))
        u = draw.normal(1, heads, tokens)
        cache.append(k, v, u)
        keys, values = torch.cat([keys, k.cpu()], 2), torch.cat([values, v.cpu()], 2)
        scores = torch.cat([scores, u.cpu()], 2)
        q = draw.normal(1, 2 * heads, 1, dim, dtype=dtype)
        out, lse = attention(q, cache.k, cache.v, key_gate=cache.gate, return_lse=True)
        assert cache.tokens == scores.shape[-1], "tokens that were appended"
        # thresholds in the precision of the cache: their own error is that of `sparsek`
        factors = _factors(scores, cache.gate[1], 2 * heads)
        seen = torch.ones(factors.shape, dtype=torch.bool)
        softmax = Softmax(dim**-0.5)
        exact, exact_lse = naive.attention(q, keys, values, seen, softmax, FP64, factors)
        plain, _ = naive.attention(q, keys, values, seen, softmax, dtype, factors)
        _, plain_lse = naive.attention(q, keys, values, seen, softmax, torch.float32, factors)
        assert_within_twice_the_budget(out, exact, plain, what="out")
        # of two numbers one lse may be next to 0, which grants no budget: compare what it is of
        assert_within_twice_the_budget(
            lse.exp(), exact_lse.exp(), plain_lse.exp(), roundings=3.0, what="denominator"
        )


# fp8.


def rounding(draw: Draw) -> None:
    """`fp8.quantize`: every value and scale, bit by bit."""
    rng, form = draw.rng, draw.form
    dtype, scale = form.choice(DTYPES), form.choice(SCALES)
    block, turned = form.choice([16, 64, 128]), form.random() < 0.3
    sizes = [*rng.choice([(), (2,), (1, 3)]), rng.choice((*LENGTHS, 130)), rng.choice([1, 24, 130])]
    draw.note(dtype=dtype, scale=scale, block=block, turned=turned, sizes=sizes)
    x = draw.normal(*sizes, dtype=dtype) * 3
    given = draw.laid_out(x)

    def call(name: str) -> Any:
        return quantize(given, scale, block=block, transposed=turned, impl=name)[:2]

    data, descale = draw.twice(call, draw.impl(PORTABLE))
    heads = x.cpu().float().reshape(-1, *sizes[-2:])
    stored, scales = data.cpu().reshape(heads.shape), descale.cpu().flatten().tolist()
    height, width = {
        "block": (block, sizes[-1]),
        "channel": (sizes[-2], 1),
        "1x128": (1, 128),
        "128x128": (128, 128),
    }.get(scale, (sizes[-2], sizes[-1]))
    parts = [heads] if scale == "tensor" else [
        head[top : top + height, left : left + width]
        for head in heads
        for top in range(0, sizes[-2], height)
        for left in range(0, sizes[-1], width)
    ]  # fmt: skip
    want = torch.stack([part.abs().max() for part in parts]) / 448
    want = torch.where(want == 0, 1.0, want.clamp(min=2.0**-120))
    assert same_bits(descale.cpu().flatten(), want), "other scales"
    places = torch.zeros(heads.shape, dtype=torch.int64)
    for number in range(len(parts)):
        _part_of(places, number, height, width, scale == "tensor").fill_(number)
    for number, one in enumerate(scales):
        inside = places == number
        expected = naive.stored_fp8(heads[inside], one)
        assert torch.equal(stored[inside].double(), expected), f"values of scale {number}"


def _part_of(x: Tensor, number: int, height: int, width: int, whole: bool) -> Tensor:
    """The part of [heads, S, D] that shares the scale of this number."""
    if whole:
        return x
    rows, columns = -(-x.shape[1] // height), -(-x.shape[2] // width)
    head, place = divmod(number, rows * columns)
    top, left = place // columns * height, place % columns * width
    return x[head, top : top + height, left : left + width]


def rounded_attention(draw: Draw) -> None:
    """`fp8.attention`: that over the values which `fp8.quantize` gives."""
    shape, rng = drawn_shape(draw)._replace(masked="none"), draw.rng
    (hq, hkv), (d, dv) = shape.heads, shape.dims
    batch, sq, sk = rng.choice([1, 2]), rng.choice((1, 15, 33)), rng.choice((*LENGTHS, 140))
    draw.note(batch=batch, sq=sq, sk=sk)
    options, softmax = drawn_options(draw, shape)
    q = draw.normal(batch, hq, sq, d, dtype=shape.dtype)
    k, v = (draw.normal(batch, hkv, sk, dim, dtype=shape.dtype) for dim in (d, dv))
    given = [draw.laid_out(x) for x in (q, k, v)]

    def call(name: str) -> Any:
        return fp8_attention(*given, **options, smooth_k=False, return_lse=True, impl=name)

    impl = draw.impl()
    out, lse = draw.twice(call, impl)
    on_hopper = out.is_cuda and impl in ("auto", "sm90") and _takes(call, "sm90")
    stood = [
        quantize(x, scale, impl="eager").dequantize().cpu()
        for x, scale in ((q, "block"), (k, "block"), (v, "channel"))
    ]
    seen = naive.in_band(sq, sk, options["causal"], options["window"]).expand(batch, hq, sq, sk)
    q8, k8, v8 = stood
    exact, exact_lse = naive.attention(q8, k8, v8, seen, softmax, FP64)
    plain, plain_lse = naive.attention(q8, k8, v8, seen, softmax, torch.float32)
    largest, _ = naive.attention(q8, k8, v8.abs(), seen, softmax, FP64)
    # Kernels round weights to 16 bits, which costs half a unit of 2**-10 of every summand. Hopper's
    # rounds them to e4m3: half a unit of 2**-3, which four times this error allows.
    rounded = exact + (plain.double() - exact).abs() + largest * 2.0 ** (-6 if on_hopper else -11)
    assert_within_twice_the_budget(out, exact, rounded, what="out")
    factor = 4.0 if lse.is_cuda else 2.0
    # each of the d / 32 sums in a score of Hopper's keeps 13 bits below its largest term
    truncated = d / 32 * 2.0 ** (23 - 13) if on_hopper else 0.0
    assert_within_twice_the_budget(
        lse, exact_lse, plain_lse, factor=factor, roundings=3.0 + truncated, what="lse"
    )


def _takes(call: Callable[[str], Any], impl: str) -> bool:
    """Whether an implementation makes the call."""
    try:
        call(impl)
    except Unsupported:
        return False
    return True


def rounded_products(draw: Draw) -> None:
    """`fp8.matmul`: the product of what rounded rows and blocks stand for."""
    rng, form = draw.rng, draw.form
    dtype, block = form.choice(DTYPES), form.choice([(16, 16), (64, 64), (128, 128), (32, 64)])
    activation = form.choice([None, "relu", "gelu"])
    rows, columns = (rng.choice([1, 2, 3]) * size for size in block)
    tokens = rng.choice([1, 3, 17, 40])
    draw.note(dtype=dtype, block=block, activation=activation, shape=(rows, columns, tokens))
    generator = torch.Generator().manual_seed(draw.seed)
    keep = torch.rand(rows // block[0], columns // block[1], generator=generator) < 0.6
    wide = draw.normal(rows, columns)
    w = BSRMatrix.from_mask(wide, keep.to(draw.device), block).to_fp8()
    bias = draw.normal(rows, dtype=dtype) if form.random() < 0.5 else None
    x = draw.normal(tokens, columns, dtype=dtype)
    given = draw.laid_out(x)

    def call(name: str) -> Any:
        return fp8_matmul(given, w.T, bias=bias, activation=activation, impl=name)

    out = draw.twice(call, draw.impl())
    stood, dense = quantize(x, "1x128", impl="eager").dequantize().cpu(), w.to_dense().cpu()

    def formula(precision: torch.dtype) -> Tensor:
        y = stood.to(precision) @ dense.to(precision).T
        y = y if bias is None else y + bias.cpu().to(precision)
        return naive.activated(y, activation)

    exact, plain = formula(FP64), formula(torch.float32)
    allowed = exact + (plain.to(out.dtype).double() - exact).abs()
    if out.is_cuda:
        # Hopper adds up 128 channels in tensor cores, 32 at a time, and each sum keeps 13 bits
        # below its largest term
        for group in range(0, columns, 128):
            terms = stood[:, None, group : group + 128].double() * dense[:, group : group + 128]
            allowed += 4 * 2.0**-13 * terms.cumsum(-1).abs().amax(-1)
    assert_within_twice_the_budget(out, exact, allowed, what="product")


def latent_decoding(draw: Draw) -> None:
    """`attention_decode` whose values are the first 512 of the 576 columns of the keys."""
    rng, form = draw.rng, draw.form
    dtype, heads = form.choice(DTYPES[:2]), form.choice([1, 16])
    page_size = form.choice([None, 16, 64])
    lengths = [rng.choice((0, 1, 17, 64, 65, 130)) for _ in range(rng.choice([1, 2]))]
    slots, sq = max(*lengths, 1) + rng.choice([0, 5]), rng.choice([1, 2])
    causal = rng.random() < 0.5
    draw.note(dtype=dtype, heads=heads, page_size=page_size, lengths=lengths, sq=sq, causal=causal)
    cache, _, table = drawn_cache(draw, lengths, 1, (576, 1), slots, page_size)
    cache = cache.to(dtype)
    q = draw.normal(len(lengths), heads, sq, 576, dtype=dtype)
    options: dict[str, Any] = {"causal": causal, "return_lse": True}
    options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
    options["page_table"] = None if table is None else table.to(draw.device)
    given = (draw.laid_out(q), cache, cache[..., :512])
    out, lse = draw.twice(lambda name: attention_decode(*given, **options, impl=name), draw.impl())
    for b, length in enumerate(lengths):
        pages = None if table is None else table[b].tolist()
        keys = naive.cached(cache.cpu(), length, pages, b, 0)[None, None]
        seen = naive.in_band(sq, length, causal, None).expand(1, heads, sq, length)
        own = slice(b, b + 1)
        softmax = Softmax(1 / math.sqrt(576))
        check_forward(out[own], lse[own], (q[own], keys, keys[..., :512]), seen, softmax)


KINDS = {
    "sparse_attention": chosen_keys,
    "select_keys": choosing_keys,
    "sparsek": weights_of_rows,
    "sparsek_causal": thresholds_of_prefixes,
    "key_gate": gated_keys,
    "SparsekCache": dropped_tokens,
    "fp8.quantize": rounding,
    "fp8.attention": rounded_attention,
    "fp8.matmul": rounded_products,
    "latent_decode": latent_decoding,
}
