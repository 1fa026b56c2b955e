"""The order in which to take the rows or columns of a mask, as `formats.block_order` describes it.

Each row finds its own place: it counts the rows that come before it. That is quadratic work, but
without a sort's many launches, and a few microseconds for thousands of rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..core.launch import cdiv, launch, scratch
from .recorded import launch_recorded
from .schedule import section_of

TILE_LISTS = 8
TILE_ENTRIES = 64
TILE_ROWS = 16
TILE_OTHERS = 256
TILE_VISITS = 1024


class OrderSizes(NamedTuple):
    """What is put in order: `rows` of each of `planes`, by how many blocks they visit."""

    planes: int
    heads: int
    """Planes of one batch."""
    rows: int
    step_b: int
    step_h: int
    """Lists between those of two batches and of two heads; 0 where the mask broadcasts."""
    per_list: int
    """Neighbouring rows that share a list."""
    group: int
    group_step: int
    """How many lists a row goes through, and how far they are apart."""
    section: int
    most: int
    """Of the blocks that a row visits."""


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
    """How many blocks of each list lie within a band."""
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
def _visits(visits_ptr, place, sizes, FROM_POINTERS: tl.constexpr, COLUMNS: tl.constexpr):
    """Blocks that the rows visit which stand at `place` among equals, their planes and rows."""
    planes, heads, rows, step_b, step_h, per_list, group, group_step = sizes
    plane = place % planes
    row = place // planes
    if not COLUMNS:
        # late rows are the long ones under a causal band, and come first among equals
        row = rows - 1 - row
    at = plane // heads * step_b + plane % heads * step_h + row // per_list
    there = place < planes * rows
    visits = tl.zeros_like(place)
    for g in range(group):
        mine = tl.load(visits_ptr + at + g * group_step, mask=there, other=0)
        if FROM_POINTERS:
            end = tl.load(visits_ptr + 1 + at + g * group_step, mask=there, other=0)
            mine = end - mine
        visits += mine
    return visits, plane, row


@triton.jit
def _keys(visits, plane, planes, section, most, total, count):
    """Sort keys: heavy rows, then section by section, the longest first within each."""
    heavy = visits.to(tl.int64) * count > 2 * total
    group = tl.where(heavy, 0, section_of(plane, planes, section) + 1)
    return group * (most + 1) + (most - visits)


@triton.jit(do_not_specialize=list(OrderSizes._fields))
def _row_order_kernel(
    order_ptr,
    visits_ptr,
    planes,
    heads,
    rows,
    step_b,
    step_h,
    per_list,
    group,
    group_step,
    section,
    most,
    FROM_POINTERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OTHERS: tl.constexpr,
    TILE_VISITS: tl.constexpr,
):
    """Put TILE_ROWS rows where they belong."""
    sizes = (planes, heads, rows, step_b, step_h, per_list, group, group_step)
    count = planes * rows
    sums = tl.zeros([TILE_VISITS], tl.int64)
    for first in range(0, count, TILE_VISITS):
        others = first + tl.arange(0, TILE_VISITS)
        theirs, _, _ = _visits(visits_ptr, others, sizes, FROM_POINTERS, COLUMNS)
        sums += theirs.to(tl.int64)
    total = tl.sum(sums, 0)

    place = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    visits, plane, row = _visits(visits_ptr, place, sizes, FROM_POINTERS, COLUMNS)
    key = _keys(visits, plane, planes, section, most, total, count)
    rank = tl.zeros([TILE_ROWS], tl.int32)
    for first in range(0, count, TILE_OTHERS):
        others = first + tl.arange(0, TILE_OTHERS)
        theirs, their_plane, _ = _visits(visits_ptr, others, sizes, FROM_POINTERS, COLUMNS)
        other = _keys(theirs, their_plane, planes, section, most, total, count)
        earlier = (other[None, :] == key[:, None]) & (others[None, :] < place[:, None])
        earlier = (earlier | (other[None, :] < key[:, None])) & (others < count)[None, :]
        rank += tl.sum(earlier.to(tl.int32), 1)
    tl.store(order_ptr + rank, plane * rows + row, mask=place < count)


def launch_row_order(
    order: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    sizes: OrderSizes,
    lengths: tuple[int, int],
    block: tuple[int, int],
    band: tuple[int, int] | None,
    columns: bool,
) -> None:
    """Fill `order`.

    Parameters
    ----------
    order : int32 [planes * rows], not empty
    indptr, indices : lists of a mask, or of its columns
    lengths, block : those of the lists' rows, then of their columns
    band : left and right, seen from the lists' rows, or None for everything
    columns : whether early rows come first among equals, and not late ones
    """
    lists = indptr.numel() - 1

    def launches() -> None:
        visits = indptr
        if band is not None:
            visits = scratch((lists,), torch.int32, order.device)
            args = (visits, indptr, indices, lists, cdiv(lengths[0], block[0]), *lengths, *band)
            tiles = (*block, TILE_LISTS, TILE_ENTRIES)
            launch(_visits_kernel, cdiv(lists, TILE_LISTS), (*args, *tiles), num_warps=4)
        tiles = (TILE_ROWS, TILE_OTHERS, TILE_VISITS)
        order_args = (order, visits, *sizes, band is None, columns, *tiles)
        launch(_row_order_kernel, cdiv(order.numel(), TILE_ROWS), order_args, num_warps=4)

    roles = (order, indptr) if band is None else (order, indptr, indices)
    key = ("row_order", sizes, lists, lengths, block, band, columns)
    launch_recorded(key, roles, launches)
