# mypy: ignore-errors
"""Records that the roles of `narrow.py` share, and the schedule as they read it."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .row_schedule import HEADER, OUTSIDE, TileHeader

SLOTS_AT = gl.constexpr(HEADER)
# Where the fields of a `TileHeader` are in a record.
TILE_COUNT = gl.constexpr(TileHeader._fields.index("tile_count"))
ROW_TILE = gl.constexpr(TileHeader._fields.index("row_tile"))
BLOCKS = gl.constexpr(TileHeader._fields.index("blocks"))
COL = gl.constexpr(TileHeader._fields.index("col"))
SPLIT = gl.constexpr(TileHeader._fields.index("split"))
# A coordinate past the end of every tensor, where TMA reads zeros.
BEYOND = gl.constexpr(OUTSIDE)


class Schedule(NamedTuple):
    """`RowSchedule` in memory: records of `HEADER + 2 * width` int32, `tiles` for each program."""

    records_ptr: Any
    tiles: Any
    width: Any


class NarrowRing(NamedTuple):
    """Blocks of A and tiles of x in shared memory, and the barriers of their stages."""

    a: Any
    x: Any
    full: Any
    empty: Any
    primed: Any  # one barrier: TMA has fetched the descriptors


class NarrowScales(NamedTuple):
    """Scales of operands in fp8: one for each block, and for 128 channels of each column of x."""

    block_ptr: Any
    x_ptr: Any
    col_stride: Any
    group_stride: Any
    groups: Any  # of 128 channels that x has


@gluon.jit
def record_size(schedule):
    """Words of one record."""
    return SLOTS_AT + 2 * schedule.width


@gluon.jit
def first_record(schedule):
    """The first record of this program."""
    size = record_size(schedule)
    return schedule.records_ptr + gl.program_id(0).to(gl.int64) * (schedule.tiles * size)
