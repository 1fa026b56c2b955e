# mypy: ignore-errors
"""The split backward on Hopper: dk and dv by one kernel, dq by another, for key blocks of 64.

    dk/dv:  s^T = k q^T    dp^T = v dout^T    dv += p^T dout    dk += ds^T q
    dq:     s = q k^T      dp = dout v^T      dq += ds k

Either kernel has one consumer warp group that owns 64 rows of its outputs: sums have one order, so
that results are the same bits in every run, and nothing is accumulated in memory. Two programs
share an SM: one computes exponentials while the other multiplies.

A program of the dk/dv kernel owns 64 keys of one KV head and walks over the queries of all heads
that see them; the producer is that of `backward`. A program of the dq kernel owns 64 queries of one
head and walks over the keys that they see, as in `forward`: a scheduler warp looks up rows of the
mask, a producer copies keys and values. Output gradients, which stay for a whole work tile, are an
operand from registers. The product for dq of a tile is issued with the scores of the next one.

Called after the preprocess kernel as part of impl "sm90" of `bsk::attn_bwd`, for masks with key
blocks of 64.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.backprop import probabilities, score_gradients
from ...device.gluon.compat import async_load, async_store, placed
from ...device.gluon.pipeline import barriers, ring, take, tiles, work_channel
from ...device.gluon.records import Ring, WorkChannel
from ...device.gluon.row_parts import ZERO, keep_bits
from ...device.masks import position, row_bounds
from ...device.records import Band, Heads, Lengths, Mask
from ...device.schedule import batch_and_heads
from ...device.visits import num_masked_blocks
from .backward import score_step, start_products, zero_of
from .backward_producer import produce_steps
from .backward_shared import (
    ROWS,
    Descriptors,
    Shared,
    WorkOrder,
    padded_queries,
    query_ring,
    resident_keys,
    step_infos,
)
from .forward_producer import (
    DENSE_FIELDS,
    ForwardShared,
    ProducerArgs,
    Schedule,
    Visit,
    count_tiles,
    find_work,
    take_work_tile,
    tile_starts,
)
from .forward_scores import visible_bits

# dk and dv


@gluon.jit
def _step_dkdv(dk, dv, step, kv_index, score, shared, MASKED: gl.constexpr, CFG: gl.constexpr):
    """Add what one tile of queries gives to the gradients of 64 keys."""
    k_smem, v_smem, ring = shared.keys.k_smem, shared.keys.v_smem, shared.queries
    dtype: gl.constexpr = k_smem.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_DV), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_D), 2)
    stage = step % CFG.STAGES
    mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
    s_started = start_products(k_smem.index(zero_of(step)), ring.q_smem, step, CFG.SCORE_D, CFG)
    v = v_smem.index(zero_of(step))
    dp_started = start_products(v, ring.dout_smem, step, CFG.SCORE_DV, CFG)
    early: gl.constexpr = score.inverse_cap is None
    p, ds = score_step(
        s_started, dp_started, step, MASKED, kv_index, score, shared, early, CFG
    )  # fmt: skip
    p = gl.convert_layout(p.to(dtype), p_layout)
    ds = gl.convert_layout(ds.to(dtype), ds_layout)
    dv_started = warpgroup_mma(p, ring.dout_smem.index(placed(stage)), dv, is_async=True)
    dk_started = warpgroup_mma(ds, ring.q_smem.index(placed(stage)), dk, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=(dv_started, dk_started))
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume_dkdv(dk_desc, dv_desc, score, shared, CFG: gl.constexpr):
    """Gradients of the 64 keys of each work tile."""
    work, heads = shared.work, shared.heads
    k_smem, v_smem, kv_full, kv_empty = shared.keys
    tile_d: gl.constexpr = CFG.TILE_D
    tile_dv: gl.constexpr = CFG.TILE_DV
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    k_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_D)
    v_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    dtype: gl.constexpr = k_smem.dtype
    offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    kv_heads = heads.q // heads.group_size
    step = 0
    slot = 1
    work_tiles = 0
    batch_head, kv_tile = take(work, 0)
    while batch_head >= 0:
        kv_index = kv_tile * ROWS + offs_n
        dk = gl.zeros([ROWS, tile_d], gl.float32, k_layout)
        dv = gl.zeros([ROWS, tile_dv], gl.float32, v_layout)
        mbarrier.wait(kv_full, work_tiles & 1)
        for _ in range(heads.group_size):
            q_tiles, masked_tiles = take(work, slot)
            slot += 1
            for _ in range(masked_tiles):
                dk, dv = _step_dkdv(dk, dv, step, kv_index, score, shared, True, CFG)
                step += 1
            # a loop of its own: what masks spill would be reloaded here
            for _ in range(masked_tiles, q_tiles):
                dk, dv = _step_dkdv(dk, dv, step, kv_index, score, shared, False, CFG)
                step += 1
        # keys and values have been read for the last time: their gradients take their memory
        place = [batch_head // kv_heads, batch_head % kv_heads, kv_tile * ROWS, 0]
        v_smem.index(0).store(dv.to(dtype))
        k_smem.index(0).store((dk * score.scale).to(dtype))
        fence_async_shared()
        async_store(dv_desc, place, v_smem.index(0))
        async_store(dk_desc, place, k_smem.index(0))
        tma.store_wait(0)
        mbarrier.arrive(kv_empty, count=1)
        work_tiles += 1
        batch_head, kv_tile = take(work, slot)
        slot += 1


@gluon.jit(
    do_not_specialize=[
        "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right", "num_batch_heads",
        "q_heads", "group_size",
    ]
)  # fmt: skip
def _attn_bwd_dkdv_sm90_kernel(
    dk_desc,
    dv_desc,
    dout_desc,
    q_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    counter_ptr,
    order_ptr,
    block_lists,
    mask_batch_step,
    mask_head_step,
    q_len,
    kv_len,
    left,
    right,
    num_batch_heads,
    q_heads,
    group_size,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles; `score` is what `gradient_factors` gives."""
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    descs = Descriptors(q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc)
    keys = resident_keys(descs, CFG)
    queries = query_ring(descs, CFG)
    steps = step_infos()
    work = work_channel(2, 1)
    fence_async_shared()

    mask = Mask(block_lists, mask_batch_step, mask_head_step)
    lengths, heads, band = Lengths(q_len, kv_len), Heads(q_heads, group_size), Band(left, right)
    shared = Shared(mask, keys, queries, steps, work, lengths, heads, band, None)
    order = WorkOrder(counter_ptr, order_ptr, None, None, 1, num_batch_heads, 1, 1)
    # the first role runs in the warps of the launch, the other in a warp of its own
    gl.warp_specialize(
        [
            (_consume_dkdv, (dk_desc, dv_desc, score, shared, CFG)),
            (produce_steps, (descs, order, shared, CFG)),
        ],
        [1],
        [producer_registers],
    )


# dq


class DqShared(NamedTuple):
    """Shared by the roles of the dq kernel: a `Ring` for each operand, and the work channel."""

    mask: Mask
    q: Ring
    dout: Ring
    k: Ring
    v: Ring
    work: WorkChannel
    lengths: Lengths
    heads: Heads
    band: Band


class OwnQueries(NamedTuple):
    """The 64 queries of a work tile, output gradients as an operand from registers."""

    q_smem: Any
    dout: Any
    shift: Any
    """lse in base 2."""
    delta: Any
    q_index: Any
    q_start: Any
    bounds: Any
    """First and last key that each of them sees, by the band."""


@gluon.jit
def copy_rows(
    desc, ring, step, batch, head, row,
    STAGES: gl.constexpr, SLICES: gl.constexpr = 1, GROUPS: gl.constexpr = 1,
):  # fmt: skip
    """Start the copies of one tile into a ring, once its stage is free: slices of 64 rows each."""
    width: gl.constexpr = desc.block_type.shape[3]
    stage = step % STAGES
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full, GROUPS * SLICES * desc.block_type.nbytes)
    for g in gl.static_range(GROUPS):
        for i in gl.static_range(SLICES):
            tile = ring.tiles.index((stage * GROUPS + g) * SLICES + i)
            async_load(desc, [batch, head, row + g * ROWS, i * width], full, tile)


@gluon.jit
def _copy_keys(k_desc, v_desc, shared, visit, batch, kv_head, kv_tile, step, CFG: gl.constexpr):
    """Start the copies of one tile of keys and of values; return the next step."""
    start = tile_starts(visit, kv_tile, CFG)[0]
    copy_rows(k_desc, shared.k, step, batch, kv_head, start, CFG.K_STAGES)
    copy_rows(v_desc, shared.v, step, batch, kv_head, start, CFG.V_STAGES)
    return step + 1


@gluon.jit
def _produce_dq(q_desc, dout_desc, k_desc, v_desc, shared, begun, CFG: gl.constexpr):
    """Keep the rings full for the work tiles that the scheduler warp publishes."""
    step = 0
    slot = 0
    tile = take_work_tile(shared.work, slot, 1)
    while tile.batch_head >= 0:
        mbarrier.arrive(begun, count=1)
        batch, q_head, kv_head = batch_and_heads(
            tile.batch_head, shared.heads.q, shared.heads.group_size
        )
        q_row = tile.q_tile * ROWS
        _, kv_tiles = count_tiles(tile.plan, CFG)
        visit = Visit(shared.mask.lists, tile.plan, num_masked_blocks(tile.plan), shared.lengths.kv)
        copy_rows(dout_desc, shared.dout, slot, batch, q_head, q_row, 1)
        # queries come after the first keys: their memory holds dq of the last work tile to its end
        ahead = gl.minimum(kv_tiles, CFG.V_STAGES)
        for kv_tile in range(0, ahead):
            step = _copy_keys(k_desc, v_desc, shared, visit, batch, kv_head, kv_tile, step, CFG)
        copy_rows(q_desc, shared.q, slot, batch, q_head, q_row, 1)
        for kv_tile in range(ahead, kv_tiles):
            step = _copy_keys(k_desc, v_desc, shared, visit, batch, kv_head, kv_tile, step, CFG)
        slot += 1
        tile = take_work_tile(shared.work, slot, 1)


@gluon.jit
def _await(ring, step, STAGES: gl.constexpr):
    """Wait for the tile of a step."""
    mbarrier.wait(ring.full.index(step % STAGES), (step // STAGES) & 1)
    return ring.tiles.index(placed(step % STAGES))


@gluon.jit
def free_stage(ring, step, STAGES: gl.constexpr):
    """Tell the producer that the tile of a step is done with."""
    mbarrier.arrive(ring.empty.index(step % STAGES), count=1)


@gluon.jit
def _start_scores(own, shared, step, CFG: gl.constexpr):
    """Start the products of queries and output gradients with the keys and values of a step."""
    tile_n: gl.constexpr = CFG.TILE_N
    nothing = gl.zeros([ROWS, tile_n], gl.float32, CFG.accumulator_layout(CFG.TILE_N))
    k = _await(shared.k, step, CFG.K_STAGES).permute((1, 0))
    s_started = warpgroup_mma(own.q_smem, k, nothing, use_acc=False, is_async=True)
    v = _await(shared.v, step, CFG.V_STAGES).permute((1, 0))
    dp_started = warpgroup_mma(own.dout, v, nothing, use_acc=False, is_async=True)
    return s_started, dp_started


@gluon.jit
def _weights(s, own, score, visit, kv_tile, masked, CFG: gl.constexpr):
    """Probabilities of the keys of a tile, 0 where a query does not see one."""
    p, capped = probabilities(s, None, own.shift[:, None], score)
    if masked:
        visible = visible_bits(visit, kv_tile, own.q_index, own.q_start, own.bounds, CFG)
        p = keep_bits(p, visible, ZERO)
    return p, capped


@gluon.jit
def _gradients(p, capped, dp, own, score, CFG: gl.constexpr):
    """ds as the operand of the product for dq."""
    layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_D), 2)
    ds = score_gradients(p, capped, dp, own.delta[:, None], score)
    return gl.convert_layout(ds.to(own.q_smem.dtype), layout)


@gluon.jit
def _step_dq(
    step, dq, ds, own, score, shared, visit, kv_tile, MASKED: gl.constexpr, CFG: gl.constexpr
):
    """dq of a step, and ds of the next one, which is returned."""
    k = shared.k.tiles.index(placed(step % CFG.K_STAGES))
    dq_started = warpgroup_mma(ds, k, dq, is_async=True)
    s_started, dp_started = _start_scores(own, shared, step + 1, CFG)
    s, dq = warpgroup_mma_wait(1, deps=(s_started, dq_started))
    free_stage(shared.k, step, CFG.K_STAGES)
    step += 1
    p, capped = _weights(s, own, score, visit, kv_tile, MASKED, CFG)
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    free_stage(shared.v, step, CFG.V_STAGES)
    return step, dq, _gradients(p, capped, dp, own, score, CFG)


@gluon.jit
def _consume_dq(dq_desc, lse_ptr, delta_ptr, score, shared, CFG: gl.constexpr):
    """dq of the 64 queries of each work tile."""
    work, lengths, heads, band = shared.work, shared.lengths, shared.heads, shared.band
    tile_d: gl.constexpr = CFG.TILE_D
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    offs = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    padded = padded_queries(lengths.q)
    step = 0
    slot = 0
    tile = take_work_tile(work, slot)
    while tile.batch_head >= 0:
        batch, q_head, _ = batch_and_heads(tile.batch_head, heads.q, heads.group_size)
        q_start = tile.q_tile * ROWS
        q_index = q_start + offs
        place = tile.batch_head.to(gl.int64) * padded + q_index
        exist = q_index < padded
        shift = gl.load(lse_ptr + place, exist, other=float("inf"))
        delta = gl.load(delta_ptr + place, exist, other=0.0)
        bounds = row_bounds(
            position(q_index, lengths.q, lengths.kv), lengths.kv, band.left, band.right
        )
        masked_tiles, kv_tiles = count_tiles(tile.plan, CFG)
        visit = Visit(shared.mask.lists, tile.plan, num_masked_blocks(tile.plan), lengths.kv)
        dout = _await(shared.dout, slot, 1).load(operand)
        q_smem = _await(shared.q, slot, 1)
        own = OwnQueries(q_smem, dout, shift, delta, q_index, q_start, bounds)
        dq = gl.zeros([ROWS, tile_d], gl.float32, CFG.accumulator_layout(CFG.TILE_D))
        if kv_tiles > 0:
            s_started, dp_started = _start_scores(own, shared, step, CFG)
            s = warpgroup_mma_wait(1, deps=(s_started,))
            p, capped = _weights(s, own, score, visit, 0, masked_tiles > 0, CFG)
            dp = warpgroup_mma_wait(0, deps=(dp_started,))
            # not before a product had them: a barrier does not wait for what was loaded, and copies
            # of the next output gradients came sooner where other programs kept shared memory busy
            free_stage(shared.dout, slot, 1)
            free_stage(shared.v, step, CFG.V_STAGES)
            ds = _gradients(p, capped, dp, own, score, CFG)
            for kv_tile in range(1, masked_tiles):
                step, dq, ds = _step_dq(step, dq, ds, own, score, shared, visit, kv_tile, True, CFG)
            # a loop of its own, which has the registers of the masks
            for kv_tile in range(gl.maximum(masked_tiles, 1), kv_tiles):
                step, dq, ds = _step_dq(
                    step, dq, ds, own, score, shared, visit, kv_tile, False, CFG
                )
            k = shared.k.tiles.index(placed(step % CFG.K_STAGES))
            dq_started = warpgroup_mma(ds, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq_started,))
            free_stage(shared.k, step, CFG.K_STAGES)
            step += 1
        else:
            free_stage(shared.dout, slot, 1)
        # every product with the queries is done: dq takes their memory
        dq_smem = shared.q.tiles.index(0)
        dq_smem.store((dq * score.scale).to(dq_smem.dtype))
        fence_async_shared()
        async_store(dq_desc, [batch, q_head, q_start, 0], dq_smem)
        tma.store_wait(0)
        free_stage(shared.q, slot, 1)
        slot += 1
        tile = take_work_tile(work, slot)


@gluon.jit(
    do_not_specialize=[
        "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right", "num_batch_heads",
        "dynamic", "q_heads", "group_size",
    ]
)  # fmt: skip
def _attn_bwd_dq_sm90_kernel(
    dq_desc,
    dout_desc,
    q_desc,
    k_desc,
    v_desc,
    lse_ptr,
    delta_ptr,
    counter_ptr,
    order_ptr,
    block_lists,
    mask_batch_step,
    mask_head_step,
    q_len,
    kv_len,
    left,
    right,
    num_batch_heads,
    dynamic,
    q_heads,
    group_size,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles; `score` is what `gradient_factors` gives."""
    tile_n: gl.constexpr = CFG.TILE_N
    registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    k_stages: gl.constexpr = CFG.K_STAGES
    v_stages: gl.constexpr = CFG.V_STAGES
    q_ring = ring(tiles(q_desc, 1, ROWS), 1, 1)
    dout_ring = ring(tiles(dout_desc, 1, ROWS), 1, 1)
    k_ring = ring(tiles(k_desc, k_stages, tile_n), k_stages, 1)
    v_ring = ring(tiles(v_desc, v_stages, tile_n), v_stages, 1)
    # producer and consumer take what the scheduler warp finds
    work = work_channel(DENSE_FIELDS, 2)
    begun = barriers(1, 1).index(0)
    fence_async_shared()

    mask = Mask(block_lists, mask_batch_step, mask_head_step)
    lengths, heads, band = Lengths(q_len, kv_len), Heads(q_heads, group_size), Band(left, right)
    shared = DqShared(mask, q_ring, dout_ring, k_ring, v_ring, work, lengths, heads, band)
    # the scheduler warp of the forward, which reads only these of its arguments
    schedule = Schedule(order_ptr, num_batch_heads, 1, dynamic, 0)
    find = ProducerArgs(None, None, None, counter_ptr, schedule, None)
    found = ForwardShared(mask, None, None, None, work, lengths, heads, band, None)
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume_dq, (dq_desc, lse_ptr, delta_ptr, score, shared, CFG)),
            (_produce_dq, (q_desc, dout_desc, k_desc, v_desc, shared, begun, CFG)),
            (find_work, (find, found, begun, CFG)),
        ],
        [1, 1],
        [registers, registers],
    )
