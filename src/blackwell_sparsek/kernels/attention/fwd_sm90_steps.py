"""One KV tile of the Hopper forward: its scores, together with the product of the tile before."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...device.gluon.pipeline import ring_place
from ...device.gluon.row_parts import add_parts, any_raised, pin_above, row_maxima, scale_rows
from ...device.scores import cap
from ...device.softmax import raise_maximum, weights_of
from ..sm90 import GROUP_ROWS
from .fwd_sm90_masks import mask_scores
from .fwd_sm90_stages import await_stage, await_turn, free_stage, pass_turn
from .fwd_sm90_work import needs_mask

ROWS = gl.constexpr(GROUP_ROWS)
# Weights grow to 2**SLACK before the sums of a row are scaled, which then seldom happens. They keep
# their precision, and fp16 holds them.
SLACK = gl.constexpr(8)


@gluon.jit
def attend_tile(tile, rings, kv_tile, step, state, acc, p, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Take in the tile after the one at `step`, whose weights are `p`; return all of it anew.

    Maxima are found while the product of the tile before runs, the weights after it: exponentials,
    sums and conversions then share one stretch of code, and other consumers have the tensor cores.
    """
    q, visit, masked_tiles, q_index, q_start, bounds, score = tile
    k_smem, v_smem = rings[0], rings[1]
    m_log2, row_sum = state
    tile_n: gl.constexpr = CFG.TILE_N
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    last_stage, last_phase = ring_place(step, CFG.STAGES)
    step += 1
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(rings, stage, phase, 0, CFG)
    await_turn(GROUP, CFG)
    k = k_smem.index(stage).permute((1, 0))
    scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
    await_stage(rings, last_stage, last_phase, 2, CFG)
    product = warpgroup_mma(p, v_smem.index(last_stage), acc, is_async=True)
    pass_turn(GROUP, CFG)
    s = cap(warpgroup_mma_wait(1, deps=(scores,)), score[1])
    free_stage(rings, stage, 1, CFG)
    if needs_mask(visit[0], visit[1], kv_tile, masked_tiles):
        s = mask_scores(s, visit, kv_tile, q_index, q_start, bounds, CFG)
    m_new, shift, rescale = raise_maximum(m_log2, row_maxima(s, m_log2), score[0], SLACK)
    # ptxas would sink all of it below the wait, where it overlaps with nothing
    pin_above(m_new, rings[2], CFG.spare_at)
    raised = gl.convert_layout(any_raised(m_log2, m_new), o_rows)[:, None]
    acc = warpgroup_mma_wait(0, deps=(product,))
    free_stage(rings, last_stage, 3, CFG)
    factor = gl.convert_layout(rescale, o_rows)[:, None]
    acc = scale_rows(acc, factor, raised)
    weights = weights_of(s, score[0], shift)
    row_sum = add_parts(row_sum, rescale, weights)
    p = gl.convert_layout(weights.to(p.dtype), p_layout)
    return step, m_new, row_sum, acc, p
