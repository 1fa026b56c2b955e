# mypy: ignore-errors
"""Attention forward on Hopper: the arithmetic of the portable forward, fed by TMA and WGMMA.

Persistent programs take work tiles until none is left; a work tile is CONSUMERS x 64 queries of
one head. Every program has these roles, which `_attn_fwd_sm90_kernel`, at the end, sets up:

- a producer warp (`forward_producer`) determines which KV tiles a work tile visits, publishes them
  as a `WorkTile`, and keeps rings of K and V tiles full;
- under a mask, a scheduler warp looks up the rows of the mask ahead of the producer;
- consumer warp groups (`_consume`) own 64 queries each and read the same KV tiles.

A consumer issues the scores of tile i together with the product of the weights and values of tile
i - 1. Its softmax of tile i runs while the tensor cores work on that product, and then for the
other consumers. Tiles that need mask code come first.

Tiles of wide heads lie in shared memory as slices of columns (`forward_stages`).

With a bias or ALiBi, consumers need the positions of the keys of every tile. With a key gate
(`device.gates`), the producer copies the gate scores of a tile along with its keys; the weight of
the gate multiplies the softmax weight, and the running maximum is taken over the raw scores of the
keys whose gate is not 0.

Called as impl "sm90" of `bsk::attn_fwd`. Shapes are those of the portable forward. Limits: fp16 and
bf16, D and Dv up to 256, a positive factor of scores, strides and addresses that TMA takes.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device.gluon.compat import async_store, thread_barrier
from ...device.gluon.partials import columns_of, rows_of, store_part_slices
from ...device.gluon.pipeline import (
    barriers,
    drop_dead_values,
    ring,
    ring_place,
    tile_at,
    tile_place,
    tiles,
    work_channel,
)
from ...device.gluon.row_parts import (
    add_parts,
    any_raised,
    pin_above,
    row_maxima,
    row_parts,
    scale_rows,
)
from ...device.gluon.warps import shared_address
from ...device.masks import exists, position, row_bounds
from ...device.partials import is_last, part_slot
from ...device.records import Band, Heads, Lengths, Mask, SoftmaxState
from ...device.schedule import batch_and_heads, lse_offset
from ...device.scores import cap, slope_of_head
from ...device.softmax import (
    LOG2_E,
    add_sink,
    finalise,
    init_state,
    join_state,
    raise_maximum,
    softmax_step,
    weights_of,
)
from ...device.visits import num_masked_blocks
from ...launch.descriptors import GROUP_ROWS
from .forward_producer import (
    DENSE_FIELDS,
    PACKED_FIELDS,
    SPLIT_FIELDS,
    ForwardShared,
    ProducerArgs,
    Schedule,
    Visit,
    count_tiles,
    dense_tile,
    needs_mask,
    take_work_tile,
    tile_tokens,
)
from .forward_roles import start_roles
from .forward_scores import (
    Alibi,
    Queries,
    TileBounds,
    add_key_terms,
    gate_margin,
    gated,
    mask_band,
    mask_scores,
    row_bias,
    tile_gate,
)
from .forward_stages import (
    EMPTY_K,
    EMPTY_V,
    FULL_K,
    FULL_V,
    SLACK,
    KvStages,
    await_outputs,
    await_stage,
    free_stage,
    kv_slices,
    ping_pong_pass,
    ping_pong_wait,
    query_slices,
    scale_slices,
    start_outputs,
    start_scores,
    zero_outputs,
)

ROWS = gl.constexpr(GROUP_ROWS)
# Keys in half a tile.
HALF = gl.constexpr(64)
# Rows of values that are zeroed at a time.
DROPPED = gl.constexpr(32)


class ConsumerArgs(NamedTuple):
    """Arguments of the consumers alone."""

    out_desc: Any
    lse_ptr: Any
    lse_head_stride: Any
    sinks_ptr: Any
    score: Any
    out_tiles: Any
    """Shared memory: a tile of outputs for each consumer."""
    tail: Any
    """`SplitTail`."""
    slopes: Any
    """`Slopes` of ALiBi, or None."""
    bias: Any
    """`Bias`, or None."""
    gates: Any
    """`KeyGates`, or None."""
    u_tiles: Any
    """fp32 [stages, keys]: the gate's scores of KV tiles; None without gates."""


class SplitTail(NamedTuple):
    """Workspace for work tiles that several programs share."""

    parts: Any
    counters: Any


# One KV tile: its scores, together with the product of the tile before.


@gluon.jit
def drop_unseen(queries, stages, kv_tile, place, CFG: gl.constexpr):
    """Zero the values in stage `place` whose keys no query sees, if they may hold anything.

    Every consumer does this; all of them write the same zeros.
    """
    if queries.seen is not None:
        lo, hi = queries.seen
        kv_start = dense_tile(queries.visit.plan, kv_tile) * CFG.TILE_N
        if (kv_start < lo) | (kv_start + CFG.TILE_N > hi):
            stage, phase = place
            await_stage(stages, stage, phase, FULL_V, CFG)
            tile = stages.v.index(stage)
            # a few at a time, because they pass through registers
            for i in gl.static_range(CFG.TILE_N // DROPPED):
                some = tile.slice(i * DROPPED, DROPPED, dim=0)
                drop_dead_values(some, kv_start + i * DROPPED, None, lo, hi)
            fence_async_shared()
            thread_barrier()


@gluon.jit
def attend_first_tile(
    queries, stages, kv_tile, step, state, acc, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Scores and softmax of the first tile; return the state, accumulators and weights."""
    visit, score = queries.visit, queries.score
    m_log2, row_sum = state
    tile_n: gl.constexpr = CFG.TILE_N
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.SLICE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, CFG.accumulator_layout(CFG.TILE_N))
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(stages, stage, phase, FULL_K, CFG)
    k = kv_slices(stages.k, stage, CFG.d_slices, CFG.TILE_N, 0)
    ping_pong_wait(GROUP, CFG)
    scores = start_scores(queries.q, k, no_scores)
    ping_pong_pass(GROUP, CFG)
    margin = gate_margin(queries, step, CFG)
    s = cap(warpgroup_mma_wait(0, deps=(scores,)), score.inverse_cap)
    free_stage(stages, stage, EMPTY_K, CFG)
    s = add_key_terms(s, margin, queries, kv_tile, step, CFG)
    if needs_mask(visit.lists, visit.plan, kv_tile, queries.masked_tiles):
        s = mask_scores(s, queries, kv_tile, CFG)
    m_log2, shift, rescale = raise_maximum(m_log2, row_maxima(s, m_log2), score.factor, SLACK)
    weights = gated(weights_of(s, score.factor, shift), margin, queries, step, CFG)
    row_sum = add_parts(row_sum, rescale, weights)
    if CFG.HALF_TILES:
        o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.SLICE_DV))
        acc = scale_slices(acc, gl.convert_layout(rescale, o_rows)[:, None])
    p = gl.convert_layout(weights.to(stages.k.dtype), p_layout)
    return m_log2, row_sum, acc, p


@gluon.jit
def attend_last_values(stages, place, acc, p, CFG: gl.constexpr):
    """Add the weights `p` of the last tile times its values; return the accumulators."""
    stage, phase = place
    await_stage(stages, stage, phase, FULL_V, CFG)
    v = kv_slices(stages.v, stage, CFG.dv_slices, CFG.TILE_N, 0)
    acc = await_outputs(start_outputs(p, v, acc))
    free_stage(stages, stage, EMPTY_V, CFG)
    return acc


@gluon.jit
def attend_tile(
    queries, stages, kv_tile, step, state, acc, p, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """One step of the main loop: scores and softmax of the next tile, values of this one.

    `p` are the weights of the tile at `step`. Returns the next step, state, accumulators, weights.
    The maxima of the next tile are computed while the product of this one runs, its weights after
    that: exponentials, sums and conversions then form one stretch of code, during which the tensor
    cores are left to the other consumers.
    """
    visit, score = queries.visit, queries.score
    m_log2, row_sum = state
    tile_n: gl.constexpr = CFG.TILE_N
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.SLICE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    last_stage, last_phase = ring_place(step, CFG.STAGES)
    step += 1
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(stages, stage, phase, FULL_K, CFG)
    ping_pong_wait(GROUP, CFG)
    k = kv_slices(stages.k, stage, CFG.d_slices, CFG.TILE_N, 0)
    scores = start_scores(queries.q, k, no_scores)
    await_stage(stages, last_stage, last_phase, FULL_V, CFG)
    v = kv_slices(stages.v, last_stage, CFG.dv_slices, CFG.TILE_N, 0)
    products = start_outputs(p, v, acc)
    ping_pong_pass(GROUP, CFG)
    margin = gate_margin(queries, step, CFG)
    s = cap(warpgroup_mma_wait(CFG.dv_slices, deps=(scores,)), score.inverse_cap)
    free_stage(stages, stage, EMPTY_K, CFG)
    s = add_key_terms(s, margin, queries, kv_tile, step, CFG)
    if needs_mask(visit.lists, visit.plan, kv_tile, queries.masked_tiles):
        s = mask_scores(s, queries, kv_tile, CFG)
    m_new, shift, rescale = raise_maximum(m_log2, row_maxima(s, m_log2), score.factor, SLACK)
    # ptxas would sink the maxima below the wait, where they overlap with nothing
    pin_above(m_new, stages.barriers, CFG.spare_at)
    raised = gl.convert_layout(any_raised(m_log2, m_new), o_rows)[:, None]
    products = await_outputs(products)
    free_stage(stages, last_stage, EMPTY_V, CFG)
    factor = gl.convert_layout(rescale, o_rows)[:, None]
    acc = ()
    for i in gl.static_range(len(products)):
        acc = acc + (scale_rows(products[i], factor, raised),)  # noqa: RUF005
    weights = gated(weights_of(s, score.factor, shift), margin, queries, step, CFG)
    row_sum = add_parts(row_sum, rescale, weights)
    p = gl.convert_layout(weights.to(p.dtype), p_layout)
    return step, m_new, row_sum, acc, p


# Tiles at the edges of a band, of which the queries of a consumer see half or nothing.


@gluon.jit
def attend_half(
    q,
    stages,
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
    """Attend to HALF keys of the tile at `step`, from START on; it begins at `kv_start`."""
    s_layout: gl.constexpr = CFG.accumulator_layout(HALF)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    state_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.SLICE_DV), 2)
    bounds = TileBounds(
        gl.convert_layout(bounds.first, s_rows),
        gl.convert_layout(bounds.last, s_rows),
        bounds.every_first,
        bounds.every_last,
    )
    m_log2 = gl.convert_layout(state.m_log2, s_rows)
    row_sum = gl.convert_layout(state.row_sum, s_rows)
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(stages, stage, phase, FULL_K, CFG)
    k = kv_slices(stages.k, stage, CFG.d_slices, HALF, START)
    no_scores = gl.zeros([ROWS, HALF], gl.float32, s_layout)
    ping_pong_wait(GROUP, CFG)
    scores = start_scores(q, k, no_scores)
    ping_pong_pass(GROUP, CFG)
    s = cap(warpgroup_mma_wait(0, deps=(scores,)), score.inverse_cap)
    free_stage(stages, stage, EMPTY_K, CFG)
    s = mask_band(s, kv_start + START, bounds)
    m_log2, row_sum, weights, rescale = softmax_step(m_log2, row_sum, s, score.factor)
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.SLICE_DV))
    acc = scale_slices(acc, gl.convert_layout(rescale, o_rows)[:, None])
    p = gl.convert_layout(weights.to(stages.k.dtype), p_layout)
    await_stage(stages, stage, phase, FULL_V, CFG)
    v = kv_slices(stages.v, stage, CFG.dv_slices, HALF, START)
    acc = await_outputs(start_outputs(p, v, acc))
    free_stage(stages, stage, EMPTY_V, CFG)
    m_log2 = gl.convert_layout(m_log2, state_rows)
    return m_log2, gl.convert_layout(row_sum, state_rows), acc


@gluon.jit
def _skip_tile(stages, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Free the tile at `step` without reading it."""
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(stages, stage, phase, FULL_K, CFG)
    ping_pong_wait(GROUP, CFG)
    ping_pong_pass(GROUP, CFG)
    free_stage(stages, stage, EMPTY_K, CFG)
    await_stage(stages, stage, phase, FULL_V, CFG)
    free_stage(stages, stage, EMPTY_V, CFG)


@gluon.jit
def skip_tiles(stages, count, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Free `count` tiles from `step` on without reading them."""
    for i in range(0, count):
        _skip_tile(stages, step + i, GROUP, CFG)


@gluon.jit
def skip_unseen(
    stages, plan, masked_tiles, any_last, step, taken, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Free the first tiles of a work tile whose keys all lie after `any_last`; return how many."""
    skipped = 0
    while (taken + skipped < masked_tiles) & (any_last < dense_tile(plan, skipped) * CFG.TILE_N):
        _skip_tile(stages, step + skipped, GROUP, CFG)
        skipped += 1
    return skipped


# The split tail: if the last work tiles are too few for all programs, their KV tiles are numbered
# through, and every program takes an equal share of them. Slots and counters work as in
# `device.partials`, with one of each per consumer; the counters follow the one for work tiles.


@gluon.jit
def combine(tail, part, state, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Store this program's part of a softmax; if it is the last one, combine all parts.

    `part` is the `TailPart` of the work tile. Returns whether this part was the last one, and the
    state and accumulators: combined if it was.
    """
    first_share, last_share = part.first_share, part.last_share
    width: gl.constexpr = CFG.SLICE_DV
    slices: gl.constexpr = CFG.dv_slices
    consumers: gl.constexpr = CFG.CONSUMERS
    state_ptr = tail.parts + gl.num_programs(0).to(gl.int64) * (2 * consumers * ROWS * CFG.TILE_DV)
    layout: gl.constexpr = CFG.accumulator_layout(CFG.SLICE_DV)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    m_log2 = gl.convert_layout(state.m_log2, rows)
    row_sum = gl.convert_layout(state.row_sum, rows)
    slot = part_slot(part.share, first_share) * consumers + GROUP
    store_part_slices(tail.parts, state_ptr, slot, m_log2, row_sum, acc, ROWS)
    counter_ptr = tail.counters + (1 + GROUP) + first_share * consumers
    last = is_last(counter_ptr, last_share - first_share + 1)
    if last:
        offs_m = rows_of(acc[0])
        offsets = offs_m[:, None] * width + columns_of(acc[0])[None, :]
        m_log2, row_sum = init_state(offs_m)
        acc = zero_outputs(CFG)
        # in the order of shares, so that the bits do not depend on which program came last
        for other in range(first_share, last_share + 1):
            slot = part_slot(other, first_share) * consumers + GROUP
            state_at = state_ptr + slot * (2 * ROWS) + offs_m
            # bypass the L1, which is not coherent with the writes of other SMs
            m_part = gl.load(state_at, cache_modifier=".cg")
            sum_part = gl.load(state_at + ROWS, cache_modifier=".cg")
            at = tail.parts + slot.to(gl.int64) * (ROWS * CFG.TILE_DV) + offsets
            part_acc = gl.load(at, cache_modifier=".cg")
            m_log2, row_sum, rescale, factor = join_state(m_log2, row_sum, m_part, sum_part)
            joined = ()
            for i in gl.static_range(slices):
                if i > 0:
                    part_acc = gl.load(at + i * (ROWS * width), cache_modifier=".cg")
                total = acc[i] * rescale[:, None] + part_acc * factor[:, None]
                joined = joined + (total,)  # noqa: RUF005
            acc = joined
    state_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    m_log2 = gl.convert_layout(m_log2, state_rows)
    return last, m_log2, gl.convert_layout(row_sum, state_rows), acc


# The consumer role, and the kernel.


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Role of a consumer warp group: compute 64 queries of each work tile."""
    if CFG.PDL:
        gdc_wait()
    score = consume.score
    q_ring, heads, band, cu_seqlens = shared.q_ring, shared.heads, shared.band, shared.cu_seqlens
    lists = shared.mask.lists
    first_row: gl.constexpr = GROUP * ROWS
    tile_n: gl.constexpr = CFG.TILE_N
    packed: gl.constexpr = cu_seqlens.q is not None
    split_tail: gl.constexpr = CFG.SPLIT_TAIL
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.SLICE_DV)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_ring.tiles.dtype
    out_smem = consume.out_tiles.index(GROUP)
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    stages = KvStages(shared.k_ring.tiles, shared.v_ring.tiles, shared_address(CFG.tile_bytes))
    step = 0
    slot = 0
    if GROUP == 0:
        # the first consumer issues first
        ping_pong_pass(CFG.CONSUMERS - 1, CFG)
    tile = take_work_tile(shared.work, slot, 4, packed, split_tail)
    while tile.batch_head >= 0:
        plan = tile.plan
        q_first, q_len, kv_len = tile_tokens(tile, shared.lengths)
        batch, q_head, _ = batch_and_heads(tile.batch_head, heads.q, heads.group_size)
        q_start = tile.q_tile * CFG.tile_m
        q_index = q_start + first_row + rows
        first, last = row_bounds(position(q_index, q_len, kv_len), kv_len, band.left, band.right)
        first_pos = position(q_start + first_row, q_len, kv_len)
        any_first, every_last = row_bounds(first_pos, kv_len, band.left, band.right)
        last_pos = first_pos + (ROWS - 1)
        every_first, any_last = row_bounds(last_pos, kv_len, band.left, band.right)
        bounds = TileBounds(first, last, every_first, every_last)
        masked_tiles, kv_tiles = count_tiles(plan, CFG)
        visit = Visit(lists, plan, num_masked_blocks(plan), kv_len)
        m_log2, row_sum = init_state(q_index)
        acc = zero_outputs(CFG)
        q_stage = slot % CFG.Q_STAGES
        q = query_slices(q_ring, q_stage * CFG.CONSUMERS + GROUP, CFG)
        mbarrier.wait(q_ring.full.index(q_stage), (slot // CFG.Q_STAGES) & 1)
        if CFG.Q_REGISTERS:
            loaded = ()
            for i in gl.static_range(len(q)):
                loaded = loaded + (q[i].load(gl.DotOperandLayout(0, s_layout, 2)),)  # noqa: RUF005
            q = loaded
        alibi, bias, gate = None, None, None
        if consume.slopes is not None:
            slope = slope_of_head(consume.slopes, batch, q_head) * (LOG2_E / score.factor)
            alibi = Alibi(position(q_index, q_len, kv_len).to(gl.float32), slope)
        if consume.bias is not None:
            unit = LOG2_E / score.factor
            bias = row_bias(consume.bias, batch, q_head, q_index, q_len, unit)
        if consume.gates is not None:
            gate = tile_gate(consume.gates, batch, q_head, q_index, q_len, consume.u_tiles)
        queries = Queries(
            q, visit, masked_tiles, q_index, q_start, bounds, score, None, alibi, bias, gate
        )
        # KV tiles before `taken` are done or skipped
        taken = 0
        if CFG.SPLIT_TAIL:
            taken = tile.part.first_tile
            kv_tiles = tile.part.end_tile
        if CFG.SKIP_ABSENT:  # noqa: SIM102
            if q_start + first_row >= q_len:
                # none of this consumer's queries exist
                skip_tiles(stages, kv_tiles - taken, step, GROUP, CFG)
                step += kv_tiles - taken
                taken = kv_tiles
        if CFG.HALF_TILES and CFG.CONSUMERS > 2:
            skipped = skip_unseen(stages, plan, masked_tiles, any_last, step, taken, GROUP, CFG)
            step += skipped
            taken += skipped
        if CFG.HALF_TILES:
            kv_start = dense_tile(plan, taken) * tile_n
            if (masked_tiles > taken) & (any_last < kv_start + HALF):
                # The same queries, obscured from ptxas: that of CUDA 12.8 would reuse their
                # descriptors after the branch, where they are undefined if it was not taken.
                own = q_stage * CFG.CONSUMERS + GROUP + gl.minimum(q_len, 0)
                same = query_slices(q_ring, own, CFG)
                m_log2, row_sum, acc = attend_half(
                    same, stages, step, SoftmaxState(m_log2, row_sum), acc, kv_start, bounds, score,
                    0, GROUP, CFG,
                )  # fmt: skip
                step += 1
                taken += 1
        # whether the queries see only half of the last tile
        halved = False
        if CFG.HALF_TILES:
            left_start = plan.edge_begin * tile_n
            halved = (plan.edge_begin < plan.full_begin) & (any_first >= left_start + HALF)
            halved = halved & (kv_tiles > taken + 1)
            kv_tiles = gl.where(halved, kv_tiles - 1, kv_tiles)
        nothing = row_parts(no_scores)
        part_rows: gl.constexpr = gl.SliceLayout(1, nothing.type.layout)
        row_sum = nothing + 0.25 * gl.convert_layout(row_sum, part_rows)[:, None]
        if kv_tiles > taken:
            m_log2, row_sum, acc, p = attend_first_tile(
                queries, stages, taken, step, (m_log2, row_sum), acc, GROUP, CFG
            )
            for kv_tile in range(taken + 1, kv_tiles):
                step, m_log2, row_sum, acc, p = attend_tile(
                    queries, stages, kv_tile, step, (m_log2, row_sum), acc, p, GROUP, CFG
                )
            place = ring_place(step, CFG.STAGES)
            # all scores of this work tile are computed: the next queries may overwrite its own
            mbarrier.arrive(q_ring.empty.index(q_stage), count=1, pred=not halved)
            acc = attend_last_values(stages, place, acc, p, CFG)
            step += 1
        else:
            mbarrier.arrive(q_ring.empty.index(q_stage), count=1)

        row_sum = gl.convert_layout(gl.sum(row_sum, 1), m_log2.type.layout)
        if CFG.HALF_TILES:  # noqa: SIM102
            if halved:
                own = q_stage * CFG.CONSUMERS + GROUP + gl.minimum(q_len, 0)
                same = query_slices(q_ring, own, CFG)
                m_log2, row_sum, acc = attend_half(
                    same, stages, step, SoftmaxState(m_log2, row_sum), acc, left_start, bounds,
                    score, HALF, GROUP, CFG,
                )  # fmt: skip
                step += 1
                mbarrier.arrive(q_ring.empty.index(q_stage), count=1)
        complete = True
        if CFG.SPLIT_TAIL:  # noqa: SIM102
            if tile.part.first_share < tile.part.last_share:
                complete, m_log2, row_sum, acc = combine(
                    consume.tail, tile.part, SoftmaxState(m_log2, row_sum), acc, GROUP, CFG
                )
        if complete:
            if consume.sinks_ptr is not None:
                sink = gl.load(consume.sinks_ptr + q_head)
                m_log2, row_sum, rescale = add_sink(m_log2, row_sum, sink)
                acc = scale_slices(acc, gl.convert_layout(rescale, o_rows)[:, None])
            inverse, lse = finalise(m_log2, row_sum)
            out = scale_slices(acc, gl.convert_layout(inverse, o_rows)[:, None])
            for i in gl.static_range(len(out)):
                # the previous copy, at first of the last work tile, must have read the buffer
                tma.store_wait(0)
                out_smem.store(out[i].to(dtype))
                fence_async_shared()
                q_row = q_start + first_row
                out_place = tile_place(cu_seqlens.q, batch, q_head, q_first, q_len)
                place = tile_at(out_place, q_row, i * CFG.SLICE_DV)
                async_store(consume.out_desc, place, out_smem)
            lse_first = lse_offset(
                batch, q_head, q_first, heads.q, consume.lse_head_stride, cu_seqlens.q
            )
            gl.store(consume.lse_ptr + lse_first + q_index, lse, mask=exists(q_index, q_len))
        slot += 1
        tile = take_work_tile(shared.work, slot, 4, packed, split_tail)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right",
        "num_batch_heads", "raster_group", "dynamic", "tail_share", "q_heads", "group_size",
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
    workspace,
    block_lists,
    mask_batch_step,
    mask_head_step,
    lse_head_stride,
    q_len,
    kv_len,
    left,
    right,
    num_batch_heads,
    raster_group,
    dynamic,
    tail_share,
    q_heads,
    group_size,
    score,
    slopes,
    bias,
    gates,
    CFG: gl.constexpr,
):
    """Allocate the rings, gather the arguments of the roles, and start them.

    cu_seqlens : `CuSeqlens`
    workspace : `Workspace`
    block_lists : `MaskLists` or None
    score : `Score`
    slopes : `Slopes` or None
    bias : `Bias` or None
    gates : `KeyGates` or None
    CFG : `AttnFwdSm90Config`
    """
    if CFG.PDL:
        # the next kernel may start as soon as there is room; it waits before it reads our results
        gdc_launch_dependents()
    consumers: gl.constexpr = CFG.CONSUMERS
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    q_smem = tiles(q_desc, CFG.Q_STAGES * consumers * CFG.d_slices, ROWS)
    out_smem = tiles(out_desc, consumers, ROWS)
    k_smem = tiles(k_desc, stages * CFG.d_slices, tile_n)
    v_smem = tiles(v_desc, stages * CFG.dv_slices, tile_n)
    q_ring = ring(q_smem, CFG.Q_STAGES, consumers)
    k_ring = ring(k_smem, stages, CFG.arrivals, CFG.barrier_room)
    v_ring = ring(v_smem, stages, CFG.arrivals, CFG.barrier_room)
    dense_fields: gl.constexpr = DENSE_FIELDS if cu_seqlens.q is None else PACKED_FIELDS
    fields: gl.constexpr = SPLIT_FIELDS if CFG.SPLIT_TAIL else dense_fields
    # if a scheduler warp publishes work tiles, the producer takes them too
    takers: gl.constexpr = consumers + 1 if CFG.SCHEDULER_WARP else consumers
    work = work_channel(fields, takers)
    begun = None
    if CFG.SCHEDULER_WARP:
        begun = barriers(1, 1).index(0)
    u_tiles = None
    if CFG.GATED:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        u_tiles = gl.allocate_shared_memory(gl.float32, [CFG.gate_stages, tile_n], plain)
    fence_async_shared()

    schedule = Schedule(workspace.order, num_batch_heads, raster_group, dynamic, tail_share)
    produce = ProducerArgs(q_desc, k_desc, v_desc, workspace.counters, schedule, gates)
    tail = SplitTail(workspace.parts, workspace.counters)
    consume = ConsumerArgs(
        out_desc, lse_ptr, lse_head_stride, sinks_ptr, score, out_smem, tail, slopes, bias, gates,
        u_tiles,
    )  # fmt: skip
    shared = ForwardShared(
        Mask(block_lists, mask_batch_step, mask_head_step),
        q_ring,
        k_ring,
        v_ring,
        work,
        Lengths(q_len, kv_len),
        Heads(q_heads, group_size),
        Band(left, right),
        cu_seqlens,
    )

    start_roles(_consume, consume, produce, shared, begun, CFG)
