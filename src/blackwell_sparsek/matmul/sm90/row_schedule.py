"""Schedules of the Hopper products with few columns: which blocks a program multiplies.

A product of few columns takes microseconds, and every load that waits for another one shows. Row
pointers, then indices, then blocks would be three round trips to memory. So each pattern gets,
once, a table of records at addresses that follow from the number of the program; a record holds all
that its program needs to load its blocks.

`RowSchedule` (`narrow.py`) also balances the work: tiles are assigned, longest first, each to the
program with the least to read. Where SMs would be idle, the longest tiles are split between two
programs. `RowTable` (`strips.py`, and the portable kernel for few columns) has one record for each
block row, longest rows first.
"""

import heapq
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...launch.launcher import cdiv
from ...launch.workspace import made_outside_pool
from .config import NarrowSm90Config

# Schedules by the row pointers they were made from, which live as long as their pattern.
_SCHEDULES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Slots that a schedule may have for each block that its tiles read, and how many more where blocks
# are few. Beyond that a few rows are much longer than the others and need a plan that splits them.
_SLOTS_PER_BLOCK, _SPARE_SLOTS = 4, 1 << 18
# In place of the number of a part: a tile that is not split.
WHOLE = -1
# A coordinate past the end of every tensor, from where TMA copies zeros.
OUTSIDE = 1 << 30
# What starting and finishing a tile costs, in blocks.
_TILE_COST = 1
# What it takes two programs to add up their parts, in K steps: the exchange takes 0.5 to 0.75 us.
_EXCHANGE_COST = 3
# Blocks of its first tile that a program prefetches to the L2 while the kernel before it still
# runs. More are slower: 11.2 us with 4 for 4096 x 14336 and 64 columns, 14.3 with all (H200).
_PREFETCH = 4
# All blocks, as many as a warp has lanes, where programs of the next kernel find idle SMs and the
# matrix is this small: 4.7 us instead of 4.9 (4096 x 4096, 7.4 MB).
_PREFETCH_ALL, _PREFETCH_ALL_BYTES = 32, 8 * 2**20
# With split tiles all programs together prefetch this much, which is how they were measured.
_SPLIT_PREFETCH_BYTES = 8 * 2**20


class TileHeader(NamedTuple):
    """The numbers in front of the slots of a `RowSchedule` record."""

    tile_count: Any  # records of the program that count
    row_tile: Any  # which TILE_M rows of the result
    blocks: Any  # slots that hold a block
    col: Any  # first column of the result
    split: Any  # whether this is one of two parts of a tile


HEADER = len(TileHeader._fields)


class RowSchedule(NamedTuple):
    """The work tiles of one pattern, assigned to programs.

    With SPLIT_K = 2 programs 2 i and 2 i + 1 form a cluster, and a tile that they split is the only
    one of both.

    Attributes
    ----------
    records : int32 [programs, tiles, HEADER + 2 * width]
        A `TileHeader`, then `width` rows of the values as a matrix [nnzb * bh, bw], then `width`
        rows of x. Slots beyond the blocks of the tile hold rows outside the tensors.
    width : blocks of the longest row, or part of one, that a program has; at least 1
    prefetch : blocks of its first tile that a program may prefetch to L2 before the previous kernel
        has ended
    """

    records: torch.Tensor
    width: int
    prefetch: int


def row_schedule(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    config: NarrowSm90Config,
    columns: int,
    programs: int,
) -> RowSchedule | None:
    """The schedule of a pattern, from the cache if there is one.

    Building it synchronises: the schedule is complete before any stream sees it, so a kernel may
    read it before the kernels in front of it have ended. None where rows are too uneven, and while
    a CUDA graph is captured unless the schedule exists.

    Parameters
    ----------
    indptr : int32 [rows_b + 1], of rows that are stored one after the other
    indices : int32 [nnzb], block columns, at least one
    config : tiles of the product
    columns : of the result
    programs : the most that the launch may have
    """
    schedules = _SCHEDULES.setdefault(indptr, {})
    panels = cdiv(columns, config.TILE_N)
    # where one tile has all columns, it does not matter how wide it is
    tile_n = config.TILE_N if panels > 1 else 0
    # tiles are split at multiples of the K blocks of a stage
    split = (config.SPLIT_K, config.STAGE_BLOCKS if config.SPLIT_K > 1 else 1)
    key = (config.TILE_M, config.BLOCK_H, config.BLOCK_W, panels, tile_n, programs, *split)
    if key in schedules:
        return schedules[key]
    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    schedule = made_outside_pool(
        lambda: build_row_schedule(indptr, indices, config, columns, programs), indptr.device
    )
    if indptr.is_cuda:
        torch.cuda.current_stream(indptr.device).synchronize()
    schedules[key] = schedule
    return schedule


def build_row_schedule(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    config: NarrowSm90Config,
    columns: int,
    programs: int,
) -> RowSchedule | None:
    """Build a schedule; None where rows are too uneven. Synchronises to read the row lengths."""
    starts = indptr.cpu()
    lengths = torch.diff(starts)
    steps = (lengths + config.STAGE_BLOCKS - 1) // config.STAGE_BLOCKS
    panels = cdiv(columns, config.TILE_N)
    copies = config.row_tiles * panels
    if config.SPLIT_K == 1:
        whole = _assign(lengths.repeat_interleave(copies).tolist(), programs)
        assigned = [[(tile, WHOLE) for tile in mine] for mine in whole]
    else:
        assigned = _assign_split(steps.repeat_interleave(copies).tolist(), programs)
    most = max(map(len, assigned))
    # [programs, tiles] from here on
    padded = torch.tensor([mine + [(0, WHOLE)] * (most - len(mine)) for mine in assigned])
    counts = torch.tensor([len(mine) for mine in assigned])[:, None].expand(-1, most)
    place, part = padded.unbind(2)
    tile, first_column = place // panels, place % panels * config.TILE_N
    row, sub_row = tile // config.row_tiles, tile % config.row_tiles * config.TILE_M
    # the first part is the longer one
    middle = starts[row] + torch.minimum((steps[row] + 1) // 2 * config.STAGE_BLOCKS, lengths[row])
    begin = torch.where(part == 1, middle, starts[row])
    end = torch.where(part == 0, middle, starts[row + 1])
    end = torch.where(torch.arange(most) < counts, end, begin)
    width = max(1, int((end - begin).max()))
    allowed = _SLOTS_PER_BLOCK * indices.shape[0] * copies + _SPARE_SLOTS
    if place.numel() * width > allowed:
        return None
    header = TileHeader(
        tile_count=counts, row_tile=tile, blocks=end - begin, col=first_column, split=part != WHOLE
    )
    slot = begin[..., None] + torch.arange(width)
    present = slot < end[..., None]
    slot = torch.where(present, slot, 0)
    a_rows = torch.where(present, slot * config.BLOCK_H + sub_row[..., None], OUTSIDE)
    x_rows = torch.where(present, indices.cpu()[slot] * config.BLOCK_W, OUTSIDE)
    records = torch.cat([torch.stack(header, dim=2), a_rows, x_rows], dim=2).int()
    prefetch = _prefetched_blocks(indices.shape[0], len(assigned), programs, config)
    return RowSchedule(records.to(indptr.device), width, prefetch)


def _prefetched_blocks(blocks: int, used: int, programs: int, config: NarrowSm90Config) -> int:
    """`prefetch` of a schedule of `blocks` blocks for `used` of `programs` programs."""
    if config.swapped:
        # not measured for low tiles
        return 0
    if config.SPLIT_K > 1:
        block_bytes = 2 * config.TILE_M * config.BLOCK_W
        return min(_PREFETCH_ALL, _SPLIT_PREFETCH_BYTES // (block_bytes * used))
    stored_bytes = 2 * blocks * config.BLOCK_H * config.BLOCK_W
    idle = 2 * used <= programs
    return _PREFETCH_ALL if idle and stored_bytes <= _PREFETCH_ALL_BYTES else _PREFETCH


def _assign(work: list[int], programs: int) -> list[list[int]]:
    """Tiles of each program, given the blocks of each tile: longest first, to the least loaded."""
    longest_first = sorted(range(len(work)), key=lambda tile: -work[tile])
    if len(work) <= programs:
        return [[tile] for tile in longest_first]
    assigned: list[list[int]] = [[] for _ in range(programs)]
    loads = [(0, program) for program in range(programs)]
    for tile in longest_first:
        load, program = heapq.heappop(loads)
        assigned[program].append(tile)
        heapq.heappush(loads, (load + work[tile] + _TILE_COST, program))
    return assigned


def _assign_split(steps: list[int], programs: int) -> list[list[tuple[int, int]]]:
    """Tiles, or parts of them, for clusters of two programs, given the K steps of each tile.

    Where programs would be idle, as many of the longest tiles are split as makes the last program
    end first.
    """
    most = max(2, programs // 2 * 2)
    order = sorted(range(len(steps)), key=lambda tile: -steps[tile])
    spare = min(most - len(steps), len(steps))
    if spare <= 0:
        assigned = [[(tile, WHOLE) for tile in mine] for mine in _assign(steps, most)]
    else:
        left = [steps[tile] for tile in order] + [0]
        half = (left[0] + 1) // 2 + _EXCHANGE_COST
        longest = [left[0]] + [max(half, left[splits]) for splits in range(1, spare + 1)]
        splits = longest.index(min(longest))
        assigned = [[(tile, part)] for tile in order[:splits] for part in range(2)]
        assigned += [[(tile, WHOLE)] for tile in order[splits:]]
    return assigned + [[]] * (len(assigned) % 2)


# One record for each block row.

# Tables by the row pointers they were made from, which live as long as their pattern. The same
# pointers serve a pattern with and one without `perm`.
_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# The same limits for the slots of a table.
_TABLE_SLOTS_PER_BLOCK, _TABLE_SPARE_SLOTS = 4, 1 << 16
# Numbers in front of the slots of a record: row, blocks.
TABLE_HEADER = 2


class RowTable(NamedTuple):
    """The blocks of each row of one pattern in one orientation, longest rows first.

    Attributes
    ----------
    records : int32 [rows_b, TABLE_HEADER + 2 * width]
        Row, number of blocks n, then `width` entries of the values, then `width` block columns, of
        which the first n count and the others are -1.
    width : blocks of the longest row, at least 1
    """

    records: torch.Tensor
    width: int


def row_table(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None
) -> RowTable | None:
    """The table of a pattern, from the cache if there is one.

    Building it synchronises, and it is None, under the same conditions as `row_schedule`.

    Parameters
    ----------
    indptr : int32 [rows_b + 1], of the orientation whose rows are the rows of the output
    indices : int32 [nnzb], block columns
    perm : int32 [nnzb] or None, which entry of the values stands behind each index
    """
    tables = _TABLES.setdefault(indptr, {})
    key = perm is None
    if key in tables:
        return tables[key]
    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    table = made_outside_pool(lambda: build_row_table(indptr, indices, perm), indptr.device)
    if indptr.is_cuda:
        torch.cuda.current_stream(indptr.device).synchronize()
    tables[key] = table
    return table


def build_row_table(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None
) -> RowTable | None:
    """Build a table; None where rows are too uneven. Synchronises to read the longest row."""
    rows_b, nnz_blocks = indptr.shape[0] - 1, indices.shape[0]
    lengths = torch.diff(indptr)
    width = int(lengths.max()) if nnz_blocks else 1
    if rows_b * width > _TABLE_SLOTS_PER_BLOCK * nnz_blocks + _TABLE_SPARE_SLOTS:
        return None
    rows = torch.sort(lengths, descending=True, stable=True).indices
    slot = torch.arange(width, dtype=torch.int32, device=indptr.device)
    present = slot < lengths[rows, None]
    entry = torch.where(present, indptr[rows, None] + slot, 0)
    if nnz_blocks:
        columns = torch.where(present, indices[entry], -1)
        entry = entry if perm is None else perm[entry]
    else:
        columns = torch.full_like(entry, -1)
    entries = torch.where(present, entry, -1)
    header = torch.stack([rows.int(), lengths[rows]], dim=1)
    return RowTable(torch.cat([header, entries, columns], dim=1), width)
