"""Smallest and largest key of each page, channel by channel, or their mean.

    low[page, h, d] = min over the tokens of the page of k_cache[page, token, h, d]

One program makes the summary of one page of one sequence and head, from the tokens below the
length. Pages of one sequence are taken from the one that holds token `length - new_tokens` on.
fp8 caches are given as uint8. Called by `bsk::page_summaries`.
"""

import torch
import triton
import triton.language as tl

from ...core.compile_cases import CompileCase, compile_cases
from ...core.launch import cdiv, launch, on_device_of
from ...device.fp8 import e4m3_values
from .append import INT32_MAX, cache_strides, stored_as_bytes

TILE_TOKENS = 16


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
    k_ptr = k_cache_ptr + slab * k_strides[0] + head * k_strides[1]
    for start in range(0, count, TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        there = (token < count)[:, None] & in_head[None, :]
        rows = (first + token) * k_strides[2]
        k = tl.load(k_ptr + rows[:, None] + offs_d[None, :], mask=there, other=0)
        k = e4m3_values(k) if k_cache_ptr.dtype.element_ty == tl.uint8 else k.to(tl.float32)
        if high_ptr is None:
            total += tl.sum(tl.where(there, k, 0.0), 0)
        else:
            low = tl.minimum(low, tl.min(tl.where(there, k, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(there, k, -float("inf")), 0))

    offset = batch * summary_strides[0] + place * summary_strides[1] + head * summary_strides[2]
    if high_ptr is None:
        low = total / count
    else:
        high = high.to(high_ptr.dtype.element_ty)
        tl.store(high_ptr + offset + offs_d, high, mask=in_head)
    tl.store(low_ptr + offset + offs_d, low.to(low_ptr.dtype.element_ty), mask=in_head)


def summary_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of sequence, page and head of summaries `[pages, H, D]` or `[B, blocks, H, D]`."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def launch_page_summaries(
    low: torch.Tensor,
    high: torch.Tensor | None,
    k_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    page_size: int,
    new_tokens: int | None,
) -> None:
    """Write the summaries of the pages that hold the last `new_tokens` tokens, None for all.

    Parameters
    ----------
    low, high : as in `PageSummaries`, contiguous; `high` None for the mean
    k_cache : [B, Hkv, S, D], or [pages, page_size, Hkv, D] with `page_table`
    cache_seqlens : int32 [B], contiguous
    page_table : int32 [B, max_pages], contiguous in the last dimension
    """
    batch = cache_seqlens.shape[0]
    if page_table is None:
        heads, capacity, pages, order = k_cache.shape[1], k_cache.shape[2], 0, (0, 1, 2)
    else:
        pages, heads, order = k_cache.shape[0], k_cache.shape[2], (0, 2, 1)
        capacity = page_table.shape[1] * page_size
    columns = cdiv(capacity, page_size)
    if new_tokens is not None:
        # tokens that do not start at a page reach into one page more
        columns = min(columns, cdiv(new_tokens, page_size) + 1)
    if batch * columns * heads == 0:
        return
    args = (
        low,
        high,
        stored_as_bytes(k_cache),
        cache_seqlens,
        page_table,
        summary_strides(low),
        cache_strides(k_cache, order),
        0 if page_table is None else page_table.stride(0),
        columns,
        heads,
        pages,
        min(capacity, INT32_MAX),
        page_size,
        INT32_MAX if new_tokens is None else new_tokens,
        low.shape[-1],
        TILE_TOKENS,
    )
    with on_device_of(low):
        launch(_page_summaries_kernel, batch * columns * heads, args, num_warps=4)


@compile_cases
def _cases():
    kinds = ((torch.bfloat16, 128), (torch.float16, 40), (torch.uint8, 128), (torch.float32, 256))
    for (stored, head_dim), paged, mean in zip(
        kinds, (True, False, True, False), (False, True, True, False), strict=True
    ):
        kept = torch.bfloat16 if stored == torch.uint8 else stored
        yield CompileCase(
            f"page_summaries/{str(stored).split('.')[-1]}-d{head_dim}",
            _page_summaries_kernel,
            {
                "low_ptr": kept,
                "high_ptr": None if mean else kept,
                "k_cache_ptr": stored,
                "cache_seqlens_ptr": torch.int32,
                "page_table_ptr": torch.int32 if paged else None,
                "summary_strides": (0 if paged else 64 * head_dim, 8 * head_dim, head_dim),
                "k_strides": (4096 * head_dim, head_dim, 8 * head_dim),
                "table_stride": 1000,
                "columns": 3,
                "heads": 7,
                "pages": 1000,
                "capacity": 4096,
                "page_size": 20,
                "new_tokens": 1000,
                "HEAD_DIM": head_dim,
                "TILE_TOKENS": TILE_TOKENS,
            },
        )
