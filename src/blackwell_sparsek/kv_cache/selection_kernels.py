# mypy: ignore-errors
"""Summaries of the keys of each page, and the pages that matter most to a query.

`_page_summaries_kernel` makes, channel by channel, the smallest and largest key of a page, or the
mean of its keys:

    low[page, h, d] = min over the tokens of the page of k_cache[page, token, h, d]

One program makes the summary of one page of one sequence and head, from the tokens below the
length. Pages of one sequence are taken from the one that holds token `length - new_tokens` on.
fp8 caches are given as uint8. Called as impl "triton" of `bsk::page_summaries`.

    score[b, h, j] = max (or sum) over the queries of KV head h of
                     sum over d of max(q_d * low[j, d], q_d * high[j, d])

is an upper bound for every key of page j. `_page_scores_kernel` makes the scores of TILE_PAGES
pages of one sequence and KV head with two products, q's positive part by `high` and its negative
part by `low`. `_select_pages_kernel` lists the k best pages of one sequence and KV head in
ascending order: the k-th best score is found by bisection of its bits, ties go to the earlier page,
and the list is filled with -1. Pages at the two ends may be kept whatever their score. Called as
impl "triton" of `bsk::topk_pages`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..calls.cache import SummariesCall, TopkCall
from ..device.fp8 import e4m3_values
from ..device.ordering import HIGHEST, LOWEST, midpoint, ordered_int
from ..device.records import Strides
from ..launch.launcher import cdiv, launch, on_device_of
from ..launch.workspace import scratch
from .append_kernel import INT32_MAX, cache_strides, stored_as_bytes
from .selection import empty_lists

TILE_TOKENS = 16


class SummaryStrides(NamedTuple):
    """Strides of sequence (0 for summaries of pages), page or block, and head."""

    sequence: Any
    page: Any
    head: Any


@triton.jit
def _summary_offset(sequence, page, head, strides):
    """Where the summary of a page (or block) and head begins."""
    return sequence * strides.sequence + page * strides.page + head * strides.head


@triton.jit(
    do_not_specialize=[
        "table_stride", "columns", "heads", "pages", "capacity", "page_size", "new_tokens",
    ]
)  # fmt: skip
def _page_summaries_kernel(
    low_ptr,
    high_ptr,
    k_cache_ptr,
    cache_seqlens_ptr,
    page_table_ptr,
    summary_strides,
    k_strides,
    table_stride,
    columns,
    heads,
    pages,
    capacity,
    page_size,
    new_tokens,
    HEAD_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """One page of one sequence and head; `high_ptr` None asks for the mean."""
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    batch = (program // heads // columns).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens_ptr + batch), 0), capacity)
    page = tl.maximum(length - new_tokens, 0) // page_size + program // heads % columns
    first = page.to(tl.int64) * page_size
    if first >= length:
        return
    count = tl.minimum(length - first, page_size).to(tl.int32)
    slab = batch
    place = page.to(tl.int64)
    if page_table_ptr is not None:
        slab = tl.load(page_table_ptr + batch * table_stride + page).to(tl.int64)
        if (slab < 0) | (slab >= pages):
            return
        first = first * 0
        place = slab

    TILE_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    offs_d = tl.arange(0, TILE_D)
    in_head = offs_d < HEAD_DIM
    low = tl.full([TILE_D], float("inf"), tl.float32)
    high = tl.full([TILE_D], -float("inf"), tl.float32)
    total = tl.zeros([TILE_D], tl.float32)
    k_ptr = k_cache_ptr + slab * k_strides.batch + head * k_strides.head
    for start in range(0, count, TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        there = (token < count)[:, None] & in_head[None, :]
        rows = (first + token) * k_strides.token
        k = tl.load(k_ptr + rows[:, None] + offs_d[None, :], mask=there, other=0)
        k = e4m3_values(k) if k_cache_ptr.dtype.element_ty == tl.uint8 else k.to(tl.float32)
        if high_ptr is None:
            total += tl.sum(tl.where(there, k, 0.0), 0)
        else:
            low = tl.minimum(low, tl.min(tl.where(there, k, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(there, k, -float("inf")), 0))

    offset = _summary_offset(batch, place, head, summary_strides)
    if high_ptr is None:
        low = total / count
    else:
        high = high.to(high_ptr.dtype.element_ty)
        tl.store(high_ptr + offset + offs_d, high, mask=in_head)
    tl.store(low_ptr + offset + offs_d, low.to(low_ptr.dtype.element_ty), mask=in_head)


def summary_strides(x: torch.Tensor) -> SummaryStrides:
    """Strides of summaries `[pages, H, D]` or `[B, blocks, H, D]`."""
    return SummaryStrides(*((0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]))


def summarise(call: SummariesCall) -> None:
    """Write the summaries of the pages that hold the last `new_tokens` tokens, None for all.

    `low` and `high` are contiguous.
    """
    low, k_cache, page_table, page_size = call.low, call.k_cache, call.page_table, call.page_size
    batch = call.cache_seqlens.shape[0]
    if page_table is None:
        heads, capacity, pages, order = k_cache.shape[1], k_cache.shape[2], 0, (0, 1, 2)
    else:
        pages, heads, order = k_cache.shape[0], k_cache.shape[2], (0, 2, 1)
        capacity = page_table.shape[1] * page_size
    columns = cdiv(capacity, page_size)
    if call.new_tokens is not None:
        # tokens that do not start at a page reach into one page more
        columns = min(columns, cdiv(call.new_tokens, page_size) + 1)
    if batch * columns * heads == 0:
        return
    args = (
        low,
        call.high,
        stored_as_bytes(k_cache),
        call.cache_seqlens,
        page_table,
        summary_strides(low),
        cache_strides(k_cache, order),
        0 if page_table is None else page_table.stride(0),
        columns,
        heads,
        pages,
        min(capacity, INT32_MAX),
        page_size,
        INT32_MAX if call.new_tokens is None else call.new_tokens,
        low.shape[-1],
        TILE_TOKENS,
    )
    with on_device_of(low):
        launch(_page_summaries_kernel, batch * columns * heads, args, num_warps=4)


TILE_PAGES = 32
TILE_M = 16
# Scores that one program of the selection holds in registers; more are read again in each pass.
MAX_TILE_SCORES = 8192


@triton.jit(do_not_specialize=["table_stride", "pages", "columns", "heads", "q_len", "group_rows"])
def _page_scores_kernel(
    scores_ptr,
    q_ptr,
    low_ptr,
    high_ptr,
    page_table_ptr,
    q_strides,
    summary_strides,
    table_stride,
    pages,
    columns,
    heads,
    q_len,
    group_rows,
    HEAD_DIM: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    TILE_M: tl.constexpr,
    SUM: tl.constexpr,
):
    """Scores of TILE_PAGES pages of one sequence and KV head; those that do not exist get -inf."""
    tiles = (columns + TILE_PAGES - 1) // TILE_PAGES
    batch_head = tl.program_id(0) // tiles
    head = (batch_head % heads).to(tl.int64)
    batch = (batch_head // heads).to(tl.int64)
    ordinal = tl.program_id(0) % tiles * TILE_PAGES + tl.arange(0, TILE_PAGES)
    live = ordinal < columns
    page = ordinal.to(tl.int64)
    if page_table_ptr is not None:
        page = tl.load(page_table_ptr + batch * table_stride + ordinal, mask=live, other=-1)
        page = page.to(tl.int64)
    exists = live & (page >= 0) & (page < pages)

    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    offs_d = tl.arange(0, TILE_D)
    in_head = (offs_d < HEAD_DIM)[None, :]
    offsets = _summary_offset(batch, page, head, summary_strides)
    at = offsets[:, None] + offs_d[None, :]
    low = tl.load(low_ptr + at, mask=exists[:, None] & in_head, other=0.0)
    high = tl.load(high_ptr + at, mask=exists[:, None] & in_head, other=0.0)
    if low.dtype != q_ptr.dtype.element_ty:
        low = low.to(tl.float32)
        high = high.to(tl.float32)

    best = tl.full([TILE_PAGES], 0.0 if SUM else -float("inf"), tl.float32)
    for start in range(0, group_rows, TILE_M):
        row = start + tl.arange(0, TILE_M)
        q_head = head * (group_rows // q_len) + row // q_len
        rows = batch * q_strides.batch + q_head * q_strides.head + (row % q_len) * q_strides.token
        there = (row < group_rows)[:, None]
        q = tl.load(q_ptr + rows[:, None] + offs_d[None, :], mask=there & in_head, other=0.0)
        q = q.to(low.dtype)
        # selects instead of maximum: moving bf16 is exact, arithmetic on it is not everywhere
        positive = q.to(tl.float32) > 0
        zero = tl.zeros_like(q)
        s = tl.dot(tl.where(positive, q, zero), tl.trans(high), input_precision="ieee")
        s = tl.dot(tl.where(positive, zero, q), tl.trans(low), s, input_precision="ieee")
        # of NaN and a number, the maximum would be the number
        s = tl.where(s != s, float("inf"), s)
        if SUM:
            best += tl.sum(tl.where(there, s, 0.0), 0)
        else:
            best = tl.maximum(best, tl.max(tl.where(there, s, -float("inf")), 0))
    best = tl.where(exists, best, -float("inf"))
    tl.store(scores_ptr + batch_head.to(tl.int64) * columns + ordinal, best, mask=live)


@triton.jit
def _ranked(scores_ptr, ordinal, count, keep_first, keep_last):
    """Scores of pages as integers in their order; kept pages above, absent ones below all."""
    live = ordinal < count
    rank = ordered_int(tl.load(scores_ptr + ordinal, mask=live, other=0.0))
    rank = tl.where((ordinal < keep_first) | (ordinal >= count - keep_last), HIGHEST, rank)
    return tl.where(live, rank, LOWEST)


@triton.jit(do_not_specialize=["columns", "heads", "page_size", "keep_first", "keep_last", "k"])
def _select_pages_kernel(
    kv_blocks_ptr,
    scores_ptr,
    cache_seqlens_ptr,
    columns,
    heads,
    page_size,
    keep_first,
    keep_last,
    k,
    TILE_SCORES: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    """The list of one sequence and KV head."""
    batch_head = tl.program_id(0).to(tl.int64)
    length = tl.maximum(tl.load(cache_seqlens_ptr + batch_head // heads), 0)
    count = tl.minimum((length.to(tl.int64) + page_size - 1) // page_size, columns).to(tl.int32)
    wanted = tl.minimum(count, k)
    scores_ptr += batch_head * columns
    kv_blocks_ptr += batch_head * k
    offs = tl.arange(0, TILE_SCORES)
    held = _ranked(scores_ptr, offs, count, keep_first, keep_last)

    # the largest threshold that at least `wanted` pages reach
    threshold = tl.full([], LOWEST, tl.int32)
    above = tl.full([], HIGHEST, tl.int32)
    for _ in range(32):
        middle = midpoint(threshold, above)
        reached = tl.sum((held >= middle).to(tl.int32), 0)
        if not ONE_TILE:
            for start in range(TILE_SCORES, count, TILE_SCORES):
                rank = _ranked(scores_ptr, start + offs, count, keep_first, keep_last)
                reached += tl.sum((rank >= middle).to(tl.int32), 0)
        enough = reached >= wanted
        threshold = tl.where(enough, middle, threshold)
        above = tl.where(enough, above, middle - 1)
    better = tl.sum((held > threshold).to(tl.int32), 0)
    if not ONE_TILE:
        for start in range(TILE_SCORES, count, TILE_SCORES):
            rank = _ranked(scores_ptr, start + offs, count, keep_first, keep_last)
            better += tl.sum((rank > threshold).to(tl.int32), 0)

    listed = tl.zeros([], tl.int32)
    ties = wanted - better
    for start in range(0, count, TILE_SCORES):
        rank = held
        if not ONE_TILE:
            rank = _ranked(scores_ptr, start + offs, count, keep_first, keep_last)
        tie = ((rank == threshold) & (start + offs < count)).to(tl.int32)
        chosen = (rank > threshold) | ((tie > 0) & (tl.cumsum(tie, 0) <= ties))
        place = listed + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(kv_blocks_ptr + place, start + offs, mask=chosen)
        listed += tl.sum(chosen.to(tl.int32), 0)
        ties -= tl.sum(tie, 0)
    for start in range(0, k, TILE_SCORES):
        unused = (start + offs >= wanted) & (start + offs < k)
        tl.store(kv_blocks_ptr + start + offs, tl.full([TILE_SCORES], -1, tl.int32), mask=unused)


def _selection_tile(columns: int) -> int:
    return min(max(triton.next_power_of_2(columns), 128), MAX_TILE_SCORES)


def topk(call: TopkCall) -> torch.Tensor:
    """The lists of a validated call."""
    kv_blocks = empty_lists(call)
    launch_topk_pages(kv_blocks, call)
    return kv_blocks


def launch_topk_pages(kv_blocks: torch.Tensor, call: TopkCall) -> None:
    """Fill `kv_blocks`, int32 [B, Hkv, k] and contiguous.

    Queries are fp16, bf16 or fp32.
    """
    q, low, page_table = call.q, call.low, call.page_table
    batch, heads, k = kv_blocks.shape
    columns = low.shape[1] if page_table is None else page_table.shape[1]
    if kv_blocks.numel() == 0:
        return
    if columns == 0 or q.shape[2] == 0:
        kv_blocks.fill_(-1)
        return
    scores = scratch((batch, heads, columns), torch.float32, q.device)
    score_args = (
        scores,
        q,
        low,
        call.high,
        page_table,
        Strides(*q.stride()[:3]),
        summary_strides(low),
        0 if page_table is None else page_table.stride(0),
        columns if page_table is None else low.shape[0],
        columns,
        heads,
        q.shape[2],
        q.shape[1] // heads * q.shape[2],
        q.shape[-1],
        TILE_PAGES,
        TILE_M,
        call.reduce == "sum",
    )
    tile = _selection_tile(columns)
    sizes = (columns, heads, call.page_size, call.keep_first, call.keep_last, k)
    select_args = (kv_blocks, scores, call.cache_seqlens, *sizes, tile, columns <= tile)
    with on_device_of(q):
        programs = batch * heads * cdiv(columns, TILE_PAGES)
        assert programs <= INT32_MAX, programs
        launch(_page_scores_kernel, programs, score_args, num_warps=4, num_stages=1)
        launch(_select_pages_kernel, batch * heads, select_args, num_warps=_warps(tile))


def _warps(tile_scores: int) -> int:
    # 16 scores to a thread: they stay in registers beside their two running sums
    return min(max(tile_scores // 512, 4), 16)
