"""Random calls of products, layers and caches, compared with the second oracle."""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidInput, OutOfPages
from ..kv_cache import append as append_api
from ..kv_cache import selection as selection_api
from ..kv_cache.cache import KVCache
from ..kv_cache.paged import PagedKVCache
from ..kv_cache.selection import PageSummaries
from ..matmul import api as matmul_api
from ..nn.bsr_linear import BSRLinear
from ..sparse.matrix import BSRMatrix
from . import naive
from .fuzz_draw import DTYPES, LENGTHS, Draw, assert_within_twice_the_budget, same_bits
from .inputs import integers

# With options from tables and draws, whose types no checker can know.
matmul: Any = matmul_api.matmul
sddmm: Any = matmul_api.sddmm
kv_append: Any = append_api.kv_append
page_summaries: Any = selection_api.page_summaries
topk_pages: Any = selection_api.topk_pages

FP8 = torch.float8_e4m3fn
FP64 = torch.float64
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (64, 16), (16, 64), (32, 8), (5, 3))


def _drawn_matrix(
    draw: Draw, dtype: torch.dtype, block: tuple[int, int], shape: tuple[int, int] | None = None
) -> BSRMatrix:
    """Any shape, often not a multiple of the block, and any pattern, also an empty one."""
    rng = draw.rng
    if shape is None:
        rows, cols = (rng.choice([1, 2, 3]) * b - rng.choice([0, 0, 1, b // 2]) for b in block)
        shape = (max(rows, 1), max(cols, 1))
    grid = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    density = rng.choice([0.0, 0.3, 0.6, 1.0])
    draw.note(matrix=(shape, block, density))
    generator = torch.Generator().manual_seed(draw.seed)
    keep = torch.rand(*grid, generator=generator) < density
    dense = draw.normal(*shape, dtype=dtype)
    return BSRMatrix.from_mask(dense, keep.to(draw.device), block)


def _dense(a: BSRMatrix, dtype: torch.dtype) -> Tensor:
    """The stored matrix; `a` must not be a transpose."""
    return naive.dense_of(a.data, a.indptr, a.indices, a.shape, dtype)


def _operand(draw: Draw, x: Tensor) -> Tensor:
    """Rows or columns contiguous, with gaps."""
    if draw.rng.random() < 0.5:
        return draw.laid_out(x)
    return draw.laid_out(x.mT.contiguous()).mT


def products(draw: Draw) -> None:
    """`matmul` of a block-sparse and a dense matrix, with what may follow, and its gradients."""
    rng, form = draw.rng, draw.form
    dtype, block = form.choice(DTYPES), form.choice(BLOCKS)
    order = form.choice(["A@X", "A.T@X", "X@A", "X@A.T"])
    activation = form.choice([None, None, "relu", "gelu", "silu"])
    with_bias, with_residual = form.random() < 0.4, form.random() < 0.3
    a = _drawn_matrix(draw, dtype, block)
    columns, batch = rng.choice([1, 2, 8, 16, 17, 33, 70]), rng.choice([(), (), (2,)])
    draw.note(dtype=dtype, order=order, activation=activation, columns=columns, batch=batch)
    inner, outer = a.shape if order in ("X@A", "A.T@X") else a.shape[::-1]
    left = order.startswith("X")
    x = draw.normal(*batch, *((columns, inner) if left else (inner, columns)), dtype=dtype)
    shape = (*batch, *((columns, outer) if left else (outer, columns)))
    bias = draw.normal(outer, dtype=dtype) if with_bias else None
    residual = draw.normal(*shape, dtype=dtype) if with_residual else None
    given, sparse = _operand(draw, x), a.T if "A.T" in order else a
    extra: dict[str, Any] = {"bias": bias, "activation": activation}
    extra["residual"] = None if residual is None else draw.laid_out(residual)

    def call(impl: str) -> Any:
        operands = (given, sparse) if left else (sparse, given)
        return matmul(*operands, **extra, impl=impl)

    impl = draw.impl(("auto", "triton", "sm90", "eager", "dense"))
    out = draw.twice(call, impl)

    def formula(precision: torch.dtype) -> Tensor:
        dense = _dense(a, precision)
        dense = dense.T if "A.T" in order else dense
        there = x.cpu().to(precision)
        if precision == FP64:
            y = naive.product(there, dense) if left else naive.product(dense, there)
        else:
            y = there @ dense if left else dense @ there
        if bias is not None:
            y = y + (bias.cpu() if left else bias.cpu()[:, None]).to(precision)
        y = naive.activated(y, activation)
        return y if residual is None else y + residual.cpu().to(precision)

    assert_within_twice_the_budget(out, formula(FP64), formula(dtype), what="product")
    if activation is None and not batch and rng.random() < 0.4:
        _product_gradients(draw, a, order, x, given, call, impl)


def _product_gradients(
    draw: Draw, a: BSRMatrix, order: str, x: Tensor, given: Tensor, call: Any, impl: str
) -> None:
    draw.note(gradients=True)
    a.data.requires_grad_()
    given.requires_grad_()
    left, turned = order.startswith("X"), "A.T" in order
    with torch.enable_grad():
        out = call("auto")
        dout = draw.normal(*out.shape, dtype=out.dtype)
        got_a, got_x = draw.twice(
            lambda name: torch.autograd.grad(call(name), [a.data, given], dout), impl
        )
    for precision in (FP64, x.dtype):
        dense, there, up = _dense(a, precision), x.cpu().to(precision), dout.cpu().to(precision)
        op = dense.T if turned else dense
        dx = up @ op.T if left else op.T @ up
        dop = there.T @ up if left else up @ there.T
        da = naive.blocks_at(dop.T if turned else dop, a.indptr, a.indices, a.block_shape)
        if precision == FP64:
            exact_a, exact_x = da, dx
    assert_within_twice_the_budget(got_x, exact_x, dx, what="gradient of the dense operand")
    assert_within_twice_the_budget(got_a, exact_a, da, what="gradient of the blocks")


def sparse_products(draw: Draw) -> None:
    """`matmul` of two block-sparse matrices."""
    form, rng = draw.form, draw.rng
    dtype = form.choice(DTYPES)
    height, inner, width = (form.choice([16, 32, 64]) for _ in range(3))
    a = _drawn_matrix(draw, dtype, (height, inner))
    b = _drawn_matrix(draw, dtype, (inner, width), (a.shape[1], rng.choice([1, 2]) * width - 3))
    draw.note(dtype=dtype)
    found: list[BSRMatrix] = []

    def call(impl: str) -> Tensor:
        found.append(matmul(a, b, impl=impl))
        return found[-1].data

    draw.twice(call, draw.impl(("auto", "triton", "eager")))
    made = found[0]
    made.validate()
    exact, low = _dense(a, FP64) @ _dense(b, FP64), _dense(a, dtype) @ _dense(b, dtype)
    assert_within_twice_the_budget(_dense(made, made.dtype), exact, low, what="product")


def sampled_products(draw: Draw) -> None:
    """`sddmm`."""
    form, rng = draw.form, draw.rng
    dtype, block = form.choice(DTYPES), form.choice(BLOCKS)
    pattern = _drawn_matrix(draw, dtype, block)
    inner = rng.choice([1, 16, 17, 64, 100])
    draw.note(dtype=dtype, inner=inner)
    a = draw.normal(pattern.shape[0], inner, dtype=dtype)
    b = draw.normal(inner, pattern.shape[1], dtype=dtype)
    given = _operand(draw, a), _operand(draw, b)
    got = draw.twice(
        lambda impl: sddmm(*given, pattern, impl=impl).data,
        draw.impl(("auto", "triton", "eager", "dense")),
    )
    places = (pattern.indptr, pattern.indices, pattern.block_shape)
    exact = naive.blocks_at(naive.product(a.cpu().double(), b.cpu().double()), *places)
    low = naive.blocks_at(a.cpu() @ b.cpu(), *places)
    assert_within_twice_the_budget(got, exact, low, what="sampled product")


def layers(draw: Draw) -> None:
    """`BSRLinear`, and the formats that a matrix goes through."""
    form, rng = draw.form, draw.rng
    dtype, block = form.choice(DTYPES), form.choice(BLOCKS)
    a = _drawn_matrix(draw, dtype, block)
    activation = form.choice([None, "relu", "gelu"])
    bias = draw.normal(a.shape[0], dtype=dtype)
    tokens = rng.choice([1, 3, 17, 40])
    draw.note(dtype=dtype, activation=activation, tokens=tokens)
    dense = _dense(a, dtype)
    assert torch.equal(a.to_dense().cpu(), dense), "to_dense"
    assert torch.equal(a.T.to_dense().cpu(), dense.T), "T.to_dense"
    if all(n % b == 0 for n, b in zip(a.shape, block, strict=True)):
        back = BSRMatrix.from_torch(a.to_torch())
        assert torch.equal(_dense(back, dtype), dense), "from_torch(to_torch)"
    again = BSRMatrix.from_dense(a.to_dense(), block)
    assert torch.equal(_dense(again, dtype), dense), "from_dense(to_dense)"
    layer = BSRLinear.from_matrix(a, bias, activation=activation)
    x = draw.normal(tokens, a.shape[1], dtype=dtype)
    with torch.no_grad():
        out = draw.twice(lambda _: layer(x), "auto")

    def formula(precision: torch.dtype) -> Tensor:
        y = x.cpu().to(precision) @ _dense(a, precision).T + bias.cpu().to(precision)
        return naive.activated(y, activation)

    assert_within_twice_the_budget(out, formula(FP64), formula(dtype), what="layer")


# Caches.


def appending(draw: Draw) -> None:
    """`kv_append`: every slot of the caches, bit by bit."""
    form, rng = draw.form, draw.rng
    dtype, fp8 = form.choice(DTYPES), form.random() < 0.4
    heads, dims = form.choice([1, 2, 3]), (form.choice([1, 24, 64]), form.choice([8, 64]))
    page_size = form.choice([None, 1, 16, 17])
    lengths = [rng.choice((0, *LENGTHS)) for _ in range(rng.choice([1, 2, 3]))]
    tokens, batch = rng.choice([1, 2, 5, 17]), len(lengths)
    counts = [rng.randint(0, tokens) for _ in lengths] if rng.random() < 0.5 else None
    draw.note(dtype=dtype, fp8=fp8, heads=heads, dims=dims, page_size=page_size)
    draw.note(lengths=lengths, tokens=tokens, counts=counts)
    slots = max(lengths) + tokens + rng.choice([0, 3])
    size = page_size or slots
    columns = -(-slots // size)
    table = None
    if page_size is None:
        shapes = [(batch, heads, slots, dim) for dim in dims]
    else:
        order = torch.randperm(
            batch * columns + 2, generator=torch.Generator().manual_seed(draw.seed)
        )
        table = order[: batch * columns].view(batch, columns).int()
        shapes = [(batch * columns + 2, page_size, heads, dim) for dim in dims]
    stored = FP8 if fp8 else dtype
    caches = [draw.normal(*shape).to(stored) for shape in shapes]
    new = [draw.laid_out(3 * draw.normal(batch, heads, tokens, dim, dtype=dtype)) for dim in dims]
    scales = [draw.normal(heads).abs() + 0.1 for _ in range(2)] if fp8 else [None, None]
    expected = [x.cpu().clone() for x in caches]
    for b, length in enumerate(lengths):
        for t in range(tokens if counts is None else counts[b]):
            slot = length + t
            for cache, x, scale in zip(expected, new, scales, strict=True):
                for h in range(heads):
                    row = x[b, h, t].cpu()
                    if scale is not None:
                        row = naive.stored_fp8(row, float(scale[h])).float().to(FP8)
                    if table is None:
                        cache[b, h, slot] = row
                    else:
                        cache[int(table[b, slot // size]), slot % size, h] = row
    here: dict[str, Any] = {"dtype": torch.int32, "device": draw.device}
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, **here)}
    options["counts"] = None if counts is None else torch.tensor(counts, **here)
    options["page_table"] = None if table is None else table.to(draw.device)
    options |= {"k_scale": scales[0], "v_scale": scales[1]}

    def call(impl: str) -> list[Tensor]:
        kv_append(*caches, *new, **options, impl=impl)
        return [x.clone() for x in caches]

    draw.twice(call, draw.impl(("auto", "triton", "eager")))
    for name, cache, want in zip("kv", caches, expected, strict=True):
        assert same_bits(cache.cpu(), want), f"the {name} cache differs"


def choosing_pages(draw: Draw) -> None:
    """`page_summaries` and `topk_pages`, with whole numbers, so that every score is exact."""
    form, rng = draw.form, draw.rng
    dtype, dim = form.choice(DTYPES), form.choice([8, 24, 64])
    heads, group = form.choice([1, 2]), form.choice([1, 3])
    page_size, paged = form.choice([1, 16, 20]), form.random() < 0.5
    lengths = [rng.choice((0, *LENGTHS, 130)) for _ in range(rng.choice([1, 2, 3]))]
    sq, reduce = rng.choice([1, 1, 3]), rng.choice(["max", "sum"])
    columns, batch = -(-max(*lengths, 1) // page_size), len(lengths)
    k = rng.randint(1, columns + 2)
    first = rng.randint(0, k)
    last = rng.randint(0, k - first)
    draw.note(dtype=dtype, dim=dim, page_size=page_size, paged=paged, lengths=lengths, sq=sq)
    draw.note(reduce=reduce, k=k, keep_first=first, keep_last=last)
    tokens = integers(batch, columns * page_size, heads, dim, seed=draw.seed)
    for b, length in enumerate(lengths):
        tokens[b, length:] = math.nan
    here: dict[str, Any] = {"dtype": torch.int32, "device": draw.device}
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, **here)}
    table = torch.randperm(batch * columns + 2, generator=torch.Generator().manual_seed(draw.seed))[
        : batch * columns
    ].view(batch, columns)
    if paged:
        cache = torch.full((batch * columns + 2, page_size, heads, dim), math.nan)
        cache[table.flatten()] = tokens.view(batch * columns, page_size, heads, dim)
        options["page_table"] = table.int().to(draw.device)
    else:
        cache = tokens.transpose(1, 2).contiguous()
    cache = cache.to(device=draw.device, dtype=dtype)
    impl = draw.impl(("auto", "triton", "eager"))
    block: dict[str, Any] = {} if paged else {"kv_block_size": page_size}

    def summarise(name: str) -> Any:
        return page_summaries(cache, **options, **block, impl=name)[:2]

    low, high = draw.twice(summarise, impl)
    q = integers(batch, heads * group, sq, dim, seed=draw.seed + 1).to(draw.device, dtype)
    made, limits = PageSummaries(low, high, page_size), {"keep_first": first, "keep_last": last}
    got = draw.twice(
        lambda name: topk_pages(q, made, k, **options, **limits, reduce=reduce, impl=name), impl
    )
    for b, length in enumerate(lengths):
        pages = -(-length // page_size)
        for h in range(heads):
            scores = []
            for j in range(pages):
                rows = tokens[b, j * page_size : min((j + 1) * page_size, length), h]
                at = (int(table[b, j]), h) if paged else (b, j, h)
                least, most = rows.min(0).values, rows.max(0).values
                assert torch.equal(low[at].cpu().float(), least), f"low of page {j}"
                assert torch.equal(high[at].cpu().float(), most), f"high of page {j}"
                bounds = [
                    torch.maximum(x * least, x * most).sum().item()
                    for x in q[b, h * group : (h + 1) * group].reshape(-1, dim).cpu().float()
                ]
                scores.append(max(bounds) if reduce == "max" else sum(bounds))
            want = _best(scores, k, first, last)
            assert got[b, h].tolist() == want, f"sequence {b}, head {h}: {got[b, h].tolist()}"


def _best(scores: list[float], k: int, first: int, last: int) -> list[int]:
    """Pages to keep: the first, the last, then the best, the earlier of equal ones."""
    pages = len(scores)
    kept = set(range(min(first, pages))) | set(range(max(pages - last, 0), pages))
    for page in sorted(range(pages), key=lambda j: (-scores[j], j)):
        if len(kept) < min(k, pages):
            kept.add(page)
    return sorted(kept) + [-1] * (k - len(kept))


def cache_objects(draw: Draw) -> None:
    """`PagedKVCache` and `KVCache`: random operations against lists of tokens."""
    rng, form = draw.rng, draw.form
    dtype, heads, dim = form.choice(DTYPES), form.choice([1, 2]), form.choice([8, 16])
    page_size, pages = rng.choice([1, 3, 16]), rng.choice([4, 9, 20])
    draw.note(dtype=dtype, page_size=page_size, pages=pages)
    cache = PagedKVCache(pages, page_size, heads, dim, dtype=dtype, device=draw.device)
    held: dict[int, list[Tensor]] = {}
    done: list[str] = []
    draw.note(done=done)
    for step in range(rng.randint(5, 25)):
        what = rng.choice(["add", "append", "append", "append", "truncate", "fork", "release"])
        ids = rng.sample(sorted(held), rng.randint(1, len(held))) if held else []
        if what == "add":
            for i in cache.add_sequences(1):
                held[i] = []
        elif not ids:
            continue
        elif what == "append":
            counts = [rng.randint(0, 2 * page_size) for _ in ids]
            k = draw.normal(len(ids), heads, max(*counts, 1), dim, dtype=dtype)
            try:
                cache.append(ids, k, k * 2, counts)
            except (OutOfPages, InvalidInput):
                done.append(f"full {ids} {counts}")
                continue
            for b, (i, count) in enumerate(zip(ids, counts, strict=True)):
                held[i] = held[i] + [k[b, :, t].cpu() for t in range(count)]
        elif what == "truncate":
            kept = [rng.randint(0, len(held[i])) for i in ids]
            cache.truncate(ids, kept)
            for i, count in zip(ids, kept, strict=True):
                held[i] = held[i][:count]
        elif what == "fork":
            try:
                child = cache.fork(ids[0])
            except (OutOfPages, InvalidInput):
                continue
            held[child] = list(held[ids[0]])
        else:
            cache.release(ids)
            for i in ids:
                del held[i]
        done.append(f"{what} {ids}")
        _check_pages(cache, held, step)
    _contiguous_cache(draw, dtype, heads, dim)


def _check_pages(cache: PagedKVCache, held: dict[int, list[Tensor]], step: int) -> None:
    for i, tokens in held.items():
        assert cache.host_lengths([i]) == [len(tokens)], f"step {step}: length of {i}"
        assert cache.lengths([i]).tolist() == [len(tokens)], f"step {step}: length of {i}"
        pages = cache.page_table([i])[0].tolist()
        for t, token in enumerate(tokens):
            at = (pages[t // cache.page_size], t % cache.page_size)
            assert torch.equal(cache.k[at].cpu(), token), f"step {step}: key {t} of sequence {i}"
            assert torch.equal(cache.v[at].cpu(), token * 2), f"step {step}: value {t} of {i}"


def _contiguous_cache(draw: Draw, dtype: torch.dtype, heads: int, dim: int) -> None:
    rng, batch, most = draw.rng, 2, 20
    cache = KVCache(batch, heads, most, dim, dtype=dtype, device=draw.device)
    held: list[list[Tensor]] = [[] for _ in range(batch)]
    for step in range(8):
        counts = [rng.randint(0, 6) for _ in held]
        if any(len(x) + n > most for x, n in zip(held, counts, strict=True)):
            kept = [len(x) // 2 for x in held]
            cache.truncate(kept)
            held = [x[:n] for x, n in zip(held, kept, strict=True)]
        k = draw.normal(batch, heads, max(*counts, 1), dim, dtype=dtype)
        cache.append(k, k * 2, counts)
        for b, count in enumerate(counts):
            held[b] += [k[b, :, t].cpu() for t in range(count)]
            assert cache.lengths[b].item() == len(held[b]), f"step {step}: length of {b}"
            for t, token in enumerate(held[b]):
                assert torch.equal(cache.k[b, :, t].cpu(), token), f"step {step}: key {t} of {b}"
                assert torch.equal(cache.v[b, :, t].cpu(), token * 2), f"step {step}: value {t}"


KINDS = {
    "matmul": products,
    "matmul-sparse": sparse_products,
    "sddmm": sampled_products,
    "BSRLinear": layers,
    "kv_append": appending,
    "topk_pages": choosing_pages,
    "PagedKVCache": cache_objects,
}
