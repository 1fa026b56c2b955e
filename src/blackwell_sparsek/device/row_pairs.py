"""Two neighbouring rows of a mask in one list of tiles, as `formats.block_pairs` describes it."""

import torch
import triton
import triton.language as tl

from ..core.launch import launch
from .recorded import launch_recorded

TILE_ENTRIES = 128
# What a pair says of itself besides how many tiles it has.
FIELDS = tl.constexpr(4)


@triton.jit
def _is_in(block, live, indices_ptr, begin, end, STEPS: tl.constexpr):
    """Whether blocks are among the entries `[begin, end)`, which ascend."""
    low = begin + tl.zeros_like(block)
    high = end + tl.zeros_like(block)
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        below = tl.load(indices_ptr + middle, mask=live & open_, other=0) < block
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    found = live & (low < end)
    return found & (tl.load(indices_ptr + low, mask=found, other=-1) == block)


@triton.jit
def _store_row(
    tiles_ptr, indices_ptr, own, other, even, OTHER: tl.constexpr, STEPS: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the blocks of a row: of the first `even` that both see only those of the first row."""
    begin, end = own
    shared = 0
    for first in range(begin, end, TILE_ENTRIES):
        entry = first + tl.arange(0, TILE_ENTRIES)
        live = entry < end
        block = tl.load(indices_ptr + entry, mask=live, other=0)
        found = _is_in(block, live, indices_ptr, other[0], other[1], STEPS).to(tl.int32)
        before = shared + tl.cumsum(found, 0) - found
        together = (found != 0) & (before < even)
        alone = even + 2 * (entry - begin - tl.minimum(before, even)) + OTHER
        if OTHER == 0:
            tl.store(tiles_ptr + before, block, mask=live & together)
        tl.store(tiles_ptr + alone, block, mask=live & (together == 0))
        shared += tl.sum(found, 0)


@triton.jit(do_not_specialize=["rows", "pairs", "count", "no_block"])
def _row_pairs_kernel(
    table_ptr,
    indptr_ptr,
    indices_ptr,
    rows,
    pairs,
    count,
    no_block,
    STEPS: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
):
    """Make the list of one pair, of `count` in all, `pairs` of each mask of `rows` rows."""
    pair = tl.program_id(0)
    in_mask = pair % pairs
    row = pair // pairs * rows + 2 * in_mask
    begin = tl.load(indptr_ptr + row)
    middle = tl.load(indptr_ptr + row + 1)
    end = tl.load(indptr_ptr + row + tl.where(2 * in_mask + 1 < rows, 2, 1))
    shared = 0
    for first in range(begin, middle, TILE_ENTRIES):
        entry = first + tl.arange(0, TILE_ENTRIES)
        live = entry < middle
        block = tl.load(indices_ptr + entry, mask=live, other=0)
        found = _is_in(block, live, indices_ptr, middle, end, STEPS)
        shared += tl.sum(found.to(tl.int32), 0)
    # a tile holds two blocks; one that is left over is fetched for each row
    even = shared // 2 * 2
    first_alone = middle - begin - even
    second_alone = end - middle - even
    most_alone = tl.maximum(first_alone, second_alone)
    fields_ptr = table_ptr + count + pair * FIELDS
    tl.store(table_ptr + pair, even // 2 + most_alone)
    tl.store(fields_ptr, begin)
    tl.store(fields_ptr + 1, even // 2)
    tl.store(fields_ptr + 2, first_alone)
    tl.store(fields_ptr + 3, second_alone)
    tiles_ptr = table_ptr + count * (1 + FIELDS) + 2 * begin
    mine, theirs = (begin, middle), (middle, end)
    _store_row(tiles_ptr, indices_ptr, mine, theirs, even, 0, STEPS, TILE_ENTRIES)
    _store_row(tiles_ptr, indices_ptr, theirs, mine, even, 1, STEPS, TILE_ENTRIES)
    # where one row has more blocks than the other
    fewer = tl.minimum(first_alone, second_alone)
    half = tl.where(first_alone < second_alone, 0, 1)
    for first in range(fewer, most_alone, TILE_ENTRIES):
        missing = first + tl.arange(0, TILE_ENTRIES)
        at = tiles_ptr + even + 2 * missing + half
        tl.store(at, no_block + tl.zeros_like(missing), mask=missing < most_alone)


def launch_row_pairs(
    table: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, grid: tuple[int, int]
) -> None:
    """Fill the table of a mask, of one or more rows and entries.

    Parameters
    ----------
    table : int32, as `formats.block_pairs.paired_rows` describes it
    indptr, indices : lists of a mask whose blocks are all full
    grid : rows and columns of each mask
    """
    rows, columns = grid
    pairs = -(-rows // 2)
    count = (indptr.numel() - 1) // rows * pairs
    sizes = (rows, pairs, count, columns, columns.bit_length(), TILE_ENTRIES)
    roles = (table, indptr, indices)
    launch_recorded(
        ("row_pairs", sizes),
        roles,
        lambda: launch(_row_pairs_kernel, count, (*roles, *sizes), num_warps=4),
    )
