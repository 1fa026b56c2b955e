# mypy: ignore-errors
"""dq of wide heads on Hopper, beside `backward_wide` for dk and dv alone; without a mask.

    s = q k^T      dp = dout v^T      dq += ds k

As the dq kernel of `backward_split`, but with two warp groups of 64 queries each in one program:
queries and output gradients of 128 rows leave no room for a second one. Both read the same keys and
values. Tiles lie in shared memory as slices of columns, and both operands of scores come from
there, because dq takes the registers. Sums have one order: the same bits in every run.
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
from ...device.gluon.compat import async_store, placed
from ...device.gluon.pipeline import barriers, ring, tiles, work_channel
from ...device.masks import position, row_bounds, within_bounds
from ...device.records import Band, Heads, Lengths, Mask
from ...device.schedule import batch_and_heads
from ...device.visits import num_full_blocks
from .backward import zero_of
from .backward_shared import ROWS, padded_queries
from .backward_split import DqShared, copy_rows, free_stage
from .forward_producer import (
    DENSE_FIELDS,
    ForwardShared,
    ProducerArgs,
    Schedule,
    count_tiles,
    dense_tile,
    find_work,
    needs_mask,
    take_work_tile,
)


class OwnRows(NamedTuple):
    """The 64 queries of a warp group, and the keys that all queries of the tile visit."""

    shift: Any
    """lse in base 2."""
    delta: Any
    bounds: Any
    """First and last key that each of them sees."""
    plan: Any


@gluon.jit
def _produce(q_desc, dout_desc, k_desc, v_desc, shared, begun, CFG: gl.constexpr):
    """Keep the rings full for the work tiles that the scheduler warp publishes."""
    consumers: gl.constexpr = CFG.CONSUMERS
    d_slices: gl.constexpr = CFG.d_slices
    dv_slices: gl.constexpr = CFG.dv_slices
    k_stages: gl.constexpr = CFG.K_STAGES
    v_stages: gl.constexpr = CFG.V_STAGES
    step = 0
    slot = 0
    tile = take_work_tile(shared.work, slot, 1)
    while tile.batch_head >= 0:
        mbarrier.arrive(begun, count=1)
        batch, q_head, kv_head = batch_and_heads(
            tile.batch_head, shared.heads.q, shared.heads.group_size
        )
        row = tile.q_tile * CFG.tile_m
        _, kv_tiles = count_tiles(tile.plan, CFG)
        for kv_tile in range(gl.maximum(kv_tiles, 1)):
            if kv_tile < kv_tiles:
                start = dense_tile(tile.plan, kv_tile) * CFG.TILE_N
                copy_rows(k_desc, shared.k, step, batch, kv_head, start, k_stages, d_slices)
                copy_rows(v_desc, shared.v, step, batch, kv_head, start, v_stages, dv_slices)
                step += 1
            if kv_tile == 0:
                # after the first keys: the memory of queries holds dq of the last work tile
                copy_rows(dout_desc, shared.dout, slot, batch, q_head, row, 1, dv_slices, consumers)
                copy_rows(q_desc, shared.q, slot, batch, q_head, row, 1, d_slices, consumers)
        slot += 1
        tile = take_work_tile(shared.work, slot, 1)


@gluon.jit
def _start_scores(
    rows, ring, step, STAGES: gl.constexpr, SLICES: gl.constexpr, GROUP: gl.constexpr,
    CFG: gl.constexpr,
):  # fmt: skip
    """Start the product of queries or dout with the keys or values of a step."""
    tile_n: gl.constexpr = CFG.TILE_N
    product = gl.zeros([ROWS, tile_n], gl.float32, CFG.accumulator_layout(CFG.TILE_N))
    stage = step % STAGES
    mbarrier.wait(ring.full.index(stage), (step // STAGES) & 1)
    for i in gl.static_range(SLICES):
        columns = ring.tiles.index(placed(stage * SLICES + i)).permute((1, 0))
        row = rows.tiles.index(GROUP * SLICES + i + zero_of(step))
        product = warpgroup_mma(row, columns, product, use_acc=i > 0, is_async=True)
    return product


@gluon.jit
def _start_dq(dq, ds, ring, step, CFG: gl.constexpr):
    """Start adding the product of ds, from registers, with the keys of a step to all slices."""
    slices: gl.constexpr = CFG.d_slices
    stage = step % CFG.K_STAGES
    started = ()
    for i in gl.static_range(slices):
        k = ring.tiles.index(placed(stage * slices + i))
        started = started + (warpgroup_mma(ds, k, dq[i], is_async=True),)  # noqa: RUF005
    return started


@gluon.jit
def _await_dq(started, PENDING: gl.constexpr):
    """dq, once all but PENDING products have ended."""
    dq = warpgroup_mma_wait(PENDING, deps=started)
    if len(started) == 1:
        dq = (dq,)
    return dq


@gluon.jit
def _hide(p, rows, kv_tile, CFG: gl.constexpr):
    """p without the keys of a tile that a query does not see."""
    tile_n: gl.constexpr = CFG.TILE_N
    columns: gl.constexpr = gl.SliceLayout(0, CFG.accumulator_layout(CFG.TILE_N))
    kv_pos = dense_tile(rows.plan, kv_tile) * tile_n + gl.arange(0, tile_n, columns)
    first, last = rows.bounds.first[:, None], rows.bounds.last[:, None]
    return gl.where(within_bounds(kv_pos[None, :], first, last), p, 0.0)


@gluon.jit
def _score_gradients(s, dp_started, step, rows, score, shared, kv_tile, masked, CFG: gl.constexpr):
    """ds of a step, as the operand of its product, from its scores and the product under way."""
    layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.slice_d), 2)
    p, capped = probabilities(s, None, rows.shift[:, None], score)
    if masked:
        p = _hide(p, rows, kv_tile, CFG)
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    free_stage(shared.v, step, CFG.V_STAGES)
    ds = score_gradients(p, capped, dp, rows.delta[:, None], score)
    return gl.convert_layout(ds.to(shared.k.tiles.dtype), layout)


@gluon.jit
def _step(
    step, dq, ds, rows, score, shared, kv_tile,
    MASKED: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """dq of a step, and ds of the next one, which is returned."""
    q, k, dout, v = shared.q, shared.k, shared.dout, shared.v
    dq_started = _start_dq(dq, ds, k, step, CFG)
    s_started = _start_scores(q, k, step + 1, CFG.K_STAGES, CFG.d_slices, GROUP, CFG)
    if CFG.DP_AHEAD:
        dp_started = _start_scores(dout, v, step + 1, CFG.V_STAGES, CFG.dv_slices, GROUP, CFG)
        s = warpgroup_mma_wait(CFG.dv_slices, deps=(s_started,))
        dq = _await_dq(dq_started, CFG.dv_slices)
    else:
        s = warpgroup_mma_wait(0, deps=(s_started,))
        dq = _await_dq(dq_started, 0)
        dp_started = _start_scores(dout, v, step + 1, CFG.V_STAGES, CFG.dv_slices, GROUP, CFG)
    free_stage(k, step, CFG.K_STAGES)
    step += 1
    ds = _score_gradients(s, dp_started, step, rows, score, shared, kv_tile, MASKED, CFG)
    return step, dq, ds


@gluon.jit
def _own_rows(tile, lse_ptr, delta_ptr, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """The terms of a warp group's queries of a work tile."""
    lengths, band = shared.lengths, shared.band
    layout: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    q_index = tile.q_tile * CFG.tile_m + GROUP * ROWS + gl.arange(0, ROWS, layout)
    padded = padded_queries(lengths.q)
    place = tile.batch_head.to(gl.int64) * padded + q_index
    exist = q_index < padded
    shift = gl.load(lse_ptr + place, exist, other=float("inf"))
    delta = gl.load(delta_ptr + place, exist, other=0.0)
    q_pos = position(q_index, lengths.q, lengths.kv)
    bounds = row_bounds(q_pos, lengths.kv, band.left, band.right)
    return OwnRows(shift, delta, bounds, tile.plan)


@gluon.jit
def _consume(dq_desc, lse_ptr, delta_ptr, score, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """dq of 64 queries of each work tile."""
    work, heads = shared.work, shared.heads
    q, k, dout, v = shared.q, shared.k, shared.dout, shared.v
    slices: gl.constexpr = CFG.d_slices
    width: gl.constexpr = CFG.slice_d
    layout: gl.constexpr = CFG.accumulator_layout(CFG.slice_d)
    step = 0
    slot = 0
    tile = take_work_tile(work, slot)
    while tile.batch_head >= 0:
        rows = _own_rows(tile, lse_ptr, delta_ptr, shared, GROUP, CFG)
        plan = tile.plan
        masked_tiles, kv_tiles = count_tiles(plan, CFG)
        dq = ()
        for _ in gl.static_range(slices):
            dq = dq + (gl.zeros([ROWS, width], gl.float32, layout),)  # noqa: RUF005
        mbarrier.wait(dout.full.index(0), slot & 1)
        mbarrier.wait(q.full.index(0), slot & 1)
        if kv_tiles > 0:
            s_started = _start_scores(q, k, step, CFG.K_STAGES, CFG.d_slices, GROUP, CFG)
            dp_started = _start_scores(dout, v, step, CFG.V_STAGES, CFG.dv_slices, GROUP, CFG)
            s = warpgroup_mma_wait(CFG.dv_slices, deps=(s_started,))
            masked = needs_mask(None, plan, 0, masked_tiles)
            ds = _score_gradients(s, dp_started, step, rows, score, shared, 0, masked, CFG)
            # the edges of a band before and after the tiles that every query sees
            right = plan.edge_end - plan.full_end
            inner = right + num_full_blocks(plan)
            for kv_tile in range(1, right):
                step, dq, ds = _step(step, dq, ds, rows, score, shared, kv_tile, True, GROUP, CFG)
            for kv_tile in range(gl.maximum(right, 1), inner):
                step, dq, ds = _step(step, dq, ds, rows, score, shared, kv_tile, False, GROUP, CFG)
            for kv_tile in range(gl.maximum(inner, 1), kv_tiles):
                step, dq, ds = _step(step, dq, ds, rows, score, shared, kv_tile, True, GROUP, CFG)
            free_stage(dout, slot, 1)
            dq = _await_dq(_start_dq(dq, ds, k, step, CFG), 0)
            free_stage(k, step, CFG.K_STAGES)
            step += 1
        else:
            free_stage(dout, slot, 1)
        # every product with this warp group's queries is done: dq takes their memory
        batch, q_head, _ = batch_and_heads(tile.batch_head, heads.q, heads.group_size)
        row = tile.q_tile * CFG.tile_m + GROUP * ROWS
        for i in gl.static_range(slices):
            smem = q.tiles.index(GROUP * slices + i)
            smem.store((dq[i] * score.scale).to(smem.dtype))
        fence_async_shared()
        for i in gl.static_range(slices):
            async_store(dq_desc, [batch, q_head, row, i * width], q.tiles.index(GROUP * slices + i))
        tma.store_wait(0)
        free_stage(q, slot, 1)
        slot += 1
        tile = take_work_tile(work, slot)


@gluon.jit(
    do_not_specialize=[
        "q_len", "kv_len", "left", "right", "num_batch_heads", "raster_group", "dynamic",
        "q_heads", "group_size",
    ]
)  # fmt: skip
def _attn_bwd_wide_dq_sm90_kernel(
    dq_desc,
    dout_desc,
    q_desc,
    k_desc,
    v_desc,
    lse_ptr,
    delta_ptr,
    counter_ptr,
    q_len,
    kv_len,
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
    """Set up rings and roles; `score` is what `gradient_factors` gives."""
    consumers: gl.constexpr = CFG.CONSUMERS
    tile_n: gl.constexpr = CFG.TILE_N
    d_slices: gl.constexpr = CFG.d_slices
    dv_slices: gl.constexpr = CFG.dv_slices
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    k_stages: gl.constexpr = CFG.K_STAGES
    v_stages: gl.constexpr = CFG.V_STAGES
    q_ring = ring(tiles(q_desc, consumers * d_slices, ROWS), 1, consumers)
    dout_ring = ring(tiles(dout_desc, consumers * dv_slices, ROWS), 1, consumers)
    k_ring = ring(tiles(k_desc, k_stages * d_slices, tile_n), k_stages, consumers)
    v_ring = ring(tiles(v_desc, v_stages * dv_slices, tile_n), v_stages, consumers)
    # producer and consumers take what the scheduler warp finds
    work = work_channel(DENSE_FIELDS, consumers + 1)
    begun = barriers(1, 1).index(0)
    fence_async_shared()

    mask = Mask(None, 0, 0)
    lengths, heads, band = Lengths(q_len, kv_len), Heads(q_heads, group_size), Band(left, right)
    shared = DqShared(mask, q_ring, dout_ring, k_ring, v_ring, work, lengths, heads, band)
    # the scheduler warp of the forward, which reads only these of its arguments
    schedule = Schedule(None, num_batch_heads, raster_group, dynamic, 0)
    find = ProducerArgs(None, None, None, counter_ptr, schedule, None)
    found = ForwardShared(mask, None, None, None, work, lengths, heads, band, None)
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume, (dq_desc, lse_ptr, delta_ptr, score, shared, 0, CFG)),
            (_consume, (dq_desc, lse_ptr, delta_ptr, score, shared, 1, CFG)),
            (_produce, (q_desc, dout_desc, k_desc, v_desc, shared, begun, CFG)),
            (find_work, (find, found, begun, CFG)),
        ],
        [4, 1, 1],
        [registers, producer_registers, producer_registers],
    )
