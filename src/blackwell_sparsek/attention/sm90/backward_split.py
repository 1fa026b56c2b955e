# mypy: ignore-errors
"""Attention backward on Hopper, the gradient of the queries alone: half of a pair of kernels.

    s = q k^T    dp = dout v^T    dq += ds k

A program owns 64 queries of one head and walks over the keys that they see, as in `fwd_sm90`: a
scout looks up rows of the mask, a producer copies keys and values, a warp group computes. Output
gradients, which stay for all of a piece of work, are an operand from registers. The product for dq
of a tile is issued with the scores of the next one. Sums have one order, so that bits are the same
in every run. Two programs share an SM: one computes exponentials while the other multiplies.

Called after `bwd_sm90_rows` as part of impl "sm90" of `bsk::attn_bwd`, for masks with key blocks
of 64 (`ops.attention_bwd_sm90_pair`).
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

from ...device.backprop import probabilities, score_gradients
from ...device.gluon.pipeline import barriers, take, tiles, work_channel
from ...device.masks import position, row_bounds
from ...device.records import Band, Heads, Lengths, Mask, VisitPlan
from ...device.schedule import batch_and_heads
from ...device.visits import num_masked_units
from ...launch.descriptors import GROUP_ROWS
from .backward import score_step, start_products, zero_of
from .backward_producer import padded_queries, produce_steps, step_info
from .forward import visible_keys
from .forward_producer import (
    ForwardShared,
    ProducerArgs,
    Schedule,
    Visit,
    count_tiles,
    find_work,
    tile_starts,
)

# Attention backward on Hopper, the gradients of keys and values alone: half of a pair of kernels.
#
#     s^T = k q^T    dp^T = v dout^T    dv += p^T dout    dk += ds^T q
#
# A program owns 64 keys of one KV head and walks over the queries of all heads that see them; the
# producer is that of `bwd_sm90`. Without dq, warp groups have nothing to exchange and nothing to
# add up in memory: sums have one order, so that bits are the same in every run, and each warp
# group is a program of its own. Two of them share an SM: one computes exponentials while the
# other multiplies.
#
# Called after `bwd_sm90_rows` as part of impl "sm90" of `bsk::attn_bwd`, for masks with key blocks
# of 64 (`ops.attention_bwd_sm90_pair`).

ROWS = gl.constexpr(GROUP_ROWS)


@gluon.jit
def _step_keys(dk, dv, step, keep, score, shared, MASKED: gl.constexpr, CFG: gl.constexpr):
    """Add what one tile of queries gives to the gradients of 64 keys."""
    k_smem, v_smem, kv_index = keep
    q_smem, dout_smem, _, _, full, empty, _, _ = shared[2]
    dtype: gl.constexpr = k_smem.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_DV), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_D), 2)
    stage = step % CFG.STAGES
    mbarrier.wait(full.index(stage), (step // CFG.STAGES) & 1)
    s_started = start_products(k_smem.index(zero_of(step)), q_smem, step, CFG)
    dp_started = start_products(v_smem.index(zero_of(step)), dout_smem, step, CFG)
    early: gl.constexpr = score[1] is None
    p, ds = score_step(
        s_started, dp_started, step, MASKED, kv_index, score, shared, early, CFG
    )  # fmt: skip
    p = gl.convert_layout(p.to(dtype), p_layout)
    ds = gl.convert_layout(ds.to(dtype), ds_layout)
    dv_started = warpgroup_mma(p, dout_smem.index(stage), dv, is_async=True)
    dk_started = warpgroup_mma(ds, q_smem.index(stage), dk, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=(dv_started, dk_started))
    mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume_keys(consume, shared, CFG: gl.constexpr):
    """Gradients of 64 keys, piece by piece of work."""
    dk_desc, dv_desc, score = consume
    kv_ring, work, heads = shared[1], shared[4], shared[6]
    k_smem, v_smem, kv_full, kv_empty = kv_ring
    tile_d: gl.constexpr = CFG.TILE_D
    tile_dv: gl.constexpr = CFG.TILE_DV
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    k_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_D)
    v_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    dtype: gl.constexpr = k_smem.dtype
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    kv_heads = heads[0] // heads[1]
    step = 0
    turn = 1
    pieces = 0
    plane, kv_tile = take(work, 0)
    while plane >= 0:
        keep = (k_smem, v_smem, kv_tile * ROWS + keys)
        dk = gl.zeros([ROWS, tile_d], gl.float32, k_layout)
        dv = gl.zeros([ROWS, tile_dv], gl.float32, v_layout)
        mbarrier.wait(kv_full, pieces & 1)
        for _ in range(heads[1]):
            q_tiles, masked_tiles = take(work, turn)
            turn += 1
            for _ in range(masked_tiles):
                dk, dv = _step_keys(dk, dv, step, keep, score, shared, True, CFG)
                step += 1
            # a loop of its own: what masks spill would be reloaded here
            for _ in range(masked_tiles, q_tiles):
                dk, dv = _step_keys(dk, dv, step, keep, score, shared, False, CFG)
                step += 1
        # keys and values are read for the last time, and leave their memory to their gradients
        place = [plane // kv_heads, plane % kv_heads, kv_tile * ROWS, 0]
        v_smem.index(0).store(dv.to(dtype))
        k_smem.index(0).store((dk * score[2]).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv_desc, place, v_smem.index(0))
        tma.async_copy_shared_to_global(dk_desc, place, k_smem.index(0))
        tma.store_wait(0)
        mbarrier.arrive(kv_empty, count=1)
        pieces += 1
        plane, kv_tile = take(work, turn)
        turn += 1


@gluon.jit(
    do_not_specialize=[
        "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right", "num_planes",
        "q_heads", "group_size",
    ]
)  # fmt: skip
def _attn_bwd_keys_sm90_kernel(
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
    num_planes,
    q_heads,
    group_size,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles; `score` is what `gradient_factors` gives."""
    stages: gl.constexpr = CFG.STAGES
    tile_m: gl.constexpr = CFG.TILE_M
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    vector: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    k_smem = tiles(k_desc, 1, ROWS)
    v_smem = tiles(v_desc, 1, ROWS)
    q_smem = tiles(q_desc, stages, tile_m)
    dout_smem = tiles(dout_desc, stages, tile_m)
    lse_smem = gl.allocate_shared_memory(gl.float32, [stages, tile_m], vector)
    delta_smem = gl.allocate_shared_memory(gl.float32, [stages, tile_m], vector)
    kv_ring = (k_smem, v_smem, barriers(1, 1).index(0), barriers(1, 1).index(0))
    q_bars = (barriers(stages, 1), barriers(stages, 1))
    q_ring = (q_smem, dout_smem, lse_smem, delta_smem) + q_bars + q_bars  # noqa: RUF005
    info = step_info()
    work = work_channel(2, 1)
    fence_async_shared()

    mask = (block_lists, mask_batch_step, mask_head_step)
    schedule = (order_ptr, None, None, 1, num_planes, 1)
    lengths = (q_len, kv_len)
    heads = (q_heads, group_size)
    shared = (mask, kv_ring, q_ring, info, work, lengths, heads, (left, right))
    produce = ((q_desc, dout_desc, lse_desc, delta_desc), k_desc, v_desc, counter_ptr, schedule)
    # the first role runs in the warps of the launch, the other in a warp of its own
    gl.warp_specialize(
        [
            (_consume_keys, ((dk_desc, dv_desc, score), shared, CFG)),
            (produce_steps, (produce, shared, CFG)),
        ],
        [1],
        [producer_registers],
    )


@gluon.jit
def _copy(desc, ring, step, place, row, STAGES: gl.constexpr):
    """Start the copy of one tile into a ring, once its stage is free."""
    smem, full, empty = ring
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    place = [place[0], place[1], row, 0]
    tma.async_copy_global_to_shared(desc, place, full.index(stage), smem.index(stage))


@gluon.jit
def _copy_keys(k_desc, v_desc, rings, visit, place, kv_tile, step, CFG: gl.constexpr):
    """Start the copies of one tile of keys and of values; return the next step."""
    start = tile_starts(visit, kv_tile, CFG)[0]
    _copy(k_desc, rings[0], step, place, start, CFG.K_STAGES)
    _copy(v_desc, rings[1], step, place, start, CFG.V_STAGES)
    return step + 1


@gluon.jit
def _produce(produce, shared, begun, CFG: gl.constexpr):
    """Keep the rings full for the pieces of work that a scout publishes."""
    q_desc, dout_desc, k_desc, v_desc = produce
    mask, q_ring, dout_ring, rings, work, lengths, heads, _ = shared
    step = 0
    turn = 0
    piece = take(work, turn, 1)
    while piece[6] >= 0:
        mbarrier.arrive(begun, count=1)
        plan = VisitPlan(piece[0], piece[1], piece[2], piece[3], piece[4], piece[5])
        batch, q_head, kv_head = batch_and_heads(piece[6], heads[0], heads[1])
        q_place = (batch, q_head)
        kv_place = (batch, kv_head)
        q_row = piece[7] * ROWS
        kv_tiles = count_tiles(plan, CFG)[1]
        visit = Visit(mask[0], plan, num_masked_units(plan), lengths[1])
        _copy(dout_desc, dout_ring, turn, q_place, q_row, 1)
        # queries come after the first keys: their memory holds dq of the piece before to its end
        ahead = gl.minimum(kv_tiles, CFG.V_STAGES)
        for kv_tile in range(0, ahead):
            step = _copy_keys(k_desc, v_desc, rings, visit, kv_place, kv_tile, step, CFG)
        _copy(q_desc, q_ring, turn, q_place, q_row, 1)
        for kv_tile in range(ahead, kv_tiles):
            step = _copy_keys(k_desc, v_desc, rings, visit, kv_place, kv_tile, step, CFG)
        turn += 1
        piece = take(work, turn, 1)


@gluon.jit
def _await(ring, step, STAGES: gl.constexpr):
    """Wait for the tile of a step."""
    smem, full, _ = ring
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    return smem.index(step % STAGES)


@gluon.jit
def _free(ring, step, STAGES: gl.constexpr):
    """Tell the producer that the tile of a step is done with."""
    mbarrier.arrive(ring[2].index(step % STAGES), count=1)


@gluon.jit
def _start_scores(rows, rings, step, CFG: gl.constexpr):
    """Start the products of queries and output gradients with the keys and values of a step."""
    q, dout = rows[0], rows[1]
    k_ring, v_ring = rings
    tile_n: gl.constexpr = CFG.TILE_N
    nothing = gl.zeros([ROWS, tile_n], gl.float32, CFG.accumulator_layout(CFG.TILE_N))
    k = _await(k_ring, step, CFG.K_STAGES).permute((1, 0))
    s_started = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    v = _await(v_ring, step, CFG.V_STAGES).permute((1, 0))
    dp_started = warpgroup_mma(dout, v, nothing, use_acc=False, is_async=True)
    return s_started, dp_started


@gluon.jit
def _weights(s, rows, tile, kv_tile, masked, CFG: gl.constexpr):
    """Probabilities of the keys of a tile, 0 where a query does not see one."""
    shift, score = rows[2], rows[4]
    visit, q_index, q_start, bounds = tile
    p, capped = probabilities(s, None, shift[:, None], score)
    if masked:
        visible = visible_keys(visit, kv_tile, q_index, q_start, bounds, CFG)
        p = gl.where(visible, p, 0.0)
    return p, capped


@gluon.jit
def _gradients(p, capped, dp, rows, CFG: gl.constexpr):
    """ds as the operand of the product for dq."""
    delta, score = rows[3], rows[4]
    layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_D), 2)
    ds = score_gradients(p, capped, dp, delta[:, None], score)
    return gl.convert_layout(ds.to(rows[0].dtype), layout)


@gluon.jit
def _step_queries(
    step, dq, ds, rows, rings, tile, kv_tile, MASKED: gl.constexpr, CFG: gl.constexpr
):
    """dq of a step, and ds of the next one, which is returned."""
    k_ring, v_ring = rings
    k = k_ring[0].index(step % CFG.K_STAGES)
    dq_started = warpgroup_mma(ds, k, dq, is_async=True)
    s_started, dp_started = _start_scores(rows, rings, step + 1, CFG)
    s, dq = warpgroup_mma_wait(1, deps=(s_started, dq_started))
    _free(k_ring, step, CFG.K_STAGES)
    step += 1
    p, capped = _weights(s, rows, tile, kv_tile, MASKED, CFG)
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    _free(v_ring, step, CFG.V_STAGES)
    return step, dq, _gradients(p, capped, dp, rows, CFG)


@gluon.jit
def _consume_queries(consume, shared, CFG: gl.constexpr):
    """dq of 64 queries, piece by piece of work."""
    dq_desc, lse_ptr, delta_ptr, score = consume
    mask, q_ring, dout_ring, rings, work, lengths, heads, band = shared
    k_ring, v_ring = rings
    tile_d: gl.constexpr = CFG.TILE_D
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    offs = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    q_len, kv_len = lengths
    padded = padded_queries(q_len)
    step = 0
    turn = 0
    piece = take(work, turn)
    while piece[6] >= 0:
        plan = VisitPlan(piece[0], piece[1], piece[2], piece[3], piece[4], piece[5])
        batch, q_head, _ = batch_and_heads(piece[6], heads[0], heads[1])
        q_start = piece[7] * ROWS
        q_index = q_start + offs
        place = piece[6].to(gl.int64) * padded + q_index
        exist = q_index < padded
        shift = gl.load(lse_ptr + place, exist, other=float("inf"))
        delta = gl.load(delta_ptr + place, exist, other=0.0)
        bounds = row_bounds(position(q_index, q_len, kv_len), kv_len, band[0], band[1])
        masked_tiles, kv_tiles = count_tiles(plan, CFG)
        visit = Visit(mask[0], plan, num_masked_units(plan), kv_len)
        tile = (visit, q_index, q_start, bounds)
        dout = _await(dout_ring, turn, 1).load(operand)
        rows = (_await(q_ring, turn, 1), dout, shift, delta, score)
        dq = gl.zeros([ROWS, tile_d], gl.float32, CFG.accumulator_layout(CFG.TILE_D))
        if kv_tiles > 0:
            s_started, dp_started = _start_scores(rows, rings, step, CFG)
            s = warpgroup_mma_wait(1, deps=(s_started,))
            p, capped = _weights(s, rows, tile, 0, masked_tiles > 0, CFG)
            dp = warpgroup_mma_wait(0, deps=(dp_started,))
            # not before a product had them: a barrier does not wait for what was loaded, and copies
            # of the next output gradients came sooner where other programs kept shared memory busy
            _free(dout_ring, turn, 1)
            _free(v_ring, step, CFG.V_STAGES)
            ds = _gradients(p, capped, dp, rows, CFG)
            for kv_tile in range(1, masked_tiles):
                step, dq, ds = _step_queries(step, dq, ds, rows, rings, tile, kv_tile, True, CFG)
            # a loop of its own, which has the registers of the masks
            for kv_tile in range(gl.maximum(masked_tiles, 1), kv_tiles):
                step, dq, ds = _step_queries(step, dq, ds, rows, rings, tile, kv_tile, False, CFG)
            k = k_ring[0].index(step % CFG.K_STAGES)
            dq_started = warpgroup_mma(ds, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq_started,))
            _free(k_ring, step, CFG.K_STAGES)
            step += 1
        else:
            _free(dout_ring, turn, 1)
        # every product with the queries is done: dq takes their memory
        dq_smem = q_ring[0].index(0)
        dq_smem.store((dq * score[2]).to(dq_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [batch, q_head, q_start, 0], dq_smem)
        tma.store_wait(0)
        _free(q_ring, turn, 1)
        turn += 1
        piece = take(work, turn)


@gluon.jit(
    do_not_specialize=[
        "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right", "num_planes",
        "dynamic", "q_heads", "group_size",
    ]
)  # fmt: skip
def _attn_bwd_queries_sm90_kernel(
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
    num_planes,
    dynamic,
    q_heads,
    group_size,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles; `score` is what `gradient_factors` gives."""
    tile_n: gl.constexpr = CFG.TILE_N
    registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    q_ring = (tiles(q_desc, 1, ROWS), barriers(1, 1), barriers(1, 1))
    dout_ring = (tiles(dout_desc, 1, ROWS), barriers(1, 1), barriers(1, 1))
    k_stages: gl.constexpr = CFG.K_STAGES
    v_stages: gl.constexpr = CFG.V_STAGES
    k_ring = (tiles(k_desc, k_stages, tile_n), barriers(k_stages, 1), barriers(k_stages, 1))
    v_ring = (tiles(v_desc, v_stages, tile_n), barriers(v_stages, 1), barriers(v_stages, 1))
    # producer and consumer take what the scout finds
    work = work_channel(8, 2)
    begun = barriers(1, 1).index(0)
    fence_async_shared()

    mask = Mask(block_lists, mask_batch_step, mask_head_step)
    lengths = Lengths(q_len, kv_len)
    heads = Heads(q_heads, group_size)
    band = Band(left, right)
    shared = (mask, q_ring, dout_ring, (k_ring, v_ring), work, lengths, heads, band)
    schedule = Schedule(order_ptr, num_planes, 1, dynamic, 0)
    # as the scout of the forward knows them
    find = ProducerArgs(None, None, None, counter_ptr, schedule)
    found = ForwardShared(mask, None, None, None, work, lengths, heads, band, None)
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume_queries, ((dq_desc, lse_ptr, delta_ptr, score), shared, CFG)),
            (_produce, ((q_desc, dout_desc, k_desc, v_desc), shared, begun, CFG)),
            (find_work, (find, found, begun, CFG)),
        ],
        [1, 1],
        [registers, registers],
    )
