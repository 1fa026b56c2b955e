# mypy: ignore-errors
"""Attention forward on Hopper over e4m3 tensors: the roles and rings of `forward`, fp8 products.

    s[i, j] = scale * (q_descale[i] q[i]) . (k_descale[j] k[j]), softcapped    where i sees j
    out[i]  = v_descale * sum_j exp(s[i, j] - lse[i]) v[j]

The producer is the one of `forward`. The consumers differ in four points:

- Scales. The 64 queries of a consumer share a scale, and so do the keys of a KV tile: both become
  part of the factor of the softmax.
- Weights are rounded to e4m3, whose smallest number is 2^-9. They are scaled up by 2^8, so that
  weights down to 2^-17 of the largest still count.
- Two-level sums. The tensor cores add fp8 products with fewer bits than fp32 has. The product of
  each KV tile therefore starts from zero and is added to fp32 sums outside the tensor cores, in the
  multiply-add that rescales them.
- Values are transposed, [B, Hkv, Dv, Sk] in memory.

Called as impl "sm90" of `bsk::attn_fwd_fp8`. Limits: dense batches, D and Dv up to 256 in steps of
16, key blocks of masks in steps of 64, outputs in 16 bits, scales and a factor of scores above 0.
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

from ...device.gluon.compat import async_store
from ...device.gluon.pipeline import (
    barriers,
    ring,
    ring_place,
    tile_at,
    tile_place,
    tiles,
    work_channel,
)
from ...device.gluon.row_parts import (
    add_parts,
    computed_here,
    pin_above,
    row_maxima,
    row_parts,
)
from ...device.gluon.warps import shared_address
from ...device.masks import exists, position, row_bounds
from ...device.records import Band, CuSeqlens, Heads, Lengths, Mask, SoftmaxState
from ...device.schedule import batch_and_heads, lse_offset
from ...device.softmax import add_sink, finalise, init_state, raise_maximum, weights_of
from ...device.visits import num_masked_blocks
from .forward_fp8_parts import (
    SCALE_TOKENS,
    HeadScales,
    cap_scaled,
    exponent_factor,
    head_scales_at,
    packed_weights,
    tile_scale,
    weight_operand,
)
from .forward_producer import (
    DENSE_FIELDS,
    ForwardShared,
    ProducerArgs,
    Schedule,
    Visit,
    count_tiles,
    needs_mask,
    take_work_tile,
)
from .forward_roles import start_roles
from .forward_scores import Queries, TileBounds, mask_scores
from .forward_stages import (
    EMPTY_K,
    EMPTY_V,
    FULL_K,
    FULL_V,
    ROWS,
    KvStages,
    await_stage,
    free_stage,
    kv_slices,
    query_slices,
    scale_slices,
    start_scores,
    zero_outputs,
)

# Weights reach 2**HEADROOM; e4m3 ends at 448.
HEADROOM = gl.constexpr(8)


class TileScales(NamedTuple):
    """The factors of the scale of a KV tile."""

    of_queries: Any
    """The scale of the queries; times the scale of the keys, if all keys share one."""
    k_scales: Any
    k_scale_ptr: Any


class Fp8ConsumerArgs(NamedTuple):
    """Arguments of the consumers alone."""

    out_desc: Any
    lse_ptr: Any
    lse_head_stride: Any
    sinks_ptr: Any
    score: Any
    out_tiles: Any
    """A tile of outputs for each consumer."""
    q_scales: Any
    k_scales: Any
    v_scales: Any
    head_dim_v: Any


@gluon.jit
def start_product(p, stages, stage, sums, SLICE: gl.constexpr, CFG: gl.constexpr):
    """Start the product of weights and one slice of the values of a stage, in the registers `sums`.

    Their values are not read.
    """
    v = stages.v.index(stage * CFG.dv_slices + SLICE).permute((1, 0))
    return warpgroup_mma(p, v, sums, use_acc=False, is_async=True)


@gluon.jit
def start_products(operand, stages, stage, CFG: gl.constexpr):
    """Start the products of weights and the first two slices of a stage, or its only one."""
    width: gl.constexpr = CFG.SLICE_DV
    nothing = gl.zeros([ROWS, width], gl.float32, CFG.accumulator_layout(CFG.SLICE_DV))
    products = ()
    for i in gl.static_range(min(CFG.dv_slices, 2)):
        products = products + (start_product(operand, stages, stage, nothing, i, CFG),)  # noqa: RUF005
    return products


@gluon.jit
def add_first_products(operand, stages, stage, acc, factor, products, CFG: gl.constexpr):
    """acc * factor + products for all slices but the last.

    Two products run at a time: each one after the second takes the registers of one that is done.
    Also returns the last product, and a product whose registers are free if there are slices
    before the last.
    """
    slices: gl.constexpr = CFG.dv_slices
    total = ()
    done = products[0]
    for i in gl.static_range(slices - 1):
        done = warpgroup_mma_wait(1, deps=(products[i],))
        added = acc[i] * factor + done
        if CFG.PRODUCTS_FIRST:
            added = computed_here(added)
        total = total + (added,)  # noqa: RUF005
        if i + 2 < slices:
            later = start_product(operand, stages, stage, done, i + 2, CFG)
            products = products + (later,)  # noqa: RUF005
    return total, products[slices - 1], done


@gluon.jit
def add_last_product(total, acc, factor, product, BEHIND: gl.constexpr, CFG: gl.constexpr):
    """Append the sum of the last slice to `total`; BEHIND WGMMAs were started after its product."""
    done = warpgroup_mma_wait(BEHIND, deps=(product,))
    added = acc[len(acc) - 1] * factor + done
    if CFG.PRODUCTS_FIRST:
        added = computed_here(added)
    return total + (added,)  # noqa: RUF005


@gluon.jit
def add_products(p, stages, stage, acc, factor, CFG: gl.constexpr):
    """acc * factor + the product of weights and a stage of values."""
    operand = weight_operand(p, CFG)
    products = start_products(operand, stages, stage, CFG)
    total, last, _ = add_first_products(operand, stages, stage, acc, factor, products, CFG)
    return add_last_product(total, acc, factor, last, 0, CFG)


@gluon.jit
def weigh_tile(s, queries, kv_tile, scale, state, CFG: gl.constexpr):
    """One softmax step; returns the state, the weights in e4m3 and the factor for older sums."""
    visit, score = queries.visit, queries.score
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.SLICE_DV))
    m_log2, row_sum = state
    s = cap_scaled(s, score, scale)
    if needs_mask(visit.lists, visit.plan, kv_tile, queries.masked_tiles):
        s = mask_scores(s, queries, kv_tile, CFG)
    exponents = exponent_factor(score, scale)
    top = row_maxima(s, m_log2)
    m_log2, shift, rescale = raise_maximum(m_log2, top, exponents, 0, HEADROOM)
    weights = weights_of(s, exponents, shift)
    row_sum = add_parts(row_sum, rescale, weights)
    factor = gl.convert_layout(rescale, o_rows)[:, None]
    return SoftmaxState(m_log2, row_sum), packed_weights(weights, CFG), factor


@gluon.jit
def attend_tile(queries, stages, kv_tile, step, scale, state, acc, p, factor, CFG: gl.constexpr):
    """One step of the main loop: scores and softmax of the next tile, values of this one.

    `p` are the weights of the tile at `step`, and `factor` [64, 1] rescales `acc` to the maxima of
    `p`. `scale` is the product of the scales of queries and keys. Returns the next step, state,
    accumulators, weights and factor.

    Products run while maxima are computed, and the product of the last slice while weights are. A
    consumer that waited for its products first would leave the tensor cores to the other consumer,
    whose products take half as long as computing the weights of a tile.
    """
    visit, score = queries.visit, queries.score
    m_log2, row_sum = state
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.SLICE_DV))
    tile_n: gl.constexpr = CFG.TILE_N
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    last_stage, last_phase = ring_place(step, CFG.STAGES)
    step += 1
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(stages, stage, phase, FULL_K, CFG)
    k = kv_slices(stages.k, stage, CFG.d_slices, CFG.TILE_N, 0)
    scores = start_scores(queries.q, k, no_scores)
    await_stage(stages, last_stage, last_phase, FULL_V, CFG)
    operand = weight_operand(p, CFG)
    products = start_products(operand, stages, last_stage, CFG)
    s = warpgroup_mma_wait(CFG.dv_slices, deps=(scores,))
    free_stage(stages, stage, EMPTY_K, CFG)
    s = cap_scaled(s, score, scale)
    if needs_mask(visit.lists, visit.plan, kv_tile, queries.masked_tiles):
        s = mask_scores(s, queries, kv_tile, CFG)
    exponents = exponent_factor(score, scale)
    m_new, shift, rescale = raise_maximum(m_log2, row_maxima(s, m_log2), exponents, 0, HEADROOM)
    # ptxas would sink the maxima below the wait, where they overlap with nothing
    pin_above(m_new, stages.barriers, CFG.spare_at)
    total, last, _ = add_first_products(operand, stages, last_stage, acc, factor, products, CFG)
    weights = weights_of(s, exponents, shift)
    row_sum = add_parts(row_sum, rescale, weights)
    pin_above(row_sum, stages.barriers, CFG.spare_at)
    acc = add_last_product(total, acc, factor, last, 0, CFG)
    free_stage(stages, last_stage, EMPTY_V, CFG)
    # before the wait this would overwrite registers that are operands, and ptxas would make every
    # WGMMA wait for the previous one
    p = packed_weights(weights, CFG)
    factor = gl.convert_layout(rescale, o_rows)[:, None]
    return step, SoftmaxState(m_new, row_sum), acc, p, factor


@gluon.jit
def attend_tile_products_first(
    queries, stages, kv_tile, step, scale, state, acc, p, factor, CFG: gl.constexpr
):
    """`attend_tile` with products before scores, for outputs that leave few registers.

    Scores are started in the registers of a product that is done, and run while the product of the
    last slice is added.
    """
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    tile_n: gl.constexpr = CFG.TILE_N
    last_stage, last_phase = ring_place(step, CFG.STAGES)
    step += 1
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(stages, last_stage, last_phase, FULL_V, CFG)
    operand = weight_operand(p, CFG)
    products = start_products(operand, stages, last_stage, CFG)
    total, last, done = add_first_products(operand, stages, last_stage, acc, factor, products, CFG)
    await_stage(stages, stage, phase, FULL_K, CFG)
    k = kv_slices(stages.k, stage, CFG.d_slices, CFG.TILE_N, 0)
    if CFG.dv_slices > 1 and CFG.TILE_N == CFG.SLICE_DV:
        scores = start_scores(queries.q, k, done)
    else:
        scores = start_scores(queries.q, k, gl.zeros([ROWS, tile_n], gl.float32, s_layout))
    acc = add_last_product(total, acc, factor, last, CFG.d_slices, CFG)
    free_stage(stages, last_stage, EMPTY_V, CFG)
    s = warpgroup_mma_wait(0, deps=(scores,))
    free_stage(stages, stage, EMPTY_K, CFG)
    state, p, factor = weigh_tile(s, queries, kv_tile, scale, state, CFG)
    return step, state, acc, p, factor


@gluon.jit
def attend_tiles(queries, stages, kv_tiles, step, scales, state, acc, q_empty, CFG: gl.constexpr):
    """Attend to all KV tiles of a work tile, at least one; return the next step, state and sums.

    Arrives at `q_empty` when the queries are no longer needed.
    """
    visit = queries.visit
    of_queries, k_scales, k_scale_ptr = scales
    tile_n: gl.constexpr = CFG.TILE_N
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, CFG.accumulator_layout(CFG.TILE_N))
    stage, phase = ring_place(step, CFG.STAGES)
    of_tile = tile_scale(of_queries, k_scales, k_scale_ptr, visit, 0, CFG)
    await_stage(stages, stage, phase, FULL_K, CFG)
    k = kv_slices(stages.k, stage, CFG.d_slices, CFG.TILE_N, 0)
    s = warpgroup_mma_wait(0, deps=(start_scores(queries.q, k, no_scores),))
    free_stage(stages, stage, EMPTY_K, CFG)
    state, p, factor = weigh_tile(s, queries, 0, of_tile, state, CFG)
    for kv_tile in range(1, kv_tiles):
        of_tile = tile_scale(of_queries, k_scales, k_scale_ptr, visit, kv_tile, CFG)
        if CFG.PRODUCTS_FIRST:
            step, state, acc, p, factor = attend_tile_products_first(
                queries, stages, kv_tile, step, of_tile, state, acc, p, factor, CFG
            )
        else:
            step, state, acc, p, factor = attend_tile(
                queries, stages, kv_tile, step, of_tile, state, acc, p, factor, CFG
            )
    # all scores of this work tile are computed: the next queries may overwrite its own
    mbarrier.arrive(q_empty, count=1)
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(stages, stage, phase, FULL_V, CFG)
    acc = add_products(p, stages, stage, acc, factor, CFG)
    free_stage(stages, stage, EMPTY_V, CFG)
    return step + 1, state, acc


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Role of a consumer warp group: compute 64 queries of each work tile."""
    q_ring, heads, band = shared.q_ring, shared.heads, shared.band
    q_len, kv_len = shared.lengths
    lists = shared.mask.lists
    first_row: gl.constexpr = GROUP * ROWS
    keys: gl.constexpr = CFG.TILE_N
    width: gl.constexpr = CFG.SLICE_DV
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.SLICE_DV)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    out_smem = consume.out_tiles.index(GROUP)
    no_scores = gl.zeros([ROWS, keys], gl.float32, s_layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    stages = KvStages(shared.k_ring.tiles, shared.v_ring.tiles, shared_address(CFG.tile_bytes))
    step = 0
    slot = 0
    tile = take_work_tile(shared.work, slot, 4)
    while tile.batch_head >= 0:
        plan = tile.plan
        batch, q_head, kv_head = batch_and_heads(tile.batch_head, heads.q, heads.group_size)
        q_start = tile.q_tile * CFG.tile_m
        q_index = q_start + first_row + rows
        first, last = row_bounds(position(q_index, q_len, kv_len), kv_len, band.left, band.right)
        first_pos = position(q_start + first_row, q_len, kv_len)
        _, every_last = row_bounds(first_pos, kv_len, band.left, band.right)
        every_first, _ = row_bounds(first_pos + (ROWS - 1), kv_len, band.left, band.right)
        bounds = TileBounds(first, last, every_first, every_last)
        masked_tiles, kv_tiles = count_tiles(plan, CFG)
        visit = Visit(lists, plan, num_masked_blocks(plan), kv_len)

        scale = 1.0
        if consume.q_scales.ptr is not None:
            # rows past the queries have no scale of their own
            row = gl.minimum(q_start + first_row, q_len - 1)
            at = head_scales_at(consume.q_scales, batch, q_head)
            scale = gl.load(at + (row // SCALE_TOKENS).to(gl.int64) * consume.q_scales.last)
        k_scale_ptr = consume.k_scales.ptr
        if consume.k_scales.ptr is not None:
            k_scale_ptr = head_scales_at(consume.k_scales, batch, kv_head)
            if not CFG.K_BLOCKS:
                scale = scale * gl.load(k_scale_ptr)

        m_log2, row_sum = init_state(q_index)
        row_sum = row_parts(no_scores)
        acc = zero_outputs(CFG)
        q_stage = slot % CFG.Q_STAGES
        q = query_slices(q_ring, q_stage * CFG.CONSUMERS + GROUP, CFG)
        mbarrier.wait(q_ring.full.index(q_stage), (slot // CFG.Q_STAGES) & 1)
        score = consume.score
        nothing = (None, None, None, None)
        queries = Queries(q, visit, masked_tiles, q_index, q_start, bounds, score, *nothing)
        scales = TileScales(scale, consume.k_scales, k_scale_ptr)
        q_empty = q_ring.empty.index(q_stage)
        if kv_tiles > 0:
            state = SoftmaxState(m_log2, row_sum)
            step, state, acc = attend_tiles(
                queries, stages, kv_tiles, step, scales, state, acc, q_empty, CFG
            )
            m_log2, row_sum = state
        else:
            mbarrier.arrive(q_empty, count=1)

        row_sum = gl.convert_layout(gl.sum(row_sum, 1), m_log2.type.layout)
        if consume.sinks_ptr is not None:
            sink = gl.load(consume.sinks_ptr + q_head)
            m_log2, row_sum, rescale = add_sink(m_log2, row_sum, sink)
            acc = scale_slices(acc, gl.convert_layout(rescale, o_rows)[:, None])
        inverse, lse = finalise(m_log2, row_sum)
        out = scale_slices(acc, gl.convert_layout(inverse, o_rows)[:, None])
        for i in gl.static_range(len(out)):
            result = out[i]
            if consume.v_scales.ptr is not None:
                channels = i * width + gl.arange(0, width, gl.SliceLayout(0, o_layout))
                at = head_scales_at(consume.v_scales, batch, kv_head)
                at = at + channels.to(gl.int64) * consume.v_scales.last
                of_channel = gl.load(at, mask=channels < consume.head_dim_v, other=0.0)
                result = result * of_channel[None, :]
            # the previous copy, at first of the last work tile, must have read the buffer
            tma.store_wait(0)
            out_smem.store(result.to(out_smem.dtype))
            fence_async_shared()
            out_place = tile_place(None, batch, q_head, 0, q_len)
            place = tile_at(out_place, q_start + first_row, i * CFG.SLICE_DV)
            async_store(consume.out_desc, place, out_smem)
        lse_first = lse_offset(batch, q_head, 0, heads.q, consume.lse_head_stride, None)
        gl.store(consume.lse_ptr + lse_first + q_index, lse, mask=exists(q_index, q_len))
        slot += 1
        tile = take_work_tile(shared.work, slot, 4)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right",
        "num_batch_heads", "raster_group", "dynamic", "q_heads", "group_size", "head_dim_v",
        "q_scale_batch", "q_scale_head", "q_scale_block", "k_scale_batch", "k_scale_head",
        "k_scale_block", "v_scale_batch", "v_scale_head", "v_scale_channel",
    ]
)  # fmt: skip
def _attn_fwd_fp8_sm90_kernel(
    out_desc,
    lse_ptr,
    q_desc,
    k_desc,
    v_desc,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_scale_batch,
    q_scale_head,
    q_scale_block,
    k_scale_batch,
    k_scale_head,
    k_scale_block,
    v_scale_batch,
    v_scale_head,
    v_scale_channel,
    sinks_ptr,
    workspace,
    block_lists,
    mask_batch_step,
    mask_head_step,
    lse_head_stride,
    q_len,
    kv_len,
    head_dim_v,
    left,
    right,
    num_batch_heads,
    raster_group,
    dynamic,
    q_heads,
    group_size,
    score,
    CFG: gl.constexpr,
):
    """Allocate the rings, gather the arguments of the roles, and start them.

    workspace : `Workspace`
    block_lists : `MaskLists` or None
    score : `Score`
    CFG : `AttnFwdSm90Config` with FP8
    """
    consumers: gl.constexpr = CFG.CONSUMERS
    stages: gl.constexpr = CFG.STAGES
    q_smem = tiles(q_desc, CFG.Q_STAGES * consumers * CFG.d_slices, ROWS)
    out_smem = tiles(out_desc, consumers, ROWS)
    k_smem = tiles(k_desc, stages * CFG.d_slices, CFG.TILE_N)
    v_smem = tiles(v_desc, stages * CFG.dv_slices, CFG.SLICE_DV)
    q_ring = ring(q_smem, CFG.Q_STAGES, consumers)
    k_ring = ring(k_smem, stages, CFG.arrivals, CFG.barrier_room)
    v_ring = ring(v_smem, stages, CFG.arrivals, CFG.barrier_room)
    # if a scheduler warp publishes work tiles, the producer takes them too
    takers: gl.constexpr = consumers + 1 if CFG.SCHEDULER_WARP else consumers
    work = work_channel(DENSE_FIELDS, takers)
    begun = None
    if CFG.SCHEDULER_WARP:
        begun = barriers(1, 1).index(0)
    fence_async_shared()

    schedule = Schedule(workspace.order, num_batch_heads, raster_group, dynamic, 0)
    produce = ProducerArgs(q_desc, k_desc, v_desc, workspace.counters, schedule, None)
    consume = Fp8ConsumerArgs(
        *(out_desc, lse_ptr, lse_head_stride, sinks_ptr, score, out_smem),
        HeadScales(q_scale_ptr, q_scale_batch, q_scale_head, q_scale_block),
        HeadScales(k_scale_ptr, k_scale_batch, k_scale_head, k_scale_block),
        HeadScales(v_scale_ptr, v_scale_batch, v_scale_head, v_scale_channel),
        head_dim_v,
    )
    shared = ForwardShared(
        Mask(block_lists, mask_batch_step, mask_head_step),
        q_ring,
        k_ring,
        v_ring,
        work,
        Lengths(q_len, kv_len),
        Heads(q_heads, group_size),
        Band(left, right),
        CuSeqlens(None, None),
    )

    start_roles(_consume, consume, produce, shared, begun, CFG)
