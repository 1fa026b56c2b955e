"""Attention forward on Hopper under masks whose rows are 64 queries: two rows in one piece of work.

Blocks that both rows see are fetched once, for both consumers; of the others each tile holds one
block for each consumer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.gluon.packed import plane_place, tile_at
from ...device.gluon.pipeline import barriers, publish, take, tiles, work_channel
from ...device.gluon.row_parts import pin_above, row_parts, scale_rows, softmax_step_parts
from ...device.masks import exists
from ...device.scores import cap
from ...device.sequences import batch_and_heads, lse_offset
from ...device.softmax import add_sink, finalise, init_state
from ..sm90 import GROUP_ROWS
from .fwd_sm90_producer import _copy_tile, claim_piece

ROWS = gl.constexpr(GROUP_ROWS)
SLACK = gl.constexpr(8)
FIELDS = gl.constexpr(8)
HEADER = gl.constexpr(8)


@gluon.jit
def _attend(q, rings, step, count, state, acc, score, START: gl.constexpr, WIDTH: gl.constexpr,
            CFG: gl.constexpr):
    """Take in WIDTH keys from START on of the next `count` tiles."""
    k_smem, k_full, k_empty = rings[0]
    v_smem, v_full, v_empty = rings[1]
    s_layout: gl.constexpr = CFG.accumulator_layout(WIDTH)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    no_scores = gl.zeros([ROWS, WIDTH], gl.float32, s_layout)
    m_log2 = gl.convert_layout(state[0], s_rows)
    row_sum = state[1]
    if count > 0:
        quarter = row_parts(no_scores)
        part_rows: gl.constexpr = gl.SliceLayout(1, quarter.type.layout)
        sums = quarter + 0.25 * gl.convert_layout(row_sum, part_rows)[:, None]
        stage = step % CFG.STAGES
        mbarrier.wait(k_full.index(stage), (step // CFG.STAGES) & 1)
        k = k_smem.index(stage).slice(START, WIDTH, dim=0).permute((1, 0))
        if CFG.Q_REGS:
            q_op = q.load(gl.DotOperandLayout(0, s_layout, 2))
        else:
            q_op = q
        scores = warpgroup_mma(q_op, k, no_scores, use_acc=False, is_async=True)
        s = cap(warpgroup_mma_wait(0, deps=(scores,)), score[1])
        mbarrier.arrive(k_empty.index(stage), count=1)
        m_log2, sums, weights, rescale = softmax_step_parts(m_log2, sums, s, score[0], SLACK)
        acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
        p = gl.convert_layout(weights.to(q.dtype), p_layout)
        for _tile in range(1, count):
            last_stage = stage
            last_phase = (step // CFG.STAGES) & 1
            step += 1
            stage = step % CFG.STAGES
            mbarrier.wait(k_full.index(stage), (step // CFG.STAGES) & 1)
            k = k_smem.index(stage).slice(START, WIDTH, dim=0).permute((1, 0))
            scores = warpgroup_mma(q_op, k, no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(last_stage), last_phase)
            v = v_smem.index(last_stage).slice(START, WIDTH, dim=0)
            product = warpgroup_mma(p, v, acc, is_async=True)
            s = cap(warpgroup_mma_wait(1, deps=(scores,)), score[1])
            mbarrier.arrive(k_empty.index(stage), count=1)
            m_log2, sums, weights, rescale = softmax_step_parts(m_log2, sums, s, score[0], SLACK)
            pin_above(sums)
            acc = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(v_empty.index(last_stage), count=1)
            acc = scale_rows(acc, gl.convert_layout(rescale, o_rows)[:, None])
            p = gl.convert_layout(weights.to(q.dtype), p_layout)
        mbarrier.wait(v_full.index(stage), (step // CFG.STAGES) & 1)
        v = v_smem.index(stage).slice(START, WIDTH, dim=0)
        product = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
        row_sum = gl.convert_layout(gl.sum(sums, 1), row_sum.type.layout)
    m_log2 = gl.convert_layout(m_log2, state[0].type.layout)
    return step, (m_log2, row_sum), acc


@gluon.jit
def _pass_by(rings, step, count, CFG: gl.constexpr):
    _, k_full, k_empty = rings[0]
    _, v_full, v_empty = rings[1]
    for _tile in range(count):
        stage = step % CFG.STAGES
        phase = (step // CFG.STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def _consume_pair(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    out_desc, lse_ptr, lse_head_stride, sinks_ptr, score, out_tiles = consume
    q_ring, k_ring, v_ring, work, asked, lengths, heads = shared
    q_smem, q_full, q_empty = q_ring
    rings = (k_ring, v_ring)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    tile_dv: gl.constexpr = CFG.TILE_DV
    out_smem = out_tiles.index(GROUP)
    rows = gl.arange(0, ROWS, o_rows)
    step = 0
    turn = 0
    piece = take(work, turn)
    while piece[6] >= 0:
        batch, q_head, kv_head = batch_and_heads(piece[6], heads[0], heads[1])
        q_index = piece[7] * CFG.tile_m + GROUP * ROWS + rows
        m_log2, row_sum = init_state(q_index)
        acc = gl.zeros([ROWS, tile_dv], gl.float32, o_layout)
        q_stage = turn % CFG.Q_STAGES
        q = q_smem.index(q_stage * CFG.CONSUMERS + GROUP)
        mbarrier.wait(q_full.index(q_stage), (turn // CFG.Q_STAGES) & 1)
        step, state, acc = _attend(
            q, rings, step, piece[1], (m_log2, row_sum), acc, score, 0, CFG.TILE_N, CFG
        )
        mine = piece[3 + GROUP]
        same = q_smem.index(q_stage * CFG.CONSUMERS + GROUP + gl.minimum(mine, 0))
        step, state, acc = _attend(
            same, rings, step, mine, state, acc, score, GROUP * 64, 64, CFG
        )
        mbarrier.arrive(q_empty.index(q_stage), count=1)
        step = _pass_by(rings, step, piece[2] - mine, CFG)
        m_log2 = state[0]
        row_sum = state[1]
        if sinks_ptr is not None:
            m_log2, row_sum, rescale = add_sink(m_log2, row_sum, gl.load(sinks_ptr + q_head))
            acc = acc * rescale[:, None]
        inverse, lse = finalise(m_log2, row_sum)
        out = acc * inverse[:, None]
        tma.store_wait(0)
        out_smem.store(out.to(dtype))
        fence_async_shared()
        q_row = piece[7] * CFG.tile_m + GROUP * ROWS
        out_place = plane_place(None, batch, q_head, 0, lengths[0])
        tma.async_copy_shared_to_global(out_desc, tile_at(out_place, q_row), out_smem)
        lse_plane = lse_offset(batch, q_head, 0, heads[0], lse_head_stride, None)
        gl.store(lse_ptr + lse_plane + q_index, lse, mask=exists(q_index, lengths[0]))
        turn += 1
        piece = take(work, turn)
    tma.store_wait(0)


@gluon.jit
def _produce_pair(produce, shared, CFG: gl.constexpr):
    q_desc, k_desc, v_desc, counter_ptr, header_ptr, blocks_ptr, total, dynamic = produce
    q_ring, k_ring, v_ring, work, asked, lengths, heads = shared
    q_smem, q_full, q_empty = q_ring
    consumers: gl.constexpr = CFG.CONSUMERS
    step = 0
    turn = 0
    piece = take(work, turn, 1)
    while piece[6] >= 0:
        mbarrier.arrive(asked.index(0), count=1)
        batch, q_head, kv_head = batch_and_heads(piece[6], heads[0], heads[1])
        q_stage = turn % CFG.Q_STAGES
        q_bar = q_full.index(q_stage)
        mbarrier.wait(q_empty.index(q_stage), ((turn // CFG.Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_bar, consumers * q_desc.block_type.nbytes)
        q_place = plane_place(None, batch, q_head, 0, lengths[0])
        kv_place = plane_place(None, batch, kv_head, 0, lengths[1])
        for g in gl.static_range(consumers):
            q_row = piece[7] * CFG.tile_m + g * ROWS
            q = q_smem.index(q_stage * consumers + g)
            tma.async_copy_global_to_shared(q_desc, tile_at(q_place, q_row), q_bar, q)
        count = piece[1] + piece[2]
        if count > 0:
            at = blocks_ptr + 2 * piece[0]
            starts = (gl.load(at) * 64, gl.load(at + 1) * 64)
            _copy_tile(k_desc, k_ring, step, starts, kv_place, CFG)
            for kv_tile in range(1, count):
                after = (gl.load(at + 2 * kv_tile) * 64, gl.load(at + 2 * kv_tile + 1) * 64)
                _copy_tile(k_desc, k_ring, step + 1, after, kv_place, CFG)
                _copy_tile(v_desc, v_ring, step, starts, kv_place, CFG)
                starts = after
                step += 1
            _copy_tile(v_desc, v_ring, step, starts, kv_place, CFG)
            step += 1
        turn += 1
        piece = take(work, turn, 1)


@gluon.jit
def _scout_pair(produce, shared, CFG: gl.constexpr):
    q_desc, k_desc, v_desc, counter_ptr, header_ptr, blocks_ptr, total, dynamic = produce
    q_ring, k_ring, v_ring, work, asked, lengths, heads = shared
    turn = 0
    piece = gl.program_id(0)
    while piece < total:
        at = header_ptr + piece * HEADER
        fields = ()
        for i in gl.static_range(HEADER):
            fields = fields + (gl.load(at + i),)  # noqa: RUF005
        publish(work, turn, fields)
        mbarrier.wait(asked.index(0), turn & 1)
        turn += 1
        piece = claim_piece(counter_ptr, dynamic, piece, total)
    publish(work, turn, (0, 0, 0, 0, 0, 0, -1, 0))


@gluon.jit(do_not_specialize=["lse_head_stride", "q_len", "kv_len", "total", "dynamic", "q_heads", "group_size"])
def _attn_fwd_sm90_pairs_kernel(
    out_desc, lse_ptr, q_desc, k_desc, v_desc, sinks_ptr, counter_ptr, header_ptr, blocks_ptr,
    lse_head_stride, q_len, kv_len, total, dynamic, q_heads, group_size, score, CFG: gl.constexpr,
):
    consumers: gl.constexpr = CFG.CONSUMERS
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    q_smem = tiles(q_desc, CFG.Q_STAGES * consumers, ROWS)
    out_smem = tiles(out_desc, consumers, ROWS)
    k_smem = tiles(k_desc, stages, tile_n)
    v_smem = tiles(v_desc, stages, tile_n)
    q_ring = (q_smem, barriers(CFG.Q_STAGES, 1), barriers(CFG.Q_STAGES, consumers))
    k_ring = (k_smem, barriers(stages, 1), barriers(stages, consumers))
    v_ring = (v_smem, barriers(stages, 1), barriers(stages, consumers))
    work = work_channel(FIELDS, consumers + 1)
    asked = barriers(1, 1)
    fence_async_shared()
    lengths = (q_len, kv_len)
    heads = (q_heads, group_size)
    shared = (q_ring, k_ring, v_ring, work, asked, lengths, heads)
    produce = (q_desc, k_desc, v_desc, counter_ptr, header_ptr, blocks_ptr, total, dynamic)
    consume = (out_desc, lse_ptr, lse_head_stride, sinks_ptr, score, out_smem)
    gl.warp_specialize(
        [
            (_consume_pair, (consume, shared, 0, CFG)),
            (_consume_pair, (consume, shared, 1, CFG)),
            (_produce_pair, (produce, shared, CFG)),
            (_scout_pair, (produce, shared, CFG)),
        ],
        [4, 1, 1],
        [registers, producer_registers, producer_registers],
    )
