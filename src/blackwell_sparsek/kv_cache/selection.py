"""`page_summaries` and `topk_pages`: sparse decoding reads the pages that can matter."""

from typing import Any

import torch

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
from ..core.errors import InvalidInput, InvalidType
from ..masks.check import check_count
from .layout import CONTIGUOUS, KINDS, NEW, PAGED, STORED, PageSummaries, empty_summaries
from .op import page_summaries as page_summaries_op
from .op import topk_pages as topk_pages_op
from .replay import cache_results


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

    Made once after a prompt, and brought up to date after each append with `out` and
    `new_tokens`; both without waiting for the device, so a CUDA graph may hold the update.

    Parameters
    ----------
    k_cache : fp16, bf16, fp32, fp64 or float8_e4m3fn `[B, Hkv, S, D]`
        With `page_table`: `[pages, page_size, Hkv, D]`.
    cache_seqlens : int32 `[B]`
        Tokens of each sequence; later ones are not read.
    page_table : int32 `[B, max_pages]`, optional
        Pages that no table names keep what `out` has.
    kv_block_size : int, optional
        Tokens of a block of a contiguous cache, which takes the place of pages.
    kind : str
        `minmax`, a bound on every product of a query with a key (as in Quest), or `mean`.
    out : PageSummaries, optional
        Summaries of the same cache to be updated in place.
    new_tokens : int, optional
        With `out`: only the pages that hold the last `new_tokens` tokens of each sequence.
    impl : str
        `auto`, `eager` or `triton`.

    Returns
    -------
    PageSummaries
        `low`, `high`: `[pages, Hkv, D]` or `[B, blocks, Hkv, D]`.

    Examples
    --------
    >>> import torch
    >>> k_cache = torch.arange(6.0).view(1, 1, 6, 1)
    >>> lengths = torch.tensor([5], dtype=torch.int32)
    >>> low, high, _ = page_summaries(k_cache, cache_seqlens=lengths, kv_block_size=2)
    >>> low.flatten(), high.flatten()
    (tensor([0., 2., 4.]), tensor([1., 3., 4.]))
    """
    where = (cache_seqlens, page_table)
    if not isinstance(out, PageSummaries):
        return _page_summaries(k_cache, *where, kv_block_size, kind, out, new_tokens, impl)

    def update() -> tuple[()]:
        _page_summaries(k_cache, *where, kv_block_size, kind, out, new_tokens, impl)
        return ()

    others = (None if out.low is out.high else out.high, k_cache, *where)
    options = (kv_block_size, kind, out.page_size, new_tokens, impl)
    cache_results("page_summaries", (out.low,), others, options, update)
    return out


def _page_summaries(
    k_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    kv_block_size: int | None,
    kind: str,
    out: PageSummaries | None,
    new_tokens: int | None,
    impl: str,
) -> PageSummaries:
    """Check everything and run the operator."""
    op = "page_summaries"
    check_tensor(op, "k_cache", k_cache)
    check_dtype(op, "k_cache", k_cache, STORED)
    check_rank(op, "k_cache", k_cache, CONTIGUOUS if page_table is None else PAGED)
    check_last_dim_contiguous(op, "k_cache", k_cache)
    check_choice(op, "kind", kind, KINDS)
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
    high = None if out.kind == "mean" else out.high
    where = (cache_seqlens, page_table, page_size, new_tokens)
    page_summaries_op(out.low, high, k_cache, *where, impl)
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

    A page's score is the largest product that a key within its summary could have with a query:
    with `minmax` no key of the page has a larger one. Pages with infinite or NaN keys come first.
    Nothing waits for the device.

    Parameters
    ----------
    q : fp16, bf16, fp32 or fp64 `[B, Hq, Sq, D]`
    summaries : from `page_summaries`
    k : int
        Pages to list; all of them where a sequence has no more.
    cache_seqlens : int32 `[B]`
        Tokens of each sequence.
    page_table : int32 `[B, max_pages]`
        For summaries of a paged cache.
    keep_first, keep_last : int
        Pages at the start (attention sinks) and at the end (the latest tokens, which the queries
        themselves belong to) that are always listed, `k` at the most together.
    reduce : str
        Over the queries that share a KV head: `max`, what one of them needs most, or `sum`.
    impl : str
        `auto`, `eager` or `triton`.

    Returns
    -------
    kv_blocks : int32 `[B, Hkv, k]`
        Ordinals of pages in ascending order, then -1: `kv_blocks` of `attention_decode`. Of pages
        with the same score the earlier ones are taken.

    Examples
    --------
    >>> import torch
    >>> k_cache = torch.tensor([0.0, 9, 1, 2, 5, 3, 0]).view(1, 1, 7, 1)
    >>> lengths = torch.tensor([7], dtype=torch.int32)
    >>> summaries = page_summaries(k_cache, cache_seqlens=lengths, kv_block_size=2)
    >>> topk_pages(torch.ones(1, 1, 1, 1), summaries, 3, cache_seqlens=lengths)
    tensor([[[0, 2, 3]]], dtype=torch.int32)
    """

    def checked() -> tuple[torch.Tensor]:
        where = (cache_seqlens, page_table)
        return (_topk_pages(q, summaries, k, *where, keep_first, keep_last, reduce, impl),)

    if not isinstance(summaries, PageSummaries):
        return checked()[0]
    others = (summaries.low, summaries.high, cache_seqlens, page_table)
    options = (summaries.page_size, k, keep_first, keep_last, reduce, impl)
    return cache_results("topk_pages", (q,), others, options, checked)[0]


def _topk_pages(
    q: torch.Tensor,
    summaries: PageSummaries,
    k: int,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    keep_first: int,
    keep_last: int,
    reduce: str,
    impl: str,
) -> torch.Tensor:
    """Check everything and run the operator."""
    op = "topk_pages"
    check_tensor(op, "q", q)
    check_dtype(op, "q", q, NEW)
    check_rank(op, "q", q, "[B, Hq, Sq, D]")
    check_last_dim_contiguous(op, "q", q)
    if not isinstance(summaries, PageSummaries):
        got = type(summaries).__name__
        raise InvalidType(message(op, "summaries", "have a wrong type", "PageSummaries", got))
    if summaries.paged == (page_table is None):
        expected = "one for summaries of pages, None for those of a contiguous cache"
        raise InvalidInput(message(op, "page_table", "does not fit", expected, page_table is None))
    batch = _check_lengths(op, cache_seqlens, page_table)
    low = summaries.low
    heads, head_dim = low.shape[-2:]
    check_shape(op, "q", q, (batch, q.shape[1], q.shape[2], head_dim))
    if heads == 0 or q.shape[1] % heads:
        expected = f"a multiple of the {heads} KV heads"
        raise InvalidInput(message(op, "q", "has a wrong number of heads", expected, q.shape[1]))
    if not summaries.paged and low.shape[0] != batch:
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
    where = (cache_seqlens, page_table, summaries.page_size)
    options = (k, keep_first, keep_last, reduce, impl)
    return topk_pages_op(q, low, summaries.high, *where, *options)


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
    """The batch size."""
    check_tensor(op, "cache_seqlens", cache_seqlens)
    check_dtype(op, "cache_seqlens", cache_seqlens, [torch.int32])
    check_rank(op, "cache_seqlens", cache_seqlens, "[B]")
    check_last_dim_contiguous(op, "cache_seqlens", cache_seqlens)
    batch = int(cache_seqlens.shape[0])
    if page_table is not None:
        check_tensor(op, "page_table", page_table)
        check_dtype(op, "page_table", page_table, [torch.int32])
        check_rank(op, "page_table", page_table, "[B, max_pages]")
        check_shape(op, "page_table", page_table, (batch, page_table.shape[1]))
        check_last_dim_contiguous(op, "page_table", page_table)
    return batch


def _check_out(
    op: str, out: Any, k_cache: torch.Tensor, kind: str, page_size: int, *, paged: bool
) -> None:
    """`out` has the form that `empty_summaries` gives for this cache."""
    if not isinstance(out, PageSummaries):
        got = type(out).__name__
        raise InvalidType(message(op, "out", "has a wrong type", "PageSummaries", got))
    with torch.device("meta"):
        like = torch.empty_strided(k_cache.shape, k_cache.stride(), dtype=k_cache.dtype)
    expected = empty_summaries(like, kind, page_size, paged=paged)
    check_shape(op, "out.low", out.low, expected.low.shape)
    check_dtype(op, "out.low", out.low, [expected.low.dtype])
    if (out.kind, out.page_size) != (kind, page_size):
        wanted, got = f"{kind} of {page_size} tokens", f"{out.kind} of {out.page_size}"
        raise InvalidInput(message(op, "out", "is of another kind", wanted, got))
