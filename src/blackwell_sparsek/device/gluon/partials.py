# mypy: ignore-errors
"""`device.partials` for Gluon kernels, which choose layouts: combining parts of one softmax.

Accumulators are [rows, columns] in any layout; the layouts of indices follow from it.
Parts lie in memory as [slot, rows, columns] and [slot, 2, rows].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..partials import MERGED_ROWS, PARTS, part_slot
from ..softmax import init_state, join_states


@gluon.jit
def rows_of(acc):
    """Row numbers of `acc`, in the layout of its row states."""
    return gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))


@gluon.jit
def columns_of(acc):
    """Column numbers of `acc`."""
    return gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))


@gluon.jit
def store_part(acc_ptr, state_ptr, slot, m_log2, row_sum, acc, num_rows):
    """Write the state and the accumulators of a part, for `num_rows` rows."""
    store_part_slices(acc_ptr, state_ptr, slot, m_log2, row_sum, (acc,), num_rows)


@gluon.jit
def store_part_slices(acc_ptr, state_ptr, slot, m_log2, row_sum, acc, num_rows):
    """As `store_part`, of accumulators in slices of columns, which lie one after the other."""
    TILE_M: gl.constexpr = acc[0].shape[0]
    WIDTH: gl.constexpr = acc[0].shape[1]
    rows = rows_of(acc[0])
    live = rows < num_rows
    state_ptr += slot * (2 * TILE_M)
    gl.store(state_ptr + rows, m_log2, live)
    gl.store(state_ptr + TILE_M + rows, row_sum, live)
    offsets = rows[:, None] * WIDTH + columns_of(acc[0])[None, :]
    acc_ptr += slot.to(gl.int64) * (TILE_M * WIDTH * len(acc))
    for i in gl.static_range(len(acc)):
        gl.store(acc_ptr + i * (TILE_M * WIDTH) + offsets, acc[i], live[:, None])


@gluon.jit
def merge_parts(
    acc_ptr,
    state_ptr,
    first_program,
    num_parts,
    first_row,
    num_rows,
    TILE_M: gl.constexpr,
    TILE_DV: gl.constexpr,
):
    """State and accumulators [MERGED_ROWS, TILE_DV] of the rows from `first_row` on.

    Called by four warps: each takes a row, and each of its threads the same columns of all parts.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [1, PARTS, TILE_DV // 32], [1, 1, 32], [4, 1, 1], [2, 1, 0]
    )
    sums: gl.constexpr = gl.SliceLayout(1, layout)
    offs_part = gl.arange(0, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    rows = first_row + gl.arange(0, MERGED_ROWS, gl.SliceLayout(1, sums))[:, None]
    offs_d = gl.arange(0, TILE_DV, gl.SliceLayout(0, sums))[None, :]
    live_row = (rows < num_rows)[:, None, :]
    m_log2, row_sum = init_state(rows)
    acc = gl.zeros([MERGED_ROWS, TILE_DV], gl.float32, sums)
    inside = (rows * TILE_DV + offs_d)[:, None, :]
    for first in range(0, num_parts, PARTS):
        part = first + offs_part
        slot = part_slot(first_program + part, first_program)
        live = (part < num_parts) & live_row
        state = state_ptr + slot * (2 * TILE_M) + rows[:, None, :]
        # bypass the L1, which does not see what other SMs write
        m_parts = gl.load(state, live, other=-float("inf"), cache_modifier=".cg")
        sum_parts = gl.load(state + TILE_M, live, other=0.0, cache_modifier=".cg")
        offsets = slot.to(gl.int64) * (TILE_M * TILE_DV) + inside
        parts = gl.load(acc_ptr + offsets, live, other=0.0, cache_modifier=".cg")
        m_log2, row_sum, rescale, factors = join_states(m_log2, row_sum, m_parts, sum_parts)
        acc = acc * rescale + gl.sum(parts * factors, 1)
    return gl.max(m_log2, 1), gl.max(row_sum, 1), acc
