"""Attention forward on Hopper: the arithmetic of `fwd.py`, moved by TMA and multiplied by WGMMA.

One program per SM takes pieces of work until none is left; a piece is CONSUMERS x 64 queries of one
head. A producer warp finds out which KV tiles the piece visits, publishes that, and keeps rings of
K and V tiles full; the consumer warp groups each own 64 queries. A consumer issues the scores of
tile i and the product of tile i - 1 with V together, so that the softmax of tile i runs while the
tensor cores are busy. Tiles that need mask code come first.

Called as impl "sm90" of `bsk::attn_fwd`. Limits: fp16 and bf16, D and Dv up to 128, positive scale,
dense batches, strides and addresses that TMA takes.
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

from ...device.masks import (
    bit_visible,
    exists,
    kv_range,
    kv_range_of_all,
    position,
    row_bounds,
    within_bounds,
)
from ...device.schedule import place_in_sections
from ...device.scores import cap
from ...device.sequences import batch_and_heads
from ...device.softmax import add_sink, finalise, init_state, softmax_step
from ...device.visits import (
    bits_of_tile,
    keys_of_tile,
    masked_unit,
    num_full_units,
    num_masked_units,
    num_tiles,
    plan_blocks,
    plan_dense,
    tile_ordinal,
)
from .config_sm90 import GROUP_ROWS

ROWS = gl.constexpr(GROUP_ROWS)
SCAN = gl.constexpr(128)
# Pieces of work in flight between producer and consumers, and the numbers that describe one:
# the six bounds of a visit plan, plane and query tile.
WORK_DEPTH = gl.constexpr(2)
WORK_FIELDS = gl.constexpr(8)


@gluon.jit
def _publish(work, turn, fields):
    """Hand a piece of work to the consumers, once they have read the one before last."""
    numbers, filled, free = work
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, lane)
    depth = turn % WORK_DEPTH
    mbarrier.wait(free.index(depth), ((turn // WORK_DEPTH) & 1) ^ 1)
    for i in gl.static_range(WORK_FIELDS):
        numbers.index(depth * WORK_FIELDS + i).store(zero + fields[i])
    mbarrier.arrive(filled.index(depth), count=1)


@gluon.jit
def _take(work, turn):
    """Read the piece of work that the producer published for this turn: (plan, plane, q_tile)."""
    numbers, filled, free = work
    group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    depth = turn % WORK_DEPTH
    mbarrier.wait(filled.index(depth), (turn // WORK_DEPTH) & 1)
    base = depth * WORK_FIELDS
    p0 = gl.max(numbers.index(base).load(group), 0)
    p1 = gl.max(numbers.index(base + 1).load(group), 0)
    p2 = gl.max(numbers.index(base + 2).load(group), 0)
    p3 = gl.max(numbers.index(base + 3).load(group), 0)
    p4 = gl.max(numbers.index(base + 4).load(group), 0)
    p5 = gl.max(numbers.index(base + 5).load(group), 0)
    plane = gl.max(numbers.index(base + 6).load(group), 0)
    q_tile = gl.max(numbers.index(base + 7).load(group), 0)
    mbarrier.arrive(free.index(depth), count=1)
    return (p0, p1, p2, p3, p4, p5), plane, q_tile


@gluon.jit
def _plan_piece(lists, plane, q_tile, lengths, heads, band, CFG: gl.constexpr):
    """Which KV tiles the queries of a piece visit."""
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    q_len, kv_len = lengths
    q_start = q_tile * CFG.tile_m
    q_end = q_start + CFG.tile_m
    kv_lo, kv_hi = kv_range(q_start, q_end, q_len, kv_len, band[0], band[1])
    all_lo, all_hi = kv_range_of_all(q_start, q_end, q_len, kv_len, band[0], band[1])
    if lists is None:
        plan = plan_dense(kv_lo, kv_hi, all_lo, all_hi, tile_n)
    else:
        batch, q_head, kv_head = batch_and_heads(plane, heads[0], heads[1])
        row = batch * lists[5] + q_head * lists[6] + q_start // lists[7]
        offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
        plan = plan_blocks(lists, row, kv_lo, kv_hi, all_lo, all_hi, offs_scan, tile_n, unit_size)
    return plan


@gluon.jit
def _fetch_tile(desc, smem, bar, lists, plan, step, num_masked, plane, kv_len, CFG: gl.constexpr):
    """Start the copies of KV tile `step` of a plan."""
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    parts: gl.constexpr = CFG.parts
    part_rows: gl.constexpr = CFG.part_rows
    masked_tiles = num_tiles(num_masked, tile_n, unit_size)
    batch, kv_head = plane
    mbarrier.expect(bar, parts * desc.block_type.nbytes)
    for part in gl.static_range(parts):
        kv_tile = step if step < masked_tiles else step - masked_tiles
        ordinal, kv_in_unit = tile_ordinal(kv_tile, part * part_rows, tile_n, unit_size)
        if step < masked_tiles:
            unit = masked_unit(plan, ordinal)
            units = num_masked
        else:
            unit = plan[3] + ordinal
            units = num_full_units(plan)
        kv = keys_of_tile(lists, unit, ordinal, units, kv_in_unit, kv_len, tile_n, unit_size)
        if parts == 1:
            tma.async_copy_global_to_shared(desc, [batch, kv_head, kv, 0], bar, smem)
        else:
            rows = smem.slice(part * part_rows, part_rows, dim=0)
            tma.async_copy_global_to_shared(desc, [batch, kv_head, kv, 0], bar, rows)


@gluon.jit
def _produce(produce, shared, CFG: gl.constexpr):
    """Take pieces of work, publish them and keep the rings full."""
    q_desc, k_desc, v_desc, counter_ptr, schedule = produce
    lists, q_ring, k_ring, v_ring, work, lengths, heads, band = shared
    q_smem, q_full, q_empty = q_ring
    k_smem, k_full, k_empty = k_ring
    v_smem, v_full, v_empty = v_ring
    consumers: gl.constexpr = CFG.CONSUMERS
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    total = schedule[0] * schedule[1]
    kv_len = lengths[1]
    step = 0
    turn = 0
    piece = gl.program_id(0)
    while piece < total:
        # asked for a whole piece ahead of its use
        next_piece = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        plane, q_tile = place_in_sections(piece, schedule[0], schedule[1], schedule[2])
        batch, q_head, kv_head = batch_and_heads(plane, heads[0], heads[1])
        plan = _plan_piece(lists, plane, q_tile, lengths, heads, band, CFG)
        num_masked = num_masked_units(plan)
        tiles = num_tiles(num_masked, tile_n, unit_size) + num_tiles(num_full_units(plan), tile_n, unit_size)
        _publish(work, turn, (plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plane, q_tile))
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, consumers * q_desc.block_type.nbytes)
        for g in gl.static_range(consumers):
            q_row = q_tile * CFG.tile_m + g * ROWS
            tma.async_copy_global_to_shared(q_desc, [batch, q_head, q_row, 0], q_full, q_smem.index(g))
        for i in range(tiles):
            stage = step % CFG.STAGES
            phase = ((step // CFG.STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            _fetch_tile(k_desc, k_smem.index(stage), k_full.index(stage), lists, plan, i, num_masked, (batch, kv_head), kv_len, CFG)
            mbarrier.wait(v_empty.index(stage), phase)
            _fetch_tile(v_desc, v_smem.index(stage), v_full.index(stage), lists, plan, i, num_masked, (batch, kv_head), kv_len, CFG)
            step += 1
        turn += 1
        piece = next_piece
    _publish(work, turn, (0, 0, 0, 0, 0, 0, -1, 0))


@gluon.jit
def _mask_scores(s, lists, plan, kv_tile, num_masked, q_index, q_start, first, last, kv_len,
                 CFG: gl.constexpr):
    """Scores of a tile that needs mask code, -inf where a query does not see a key."""
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    layout: gl.constexpr = CFG.layout(CFG.TILE_N)
    offs_n = gl.arange(0, tile_n, gl.SliceLayout(0, layout))
    ordinal, kv_in_unit = tile_ordinal(kv_tile, offs_n, tile_n, unit_size)
    unit = masked_unit(plan, ordinal)
    kv_pos = keys_of_tile(lists, unit, ordinal, num_masked, kv_in_unit, kv_len, tile_n, unit_size)
    visible = within_bounds(kv_pos[None, :], first[:, None], last[:, None])
    if lists is not None:
        q_in_block = q_index - q_start // lists[7] * lists[7]
        words = bits_of_tile(lists, unit, ordinal, num_masked, q_in_block, kv_in_unit, tile_n, unit_size)
        visible = visible & bit_visible(words, kv_in_unit[None, :])
    return gl.where(visible, s, -float("inf"))


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Attend with 64 queries, piece by piece of work."""
    out_desc, lse_ptr, lse_strides, sinks_ptr, score, out_smem, pins = consume
    lists, q_ring, k_ring, v_ring, work, lengths, heads, band = shared
    q_smem, q_full, q_empty = q_ring
    k_smem, k_full, k_empty = k_ring
    v_smem, v_full, v_empty = v_ring
    tile_n: gl.constexpr = CFG.TILE_N
    tile_dv: gl.constexpr = CFG.TILE_DV
    unit_size: gl.constexpr = CFG.UNIT
    s_layout: gl.constexpr = CFG.layout(CFG.TILE_N)
    o_layout: gl.constexpr = CFG.layout(CFG.TILE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    q_len, kv_len = lengths
    q = q_smem.index(GROUP)
    out_smem = out_smem.index(GROUP)
    pin = pins.index(GROUP)
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    step = 0
    turn = 0
    plan, plane, q_tile = _take(work, turn)
    while plane >= 0:
        batch, q_head, kv_head = batch_and_heads(plane, heads[0], heads[1])
        q_start = q_tile * CFG.tile_m
        q_index = q_start + GROUP * ROWS + rows
        first, last = row_bounds(position(q_index, q_len, kv_len), kv_len, band[0], band[1])
        num_masked = num_masked_units(plan)
        masked_tiles = num_tiles(num_masked, tile_n, unit_size)
        tiles = masked_tiles + num_tiles(num_full_units(plan), tile_n, unit_size)
        m_log2, row_sum = init_state(q_index)
        acc = gl.zeros([ROWS, tile_dv], gl.float32, o_layout)
        mbarrier.wait(q_full, turn & 1)
        if tiles > 0:
            stage = step % CFG.STAGES
            mbarrier.wait(k_full.index(stage), (step // CFG.STAGES) & 1)
            pending = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            s = cap(warpgroup_mma_wait(0, deps=(pending,)), score[1])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if masked_tiles > 0:
                s = _mask_scores(s, lists, plan, 0, num_masked, q_index, q_start, first, last, kv_len, CFG)
            m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, score[0])
            p = gl.convert_layout(p.to(dtype), p_layout)
            for i in range(1, tiles):
                last_stage = stage
                last_phase = (step // CFG.STAGES) & 1
                step += 1
                stage = step % CFG.STAGES
                mbarrier.wait(k_full.index(stage), (step // CFG.STAGES) & 1)
                scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(last_stage), last_phase)
                product = warpgroup_mma(p, v_smem.index(last_stage), acc, is_async=True)
                s = cap(warpgroup_mma_wait(1, deps=(scores,)), score[1])
                mbarrier.arrive(k_empty.index(stage), count=1)
                if i < masked_tiles:
                    s = _mask_scores(s, lists, plan, i, num_masked, q_index, q_start, first, last, kv_len, CFG)
                m_log2, row_sum, weights, rescale = softmax_step(m_log2, row_sum, s, score[0])
                pin.store(row_sum)
                acc = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(v_empty.index(last_stage), count=1)
                acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
                p = gl.convert_layout(weights.to(dtype), p_layout)
            # every score of this piece is taken: the next queries may come
            mbarrier.arrive(q_empty, count=1)
            mbarrier.wait(v_full.index(stage), (step // CFG.STAGES) & 1)
            product = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
        else:
            mbarrier.arrive(q_empty, count=1)

        if sinks_ptr is not None:
            m_log2, row_sum, rescale = add_sink(m_log2, row_sum, gl.load(sinks_ptr + q_head))
            acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
        inverse, lse = finalise(m_log2, row_sum)
        out = acc * gl.convert_layout(inverse, o_rows)[:, None]
        tma.store_wait(0)
        out_smem.store(out.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [batch, q_head, q_start + GROUP * ROWS, 0], out_smem)
        lse_plane = gl.cast(batch, gl.int64) * lse_strides[0] + gl.cast(q_head, gl.int64) * lse_strides[1]
        gl.store(lse_ptr + lse_plane + q_index * lse_strides[2], lse, mask=exists(q_index, q_len))
        turn += 1
        plan, plane, q_tile = _take(work, turn)
    tma.store_wait(0)


@gluon.jit
def _tiles(desc, count: gl.constexpr, rows: gl.constexpr):
    """Allocate `count` shared-memory tiles of `rows` rows as wide as a descriptor copies."""
    width: gl.constexpr = desc.block_type.shape[3]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, width], desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [count, rows, width], layout)


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Allocate `count` barriers that complete after `arrivals` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit(do_not_specialize=["block_lists", "lse_strides", "lengths", "heads", "schedule", "band"])
def _attn_fwd_sm90_kernel(out_desc, lse_ptr, q_desc, k_desc, v_desc, sinks_ptr, counter_ptr,
                          block_lists, lse_strides, lengths, heads, schedule, band, score,
                          CFG: gl.constexpr):
    """Set up rings and roles; `_produce` and `_consume` do the work."""
    consumers: gl.constexpr = CFG.CONSUMERS
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    q_smem = _tiles(q_desc, consumers, ROWS)
    out_smem = _tiles(out_desc, consumers, ROWS)
    k_smem = _tiles(k_desc, stages, tile_n)
    v_smem = _tiles(v_desc, stages, tile_n)
    numbers = gl.allocate_shared_memory(
        gl.int32, [WORK_DEPTH * WORK_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = _barriers(1, 1)
    q_empty = _barriers(1, consumers)
    k_full = _barriers(stages, 1)
    k_empty = _barriers(stages, consumers)
    v_full = _barriers(stages, 1)
    v_empty = _barriers(stages, consumers)
    filled = _barriers(WORK_DEPTH, 1)
    free = _barriers(WORK_DEPTH, consumers)
    fence_async_shared()

    q_ring = (q_smem, q_full.index(0), q_empty.index(0))
    k_ring = (k_smem, k_full, k_empty)
    v_ring = (v_smem, v_full, v_empty)
    work = (numbers, filled, free)
    produce = (q_desc, k_desc, v_desc, counter_ptr, schedule)
    pins = gl.allocate_shared_memory(gl.float32, [consumers, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    consume = (out_desc, lse_ptr, lse_strides, sinks_ptr, score, out_smem, pins)
    shared = (block_lists, q_ring, k_ring, v_ring, work, lengths, heads, band)
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
