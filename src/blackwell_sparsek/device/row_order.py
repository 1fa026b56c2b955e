"""The order in which to take the rows of a block mask, as `formats.block_order` describes it.

Each row finds its own place: it counts the rows that come before it. That is quadratic work, but
without a sort's many launches, and a few microseconds for thousands of rows.
"""

import torch
import triton
import triton.language as tl

from ..core.launch import cdiv, launch, scratch
from .recorded import launch_recorded

TILE_LISTS = 8
TILE_ENTRIES = 64
TILE_ROWS = 16
TILE_OTHERS = 256
TILE_VISITS = 1024


@triton.jit(do_not_specialize=["rows", "mb", "sq", "sk", "left", "right"])
def _visits_kernel(
    visits_ptr,
    indptr_ptr,
    indices_ptr,
    rows,
    mb,
    sq,
    sk,
    left,
    right,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_LISTS: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
):
    """How many blocks of each row lie within a band."""
    row = tl.program_id(0) * TILE_LISTS + tl.arange(0, TILE_LISTS)
    entry = tl.load(indptr_ptr + row, mask=row < rows, other=0)
    end = tl.load(indptr_ptr + 1 + row, mask=row < rows, other=0)
    first = (row % mb).to(tl.int64) * BLOCK_Q + (sk - sq)
    lo = tl.maximum(first - left, 0)
    hi = tl.minimum(tl.minimum(first + BLOCK_Q, sk) + right, sk)
    first_block = lo // BLOCK_KV
    end_block = tl.where(lo < hi, (hi + BLOCK_KV - 1) // BLOCK_KV, first_block)
    count = tl.zeros([TILE_LISTS], tl.int32)
    for skip in range(0, tl.max(end - entry, 0), TILE_ENTRIES):
        at = (entry + skip)[:, None] + tl.arange(0, TILE_ENTRIES)[None, :]
        block = tl.load(indices_ptr + at, mask=at < end[:, None], other=-1)
        seen = (block >= first_block[:, None]) & (block < end_block[:, None])
        count += tl.sum(seen.to(tl.int32), 1)
    tl.store(visits_ptr + row, count, mask=row < rows)


@triton.jit
def _visits(visits_ptr, at, there, FROM_POINTERS: tl.constexpr):
    visits = tl.load(visits_ptr + at, mask=there, other=0)
    if FROM_POINTERS:
        visits = tl.load(visits_ptr + 1 + at, mask=there, other=0) - visits
    return visits


@triton.jit
def _keys(visits_ptr, place, sizes, total, FROM_POINTERS: tl.constexpr):
    """Sort keys of the rows that stand at `place` among equals, and their numbers."""
    planes, heads, mb, step_b, step_h, section, most, count = sizes
    there = place < planes * mb
    plane = place % planes
    row = mb - 1 - place // planes
    at = plane // heads * step_b + plane % heads * step_h + row
    visits = _visits(visits_ptr, at, there, FROM_POINTERS)
    heavy = visits.to(tl.int64) * count > 2 * total
    group = tl.where(heavy, 0, plane // section + 1)
    key = group * (most + 1) + (most - visits)
    return tl.where(there, key, 2**31 - 1), plane * mb + row


_ORDER_SIZES = ["planes", "heads", "mb", "step_b", "step_h", "section", "most", "count"]


@triton.jit(do_not_specialize=_ORDER_SIZES)
def _row_order_kernel(
    order_ptr,
    visits_ptr,
    planes,
    heads,
    mb,
    step_b,
    step_h,
    section,
    most,
    count,
    FROM_POINTERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OTHERS: tl.constexpr,
    TILE_VISITS: tl.constexpr,
):
    """Put TILE_ROWS rows where they belong."""
    sums = tl.zeros([TILE_VISITS], tl.int64)
    for first in range(0, count, TILE_VISITS):
        at = first + tl.arange(0, TILE_VISITS)
        sums += _visits(visits_ptr, at, at < count, FROM_POINTERS).to(tl.int64)
    total = tl.sum(sums, 0)

    sizes = (planes, heads, mb, step_b, step_h, section, most, count)
    place = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    key, row = _keys(visits_ptr, place, sizes, total, FROM_POINTERS)
    rank = tl.zeros([TILE_ROWS], tl.int32)
    for first in range(0, planes * mb, TILE_OTHERS):
        others = first + tl.arange(0, TILE_OTHERS)
        other, _ = _keys(visits_ptr, others, sizes, total, FROM_POINTERS)
        earlier = (other[None, :] == key[:, None]) & (others[None, :] < place[:, None])
        earlier = earlier | (other[None, :] < key[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    tl.store(order_ptr + rank, row, mask=place < planes * mb)


def launch_row_order(
    order: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    planes: tuple[int, int],
    mask_planes: tuple[int, int],
    lengths: tuple[int, int],
    block: tuple[int, int],
    band: tuple[int, int] | None,
    section: int,
) -> None:
    """Fill `order`.

    Parameters
    ----------
    order : int32 [batch * heads * Mb], at least one and fewer than 2**15 or so
    indptr, indices : lists of a mask with at least one block column
    planes, mask_planes : batch and heads, of the queries and of the mask
    lengths, block : (Sq, Sk), (bq, bk)
    band : left and right, as operator schemas carry them, or None for everything
    """
    (batch, heads), (mask_batch, mask_heads) = planes, mask_planes
    mb, nb = cdiv(lengths[0], block[0]), cdiv(lengths[1], block[1])
    rows = mask_batch * mask_heads * mb
    steps = (mask_heads * mb if mask_batch > 1 else 0, mb if mask_heads > 1 else 0)
    sizes = (batch * heads, heads, mb, *steps, section, nb, rows)

    def launches() -> None:
        visits = indptr
        if band is not None:
            visits = scratch((rows,), torch.int32, order.device)
            args = (visits, indptr, indices, rows, mb, *lengths, *band, *block)
            tiles = (TILE_LISTS, TILE_ENTRIES)
            launch(_visits_kernel, cdiv(rows, TILE_LISTS), (*args, *tiles), num_warps=4)
        order_args = (order, visits, *sizes, band is None, TILE_ROWS, TILE_OTHERS, TILE_VISITS)
        launch(_row_order_kernel, cdiv(order.numel(), TILE_ROWS), order_args, num_warps=4)

    roles = (order, indptr) if band is None else (order, indptr, indices)
    launch_recorded(("row_order", sizes, lengths, block, band), roles, launches)
