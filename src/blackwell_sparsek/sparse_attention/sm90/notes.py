# mypy: ignore-errors
"""Rows and notes in consumers that own queries.

Shared by the kernel of the outputs (`forward.py`) and that of the gradients of queries (`dq.py`):
loading rows, finding the KV tiles that one of these rows has, and which keys each row sees there.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...attention.sm90.forward_stages import (
    EMPTY_K,
    EMPTY_V,
    FULL_K,
    FULL_V,
    await_stage,
    free_stage,
)
from ...device.gluon.partials import columns_of, rows_of
from ...device.gluon.pipeline import ring_place
from ...device.masks import not_after, within_bounds
from ...device.scores import fold_sign
from ..triton.walk import offsets_of, rows_of_tile
from .producer import FIRST_USER, LAST, NEAR, NOTE_WORDS, ROWS


class Note(NamedTuple):
    """The note of the producer on the KV tile at `step`, as a consumer reads it."""

    step: Any
    start: Any
    flags: Any
    used: Any
    """Whether the consumer has a row with these keys."""
    there: Any
    """Whether the work tile has such a KV tile at all."""


@gluon.jit
def own_rows(row, tile, GROUP: gl.constexpr, CFG: gl.constexpr):
    """The rows of a consumer numbered `row`: see `rows_of_tile`.

    They go on where those of the consumer before it end, in the middle of a query perhaps, unless
    each consumer has `group_t` queries of its own.
    """
    if CFG.group_t is None:
        row += GROUP * ROWS
        own = rows_of_tile(row, tile.q_start, tile.q_len, tile.first_head, CFG.PACK, CFG.tile_t)
    else:
        # 0, which the compiler does not know: else it would keep what it divides rows into through
        # all work tiles, and spill it
        row += tile.q_len >> 30
        q_start = tile.q_start + GROUP * CFG.group_t
        own = rows_of_tile(row, q_start, tile.q_len, tile.first_head, CFG.PACK, CFG.group_t)
    return own


@gluon.jit
def put_rows(
    ptr, strides, tiles, tile, factor,
    HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, SLICES: gl.constexpr, GROUP: gl.constexpr,
    CFG: gl.constexpr,
):  # fmt: skip
    """Load a consumer's rows of a tensor into shared memory; return the slices.

    The sign of `factor` is folded into them, if one is given.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    own = own_rows(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), tile, GROUP, CFG)
    at = offsets_of(tile.batch, own.head, tile.q_first + own.token, strides)
    held = ()
    for i in gl.static_range(SLICES):
        offs_d = i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        live = own.real[:, None] & (offs_d < HEAD_DIM)[None, :]
        x = gl.load(ptr + at[:, None] + offs_d[None, :], live, other=0.0)
        if factor is not None:
            x, _ = fold_sign(x, factor)
        x_tile = tiles.index(GROUP * SLICES + i)
        x_tile.store(x)
        held = held + (x_tile,)  # noqa: RUF005
    fence_async_shared()
    return held


@gluon.jit
def write_rows(
    ptr, strides, tile, acc, factor,
    HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Store the slices `acc` of a consumer's rows, times `factor`."""
    own = own_rows(rows_of(acc[0]), tile, GROUP, CFG)
    at = offsets_of(tile.batch, own.head, tile.q_first + own.token, strides)
    for i in gl.static_range(len(acc)):
        columns = i * WIDTH + columns_of(acc[i])
        live = own.real[:, None] & (columns < HEAD_DIM)[None, :]
        x = (acc[i] * factor).to(ptr.dtype.element_ty)
        gl.store(ptr + at[:, None] + columns[None, :], x, live)


@gluon.jit
def note_at(shared, stages, step, there, GROUP: gl.constexpr, CFG: gl.constexpr):
    """The `Note` of the KV tile at `step`, once its keys have come."""
    group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    start = step - step
    flags = start
    if there != 0:
        stage, phase = ring_place(step, CFG.STAGES)
        await_stage(stages, stage, phase, FULL_K, CFG)
        start = gl.max(shared.notes.words.index(stage * NOTE_WORDS).load(group), 0)
        flags = gl.max(shared.notes.words.index(stage * NOTE_WORDS + 1).load(group), 0)
    return Note(step, start, flags, (flags >> (FIRST_USER + GROUP)) & 1, there)


@gluon.jit
def goes_on(note):
    """1 if the work tile has another KV tile after this one."""
    return gl.where((note.there != 0) & ((note.flags & LAST) == 0), 1, 0)


@gluon.jit
def next_used(shared, stages, note, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Free KV tiles from `note` on unread until one has keys of this consumer's rows."""
    step, start, flags, used, there = note
    while (there != 0) & (used == 0):
        stage, phase = ring_place(step, CFG.STAGES)
        free_stage(stages, stage, EMPTY_K, CFG)
        await_stage(stages, stage, phase, FULL_V, CFG)
        free_stage(stages, stage, EMPTY_V, CFG)
        there = gl.where((flags & LAST) == 0, 1, 0)
        step, start, flags, used, there = note_at(shared, stages, step + 1, there, GROUP, CFG)
    return Note(step, start, flags, used, there)


@gluon.jit
def row_weights(shared, stage, layout: gl.constexpr, GROUP: gl.constexpr):
    """The weight of each of this consumer's rows for the KV tile in a stage."""
    return shared.notes.weights.index(stage).slice(GROUP * ROWS, ROWS, dim=0).load(layout)


@gluon.jit
def visible_keys(note, limits, near, CFG: gl.constexpr):
    """Which keys of a KV tile each row sees, by their positions."""
    columns: gl.constexpr = gl.SliceLayout(0, CFG.accumulator_layout(CFG.TILE_N))
    kv_pos = note.start + gl.arange(0, CFG.TILE_N, columns)
    is_near = within_bounds(kv_pos[None, :], near.first[:, None], near.last[:, None])
    wanted = gl.where((note.flags & NEAR) != 0, 1, 0)
    visible = is_near.to(gl.int32) == wanted
    return visible & not_after(kv_pos[None, :], limits.last[:, None])
