"""Pieces of work of the Hopper forward that several programs share, each of them some of the keys.

The last pieces, when there are too few of them for all programs, are one stretch of KV tiles, of
which every program has the same share. Slots and counters are those of `device.partials`, one for
each consumer; the counters come after the one for pieces of work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.gluon.partials import columns_of, rows_of, store_part
from ...device.partials import is_last, part_slot
from ...device.softmax import init_state, join_state
from ..sm90 import GROUP_ROWS

ROWS = gl.constexpr(GROUP_ROWS)


@gluon.jit
def meet(tail, share, begins, ends, state, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Leave this program's part of a softmax for the others, or put all parts together.

    `share` is this program's, `begins` and `ends` those of the first and last part. Returns whether
    this was the last one to come, and state and accumulators, which are of all parts if so.
    """
    parts_ptr, counter_ptr = tail
    tile_dv: gl.constexpr = CFG.TILE_DV
    consumers: gl.constexpr = CFG.CONSUMERS
    state_ptr = parts_ptr + gl.num_programs(0).to(gl.int64) * (2 * consumers * ROWS * tile_dv)
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    m_log2 = gl.convert_layout(state[0], rows)
    row_sum = gl.convert_layout(state[1], rows)
    slot = part_slot(share, begins) * consumers + GROUP
    store_part(parts_ptr, state_ptr, slot, m_log2, row_sum, acc, ROWS)
    last = is_last(counter_ptr + (1 + GROUP) + begins * consumers, ends - begins + 1)
    if last:
        offs_m = rows_of(acc)
        offsets = offs_m[:, None] * tile_dv + columns_of(acc)[None, :]
        m_log2, row_sum = init_state(offs_m)
        acc = gl.zeros([ROWS, tile_dv], gl.float32, layout)
        # in their order, whoever is last: the bits do not depend on the race
        for other in range(begins, ends + 1):
            slot = part_slot(other, begins) * consumers + GROUP
            state_at = state_ptr + slot * (2 * ROWS) + offs_m
            # past the L1, which does not see what other SMs write
            m_part = gl.load(state_at, cache_modifier=".cg")
            sum_part = gl.load(state_at + ROWS, cache_modifier=".cg")
            at = parts_ptr + slot.to(gl.int64) * (ROWS * tile_dv) + offsets
            part = gl.load(at, cache_modifier=".cg")
            m_log2, row_sum, rescale, factor = join_state(m_log2, row_sum, m_part, sum_part)
            acc = acc * rescale[:, None] + part * factor[:, None]
    state_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    m_log2 = gl.convert_layout(m_log2, state_rows)
    return last, m_log2, gl.convert_layout(row_sum, state_rows), acc
