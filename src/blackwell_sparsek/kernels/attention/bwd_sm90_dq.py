"""dq of the Hopper backward: products of a step, and adding them to the sums in memory.

Sums are fp32, in tiles of [64, 64] that lie in memory as in the registers of a warp group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from ...device.gluon.tma_reduce import await_turn, finish_turn, tma_add
from ..sm90 import GROUP_ROWS
from . import bwd_config_sm90 as config
from .bwd_sm90_steps import ds_place, hand_over, zero_of
from .bwd_sm90_work import padded_queries, read_info

ROWS = gl.constexpr(GROUP_ROWS)
SUM_ROWS = gl.constexpr(config.SUM_ROWS)
SUM_COLUMNS = gl.constexpr(config.SUM_COLUMNS)


@gluon.jit
def start_dq(ds_ring, k_smem, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Start a [64, 64] tile of dq: rows or columns of its own for each warp group."""
    layout: gl.constexpr = CFG.accumulator_layout(64)
    consumers: gl.constexpr = CFG.CONSUMERS
    dq = gl.zeros([ROWS, 64], gl.float32, layout)
    for g in gl.static_range(consumers):
        ds, _ = ds_place(ds_ring, step, g, CFG)
        if CFG.dq_by_rows:
            ds = ds.slice(GROUP * ROWS, ROWS, dim=1)
            k = k_smem.index(g + zero_of(step))
        else:
            k = k_smem.index(g + zero_of(step)).slice(GROUP * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=g > 0, is_async=True)
    return dq


@gluon.jit
def in_register_order(dq):
    """A [64, 64] tile of dq with four sums of a thread side by side, and so the threads of a warp.

    `bwd_sm90_rows` puts them back. Stored as a tile, rows would meet in the same banks.
    """
    # row: warp, half of its 16 rows, thread; column: eighth, thread, one of two
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return dq.reshape([SUM_ROWS, SUM_COLUMNS])


@gluon.jit
def give_dq(dq, dq_ring, step, GROUP: gl.constexpr):
    """Hand a tile of dq to the writer, once it has taken the one before."""
    smem, full, empty = dq_ring
    dq = in_register_order(dq)
    mbarrier.wait(empty.index(GROUP), (step & 1) ^ 1)
    hand_over(dq, smem.index(GROUP + zero_of(step)), full.index(GROUP))


@gluon.jit
def write_dq(dq_desc, sums_turn_ptr, q_len, dq_ring, info, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Add what a warp group hands over to the sums of dq in memory, in turn where that is asked."""
    smem, full, empty = dq_ring
    row_field: gl.constexpr = 1 + GROUP if CFG.dq_by_rows else 1
    step = 0
    plane = 0
    while plane >= 0:
        mbarrier.wait(full.index(GROUP), step & 1)
        plane = read_info(info, step, 0, 1)
        if plane >= 0:
            column = 0 if CFG.dq_by_rows else GROUP
            row = read_info(info, step, row_field, 1)
            place = [plane, (row // ROWS * (CFG.TILE_D // 64) + column) * SUM_ROWS, 0]
            turn = 1
            if CFG.ORDERED:
                rows = padded_queries(q_len)
                tile = plane.to(gl.int64) * (rows // ROWS) + row // CFG.UNIT * (CFG.UNIT // ROWS)
                # either warp group may get a unit that fills half a tile
                turn_ptr = sums_turn_ptr + tile * 2 + (0 if CFG.parts == 2 else GROUP)
                # a part without queries has no turn; all of a unit goes in one, last rows first
                has_turn = (row < rows) if CFG.parts == 2 else True
                tile_in_unit = row % CFG.UNIT // CFG.TILE_M
                turn = read_info(info, step, 4 + row_field, 1)
                if has_turn & (tile_in_unit == CFG.last_in_unit):
                    await_turn(turn_ptr, turn)
            if turn == 0:
                # nobody was here: sums begin
                tma.async_copy_shared_to_global(dq_desc, place, smem.index(GROUP))
            else:
                tma_add(dq_desc, place, smem.index(GROUP))
            tma.store_wait(0)
            mbarrier.arrive(empty.index(GROUP), count=1)
            if CFG.ORDERED:  # noqa: SIM102 - a constant decides whether `has_turn` exists
                if has_turn & (tile_in_unit == 0):
                    finish_turn(turn_ptr)
        step += 1
