"""The tiles that each program of Hopper's product with few columns computes, and their blocks.

A product of few columns is over in microseconds, so no program may have much more to read than
another, and none may look anything up before it can ask for its first block. The schedule is made
once for each pattern: tiles are dealt out, longest first, each to the program with the least to
read, and each tile becomes a record at an address known from the number of its program. Where SMs
would be idle, the longest tiles may be cut into two parts for two programs.
"""

import heapq
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...launch.launcher import cdiv
from ...launch.workspace import made_apart
from .config import NarrowSm90Config

# Schedules by the row pointers they were made from, which live as long as their pattern.
_SCHEDULES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Slots that a schedule may have for each block that its tiles read, and some more where they are
# few. Past that a few rows are much longer than the others, which wants a plan that cuts them.
_SLOTS_PER_BLOCK, _SPARE_SLOTS = 4, 1 << 18
# Numbers before the slots of a record: tiles of the program, which tile of rows, its blocks, its
# first column, whether it is one of two parts.
HEADER = 5
# Instead of the number of a part: all of a tile.
WHOLE = -1
# A coordinate past the end of every tensor, from where TMA copies zeros.
OUTSIDE = 1 << 30
# What starting and finishing a tile costs, in blocks.
_TILE_COST = 1
# What it takes two programs to add up their parts, in steps: the exchange takes 0.5 to 0.75 us.
_MAIL_COST = 3
# Blocks of its first tile that a program brings to the L2 while a kernel in front still runs. More
# of them come too early: 11.2 us with 4 of 4096 x 14336 and 64 columns, 14.3 with all (H200).
_EARLY = 4
# All blocks, as many as a warp has lanes, where programs of the next kernel find idle SMs and all
# is this small: 4.7 us instead of 4.9 (4096 x 4096, 7.4 MB).
_ALL_EARLY, _ALL_EARLY_BYTES = 32, 8 * 2**20
# With rows in two parts all programs together bring this much, which is how they were measured.
_PARTS_EARLY_BYTES = 8 * 2**20


class RowSchedule(NamedTuple):
    """The tiles of one pattern, dealt out to programs.

    `records` is int32 [programs, tiles, HEADER + 2 * width]. The first number of a record is how
    many of the program's records count. After the header come `width` rows of the values as a
    matrix [nnzb * bh, bw], then `width` rows of x; past the blocks of the row
    they lie outside of the tensors. `width` is
    the length of the longest row, at least 1. `early` is how many blocks of a program's first tile
    may come to the L2 before the kernel in front has ended.

    With PARTS = 2 programs 2 i and 2 i + 1 are a pair, and a tile that is cut is the only one of
    both. `width` is then the length of the longest row or part of one that a program has.
    """

    records: torch.Tensor
    width: int
    early: int


def row_schedule(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    config: NarrowSm90Config,
    columns: int,
    programs: int,
) -> RowSchedule | None:
    """The schedule of a pattern, from the cache where it was asked for before.

    The first request synchronises: the schedule is complete before any stream sees it, so a kernel
    may read it before kernels in front of it have finished. None where rows are too uneven, and
    while a CUDA graph is captured unless the schedule exists.

    Parameters
    ----------
    indptr : int32 [rows_b + 1], of rows that are stored one after the other
    indices : int32 [nnzb], block columns, at least one
    config : tiles of the product
    columns : of the result
    programs : how many there are at most
    """
    schedules = _SCHEDULES.setdefault(indptr, {})
    panels = cdiv(columns, config.TILE_N)
    # where one tile has all columns, it does not matter how wide it is
    tile_n = config.TILE_N if panels > 1 else 0
    # only parts are counted in steps of so many blocks
    parts = (config.PARTS, config.UNITS if config.PARTS > 1 else 1)
    key = (config.TILE_M, config.BLOCK_H, config.BLOCK_W, panels, tile_n, programs, *parts)
    if key in schedules:
        return schedules[key]
    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    schedule = made_apart(
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
    """Make a schedule; None where rows are too uneven. Synchronises for the lengths of rows."""
    starts = indptr.cpu()
    lengths = torch.diff(starts)
    steps = (lengths + config.UNITS - 1) // config.UNITS
    panels = cdiv(columns, config.TILE_N)
    copies = config.row_tiles * panels
    if config.PARTS == 1:
        hands = _deal(lengths.repeat_interleave(copies).tolist(), programs)
        dealt = [[(tile, WHOLE) for tile in mine] for mine in hands]
    else:
        dealt = _deal_cut(steps.repeat_interleave(copies).tolist(), programs)
    most = max(map(len, dealt))
    # [programs, tiles] from here on
    padded = torch.tensor([mine + [(0, WHOLE)] * (most - len(mine)) for mine in dealt])
    counts = torch.tensor([len(mine) for mine in dealt])[:, None].expand(-1, most)
    place, part = padded.unbind(2)
    tile, first_column = place // panels, place % panels * config.TILE_N
    row, sub_row = tile // config.row_tiles, tile % config.row_tiles * config.TILE_M
    # the first part is the longer one
    middle = starts[row] + torch.minimum((steps[row] + 1) // 2 * config.UNITS, lengths[row])
    begin = torch.where(part == 1, middle, starts[row])
    end = torch.where(part == 0, middle, starts[row + 1])
    end = torch.where(torch.arange(most) < counts, end, begin)
    width = max(1, int((end - begin).max()))
    allowed = _SLOTS_PER_BLOCK * indices.shape[0] * copies + _SPARE_SLOTS
    if place.numel() * width > allowed:
        return None
    header = torch.stack([counts, tile, end - begin, first_column, part != WHOLE], dim=2)
    slot = begin[..., None] + torch.arange(width)
    present = slot < end[..., None]
    slot = torch.where(present, slot, 0)
    a_rows = torch.where(present, slot * config.BLOCK_H + sub_row[..., None], OUTSIDE)
    x_rows = torch.where(present, indices.cpu()[slot] * config.BLOCK_W, OUTSIDE)
    records = torch.cat([header, a_rows, x_rows], dim=2).int()
    early = _early_blocks(indices.shape[0], len(dealt), programs, config)
    return RowSchedule(records.to(indptr.device), width, early)


def _early_blocks(blocks: int, used: int, programs: int, config: NarrowSm90Config) -> int:
    """`early` of a schedule with so many blocks for `used` of so many programs."""
    if config.swapped:
        # not measured for low tiles
        return 0
    if config.PARTS > 1:
        piece_bytes = 2 * config.TILE_M * config.BLOCK_W
        return min(_ALL_EARLY, _PARTS_EARLY_BYTES // (piece_bytes * used))
    stored_bytes = 2 * blocks * config.BLOCK_H * config.BLOCK_W
    idle = 2 * used <= programs
    return _ALL_EARLY if idle and stored_bytes <= _ALL_EARLY_BYTES else _EARLY


def _deal(work: list[int], programs: int) -> list[list[int]]:
    """Tiles of each program, given what each tile has to read."""
    longest_first = sorted(range(len(work)), key=lambda tile: -work[tile])
    if len(work) <= programs:
        return [[tile] for tile in longest_first]
    hands: list[list[int]] = [[] for _ in range(programs)]
    loads = [(0, program) for program in range(programs)]
    for tile in longest_first:
        load, program = heapq.heappop(loads)
        hands[program].append(tile)
        heapq.heappush(loads, (load + work[tile] + _TILE_COST, program))
    return hands


def _deal_cut(steps: list[int], programs: int) -> list[list[tuple[int, int]]]:
    """Tiles, or parts of them, for pairs of programs, given the steps of each tile.

    Of the longest tiles as many are cut as it takes to be done first, if programs would be idle.
    """
    most = max(2, programs // 2 * 2)
    order = sorted(range(len(steps)), key=lambda tile: -steps[tile])
    spare = min(most - len(steps), len(steps))
    if spare <= 0:
        hands = [[(tile, WHOLE) for tile in mine] for mine in _deal(steps, most)]
    else:
        left = [steps[tile] for tile in order] + [0]
        parted = (left[0] + 1) // 2 + _MAIL_COST
        longest = [left[0]] + [max(parted, left[cuts]) for cuts in range(1, spare + 1)]
        cuts = longest.index(min(longest))
        hands = [[(tile, part)] for tile in order[:cuts] for part in range(2)]
        hands += [[(tile, WHOLE)] for tile in order[cuts:]]
    return hands + [[]] * (len(hands) % 2)


# The blocks of each row as records that a program finds without looking anything up first.
#
# A product of few columns is over in microseconds; every load that waits for another one shows.
# Row pointers, then indices, then blocks are three round trips to memory. A record stands at an
# address known from the number of the program and holds all that its program needs to ask for its
# blocks.

# Tables by the row pointers they were made from, which live as long as their pattern. The same
# pointers serve a pattern with and one without `perm`.
_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# A table may have this many slots for each stored block, and some more where there are few. Past
# that a few rows are much longer than the others, which wants a plan that cuts them.
_TABLE_SLOTS_PER_BLOCK, _TABLE_SPARE_SLOTS = 4, 1 << 16
# Numbers before the slots of a record: row, blocks.
TABLE_HEADER = 2


class RowTable(NamedTuple):
    """The records of one pattern in one orientation.

    `records` is int32 [rows_b, TABLE_HEADER + 2 * width]: row, number of blocks n, then `width`
    entries of the values, then `width` block columns, of which the first n count and the
    others are -1. Longest rows come first. `width` is the length of the longest row, at least 1.
    """

    records: torch.Tensor
    width: int


def row_table(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None
) -> RowTable | None:
    """The table of a pattern, from the cache where it was asked for before.

    The first request synchronises: the table is complete before any stream sees it, so a kernel
    may read it before kernels in front of it have finished. None where rows are too uneven for a
    table, and while a CUDA graph is captured unless the table exists.

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
    table = made_apart(lambda: build_row_table(indptr, indices, perm), indptr.device)
    if indptr.is_cuda:
        torch.cuda.current_stream(indptr.device).synchronize()
    tables[key] = table
    return table


def build_row_table(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None
) -> RowTable | None:
    """Make a table; None where rows are too uneven. Synchronises for the longest row."""
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
