"""The tiles that each program of Hopper's product with few columns computes, and their blocks.

A product of few columns is over in microseconds, so no program may have much more to read than
another, and none may look anything up before it can ask for its first block. The schedule is made
once for each pattern: tiles are dealt out, longest first, each to the program with the least to
read, and each tile becomes a record at an address known from the number of its program.
"""

import heapq
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.apart import made_apart
from ...core.launch import cdiv
from .config_narrow_sm90 import NarrowSm90Config

# Schedules by the row pointers they were made from, which live as long as their pattern.
_SCHEDULES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Slots that a schedule may have for each block that its tiles read, and some more where they are
# few. Past that a few rows are much longer than the others, which wants a plan that cuts them.
_SLOTS_PER_BLOCK, _SPARE_SLOTS = 4, 1 << 18
# Numbers before the slots of a record: tiles of the program, which tile of rows, its blocks, its
# first column.
HEADER = 4
# A coordinate past the end of every tensor, from where TMA copies zeros.
OUTSIDE = 1 << 30
# What starting and finishing a tile costs, in blocks.
_TILE_COST = 1
# Blocks of its first tile that a program brings to the L2 while a kernel in front still runs. More
# of them come too early: 11.2 us with 4 of 4096 x 14336 and 64 columns, 14.3 with all (H200).
_EARLY = 4
# All blocks, as many as a warp has lanes, where programs of the next kernel find idle SMs and all
# is this small: 4.7 us instead of 4.9 (4096 x 4096, 7.4 MB).
_ALL_EARLY, _ALL_EARLY_BYTES = 32, 8 * 2**20


class RowSchedule(NamedTuple):
    """The tiles of one pattern, dealt out to programs.

    `records` is int32 [programs, tiles, HEADER + 2 * width]. The first number of a record is how
    many of the program's records count. After the header come `width` rows of the values as a
    matrix [nnzb * bh, bw], then `width` rows of x; past the blocks of the row
    they lie outside of the tensors. `width` is
    the length of the longest row, at least 1. `early` is how many blocks of a program's first tile
    may come to the L2 before the kernel in front has ended.
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
    key = (config.TILE_M, config.BLOCK_H, config.BLOCK_W, panels, tile_n, programs)
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
    width = max(1, int(lengths.max()))
    panels = cdiv(columns, config.TILE_N)
    dealt = _deal(lengths.repeat_interleave(config.row_tiles * panels).tolist(), programs)
    most = max(map(len, dealt))
    allowed = _SLOTS_PER_BLOCK * indices.shape[0] * config.row_tiles * panels + _SPARE_SLOTS
    if len(dealt) * most * width > allowed:
        return None
    place = torch.tensor([mine + [mine[0]] * (most - len(mine)) for mine in dealt])
    tile, first_column = place // panels, place % panels * config.TILE_N
    row, sub_row = tile // config.row_tiles, tile % config.row_tiles * config.TILE_M
    counts = torch.tensor([len(mine) for mine in dealt])[:, None].expand_as(tile)
    header = torch.stack([counts, tile, lengths[row], first_column], dim=2)
    along = torch.arange(width)
    present = along < lengths[row][..., None]
    slot = torch.where(present, starts[row][..., None] + along, 0)
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
    stored_bytes = 2 * blocks * config.BLOCK_H * config.BLOCK_W
    idle = 2 * used <= programs
    return _ALL_EARLY if idle and stored_bytes <= _ALL_EARLY_BYTES else _EARLY


def _deal(blocks: list[int], programs: int) -> list[list[int]]:
    """Tiles of each program, given the blocks of each tile."""
    longest_first = sorted(range(len(blocks)), key=lambda tile: -blocks[tile])
    if len(blocks) <= programs:
        return [[tile] for tile in longest_first]
    hands: list[list[int]] = [[] for _ in range(programs)]
    loads = [(0, program) for program in range(programs)]
    for tile in longest_first:
        load, program = heapq.heappop(loads)
        hands[program].append(tile)
        heapq.heappush(loads, (load + blocks[tile] + _TILE_COST, program))
    return hands
