"""Random calls of the attention functions, compared with the second oracle."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import masks
from ..attention import api as attention_api
from ..attention import merge as merge_api
from ..attention import sdpa as sdpa_api
from ..decode import api as decode_api
from ..masks.block_mask import BlockMask
from . import naive
from .fuzz_draw import DTYPES, LENGTHS, Draw, assert_within_twice_the_budget
from .naive import Softmax, Window

# With options from tables and draws, whose types no checker can know.
attention: Any = attention_api.attention
attention_packed: Any = attention_api.attention_packed
merge_states: Any = merge_api.merge_states
scaled_dot_product_attention: Any = sdpa_api.scaled_dot_product_attention
attention_decode: Any = decode_api.attention_decode

FP8 = torch.float8_e4m3fn
FP64 = torch.float64
QKV = tuple[Tensor, Tensor, Tensor]


class Shape(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    heads: tuple[int, int]
    dims: tuple[int, int]
    softcap: bool
    sinks: bool
    masked: str
    block_size: tuple[int, int]


def drawn_shape(draw: Draw) -> Shape:
    """A shape, from the choices that make a kernel compile again."""
    form = draw.form
    kv_heads = form.choice([1, 2, 3])
    dim = form.choice([1, 8, 24, 64, 72, 128])
    shape = Shape(
        form.choice(DTYPES),
        (kv_heads * form.choice([1, 1, 2, 4]), kv_heads),
        (dim, dim if form.random() < 0.6 else form.choice([16, 40, 64])),
        form.random() < 0.3,
        form.random() < 0.3,
        form.choice(["none", "none", "blocks", "elements"]),
        (form.choice([16, 64, 128]), form.choice([16, 64, 128])),
    )
    draw.note(**shape._asdict())
    return shape


def drawn_options(draw: Draw, shape: Shape) -> tuple[dict[str, Any], Softmax]:
    """Arguments besides tensors and masks, and the same for the oracle."""
    rng = draw.rng
    window: Window = rng.choice([None, None, 1, 5, 17, (3, 0), (None, 4), (16, None), (0, 20)])
    causal = rng.random() < 0.5
    scale = rng.choice([None, None, 0.3, -0.2, 0.0])
    softcap = rng.choice([2.0, 30.0]) if shape.softcap else None
    sinks = draw.normal(shape.heads[0]) if shape.sinks else None
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
    draw.note(**options)
    meant = 1 / math.sqrt(shape.dims[0]) if scale is None else scale
    plain_sinks = None if sinks is None else sinks.cpu()
    return {**options, "sinks": sinks}, Softmax(meant, softcap or 0.0, plain_sinks)


def _mask(draw: Draw, shape: Shape, sizes: list[int]) -> tuple[BlockMask | None, Tensor]:
    """A block mask and the elements it shows, bool [B, Hq, Sq, Sk]."""
    batch, sq, sk = sizes
    heads = shape.heads[0]
    if shape.masked == "none":
        return None, torch.ones(batch, heads, sq, sk, dtype=torch.bool)
    bq, bk = shape.block_size
    wide = draw.rng.choice([1, batch]), draw.rng.choice([1, heads])
    draw.note(mask_sizes=wide)
    generator = torch.Generator().manual_seed(draw.seed)
    keep = torch.rand(*wide, -(-sq // bq), -(-sk // bk), generator=generator) < 0.6
    shown = torch.zeros(*wide, sq, sk, dtype=torch.bool)
    for i in range(sq):
        for j in range(sk):
            shown[:, :, i, j] = keep[:, :, i // bq, j // bk]
    if shape.masked == "blocks":
        made = BlockMask.from_dense(keep.to(draw.device), (bq, bk), (sq, sk))
    else:
        shown &= torch.rand(shown.shape, generator=generator) < 0.7
        made = BlockMask.from_element_mask(shown.to(draw.device), (bq, bk))
    return made, shown.expand(batch, heads, sq, sk)


def _poison_unseen(
    draw: Draw, tensors: list[Tensor], seen: Tensor, absent: Tensor, impl: str, gradients: bool
) -> None:
    """NaN in keys and values [B, Hkv, Sk, D] that no query of their group sees.

    Kernels read whole tiles. They promise no more than that NaN stays away in keys that are hidden,
    as far as results go, and in blocks that are `absent` from the mask.
    """
    k, v = tensors
    if not k.numel():
        return
    sizes = (*k.shape[:2], -1, k.shape[2])
    unseen = ~seen.reshape(sizes).any(2)
    gone = unseen & absent.reshape(sizes).all(2)
    plain = draw.device.type == "cpu" and impl != "triton"
    keys_hidden = unseen if plain or not gradients else gone
    values_hidden = unseen if plain else gone
    for x, hidden in ((k, keys_hidden), (v, values_hidden)):
        x.masked_fill_(hidden[..., None].to(x.device), math.nan)


def _absent(shape: Shape, shown: Tensor) -> Tensor:
    """bool [B, Hq, 1, Sk]: keys in blocks of which no query sees anything, whatever the band."""
    absent = torch.zeros(*shown.shape[:2], 1, shown.shape[3], dtype=torch.bool)
    if shape.masked != "none":
        width = shape.block_size[1]
        for begin in range(0, shown.shape[3], width):
            block = shown[..., begin : begin + width]
            absent[..., 0, begin : begin + width] = ~block.flatten(2).any(2)[..., None]
    return absent


def check_forward(
    out: Tensor, lse: Tensor, given: QKV, seen: Tensor, softmax: Softmax,
    factors: Tensor | None = None,
) -> None:  # fmt: skip
    """Compare results [B, Hq, Sq, Dv] and [B, Hq, Sq] with the second oracle."""
    exact, exact_lse = naive.attention(*given, seen, softmax, FP64, factors)
    plain, _ = naive.attention(*given, seen, softmax, out.dtype, factors)
    assert_within_twice_the_budget(out, exact, plain, what="out")
    q, k, v = given
    lows = []
    for order in range(ORDERS if lse.numel() <= FEW_ROWS else 1):
        dims = _order_of(q.shape[-1], order)
        reordered = (q.cpu()[..., dims], k.cpu()[..., dims], v)
        lows.append(naive.attention(*reordered, seen, softmax, torch.float32, factors)[1])
    # the reasons for these factors are in docs/numerics.md and `tolerance.assert_lse_within_budget`
    factor = 4.0 if lse.is_cuda else 2.0
    assert_within_twice_the_budget(
        lse, exact_lse, _farthest(lows, exact_lse), factor=factor, roundings=3.0, what="lse"
    )


# Orders of summation in which plain PyTorch computes the gradients, and the lse of FEW_ROWS rows. A
# small call has a single row and key, whose error in one order may be next to nothing by luck.
ORDERS, FEW_ROWS = 4, 8


def _order_of(dim: int, order: int) -> Tensor:
    """Channels in their own order (0) or in a random one."""
    dims = torch.randperm(dim, generator=torch.Generator().manual_seed(order))
    return dims.sort().values if order == 0 else dims


def _farthest(lows: Sequence[Tensor], exact: Tensor) -> Tensor:
    """Of several results, for each element the one with the largest error."""
    made = torch.stack([x.double() for x in lows])
    return made.gather(0, (made - exact).abs().argmax(0)[None])[0]


def _check_gradients(
    got: tuple[Tensor, ...], given: QKV, seen: Tensor, softmax: Softmax,
    dout: Tensor, dlse: Tensor,
) -> None:  # fmt: skip
    dtype = given[0].dtype
    exact = naive.attention_gradients(*given, seen, softmax, dout, dlse, FP64)
    # a backward pass is not to blame for reading rounded results of the forward pass
    others = [naive.attention_gradients(*given, seen, softmax, dout, dlse, FP64, dtype)]
    for order in range(ORDERS):
        others.append(_reordered_gradients(given, seen, softmax, dout, dlse, order))
    factor = 3.0 if softmax.softcap or dtype == torch.float32 else 2.0
    for name, ours, want, *lows in zip("qkvs", got, exact, *others, strict=False):
        assert want is not None
        slack = 2.0 if name == "s" else 1.0
        farthest = _farthest(lows, want).to(ours.dtype)
        assert_within_twice_the_budget(
            ours, want, farthest, factor=slack * factor, what=f"gradient of {name}"
        )


def _reordered_gradients(
    given: QKV,
    seen: Tensor,
    softmax: Softmax,
    dout: Tensor,
    dlse: Tensor,
    order: int,
) -> naive.Gradients:
    """Gradients in the dtype of the call, with the head dimensions in another order."""
    q, k, v = given
    dtype = q.dtype
    dims, dims_v = (_order_of(x.shape[-1], order) for x in (q, v))
    q, k, v, dout = (
        x.cpu()[..., p] for x, p in ((q, dims), (k, dims), (v, dims_v), (dout, dims_v))
    )
    # in fp32 the roundings of lse and output are the whole error
    stored = dtype if dtype == torch.float32 else None
    found = naive.attention_gradients(q, k, v, seen, softmax, dout, dlse, dtype, stored)
    back, back_v = dims.argsort(), dims_v.argsort()
    return found._replace(q=found.q[..., back], k=found.k[..., back], v=found.v[..., back_v])


def dense_attention(draw: Draw) -> None:
    """`attention`, and in half of the calls its gradients."""
    shape, rng = drawn_shape(draw), draw.rng
    (hq, hkv), (d, dv) = shape.heads, shape.dims
    batch, sq = rng.choice([1, 1, 2]), rng.choice(LENGTHS)
    sk = rng.choice([sq, rng.choice(LENGTHS), rng.randint(1, 70)])
    draw.note(batch=batch, sq=sq, sk=sk)
    options, softmax = drawn_options(draw, shape)
    mask, shown = _mask(draw, shape, [batch, sq, sk])
    seen = shown & naive.in_band(sq, sk, options["causal"], options["window"])
    q = draw.normal(batch, hq, sq, d, dtype=shape.dtype)
    k = draw.normal(batch, hkv, sk, d, dtype=shape.dtype)
    v = draw.normal(batch, hkv, sk, dv, dtype=shape.dtype)
    impl, gradients = draw.impl(), rng.random() < 0.5
    _poison_unseen(draw, [k, v], seen, _absent(shape, shown), impl, gradients)
    given: Any = tuple(draw.laid_out(x) for x in (q, k, v))

    def call(impl: str) -> Any:
        return attention(*given, **options, block_mask=mask, return_lse=True, impl=impl)

    out, lse = draw.twice(call, impl)
    check_forward(out, lse, (q, k, v), seen, softmax)
    if gradients:
        gradients_of(draw, call, impl, given, (q, k, v), options["sinks"], seen, softmax)


def gradients_of(
    draw: Draw, call: Any, impl: str, given: QKV, contiguous: QKV,
    sinks: Tensor | None, seen: Tensor, softmax: Softmax,
) -> None:  # fmt: skip
    """Make the call again with gradients and compare these; `contiguous` are the values given."""
    leaves = [*given] if sinks is None else [*given, sinks]
    for x in leaves:
        x.requires_grad_()
    q, _, v = contiguous
    dout = draw.normal(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    dlse = draw.normal(*q.shape[:-1])
    draw.note(gradients=True)

    def run(name: str) -> tuple[Tensor, ...]:
        out, lse = call(name)
        return torch.autograd.grad((out, lse), leaves, (dout.to(out), dlse.to(lse)))

    _check_gradients(_twice_with_gradients(draw, run, impl), contiguous, seen, softmax, dout, dlse)


def _twice_with_gradients(draw: Draw, run: Any, impl: str) -> tuple[Tensor, ...]:
    """`Draw.twice` where gradients are the same bits in every run."""
    with torch.enable_grad():
        # the Hopper backward adds to dq in any order unless it is told not to
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return tuple(draw.twice(run, impl))
        finally:
            torch.use_deterministic_algorithms(False)


def packed_attention(draw: Draw) -> None:
    """`attention_varlen`, and in some calls its gradients."""
    shape, rng = drawn_shape(draw)._replace(masked="none"), draw.rng
    (hq, hkv), (d, dv) = shape.heads, shape.dims
    count = rng.choice([1, 2, 3, 4])
    lengths = [(rng.choice((0, *LENGTHS)), rng.choice((0, *LENGTHS))) for _ in range(count)]
    draw.note(lengths=lengths)
    options, softmax = drawn_options(draw, shape)
    totals = [sum(x) for x in zip(*lengths, strict=True)]
    q = draw.normal(totals[0], hq, d, dtype=shape.dtype)
    k = draw.normal(totals[1], hkv, d, dtype=shape.dtype)
    v = draw.normal(totals[1], hkv, dv, dtype=shape.dtype)
    # one row of all sequences for the oracle: each query sees its own sequence
    seen = torch.zeros(1, hq, *totals, dtype=torch.bool)
    q_at = k_at = 0
    for sq, sk in lengths:
        band = naive.in_band(sq, sk, options["causal"], options["window"])
        seen[:, :, q_at : q_at + sq, k_at : k_at + sk] = band
        q_at, k_at = q_at + sq, k_at + sk
    as_batch: Any = [x.transpose(0, 1)[None] for x in (q, k, v)]
    impl, gradients = draw.impl(), rng.random() < 0.4 and min(totals) > 0
    nowhere = torch.zeros(1, hq, 1, totals[1], dtype=torch.bool)
    _poison_unseen(draw, as_batch[1:], seen, nowhere, impl, gradients)
    given: Any = tuple(draw.laid_out(x) for x in (q, k, v))
    offsets = [
        torch.tensor([0, *x]).cumsum(0).int().to(draw.device) for x in zip(*lengths, strict=True)
    ]
    longest = {
        "max_seqlen_q": max(x for x, _ in lengths) + rng.choice([0, 3]),
        "max_seqlen_k": max(x for _, x in lengths) + rng.choice([0, 3]),
    }

    def call(impl: str) -> tuple[Tensor, Tensor]:
        out, lse = attention_packed(
            *given, *offsets, **longest, **options, return_lse=True, impl=impl
        )
        return out.transpose(0, 1)[None], lse[None]

    out, lse = draw.twice(call, impl)
    batch: Any = tuple(as_batch)
    check_forward(out, lse, batch, seen, softmax)
    if gradients:
        leaves = [*given] if options["sinks"] is None else [*given, options["sinks"]]
        for x in leaves:
            x.requires_grad_()
        dout = draw.normal(*out.shape, dtype=out.dtype)
        dlse = draw.normal(*lse.shape)
        draw.note(gradients=True)

        def run(name: str) -> tuple[Tensor, ...]:
            results = call(name)
            found = torch.autograd.grad(results, leaves, (dout, dlse.to(lse)))
            return *(x.transpose(0, 1)[None] for x in found[:3]), *found[3:]

        got = _twice_with_gradients(draw, run, impl)
        _check_gradients(got, batch, seen, softmax, dout, dlse)


def torch_attention(draw: Draw) -> None:
    """`scaled_dot_product_attention`, with torch's alignment to the top left."""
    rng, form = draw.rng, draw.form
    dtype, dim = form.choice(DTYPES), form.choice([16, 40, 64])
    kv_heads, group = form.choice([1, 2]), form.choice([1, 3])
    batch, sq, sk = rng.choice([1, 2]), rng.choice(LENGTHS), rng.choice(LENGTHS)
    is_causal, masked = rng.random() < 0.4, rng.random() < 0.5
    draw.note(dtype=dtype, dim=dim, batch=batch, sq=sq, sk=sk, is_causal=is_causal, masked=masked)
    q = draw.normal(batch, kv_heads * group, sq, dim, dtype=dtype)
    k, v = (draw.normal(batch, kv_heads, sk, dim, dtype=dtype) for _ in range(2))
    seen = torch.ones(batch, kv_heads * group, sq, sk, dtype=torch.bool)
    mask = None
    if masked:
        shown = draw.normal(rng.choice([1, batch]), 1, rng.choice([1, sq]), sk) > -0.5
        mask, seen = shown, seen & shown.cpu()
    if is_causal:
        seen = seen & (torch.arange(sk) <= torch.arange(sq)[:, None])
    given = [draw.laid_out(x) for x in (q, k, v)]
    options = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": group > 1}
    out = draw.twice(lambda _: scaled_dot_product_attention(*given, **options), "auto")
    softmax = Softmax(1 / math.sqrt(dim))
    exact, _ = naive.attention(q, k, v, seen, softmax, FP64)
    plain, _ = naive.attention(q, k, v, seen, softmax, dtype)
    assert_within_twice_the_budget(out, exact, plain, what="out")


def decoding(draw: Draw) -> None:
    """`attention_decode` over contiguous and paged caches, with lists of blocks and fp8."""
    shape, rng, form = drawn_shape(draw), draw.rng, draw.form
    (hq, hkv), (d, dv) = shape.heads, shape.dims
    page_size = form.choice([None, None, 16, 17, 64])
    block_size = page_size or form.choice([16, 20, 64])
    fp8 = shape.dtype != torch.float32 and form.random() < 0.3
    lengths = [rng.choice((0, *LENGTHS, 130)) for _ in range(rng.choice([1, 2, 4]))]
    batch, sq = len(lengths), rng.choice([1, 1, 1, 2, 5])
    slots = max(*lengths, 1) + rng.choice([0, 1, 37])
    columns = -(-slots // block_size)
    listed = rng.random() < 0.4
    draw.note(page_size=page_size, fp8=fp8, lengths=lengths, sq=sq, slots=slots, listed=listed)
    options, softmax = drawn_options(draw, shape)
    band, causal = options["window"], options["causal"]
    seen = torch.zeros(batch, hq, sq, max(slots, columns * block_size), dtype=torch.bool)
    chosen = torch.rand(batch, hkv, columns, generator=torch.Generator().manual_seed(draw.seed))
    for b, length in enumerate(lengths):
        seen[b, :, :, :length] = naive.in_band(sq, length, causal, band)
        if listed:
            for h in range(hq):
                for j in range(length):
                    if chosen[b, h // (hq // hkv), j // block_size] > 0.5:
                        seen[b, h, :, j] = False
    q = draw.normal(batch, hq, sq, d, dtype=shape.dtype)
    k, v, table = drawn_cache(draw, lengths, hkv, (d, dv), slots, page_size)
    k, v = (x.to(FP8 if fp8 else shape.dtype) for x in (k, v))
    if fp8:
        scales = [draw.normal(rng.choice([1, hkv])).abs() + 0.5 for _ in range(2)]
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
    if table is not None:
        options["page_table"] = table.to(draw.device)
    if listed:
        options["kv_blocks"] = _block_lists(chosen, columns).to(draw.device)
        if page_size is None:
            options["kv_block_size"] = block_size
    caches = [draw.laid_out(x) if not fp8 else x for x in (k, v)]
    queries = draw.laid_out(q)
    options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=draw.device)

    def call(impl: str) -> Any:
        return attention_decode(queries, *caches, **options, return_lse=True, impl=impl)

    out, lse = draw.twice(call, draw.impl())
    as_batch = []
    for name, cache in (("k_scale", k), ("v_scale", v)):
        whole = torch.full((batch, hkv, seen.shape[-1], cache.shape[-1]), math.nan, dtype=FP64)
        scale = options[name].cpu().double().expand(hkv) if fp8 else torch.ones(hkv, dtype=FP64)
        for b, length in enumerate(lengths):
            pages = None if table is None else table[b].tolist()
            for h in range(hkv):
                rows = naive.cached(cache.cpu().double(), length, pages, b, h)
                whole[b, h, :length] = rows * scale[h]
        as_batch.append(whole)
    check_forward(out, lse, (q, as_batch[0], as_batch[1]), seen, softmax)


def drawn_cache(
    draw: Draw, lengths: list[int], heads: int, dims: tuple[int, int], slots: int,
    page_size: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """fp32 keys and values, NaN past the lengths and in pages of nobody; the page table."""
    batch = len(lengths)
    if page_size is None:
        caches = [draw.normal(batch, heads, slots, dim) for dim in dims]
        for b, length in enumerate(lengths):
            for cache in caches:
                cache[b, :, length:] = math.nan
        return caches[0], caches[1], None
    columns = -(-slots // page_size)
    order = torch.randperm(
        batch * columns + 3, generator=torch.Generator().manual_seed(draw.seed + 1)
    )
    table = order[: batch * columns].view(batch, columns).int()
    caches = []
    for dim in dims:
        filled = draw.normal(batch * columns + 3, page_size, heads, dim)
        used = torch.zeros(filled.shape[:2], dtype=torch.bool)
        for b, length in enumerate(lengths):
            for t in range(length):
                used[table[b, t // page_size], t % page_size] = True
        caches.append(filled.masked_fill(~used[:, :, None, None].to(filled.device), math.nan))
    return caches[0], caches[1], table


def _block_lists(chosen: Tensor, columns: int) -> Tensor:
    """int32 [B, Hkv, columns + 1]: the chosen blocks of each, then -1."""
    lists = torch.full((*chosen.shape[:2], columns + 1), -1, dtype=torch.int32)
    for b in range(chosen.shape[0]):
        for h in range(chosen.shape[1]):
            blocks = [j for j in range(columns) if not chosen[b, h, j] > 0.5]
            lists[b, h, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return lists


def merging(draw: Draw) -> None:
    """`merge_states`, with parts that saw nothing."""
    rng, form = draw.rng, draw.form
    dtype, dim = form.choice(DTYPES), form.choice([1, 24, 64, 128])
    shape = (rng.choice([1, 2]), rng.choice([1, 3]), rng.choice(LENGTHS))
    draw.note(dtype=dtype, dim=dim, shape=shape)
    outs, lses = [], []
    for _ in range(2):
        lse = draw.normal(*shape)
        empty = draw.normal(*shape) > 1
        outs.append(draw.normal(*shape, dim, dtype=dtype).masked_fill(empty[..., None], math.nan))
        lses.append(lse.masked_fill(empty, -math.inf))
    given: Any = (outs[0], lses[0], outs[1], lses[1])
    laid = (draw.laid_out(outs[0]), lses[0], draw.laid_out(outs[1]), lses[1])
    out, lse = draw.twice(lambda _: merge_states(*laid), "auto")
    exact, exact_lse = naive.merged(*given)
    o_a, lse_a, o_b, lse_b = (x.cpu() for x in given)
    low, low_lse = _plainly_merged(o_a, lse_a, o_b, lse_b, dtype)
    assert_within_twice_the_budget(out, exact, low, what="out")
    assert_within_twice_the_budget(lse, exact_lse, low_lse, roundings=3.0, what="lse")


def _plainly_merged(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    total = torch.zeros_like(o_a)
    for out, part in ((o_a, lse_a), (o_b, lse_b)):
        weight = torch.exp(part - shift).to(dtype)[..., None]
        total = total + torch.where(weight > 0, weight * out, torch.zeros_like(out))
    return total, lse


def mask_patterns(draw: Draw) -> None:
    """`masks`: what each pattern shows, element by element."""
    rng = draw.rng
    sq = rng.choice(LENGTHS)
    sk = rng.choice([sq, rng.choice(LENGTHS)])
    block = (rng.choice([16, 32, 64]), rng.choice([16, 32, 64]))
    pattern = rng.choice(["causal", "sliding_window", "strided", "documents"])
    causal = rng.random() < 0.5
    window: Any = rng.choice([1, 7, 20, (3, None), (None, 2), (4, 9)])
    stride, local = rng.choice([1, 2, 3]), rng.choice([0, 1, 2])
    draw.note(pattern=pattern, sq=sq, sk=sk, block=block, causal=causal, window=window)
    draw.note(stride=stride, local=local)
    here: dict[str, Any] = {"device": draw.device}
    seen = naive.in_band(sq, sk, True, None) if causal else torch.ones(sq, sk, dtype=torch.bool)
    if pattern == "causal":
        mask = masks.causal((sq, sk), block, **here)
        seen = naive.in_band(sq, sk, True, None)
    elif pattern == "sliding_window":
        mask = masks.sliding_window((sq, sk), window, block, causal=causal, **here)
        seen = naive.in_band(sq, sk, causal, window)
    elif pattern == "strided":
        mask = masks.strided((sq, sk), stride, block, local_blocks=local, causal=causal, **here)
        for i in range(sq):
            first = i // block[0] * block[0]
            last = min(first + block[0], sq) - 1
            own = [(x + sk - sq) // block[1] for x in (first, last)]
            for j in range(sk):
                c = j // block[1]
                near = own[0] - local < c < own[1] + local
                seen[i, j] &= near or (own[1] - c) % stride == 0
    else:
        ends = sorted({0, sq, *(rng.randint(0, sq) for _ in range(3))})
        offsets = torch.tensor(ends, dtype=torch.int32, device=draw.device)
        mask = masks.documents(offsets, block, causal=causal)
        seen = torch.zeros(sq, sq, dtype=torch.bool)
        for begin, end in pairwise(ends):
            seen[begin:end, begin:end] = naive.in_band(end - begin, end - begin, causal, None)
    assert torch.equal(mask.to_element_mask().cpu()[0, 0], seen), "other elements are visible"
    turned = mask.T.to_element_mask().cpu()[0, 0]
    assert torch.equal(turned, seen.T), "the transposed mask shows other elements"


KINDS = {
    "attention": dense_attention,
    "attention_varlen": packed_attention,
    "scaled_dot_product_attention": torch_attention,
    "attention_decode": decoding,
    "merge_states": merging,
    "masks": mask_patterns,
}
