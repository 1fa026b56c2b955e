"""Tiles at the edges of a band, for consumers of the Hopper forward that see half or nothing."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.scores import cap
from ...device.softmax import softmax_step
from ..sm90 import GROUP_ROWS
from .fwd_sm90_masks import mask_band
from .fwd_sm90_work import dense_tile

ROWS = gl.constexpr(GROUP_ROWS)
# Keys of half a tile.
HALF = gl.constexpr(64)


@gluon.jit
def attend_half(
    q, rings, step, state, acc, kv_start, bounds, score, START: gl.constexpr, CFG: gl.constexpr
):
    """Take in HALF keys from START on of the tile at `step`, which begins at `kv_start`."""
    k_smem, k_full, k_empty = rings[0]
    v_smem, v_full, v_empty = rings[1]
    s_layout: gl.constexpr = CFG.accumulator_layout(HALF)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    state_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_DV), 2)
    first, last, every_first, every_last = bounds
    first = gl.convert_layout(first, s_rows)
    last = gl.convert_layout(last, s_rows)
    m_log2 = gl.convert_layout(state[0], s_rows)
    row_sum = gl.convert_layout(state[1], s_rows)
    stage = step % CFG.STAGES
    phase = (step // CFG.STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    k = k_smem.index(stage).slice(START, HALF, dim=0).permute((1, 0))
    no_scores = gl.zeros([ROWS, HALF], gl.float32, s_layout)
    scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
    s = cap(warpgroup_mma_wait(0, deps=(scores,)), score[1])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = mask_band(s, kv_start + START, (first, last, every_first, every_last), CFG)
    m_log2, row_sum, weights, rescale = softmax_step(m_log2, row_sum, s, score[0])
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_DV))
    acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
    p = gl.convert_layout(weights.to(q.dtype), p_layout)
    mbarrier.wait(v_full.index(stage), phase)
    v = v_smem.index(stage).slice(START, HALF, dim=0)
    product = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    m_log2 = gl.convert_layout(m_log2, state_rows)
    return m_log2, gl.convert_layout(row_sum, state_rows), acc


@gluon.jit
def pass_by(rings, plan, masked_tiles, any_last, step, CFG: gl.constexpr):
    """Free the first tiles of a piece, whose keys come after `any_last`; return how many."""
    _, k_full, k_empty = rings[0]
    _, v_full, v_empty = rings[1]
    passed = 0
    while (passed < masked_tiles) & (any_last < dense_tile(plan, passed) * CFG.TILE_N):
        stage = (step + passed) % CFG.STAGES
        phase = ((step + passed) // CFG.STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        passed += 1
    return passed
