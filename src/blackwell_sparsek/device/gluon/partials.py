"""`device.partials` for kernels that choose their layouts: parts of one softmax, put together.

Accumulators are [rows, columns] in any layout; indices are made in the layouts that follow from it.
Parts lie in memory as [slot, rows, columns] and [slot, 2, rows].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..partials import MERGED_ROWS, PARTS, part_slot
from ..softmax import init_state, join_states


@gluon.jit
def rows_of(acc):
    """Numbers of the rows of `acc`, in the layout of its row states."""
    return gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))


@gluon.jit
def columns_of(acc):
    """Numbers of the columns of `acc`."""
    return gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))


@gluon.jit
def store_part(acc_ptr, state_ptr, slot, m_log2, row_sum, acc, num_rows):
    """Write the state and the accumulators of a part; `num_rows` count."""
    TILE_M: gl.constexpr = acc.shape[0]
    TILE_DV: gl.constexpr = acc.shape[1]
    rows = rows_of(acc)
    live = rows < num_rows
    state_ptr += slot * (2 * TILE_M)
    gl.store(state_ptr + rows, m_log2, live)
    gl.store(state_ptr + TILE_M + rows, row_sum, live)
    offsets = rows[:, None] * TILE_DV + columns_of(acc)[None, :]
    gl.store(acc_ptr + slot.to(gl.int64) * (TILE_M * TILE_DV) + offsets, acc, live[:, None])


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

    Four warps; each takes a row, and each of its threads the same columns of all parts.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [PARTS, 1, TILE_DV // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0]
    )
    states: gl.constexpr = gl.SliceLayout(2, layout)
    offs_part = gl.arange(0, PARTS, gl.SliceLayout(1, states))
    rows = first_row + gl.arange(0, MERGED_ROWS, gl.SliceLayout(0, states))
    offs_d = gl.arange(0, TILE_DV, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    live_row = rows < num_rows
    m_log2, row_sum = init_state(rows)
    acc = gl.zeros([MERGED_ROWS, TILE_DV], gl.float32, gl.SliceLayout(0, layout))
    for first in range(0, num_parts, PARTS):
        part = first + offs_part
        slot = part_slot(first_program + part, first_program)
        live = (part < num_parts)[:, None] & live_row[None, :]
        state = state_ptr + slot[:, None] * (2 * TILE_M) + rows[None, :]
        # past the L1, which does not see what other SMs write
        m_parts = gl.load(state, live, other=-float("inf"), cache_modifier=".cg")
        sum_parts = gl.load(state + TILE_M, live, other=0.0, cache_modifier=".cg")
        offsets = slot.to(gl.int64)[:, None] * (TILE_M * TILE_DV) + rows[None, :] * TILE_DV
        parts = gl.load(
            acc_ptr + offsets[:, :, None] + offs_d[None, None, :],
            live[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        m_log2, row_sum, rescale, factors = join_states(m_log2, row_sum, m_parts, sum_parts)
        rescale = gl.convert_layout(rescale, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
        acc = acc * rescale[:, None] + gl.sum(parts * factors[:, :, None], 0)
    rows_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    m_log2 = gl.convert_layout(m_log2, rows_layout)
    row_sum = gl.convert_layout(row_sum, rows_layout)
    return m_log2, row_sum, acc
