"""Tiles at the edges of a band, for consumers of the Hopper forward that see half or nothing."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.gluon.pipeline import ring_place
from ...device.scores import cap
from ...device.softmax import softmax_step
from ..sm90 import GROUP_ROWS
from .fwd_sm90_masks import mask_band
from .fwd_sm90_stages import await_stage, await_turn, free_stage, pass_turn
from .fwd_sm90_work import dense_tile

ROWS = gl.constexpr(GROUP_ROWS)
# Keys of half a tile.
HALF = gl.constexpr(64)


@gluon.jit
def attend_half(
    q,
    rings,
    step,
    state,
    acc,
    kv_start,
    bounds,
    score,
    START: gl.constexpr,
    GROUP: gl.constexpr,
    CFG: gl.constexpr,
):
    """Take in HALF keys from START on of the tile at `step`, which begins at `kv_start`."""
    k_smem, v_smem = rings[0], rings[1]
    s_layout: gl.constexpr = CFG.accumulator_layout(HALF)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    state_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_DV), 2)
    first, last, every_first, every_last = bounds
    first = gl.convert_layout(first, s_rows)
    last = gl.convert_layout(last, s_rows)
    m_log2 = gl.convert_layout(state[0], s_rows)
    row_sum = gl.convert_layout(state[1], s_rows)
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(rings, stage, phase, 0, CFG)
    k = k_smem.index(stage).slice(START, HALF, dim=0).permute((1, 0))
    no_scores = gl.zeros([ROWS, HALF], gl.float32, s_layout)
    await_turn(GROUP, CFG)
    scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
    pass_turn(GROUP, CFG)
    s = cap(warpgroup_mma_wait(0, deps=(scores,)), score[1])
    free_stage(rings, stage, 1, CFG)
    s = mask_band(s, kv_start + START, (first, last, every_first, every_last))
    m_log2, row_sum, weights, rescale = softmax_step(m_log2, row_sum, s, score[0])
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_DV))
    acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
    p = gl.convert_layout(weights.to(q.dtype), p_layout)
    await_stage(rings, stage, phase, 2, CFG)
    v = v_smem.index(stage).slice(START, HALF, dim=0)
    product = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(product,))
    free_stage(rings, stage, 3, CFG)
    m_log2 = gl.convert_layout(m_log2, state_rows)
    return m_log2, gl.convert_layout(row_sum, state_rows), acc


@gluon.jit
def _pass_tile(rings, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Free the tile at `step` unread."""
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(rings, stage, phase, 0, CFG)
    await_turn(GROUP, CFG)
    pass_turn(GROUP, CFG)
    free_stage(rings, stage, 1, CFG)
    await_stage(rings, stage, phase, 2, CFG)
    free_stage(rings, stage, 3, CFG)


@gluon.jit
def pass_all(rings, count, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Free `count` tiles from `step` on."""
    for i in range(0, count):
        _pass_tile(rings, step + i, GROUP, CFG)


@gluon.jit
def pass_by(
    rings, plan, masked_tiles, any_last, step, taken, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Free the first tiles of a piece, whose keys come after `any_last`; return how many."""
    passed = 0
    while (taken + passed < masked_tiles) & (any_last < dense_tile(plan, passed) * CFG.TILE_N):
        _pass_tile(rings, step + passed, GROUP, CFG)
        passed += 1
    return passed
