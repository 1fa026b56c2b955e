"""`page_summaries` and `topk_pages`: choose the pages that sparse decoding reads.

The public functions, their checks, the operators, and the implementations in plain PyTorch; the
Triton kernels are in `selection_kernels.py`.
"""

from typing import Any, NamedTuple

import torch

from ..calls.cache import SummariesCall, TopkCall
from ..core.checks import (
    check_choice,
    check_dtype,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput, InvalidType
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only
from ..dispatch.operators import Operator, define_op
from ..launch.replay import record, repeat
from ..masks.check import check_count
from .layout import CONTIGUOUS, FP8, INDICES, NEW, PAGED, STORED
from .slots import why_not_triton

KINDS = ("minmax", "mean")
# Launches of earlier calls, for `repeat`.
_UPDATES: dict[Any, Any] = {}
_CHOICES: dict[Any, Any] = {}


class PageSummaries(NamedTuple):
    """The result of `page_summaries`: the smallest and largest value of each channel in each page.

    `low`, `high`: `[pages, Hkv, D]`, or `[B, blocks, Hkv, D]` for a contiguous cache that is cut
    into blocks of `page_size` tokens. dtype of the cache; for fp8 caches, bf16 with the stored
    numbers, which are the keys divided by their scale. For kind "mean" both are the mean.
    """

    low: torch.Tensor
    high: torch.Tensor
    page_size: int

    @property
    def kind(self) -> str:
        """`minmax` or `mean`."""
        return _kind(self)

    @property
    def paged(self) -> bool:
        """Whether a page table says which pages belong to which sequence."""
        return _paged(self)


# Functions, because the compiler of torch 2.10 does not trace properties of named tuples.


def _kind(summaries: PageSummaries) -> str:
    return "mean" if summaries.low is summaries.high else "minmax"


def _paged(summaries: PageSummaries) -> bool:
    return summaries.low.dim() == 3


torch.serialization.add_safe_globals([PageSummaries])


def empty_summaries(
    k_cache: torch.Tensor, kind: str, page_size: int, *, paged: bool
) -> PageSummaries:
    """Summaries for all pages of a cache; 0 until they are made."""
    dtype = torch.bfloat16 if k_cache.dtype == FP8 else k_cache.dtype
    if paged:
        shape = (k_cache.shape[0], k_cache.shape[2], k_cache.shape[3])
    else:
        batch, heads, tokens, head_dim = k_cache.shape
        shape = (batch, -(-tokens // page_size), heads, head_dim)  # type: ignore[assignment]
    low = torch.zeros(shape, dtype=dtype, device=k_cache.device)
    return PageSummaries(low, low if kind == "mean" else torch.zeros_like(low), page_size)


def page_summaries(
    k_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    kind: str = "minmax",
    out: PageSummaries | None = None,
    new_tokens: int | None = None,
    impl: str = "auto",
) -> PageSummaries:
    """Per channel, the smallest and largest key of each page, for `topk_pages`.

    Compute them once after a prompt, and update them after each append with `out` and
    `new_tokens`. Neither waits for the device, so a CUDA graph may capture the update. Sequences
    that share a page must hold equally many of its tokens: after `fork`, a sequence that was
    truncated within a shared page belongs in a call of its own, before that of the others. This is
    checked on the CPU; on a GPU, which would have to be waited for, the page gets the summary of
    one of the sequences.

    Parameters
    ----------
    k_cache : fp16, bf16, fp32, fp64 or float8_e4m3fn `[B, Hkv, S, D]`
        With `page_table`: `[pages, page_size, Hkv, D]`.
    cache_seqlens : int32 `[B]`
        Tokens of each sequence; later ones are not read.
    page_table : int32 or int64 `[B, max_pages]`, optional
        Pages that are not in the table keep their summaries in `out`.
    kv_block_size : int, optional
        Tokens of a block of a contiguous cache; blocks take the place of pages.
    kind : str
        `minmax`, a bound on every product of a query with a key (as in Quest), or `mean`.
    out : PageSummaries, optional
        Summaries of the same cache to be updated in place.
    new_tokens : int, optional
        With `out`: update only the pages that hold the last `new_tokens` tokens of each sequence.
    impl : str
        `auto`, `eager` or `triton`.

    Returns
    -------
    PageSummaries
        `low`, `high`: `[pages, Hkv, D]` or `[B, blocks, Hkv, D]`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> k_cache = torch.arange(6.0).view(1, 1, 6, 1)
    >>> lengths = torch.tensor([5], dtype=torch.int32)
    >>> low, high, _ = page_summaries(k_cache, cache_seqlens=lengths, kv_block_size=2)
    >>> low.flatten(), high.flatten()
    (tensor([0., 2., 4.]), tensor([1., 3., 4.]))
    """
    inputs: tuple[Any, ...] = ()
    options: tuple[Any, ...] = (kv_block_size, kind, new_tokens, impl)
    if isinstance(out, PageSummaries):
        high = None if _kind(out) == "mean" else out.high
        inputs = (out.low, high, k_cache, cache_seqlens, page_table)
        options = (out.page_size, *options)
        if repeat(_UPDATES, options, inputs) is not None:
            return out
    op = "page_summaries"
    check_tensor(op, "k_cache", k_cache)
    check_dtype(op, "k_cache", k_cache, STORED)
    check_rank(op, "k_cache", k_cache, CONTIGUOUS if page_table is None else PAGED)
    check_last_dim_contiguous(op, "k_cache", k_cache)
    check_choice(op, "kind", kind, KINDS)
    check_choice(op, "impl", impl, IMPLS)
    page_size = _page_size(op, k_cache, page_table, kv_block_size)
    batch = _check_lengths(op, cache_seqlens, page_table)
    if page_table is None and k_cache.shape[0] != batch:
        expected = f"[{k_cache.shape[0]}]"
        raise InvalidInput(message(op, "cache_seqlens", "has a wrong shape", expected, [batch]))
    check_same_device(
        op, {"k_cache": k_cache, "cache_seqlens": cache_seqlens, "page_table": page_table}
    )
    if new_tokens is not None:
        check_count(op, "new_tokens", new_tokens)
        if out is None:
            raise InvalidInput(message(op, "new_tokens", "needs `out`", "PageSummaries", None))
    if out is None:
        out = empty_summaries(k_cache, kind, page_size, paged=page_table is not None)
    else:
        _check_out(op, out, k_cache, kind, page_size, paged=page_table is not None)
    high = None if _kind(out) == "mean" else out.high
    call = SummariesCall(out.low, high, k_cache, cache_seqlens, page_table, page_size, new_tokens)
    if inputs:
        record(_UPDATES, options, inputs, _summarise, call, impl, operands=1)
    else:
        _summarise(call, impl)
    return out


def topk_pages(
    q: torch.Tensor,
    summaries: PageSummaries,
    k: int,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    keep_first: int = 0,
    keep_last: int = 1,
    reduce: str = "max",
    impl: str = "auto",
) -> torch.Tensor:
    """The `k` pages of each sequence and KV head whose keys can matter most to the queries.

    A page's score is the largest product that a key within its summary could have with a query;
    with `minmax` it bounds the product of every key of the page. Pages with infinite or NaN keys
    come first. Nothing waits for the device.

    Parameters
    ----------
    q : fp16, bf16, fp32 or fp64 `[B, Hq, Sq, D]`
    summaries : from `page_summaries`
    k : int
        Pages to list; a sequence with fewer lists all of them.
    cache_seqlens : int32 `[B]`
        Tokens of each sequence.
    page_table : int32 or int64 `[B, max_pages]`
        For summaries of a paged cache.
    keep_first, keep_last : int
        Pages at the start (attention sinks) and at the end (the latest tokens, including the
        queries themselves) that are always listed; together at most `k`.
    reduce : str
        How scores of the queries that share a KV head are combined: `max` or `sum`.
    impl : str
        `auto`, `eager` or `triton`.

    Returns
    -------
    kv_blocks : int32 `[B, Hkv, k]`
        Ordinals of pages in ascending order, then -1: `kv_blocks` of `attention_decode`. Of pages
        with the same score the earlier ones are taken.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> k_cache = torch.tensor([0.0, 9, 1, 2, 5, 3, 0]).view(1, 1, 7, 1)
    >>> lengths = torch.tensor([7], dtype=torch.int32)
    >>> summaries = page_summaries(k_cache, cache_seqlens=lengths, kv_block_size=2)
    >>> topk_pages(torch.ones(1, 1, 1, 1), summaries, 3, cache_seqlens=lengths)
    tensor([[[0, 2, 3]]], dtype=torch.int32)
    """
    inputs: tuple[Any, ...] = ()
    options: tuple[Any, ...] = (k, keep_first, keep_last, reduce, impl)
    if isinstance(summaries, PageSummaries):
        inputs = (q, summaries.low, summaries.high, cache_seqlens, page_table)
        options = (summaries.page_size, *options)
        results = repeat(_CHOICES, options, inputs)
        if results is not None:
            return results[0]
    op = "topk_pages"
    check_tensor(op, "q", q)
    check_dtype(op, "q", q, NEW)
    check_rank(op, "q", q, "[B, Hq, Sq, D]")
    check_last_dim_contiguous(op, "q", q)
    if not isinstance(summaries, PageSummaries):
        got = type(summaries).__name__
        raise InvalidType(message(op, "summaries", "have a wrong type", "PageSummaries", got))
    if _paged(summaries) == (page_table is None):
        expected = "one for summaries of pages, None for those of a contiguous cache"
        raise InvalidInput(message(op, "page_table", "does not fit", expected, page_table is None))
    batch = _check_lengths(op, cache_seqlens, page_table)
    low = summaries.low
    _check_pair(op, "summaries", summaries)
    heads, head_dim = low.shape[-2:]
    check_shape(op, "q", q, (batch, q.shape[1], q.shape[2], head_dim))
    if heads == 0 or q.shape[1] % heads:
        expected = f"a multiple of the {heads} KV heads"
        raise InvalidInput(message(op, "q", "has a wrong number of heads", expected, q.shape[1]))
    if not _paged(summaries) and low.shape[0] != batch:
        got = list(low.shape)
        raise InvalidInput(message(op, "summaries", "have a wrong batch", batch, got))
    check_same_device(
        op, {"q": q, "summaries": low, "cache_seqlens": cache_seqlens, "page_table": page_table}
    )
    check_count(op, "k", k, at_least=1)
    for arg, count in (("keep_first", keep_first), ("keep_last", keep_last)):
        check_count(op, arg, count)
    if keep_first + keep_last > k:
        expected = f"keep_first + keep_last ({keep_first} + {keep_last}) or more"
        raise InvalidInput(message(op, "k", "is too small", expected, k))
    check_choice(op, "reduce", reduce, ("max", "sum"))
    check_choice(op, "impl", impl, IMPLS)
    call = TopkCall(
        q,
        low,
        summaries.high,
        cache_seqlens,
        page_table,
        summaries.page_size,
        k,
        keep_first,
        keep_last,
        reduce,
    )
    return record(_CHOICES, options, inputs, _choose, call, impl, operands=1)[0]


def _page_size(op: str, k_cache: torch.Tensor, page_table: Any, kv_block_size: Any) -> int:
    if page_table is None:
        if kv_block_size is None:
            problem = "is missing for a contiguous cache"
            raise InvalidInput(message(op, "kv_block_size", problem, "tokens of a block", None))
        return check_count(op, "kv_block_size", kv_block_size, at_least=1)
    if kv_block_size not in (None, k_cache.shape[1]):
        expected = f"None or the {k_cache.shape[1]} tokens of a page"
        raise InvalidInput(message(op, "kv_block_size", "does not fit", expected, kv_block_size))
    return k_cache.shape[1]


def _check_lengths(op: str, cache_seqlens: Any, page_table: Any) -> int:
    """Check lengths and page table; return the batch size."""
    check_tensor(op, "cache_seqlens", cache_seqlens)
    check_dtype(op, "cache_seqlens", cache_seqlens, [torch.int32])
    check_rank(op, "cache_seqlens", cache_seqlens, "[B]")
    check_last_dim_contiguous(op, "cache_seqlens", cache_seqlens)
    batch = int(cache_seqlens.shape[0])
    if page_table is not None:
        check_tensor(op, "page_table", page_table)
        check_dtype(op, "page_table", page_table, INDICES)
        check_rank(op, "page_table", page_table, "[B, max_pages]")
        check_shape(op, "page_table", page_table, (batch, page_table.shape[1]))
        check_last_dim_contiguous(op, "page_table", page_table)
    return batch


def _check_out(
    op: str, out: Any, k_cache: torch.Tensor, kind: str, page_size: int, *, paged: bool
) -> None:
    """Check that `out` has the form of `empty_summaries` for this cache."""
    if not isinstance(out, PageSummaries):
        got = type(out).__name__
        raise InvalidType(message(op, "out", "has a wrong type", "PageSummaries", got))
    with torch.device("meta"):
        like = torch.empty_strided(k_cache.shape, k_cache.stride(), dtype=k_cache.dtype)
    expected = empty_summaries(like, kind, page_size, paged=paged)
    check_shape(op, "out.low", out.low, expected.low.shape)
    check_dtype(op, "out.low", out.low, [expected.low.dtype])
    _check_pair(op, "out", out)
    check_same_device(op, {"k_cache": k_cache, "out": out.low})
    if ((found := _kind(out)), out.page_size) != (kind, page_size):
        wanted, got = f"{kind} of {page_size} tokens", f"{found} of {out.page_size}"
        raise InvalidInput(message(op, "out", "is of another kind", wanted, got))


def _check_pair(op: str, arg: str, summaries: PageSummaries) -> None:
    """Check that both summaries are tensors of one form: kernels find them at the same offsets."""
    low, high = summaries.low, summaries.high
    check_tensor(op, f"{arg}.low", low)
    check_last_dim_contiguous(op, f"{arg}.low", low)
    if high is low:
        return
    check_tensor(op, f"{arg}.high", high)
    check_shape(op, f"{arg}.high", high, low.shape)
    check_dtype(op, f"{arg}.high", high, [low.dtype])
    check_same_device(op, {f"{arg}.low": low, f"{arg}.high": high})
    if high.stride() != low.stride():
        expected, got = f"those of low, {list(low.stride())}", list(high.stride())
        raise InvalidInput(message(op, f"{arg}.high", "has other strides", expected, got))


def _check_shared_pages(op: str, call: SummariesCall, page_table: torch.Tensor) -> None:
    """Raise if sequences hold different numbers of tokens of a page whose summary is written.

    There would be several summaries of the page, and which of them stays a matter of chance.
    """
    columns, size = page_table.shape[1], call.page_size
    length = call.cache_seqlens.clamp(0, columns * size).long().view(-1, 1)
    first = torch.arange(columns, device="cpu") * size
    written = (page_table >= 0) & (page_table < call.k_cache.shape[0]) & (first < length)
    if call.new_tokens is not None:
        written &= first + size > length - call.new_tokens
    held = (length - first).clamp(max=size)[written]
    pages = page_table[written].long()
    most = torch.zeros(call.k_cache.shape[0], dtype=torch.long, device="cpu")
    most.scatter_reduce_(0, pages, held, "amax")
    fewer = (held < most[pages]).nonzero()
    if len(fewer) == 0:
        return
    entry = int(fewer[0])
    b, column = (int(x) for x in written.nonzero()[entry])
    page = int(pages[entry])
    problem = f"shares page {page} with a sequence that holds more tokens of it"
    expected = f"{int(most[page])} tokens of that page, or a call of its own before this one"
    arg = f"page_table[{b}, {column}]"
    raise InvalidInput(message(op, arg, problem, expected, int(held[entry])))


def summaries_eager(call: SummariesCall) -> None:
    """Write the summaries of the pages with the last `new_tokens` tokens; of all pages if None."""
    low, k_cache, page_table = call.low, call.k_cache, call.page_table
    page_size, new_tokens = call.page_size, call.new_tokens
    if page_table is None:
        batch, heads, tokens, dim = k_cache.shape
        columns = low.shape[1]
        keys = k_cache.view(torch.uint8) if k_cache.dtype == FP8 else k_cache
        keys = torch.nn.functional.pad(keys, (0, 0, 0, columns * page_size - tokens))
        keys = keys.view(batch, heads, columns, page_size, dim).permute(0, 2, 3, 1, 4)
        keys = keys.view(FP8) if k_cache.dtype == FP8 else keys
        exists = torch.ones((), dtype=torch.bool, device=low.device)
        capacity = tokens
    else:
        columns = page_table.shape[1]
        if k_cache.shape[0] == 0:
            return
        exists = (page_table >= 0) & (page_table < k_cache.shape[0])
        keys = k_cache[page_table.clamp(0, k_cache.shape[0] - 1).long()]
        capacity = columns * page_size
    if columns == 0 or keys.numel() == 0:
        return
    length = call.cache_seqlens.clamp(0, capacity).long().view(-1, 1)
    page = torch.arange(columns, device=low.device)
    first = 0 if new_tokens is None else (length - new_tokens).clamp(min=0) // page_size
    live = exists & (page >= first) & (page * page_size < length)
    token = page.unsqueeze(1) * page_size + torch.arange(page_size, device=low.device)
    there = (token < length.unsqueeze(2)).view(-1, columns, page_size, 1, 1)
    keys = keys.float() if low.dtype != torch.float64 else keys
    if call.high is None:
        total = keys.masked_fill(~there, 0).sum(2)
        made = [(low, total / there.sum(2).clamp(min=1))]
    else:
        made = [
            (low, keys.masked_fill(~there, torch.inf).amin(2)),
            (call.high, keys.masked_fill(~there, -torch.inf).amax(2)),
        ]
    for summary, values in made:
        _put_rows(summary, values.to(summary.dtype), page_table, live)


def _put_rows(
    summary: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor | None,
    live: torch.Tensor,
) -> None:
    """Write `values` [B, columns, H, D] where `live`."""
    if page_table is None:
        summary.copy_(torch.where(live.view(*live.shape, 1, 1), values, summary))
        return
    # rows that are not live repeat a harmless write, see `slots.put_tokens`
    flat, pages = live.flatten(), page_table.long().clamp(0, summary.shape[0] - 1).flatten()
    anchor = flat.int().argmax(keepdim=True)
    rows, to = values.flatten(0, 1), pages[anchor]
    kept = torch.where(flat[anchor].view(1, 1, 1), rows[anchor], summary[to])
    at = torch.where(flat, pages, to)
    summary.index_put_((at,), torch.where(flat.view(-1, 1, 1), rows, kept))


def topk_eager(call: TopkCall) -> torch.Tensor:
    """Ordinals [B, Hkv, k] of the best pages in ascending order, then -1."""
    q, low, high, page_table = call.q, call.low, call.high, call.page_table
    k, page_size = call.k, call.page_size
    heads = low.shape[-2]
    columns = low.shape[1] if page_table is None else page_table.shape[1]
    out = torch.full((q.shape[0], heads, k), -1, dtype=torch.int32, device=q.device)
    if out.numel() == 0 or columns == 0 or q.shape[2] == 0:
        return out
    exists = torch.ones((), dtype=torch.bool, device=q.device)
    if page_table is not None:
        exists = ((page_table >= 0) & (page_table < low.shape[0])).unsqueeze(1)
        if low.shape[0] == 0:
            # a page to stand in for those that the table names
            low = high = low.new_zeros((1, *low.shape[1:]))
        at = page_table.long().clamp(0, low.shape[0] - 1)
        low, high = low[at], high[at]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = q.to(dtype).reshape(q.shape[0], heads, -1, q.shape[-1])
    scores = rows.clamp(min=0) @ high.to(dtype).permute(0, 2, 3, 1)
    scores += rows.clamp(max=0) @ low.to(dtype).permute(0, 2, 3, 1)
    scores = scores.sum(2) if call.reduce == "sum" else scores.amax(2)
    scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf).masked_fill(~exists, -torch.inf)

    count = ((call.cache_seqlens.long().clamp(min=0) + page_size - 1) // page_size).clamp(
        max=columns
    )
    count = count.view(-1, 1, 1)
    page = torch.arange(columns, device=q.device)
    kept = (page < call.keep_first) | (page >= count - call.keep_last)
    # stable sorts, least significant key first: ordinal, score, kept before others, absent last
    order = scores.argsort(dim=-1, descending=True, stable=True)
    group = torch.where(page < count, (~kept).int(), 2).expand_as(scores).gather(-1, order)
    order = order.gather(-1, group.argsort(dim=-1, stable=True))
    best = order[..., :k]
    chosen = torch.arange(best.shape[-1], device=q.device) < count
    best = torch.where(chosen, best, columns).sort(dim=-1).values
    out[..., : best.shape[-1]] = torch.where(best < columns, best, -1)
    return out


def _summarise(call: SummariesCall, impl: str) -> tuple[()]:
    """Run a checked call through the operator, which returns nothing."""
    page_summaries_op(
        call.low,
        call.high,
        call.k_cache,
        call.cache_seqlens,
        call.page_table,
        call.page_size,
        call.new_tokens,
        impl,
    )
    return ()


def _choose(call: TopkCall, impl: str) -> tuple[torch.Tensor]:
    """Run a checked call through the operator."""
    lists = topk_pages_op(
        call.q,
        call.low,
        call.high,
        call.cache_seqlens,
        call.page_table,
        call.page_size,
        call.k,
        call.keep_first,
        call.keep_last,
        call.reduce,
        impl,
    )
    return (lists,)


def _page_summaries(*args: Any) -> None:
    *asked, impl = args
    call = SummariesCall(*asked)
    if call.page_table is not None and call.low.device.type == "cpu":
        _check_shared_pages("page_summaries", call, call.page_table)
    with without_autocast(call.low.device), torch.no_grad():
        summaries_dispatch.run(impl, call)


def _topk_pages(*args: Any) -> torch.Tensor:
    *asked, impl = args
    call = TopkCall(*asked)
    with without_autocast(call.q.device), torch.no_grad():
        return topk_dispatch.run(impl, call)


def _topk_pages_fake(*args: Any) -> torch.Tensor:
    *asked, _ = args
    return empty_lists(TopkCall(*asked))


def empty_lists(call: TopkCall) -> torch.Tensor:
    """Memory for the lists of a call."""
    shape = (call.q.shape[0], call.low.shape[-2], call.k)
    return call.q.new_empty(shape, dtype=torch.int32)


summaries_dispatch: Dispatcher = Dispatcher("page_summaries")
summaries_dispatch.register(
    "triton",
    why_not_triton,
    "blackwell_sparsek.kv_cache.selection_kernels:summarise",
    auto_passes=interpreted_only,
)
summaries_dispatch.register("eager", every_problem, summaries_eager)
topk_dispatch: Dispatcher = Dispatcher("topk_pages")
topk_dispatch.register(
    "triton",
    why_not_triton,
    "blackwell_sparsek.kv_cache.selection_kernels:topk",
    auto_passes=interpreted_only,
)
topk_dispatch.register("eager", every_problem, topk_eager)

page_summaries_op: Operator = define_op(
    "page_summaries",
    "(Tensor(a!) low, Tensor(b!)? high, Tensor k_cache, Tensor cache_seqlens, "
    "Tensor? page_table, int page_size, int? new_tokens, str impl) -> ()",
    _page_summaries,
    lambda *args: None,
)
topk_pages_op: Operator = define_op(
    "topk_pages",
    "(Tensor q, Tensor low, Tensor high, Tensor cache_seqlens, Tensor? page_table, "
    "int page_size, int k, int keep_first, int keep_last, str reduce, str impl) -> Tensor",
    _topk_pages,
    _topk_pages_fake,
)
