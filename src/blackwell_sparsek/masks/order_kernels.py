# mypy: ignore-errors
"""Kernels for the order in which the rows or columns of a mask run (`masks/order.py`).

Each row finds its place by counting the rows that come before it. That is quadratic work, a
comparison for each pair of rows, but avoids the many launches of a sort.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device.schedule import raster_group_of
from ..launch.launcher import cdiv, launch
from ..launch.replay import launch_recorded
from ..launch.templates import RecordedLaunches
from ..launch.workspace import scratch

TILE_LISTS = 8
TILE_ENTRIES = 64
TILE_ROWS = 8
TILE_OTHERS = 256
TILE_VISITS = 1024


class OrderSizes(NamedTuple):
    """Sizes of the rows to sort: `rows` for each (batch, head), by how many blocks they visit."""

    batch_heads: int
    heads: int
    """Heads of one batch."""
    rows: int
    step_b: int
    step_h: int
    """Strides, in lists, from batch to batch and head to head; 0 where the mask broadcasts."""
    per_list: int
    """Neighbouring rows that share a list."""
    group: int
    group_step: int
    """How many lists a row visits, and the stride between them."""
    raster_group: int
    """How many neighbouring (batch, head)s stay together."""
    most: int
    """Upper bound of the blocks that a row visits."""


class RowVisits(NamedTuple):
    """How many blocks each row visits, and which row it is; int32."""

    count: tl.tensor
    batch_head: tl.tensor
    row: tl.tensor


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
    """Count the blocks of each list that lie within a band."""
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
    """Visits of the rows that are at `place` in the order of ties."""
    batch_head = place % sizes.batch_heads
    row = place // sizes.batch_heads
    if not COLUMNS:
        # under a band the late rows are long, so they come first among equals
        row = sizes.rows - 1 - row
    at = batch_head // sizes.heads * sizes.step_b + batch_head % sizes.heads * sizes.step_h
    at += row // sizes.per_list
    there = place < sizes.batch_heads * sizes.rows
    count = tl.zeros_like(place)
    for g in range(sizes.group):
        visits = tl.load(visits_ptr + at + g * sizes.group_step, mask=there, other=0)
        if FROM_POINTERS:
            end = tl.load(visits_ptr + 1 + at + g * sizes.group_step, mask=there, other=0)
            visits = end - visits
        count += visits
    return RowVisits(count, batch_head, row)


@triton.jit
def _keys(visits, sizes, total, count):
    """Sort keys: heavy rows, then one raster group after the other, the longest rows first."""
    heavy = visits.count.to(tl.int64) * count > 2 * total
    group = raster_group_of(visits.batch_head, sizes.batch_heads, sizes.raster_group)
    group = tl.where(heavy, 0, group + 1)
    return group * (sizes.most + 1) + (sizes.most - visits.count)


@triton.jit(do_not_specialize=list(OrderSizes._fields))
def _order_keys_kernel(
    keys_ptr,
    visits_ptr,
    batch_heads,
    heads,
    rows,
    step_b,
    step_h,
    per_list,
    group,
    group_step,
    raster_group,
    most,
    FROM_POINTERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_VISITS: tl.constexpr,
):
    """Compute the sort keys of TILE_VISITS rows; rows with equal keys keep their order."""
    sizes = OrderSizes(
        batch_heads, heads, rows, step_b, step_h, per_list, group, group_step, raster_group, most
    )
    count = batch_heads * rows
    sums = tl.zeros([TILE_VISITS], tl.int64)
    for first in range(0, count, TILE_VISITS):
        others = first + tl.arange(0, TILE_VISITS)
        theirs = _visits(visits_ptr, others, sizes, FROM_POINTERS, COLUMNS)
        sums += theirs.count.to(tl.int64)
    total = tl.sum(sums, 0)

    place = tl.program_id(0) * TILE_VISITS + tl.arange(0, TILE_VISITS)
    visits = _visits(visits_ptr, place, sizes, FROM_POINTERS, COLUMNS)
    key = _keys(visits, sizes, total, count)
    tl.store(keys_ptr + place, key, mask=place < count)


@triton.jit(do_not_specialize=["batch_heads", "rows"])
def _row_order_kernel(
    order_ptr,
    keys_ptr,
    batch_heads,
    rows,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OTHERS: tl.constexpr,
):
    """Write TILE_ROWS rows to their places in the order; TILE_ROWS divides TILE_OTHERS."""
    count = batch_heads * rows
    first = tl.program_id(0) * TILE_ROWS
    place = first + tl.arange(0, TILE_ROWS)
    key = tl.load(keys_ptr + place, mask=place < count, other=0)[:, None]
    others = tl.arange(0, TILE_OTHERS)
    rank = tl.zeros([TILE_ROWS, TILE_OTHERS], tl.int32)
    own = first // TILE_OTHERS * TILE_OTHERS
    for start in range(0, own, TILE_OTHERS):
        other = tl.load(keys_ptr + start + others)[None, :]
        rank += (other <= key).to(tl.int32)
    for start in range(own, count, TILE_OTHERS):
        later = start + others
        other = tl.load(keys_ptr + later, mask=later < count, other=2**31 - 1)[None, :]
        rank += (other < key).to(tl.int32)
    # equal keys need a tie-break only within the tile that holds these rows
    other = tl.load(keys_ptr + own + others, mask=own + others < count, other=-1)[None, :]
    rank += ((other == key) & ((own + others)[None, :] < place[:, None])).to(tl.int32)
    batch_head = place % batch_heads
    row = place // batch_heads
    if not COLUMNS:
        row = rows - 1 - row
    tl.store(order_ptr + tl.sum(rank, 1), batch_head * rows + row, mask=place < count)


def launch_row_order(
    order: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    sizes: OrderSizes,
    lengths: tuple[int, int],
    block: tuple[int, int],
    band: tuple[int, int] | None,
    columns: bool,
) -> RecordedLaunches | None:
    """Fill `order`. Returns the recorded launches, to replay with other tensors of these sizes.

    Parameters
    ----------
    order : int32 [batch_heads * rows], not empty
    indptr, indices : lists of a mask, or of its columns
    lengths, block : first those of the lists' rows, then of their columns
    band : left and right, seen from the lists' rows, or None for everything
    columns : whether early rows come first among equals, instead of late rows
    """
    lists = indptr.numel() - 1

    def launches() -> None:
        visits = indptr
        if band is not None:
            visits = scratch((lists,), torch.int32, order.device)
            args = (visits, indptr, indices, lists, cdiv(lengths[0], block[0]), *lengths, *band)
            tiles = (*block, TILE_LISTS, TILE_ENTRIES)
            launch(_visits_kernel, cdiv(lists, TILE_LISTS), (*args, *tiles), num_warps=4)
        keys = scratch(order.shape, torch.int32, order.device)
        args = (keys, visits, *sizes, band is None, columns, TILE_VISITS)
        launch(_order_keys_kernel, cdiv(order.numel(), TILE_VISITS), args, num_warps=4)
        args = (order, keys, sizes.batch_heads, sizes.rows, columns, TILE_ROWS, TILE_OTHERS)
        launch(_row_order_kernel, cdiv(order.numel(), TILE_ROWS), args, num_warps=4)

    key = ("row_order", sizes, lists, lengths, block, band, columns)
    return launch_recorded(key, (order, indptr, indices), launches)
