"""Attention forward on Hopper: the arithmetic of `fwd.py`, moved by TMA and multiplied by WGMMA.

Shapes are those of `fwd.py`. Programs take pieces of work until none is left; a piece is
CONSUMERS x 64 queries of one head. A producer warp finds out which KV tiles the piece visits,
publishes that, and keeps rings of K and V tiles full; the consumer warp groups each own 64 queries.
A consumer issues the scores of tile i and the product of tile i - 1 with V together, so that the
softmax of tile i runs while the tensor cores are busy. Tiles that need mask code come first.

Called as impl "sm90" of `bsk::attn_fwd`. Limits: fp16 and bf16, D and Dv up to 128, a positive
factor of scores, strides and addresses that TMA takes, and those of `fwd.py`.
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
from ...device.masks import exists, position, row_bounds
from ...device.schedule import count_packed_pieces
from ...device.scores import cap
from ...device.sequences import batch_and_heads, lse_offset
from ...device.softmax import add_sink, finalise, init_state, softmax_step
from ...device.visits import (
    keys_of_tile,
    masked_unit,
    num_full_units,
    num_masked_units,
    num_tiles,
    tile_ordinal,
)
from ..sm90 import GROUP_ROWS
from .fwd_sm90_masks import mask_band, mask_scores
from .fwd_sm90_work import (
    count_q_tiles,
    piece_lengths,
    place_packed_piece,
    place_piece,
    plan_piece,
)

ROWS = gl.constexpr(GROUP_ROWS)
# Keys of half a tile.
HALF = gl.constexpr(64)
# What describes a piece of work: the six bounds of a visit plan, plane and query tile; of packed
# sequences also the first query token, queries and keys.
DENSE_FIELDS = gl.constexpr(8)
PACKED_FIELDS = gl.constexpr(11)


@gluon.jit
def _fetch_tile(desc, ring, step, visit, kv_tile, place, CFG: gl.constexpr):
    """Start the copies of one KV tile of a plan into a ring, once its stage is free."""
    smem, full, empty = ring
    lists, plan, num_masked, kv_len = visit
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    parts: gl.constexpr = CFG.parts
    part_rows: gl.constexpr = CFG.part_rows
    stage = step % CFG.STAGES
    bar = full.index(stage)
    tile = smem.index(stage)
    mbarrier.wait(empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
    mbarrier.expect(bar, parts * desc.block_type.nbytes)
    masked_tiles = num_tiles(num_masked, tile_n, unit_size)
    for part in gl.static_range(parts):
        in_kind = kv_tile if kv_tile < masked_tiles else kv_tile - masked_tiles
        ordinal, kv_in_unit = tile_ordinal(in_kind, part * part_rows, tile_n, unit_size)
        if kv_tile < masked_tiles:
            unit = masked_unit(plan, ordinal)
            units = num_masked
        else:
            unit = plan[3] + ordinal
            units = num_full_units(plan)
        # a tile with no unit left is read from past the keys, where TMA fills zeros
        kv = keys_of_tile(lists, unit, ordinal, units, kv_in_unit, kv_len, tile_n, unit_size)
        if parts == 1:
            tma.async_copy_global_to_shared(desc, tile_at(place, kv), bar, tile)
        else:
            rows = tile.slice(part * part_rows, part_rows, dim=0)
            tma.async_copy_global_to_shared(desc, tile_at(place, kv), bar, rows)


@gluon.jit
def _feed(produce, shared, plane, q_tile, q_span, kv_span, step, turn, CFG: gl.constexpr):
    """Publish a piece of work, fetch its queries and KV tiles; return the next step."""
    q_desc, k_desc, v_desc, _, _ = produce
    mask, q_ring, k_ring, v_ring, work, _, heads, band, cu_seqlens = shared
    q_smem, q_full, q_empty = q_ring
    consumers: gl.constexpr = CFG.CONSUMERS
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    batch, q_head, kv_head = batch_and_heads(plane, heads[0], heads[1])
    plan = plan_piece(mask, plane, q_tile, (q_span[1], kv_span[1]), heads, band, CFG)
    num_masked = num_masked_units(plan)
    kv_tiles = num_tiles(num_masked, tile_n, unit_size)
    kv_tiles += num_tiles(num_full_units(plan), tile_n, unit_size)
    fields = (plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plane, q_tile)
    if cu_seqlens[0] is not None:
        fields = fields + (q_span[0], q_span[1], kv_span[1])  # noqa: RUF005
    publish(work, turn, fields)
    q_stage = turn % CFG.Q_STAGES
    q_bar = q_full.index(q_stage)
    mbarrier.wait(q_empty.index(q_stage), ((turn // CFG.Q_STAGES) & 1) ^ 1)
    mbarrier.expect(q_bar, consumers * q_desc.block_type.nbytes)
    q_place = plane_place(cu_seqlens[0], batch, q_head, q_span[0], q_span[1])
    for g in gl.static_range(consumers):
        q_row = q_tile * CFG.tile_m + g * ROWS
        q = q_smem.index(q_stage * consumers + g)
        tma.async_copy_global_to_shared(q_desc, tile_at(q_place, q_row), q_bar, q)
    visit = (mask[0], plan, num_masked, kv_span[1])
    kv_place = plane_place(cu_seqlens[1], batch, kv_head, kv_span[0], kv_span[1])
    for kv_tile in range(kv_tiles):
        _fetch_tile(k_desc, k_ring, step, visit, kv_tile, kv_place, CFG)
        _fetch_tile(v_desc, v_ring, step, visit, kv_tile, kv_place, CFG)
        step += 1
    return step


@gluon.jit
def _produce(produce, shared, CFG: gl.constexpr):
    """Take pieces of work, publish them and keep the rings full."""
    _, _, _, counter_ptr, schedule = produce
    mask, _, _, _, work, lengths, heads, _, cu_seqlens = shared
    step = 0
    turn = 0
    sequence = 0
    if cu_seqlens[0] is None:
        q_tiles = count_q_tiles(mask, schedule, lengths[0], CFG)
        total = schedule[1] * q_tiles
    else:
        num_sequences = schedule[1] // heads[0]
        total = count_packed_pieces(cu_seqlens[0], num_sequences, heads[0], CFG.tile_m)
    piece = gl.program_id(0)
    while piece < total:
        next_piece = piece + gl.num_programs(0)
        if schedule[3] != 0:
            # asked for a whole piece ahead of its use
            next_piece = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        if cu_seqlens[0] is None:
            plane, q_tile = place_piece(mask, schedule, piece, q_tiles, CFG)
            spans = (0, lengths[0]), (0, lengths[1])
            step = _feed(produce, shared, plane, q_tile, *spans, step, turn, CFG)
            turn += 1
        else:
            sequence, plane, q_tile, q_span, kv_span = place_packed_piece(
                cu_seqlens, piece, sequence, num_sequences, lengths, heads, CFG
            )
            if q_tile * CFG.tile_m < q_span[1]:
                step = _feed(produce, shared, plane, q_tile, q_span, kv_span, step, turn, CFG)
                turn += 1
        piece = next_piece
    # no plane: the end
    end = (0, 0, 0, 0, 0, 0, -1, 0)
    if cu_seqlens[0] is not None:
        end = end + (0, 0, 0)  # noqa: RUF005
    publish(work, turn, end)


@gluon.jit
def _attend_half(q, rings, step, state, acc, kv_start, bounds, score, CFG: gl.constexpr):
    """Take in the first HALF keys of the tile at `step`, which is a piece's first."""
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
    k = k_smem.index(stage).slice(0, HALF, dim=0).permute((1, 0))
    no_scores = gl.zeros([ROWS, HALF], gl.float32, s_layout)
    scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
    s = cap(warpgroup_mma_wait(0, deps=(scores,)), score[1])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = mask_band(s, kv_start, (first, last, every_first, every_last), CFG)
    m_log2, row_sum, weights, _ = softmax_step(m_log2, row_sum, s, score[0])
    p = gl.convert_layout(weights.to(q.dtype), p_layout)
    mbarrier.wait(v_full.index(stage), phase)
    v = v_smem.index(stage).slice(0, HALF, dim=0)
    product = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    m_log2 = gl.convert_layout(m_log2, state_rows)
    return m_log2, gl.convert_layout(row_sum, state_rows), acc


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Attend with 64 queries, piece by piece of work."""
    out_desc, lse_ptr, lse_head_stride, sinks_ptr, score, out_tiles, pins = consume
    mask, q_ring, k_ring, v_ring, work, lengths, heads, band, cu_seqlens = shared
    q_smem, q_full, q_empty = q_ring
    k_smem, k_full, k_empty = k_ring
    v_smem, v_full, v_empty = v_ring
    tile_n: gl.constexpr = CFG.TILE_N
    tile_dv: gl.constexpr = CFG.TILE_DV
    unit_size: gl.constexpr = CFG.UNIT
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    out_smem = out_tiles.index(GROUP)
    pin = pins.index(GROUP)
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    step = 0
    turn = 0
    piece = take(work, turn)
    while piece[6] >= 0:
        plan = (piece[0], piece[1], piece[2], piece[3], piece[4], piece[5])
        q_first, q_len, kv_len = piece_lengths(piece, lengths)
        batch, q_head, _ = batch_and_heads(piece[6], heads[0], heads[1])
        q_start = piece[7] * CFG.tile_m
        q_index = q_start + GROUP * ROWS + rows
        first, last = row_bounds(position(q_index, q_len, kv_len), kv_len, band[0], band[1])
        first_pos = position(q_start + GROUP * ROWS, q_len, kv_len)
        _, every_last = row_bounds(first_pos, kv_len, band[0], band[1])
        every_first, any_last = row_bounds(first_pos + (ROWS - 1), kv_len, band[0], band[1])
        bounds = (first, last, every_first, every_last)
        num_masked = num_masked_units(plan)
        masked_tiles = num_tiles(num_masked, tile_n, unit_size)
        kv_tiles = masked_tiles + num_tiles(num_full_units(plan), tile_n, unit_size)
        visit = (mask[0], plan, num_masked, kv_len)
        m_log2, row_sum = init_state(q_index)
        acc = gl.zeros([ROWS, tile_dv], gl.float32, o_layout)
        q_stage = turn % CFG.Q_STAGES
        q = q_smem.index(q_stage * CFG.CONSUMERS + GROUP)
        mbarrier.wait(q_full.index(q_stage), (turn // CFG.Q_STAGES) & 1)
        taken = 0
        if CFG.HALF_TILES:
            kv_start = masked_unit(plan, 0) * tile_n
            if (masked_tiles > 0) & (any_last < kv_start + HALF):
                rings = (k_ring, v_ring)
                m_log2, row_sum, acc = _attend_half(
                    q, rings, step, (m_log2, row_sum), acc, kv_start, bounds, score, CFG
                )
                step += 1
                taken = 1
        if kv_tiles > taken:
            stage = step % CFG.STAGES
            mbarrier.wait(k_full.index(stage), (step // CFG.STAGES) & 1)
            k = k_smem.index(stage).permute((1, 0))
            scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            s = cap(warpgroup_mma_wait(0, deps=(scores,)), score[1])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if masked_tiles > taken:
                s = mask_scores(s, visit, taken, q_index, q_start, bounds, CFG)
            m_log2, row_sum, weights, rescale = softmax_step(m_log2, row_sum, s, score[0])
            if CFG.HALF_TILES:
                acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)
            for kv_tile in range(taken + 1, kv_tiles):
                last_stage = stage
                last_phase = (step // CFG.STAGES) & 1
                step += 1
                stage = step % CFG.STAGES
                mbarrier.wait(k_full.index(stage), (step // CFG.STAGES) & 1)
                k = k_smem.index(stage).permute((1, 0))
                scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(last_stage), last_phase)
                product = warpgroup_mma(p, v_smem.index(last_stage), acc, is_async=True)
                s = cap(warpgroup_mma_wait(1, deps=(scores,)), score[1])
                mbarrier.arrive(k_empty.index(stage), count=1)
                if kv_tile < masked_tiles:
                    s = mask_scores(s, visit, kv_tile, q_index, q_start, bounds, CFG)
                m_log2, row_sum, weights, rescale = softmax_step(m_log2, row_sum, s, score[0])
                # ptxas would sink the softmax below the wait, where it overlaps with nothing;
                # a store to shared memory that needs its result keeps it above
                pin.store(row_sum)
                acc = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(v_empty.index(last_stage), count=1)
                acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
                p = gl.convert_layout(weights.to(dtype), p_layout)
            # every score of this piece is taken: the next queries may come
            mbarrier.arrive(q_empty.index(q_stage), count=1)
            mbarrier.wait(v_full.index(stage), (step // CFG.STAGES) & 1)
            product = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
        else:
            mbarrier.arrive(q_empty.index(q_stage), count=1)

        if sinks_ptr is not None:
            m_log2, row_sum, rescale = add_sink(m_log2, row_sum, gl.load(sinks_ptr + q_head))
            acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
        inverse, lse = finalise(m_log2, row_sum)
        out = acc * gl.convert_layout(inverse, o_rows)[:, None]
        # the copy of the piece before must have read the buffer
        tma.store_wait(0)
        out_smem.store(out.to(dtype))
        fence_async_shared()
        q_row = q_start + GROUP * ROWS
        out_place = plane_place(cu_seqlens[0], batch, q_head, q_first, q_len)
        tma.async_copy_shared_to_global(out_desc, tile_at(out_place, q_row), out_smem)
        lse_plane = lse_offset(batch, q_head, q_first, heads[0], lse_head_stride, cu_seqlens[0])
        gl.store(lse_ptr + lse_plane + q_index, lse, mask=exists(q_index, q_len))
        turn += 1
        piece = take(work, turn)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right",
        "num_planes", "section", "dynamic", "q_heads", "group_size",
    ]
)  # fmt: skip
def _attn_fwd_sm90_kernel(
    out_desc,
    lse_ptr,
    q_desc,
    k_desc,
    v_desc,
    sinks_ptr,
    cu_seqlens,
    counter_ptr,
    order_ptr,
    block_lists,
    mask_batch_step,
    mask_head_step,
    lse_head_stride,
    q_len,
    kv_len,
    left,
    right,
    num_planes,
    section,
    dynamic,
    q_heads,
    group_size,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles; `_produce` and `_consume` do the work."""
    consumers: gl.constexpr = CFG.CONSUMERS
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    q_smem = tiles(q_desc, CFG.Q_STAGES * consumers, ROWS)
    out_smem = tiles(out_desc, consumers, ROWS)
    k_smem = tiles(k_desc, stages, tile_n)
    v_smem = tiles(v_desc, stages, tile_n)
    pins = gl.allocate_shared_memory(
        gl.float32, [consumers, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_ring = (q_smem, barriers(CFG.Q_STAGES, 1), barriers(CFG.Q_STAGES, consumers))
    k_ring = (k_smem, barriers(stages, 1), barriers(stages, consumers))
    v_ring = (v_smem, barriers(stages, 1), barriers(stages, consumers))
    work = work_channel(DENSE_FIELDS if cu_seqlens[0] is None else PACKED_FIELDS, consumers)
    fence_async_shared()

    mask = (block_lists, mask_batch_step, mask_head_step)
    heads = (q_heads, group_size)
    schedule = (order_ptr, num_planes, section, dynamic)
    produce = (q_desc, k_desc, v_desc, counter_ptr, schedule)
    consume = (out_desc, lse_ptr, lse_head_stride, sinks_ptr, score, out_smem, pins)
    lengths = (q_len, kv_len)
    shared = (mask, q_ring, k_ring, v_ring, work, lengths, heads, (left, right), cu_seqlens)
    # the first role runs in the warps of the launch, the others in warps of their own
    if consumers == 1:
        gl.warp_specialize(
            [(_consume, (consume, shared, 0, CFG)), (_produce, (produce, shared, CFG))],
            [1],
            [producer_registers],
        )
    elif consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, 0, CFG)),
                (_consume, (consume, shared, 1, CFG)),
                (_produce, (produce, shared, CFG)),
            ],
            [4, 1],
            [registers, producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, 0, CFG)),
                (_consume, (consume, shared, 1, CFG)),
                (_consume, (consume, shared, 2, CFG)),
                (_produce, (produce, shared, CFG)),
            ],
            [4, 4, 1],
            [registers, registers, producer_registers],
        )
