# mypy: ignore-errors
"""Attention backward on Hopper for wide heads: dk by one warp group, dv by the other.

Gradients of 64 keys with more than 128 dims are more than one warp group has registers for. Here
both warp groups work on the same 64 keys, and every tile has 128 queries:

    s^T = k q^T    dp^T = v dout^T      each warp group for 64 of the queries
    dk += ds^T q   or   dv += p^T dout  either warp group one of them, for all queries
    dq = ds k                           each warp group for its own queries

p and ds go through shared memory, from where either warp group reads what both have written. dq is
added to the sums in memory from registers, 16 bytes at a time: shared memory is full, and its
bandwidth is what the products need most. Tiles lie in shared memory as slices of columns, because
their sizes are powers of two.

Roles, order of work and ordered accumulation are those of `backward`, except that the warp groups
wait for semaphores themselves. Called as impl "sm90" of `bsk::attn_bwd` where a head dim is above
128, with key blocks of masks of 64, 128 or 256.
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

from ...device.gluon.compat import async_store, placed
from ...device.gluon.memory import acquire_by_group, add_vectors, release_by_group, store_vectors
from ...device.gluon.pipeline import barriers, take, tile_at, work_channel
from ...device.records import Band, GradientScore, Heads, Lengths, Mask
from .backward import block_semaphore, hand_over, in_register_order, score_step, zero_of
from .backward_producer import heads_of_visits, produce_steps
from .backward_shared import (
    BATCH_HEAD,
    DENSE_FIELDS,
    PACKED_FIELDS,
    RANK,
    ROWS,
    Descriptors,
    Shared,
    WorkOrder,
    place_of_keys,
    query_ring,
    read_info,
    resident_keys,
    step_infos,
    sum_row,
)

# Columns of dq that are multiplied and added at a time, and the numbers of such a tile.
DQ_COLUMNS = gl.constexpr(64)
DQ_NUMBERS = gl.constexpr(64 * 64)


class Exchange(NamedTuple):
    """p^T and ds^T [64 keys, 64 queries] of each warp group, for the other one to read."""

    p_smem: Any
    ds_smem: Any
    ready: Any
    """Both warp groups have stored theirs."""
    free: Any
    """Both have read what they need of the other."""
    done: Any
    """Both have read the keys and values of a work tile for the last time."""


class Sums(NamedTuple):
    """Where dq is summed, and the semaphores of ordered accumulation."""

    sums_ptr: Any
    semaphore_ptr: Any
    head_rows: Any
    """Rows of a head of packed sequences, else None."""


class Outputs(NamedTuple):
    """What a consumer writes."""

    dk_desc: Any
    dv_desc: Any
    score: GradientScore
    sums: Sums


@gluon.jit
def _start_scores(
    rows, columns, stage, step, SLICES: gl.constexpr, PART: gl.constexpr, CFG: gl.constexpr
):
    """Start the product of all keys or values with a warp group's part of the queries or dout."""
    product = gl.zeros([ROWS, ROWS], gl.float32, CFG.accumulator_layout(ROWS))
    for i in gl.static_range(SLICES):
        part = columns.index(placed(stage * SLICES + i)).slice(PART * ROWS, ROWS, dim=0)
        row = rows.index(i + zero_of(step))
        product = warpgroup_mma(row, part.permute((1, 0)), product, use_acc=i > 0, is_async=True)
    return product


@gluon.jit
def _start_gradients(acc, weights, rows, stage, step, SLICES: gl.constexpr):
    """Start adding the products of p^T or ds^T with all dout or queries of a stage to `acc`."""
    started = ()
    for i in gl.static_range(SLICES):
        total = acc[i]
        for part in gl.static_range(2):
            tile = rows.index(placed(stage * SLICES + i)).slice(part * ROWS, ROWS, dim=0)
            weight = weights.index(part + zero_of(step))
            total = warpgroup_mma(weight, tile, total, is_async=True)
        started = started + (total,)  # noqa: RUF005
    return started


@gluon.jit
def _await_gradients(started, PENDING: gl.constexpr):
    """The sums, once all but PENDING products have ended."""
    acc = warpgroup_mma_wait(PENDING, deps=started)
    if len(started) == 1:
        acc = (acc,)
    return acc


@gluon.jit
def _start_dq(ds, k_smem, step, PIECE: gl.constexpr, CFG: gl.constexpr):
    """Start DQ_COLUMNS columns of dq of a warp group's queries."""
    width: gl.constexpr = CFG.slice_d
    first: gl.constexpr = PIECE * DQ_COLUMNS
    k = k_smem.index(first // width + zero_of(step))
    if width > DQ_COLUMNS:
        k = k.slice(first % width, DQ_COLUMNS, dim=1)
    nothing = gl.zeros([ROWS, DQ_COLUMNS], gl.float32, CFG.accumulator_layout(DQ_COLUMNS))
    return warpgroup_mma(ds.permute((1, 0)), k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_piece(sums_ptr, dq, first, CFG: gl.constexpr):
    """Add a piece of dq to its sums, or store it if `first`."""
    dq = in_register_order(dq)
    if CFG.ORDERED:
        if first:
            store_vectors(sums_ptr, dq)
        else:
            add_vectors(sums_ptr, dq)
    else:
        add_vectors(sums_ptr, dq)


@gluon.jit
def _add_dq(dq_started, ds, step, sums, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Add dq of a warp group's queries to the sums in memory, whose first piece is under way."""
    pieces: gl.constexpr = CFG.TILE_D // DQ_COLUMNS
    batch_head = read_info(shared.steps, step, BATCH_HEAD, 4)
    row, rows = sum_row(shared.steps, sums.head_rows, shared.lengths.q, step, GROUP, 4)
    # a part without queries, which begins past all rows, adds nothing and has no rank
    exists = row < rows
    first = False
    if CFG.ORDERED:
        semaphore = block_semaphore(sums.semaphore_ptr, batch_head, row, rows, GROUP, CFG)
        has_rank = exists if CFG.parts == 2 else True
        tile_in_block = row % CFG.BLOCK_Q // CFG.TILE_M
        rank = read_info(shared.steps, step, RANK + GROUP, 4)
        # the first KV tile of this block stores, so that sums need no zeroing
        first = rank == 0
        if has_rank & (tile_in_block == CFG.last_in_block):
            acquire_by_group(semaphore, rank)
    sums_ptr = sums.sums_ptr + (batch_head.to(gl.int64) * rows + row) * CFG.TILE_D
    for piece in gl.static_range(pieces):
        if piece + 1 < pieces:
            after = _start_dq(ds, shared.keys.k_smem, step, piece + 1, CFG)
            dq = warpgroup_mma_wait(1, deps=(dq_started,))
            dq_started = after
        else:
            dq = warpgroup_mma_wait(0, deps=(dq_started,))
        if exists:
            _add_piece(sums_ptr + piece * DQ_NUMBERS, dq, first, CFG)
    if CFG.ORDERED:  # noqa: SIM102 - a constant decides whether `has_rank` exists
        if has_rank & (tile_in_block == 0):
            release_by_group(semaphore)


@gluon.jit
def _step(
    acc, step, kv_index, exchange, outputs, shared,
    MASKED: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Scores and gradients of one tile of queries."""
    k_smem, v_smem, ring = shared.keys.k_smem, shared.keys.v_smem, shared.queries
    dtype: gl.constexpr = k_smem.dtype
    # not constants, even where there is one stage
    stage = step % CFG.STAGES + zero_of(step)
    dout_stage = step % CFG.DOUT_STAGES + zero_of(step)
    mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
    s_started = _start_scores(k_smem, ring.q_smem, stage, step, CFG.d_slices, GROUP, CFG)
    mbarrier.wait(ring.dout_full.index(dout_stage), (step // CFG.DOUT_STAGES) & 1)
    dp_started = _start_scores(v_smem, ring.dout_smem, dout_stage, step, CFG.dv_slices, GROUP, CFG)
    p, ds = score_step(
        s_started, dp_started, step, MASKED, kv_index, outputs.score, shared, False, CFG, GROUP
    )
    ds_tile = exchange.ds_smem.index(GROUP + zero_of(step))
    mbarrier.wait(exchange.free, (step & 1) ^ 1)
    exchange.p_smem.index(GROUP).store(p.to(dtype))
    hand_over(ds.to(dtype), ds_tile, exchange.ready)
    # one warp group needs no more of dout now, the other no more of the queries
    if GROUP == 0:
        mbarrier.arrive(ring.dout_empty.index(dout_stage), count=1)
        mbarrier.wait(exchange.ready, step & 1)
        started = _start_gradients(acc, exchange.ds_smem, ring.q_smem, stage, step, CFG.d_slices)
    else:
        mbarrier.arrive(ring.empty.index(stage), count=1)
        mbarrier.wait(exchange.ready, step & 1)
        started = _start_gradients(
            acc, exchange.p_smem, ring.dout_smem, dout_stage, step, CFG.dv_slices
        )
    dq_started = _start_dq(ds_tile, k_smem, step, 0, CFG)
    acc = _await_gradients(started, 1)
    mbarrier.arrive(exchange.free, count=1)
    # the next tile comes while dq is computed
    if GROUP == 0:
        mbarrier.arrive(ring.empty.index(stage), count=1)
    else:
        mbarrier.arrive(ring.dout_empty.index(dout_stage), count=1)
    _add_dq(dq_started, ds_tile, step, outputs.sums, shared, GROUP, CFG)
    return acc


@gluon.jit
def _store_gradient(desc, acc, factor, smem, place, row, WIDTH: gl.constexpr):
    """Round a gradient of keys or values and copy it to memory, by way of their own tiles."""
    dtype: gl.constexpr = smem.dtype
    for i in gl.static_range(len(acc)):
        smem.index(i).store((acc[i] * factor).to(dtype))
    fence_async_shared()
    for i in gl.static_range(len(acc)):
        async_store(desc, tile_at(place, row, i * WIDTH), smem.index(i))
    tma.store_wait(0)


@gluon.jit
def _consume(exchange, outputs, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """dk or dv of the 64 keys of each work tile, and dq of half of the queries."""
    work, heads = shared.work, shared.heads
    k_smem, v_smem, kv_full, kv_empty = shared.keys
    slices: gl.constexpr = CFG.d_slices if GROUP == 0 else CFG.dv_slices
    width: gl.constexpr = CFG.slice_d if GROUP == 0 else CFG.slice_dv
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.scored_queries)
    layout: gl.constexpr = CFG.accumulator_layout(CFG.slice_d if GROUP == 0 else CFG.slice_dv)
    offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    kv_heads = heads.q // heads.group_size
    visits, _ = heads_of_visits(shared, CFG)
    step = 0
    slot = 1
    work_tiles = 0
    batch_head, kv_tile = take(work, 0)
    while batch_head >= 0:
        kv_index = kv_tile * ROWS + offs_n
        acc = ()
        for _ in gl.static_range(slices):
            acc = acc + (gl.zeros([ROWS, width], gl.float32, layout),)  # noqa: RUF005
        mbarrier.wait(kv_full, work_tiles & 1)
        for _ in range(visits * CFG.visits_per_head):
            q_tiles, masked_tiles = take(work, slot)
            slot += 1
            for _ in range(masked_tiles):
                acc = _step(acc, step, kv_index, exchange, outputs, shared, True, GROUP, CFG)
                step += 1
            # a loop of its own: what masks spill would be reloaded here
            for _ in range(masked_tiles, q_tiles):
                acc = _step(acc, step, kv_index, exchange, outputs, shared, False, GROUP, CFG)
                step += 1
        mbarrier.arrive(exchange.done, count=1)
        mbarrier.wait(exchange.done, work_tiles & 1)
        # found here, and not before: registers are scarce in the loops
        place = place_of_keys(shared, batch_head, kv_heads)
        if GROUP == 0:
            scale = outputs.score.scale
            _store_gradient(outputs.dk_desc, acc, scale, k_smem, place, kv_tile * ROWS, width)
        else:
            _store_gradient(outputs.dv_desc, acc, 1.0, v_smem, place, kv_tile * ROWS, width)
        mbarrier.arrive(kv_empty, count=1)
        work_tiles += 1
        batch_head, kv_tile = take(work, slot)
        slot += 1


@gluon.jit(
    do_not_specialize=[
        "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right", "num_batch_heads",
        "raster_group", "visit_heads", "q_heads", "group_size",
    ]
)  # fmt: skip
def _attn_bwd_wide_sm90_kernel(
    sums_ptr,
    dk_desc,
    dv_desc,
    dout_desc,
    q_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    work_ptrs,
    block_lists,
    mask_batch_step,
    mask_head_step,
    q_len,
    kv_len,
    left,
    right,
    num_batch_heads,
    raster_group,
    visit_heads,
    q_heads,
    group_size,
    cu_seqlens,
    head_rows,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles; arguments are those of `_attn_bwd_sm90_kernel`, but for the sums.

    `cu_seqlens` and `head_rows` are as in `Shared`, or None if sequences are not packed.
    """
    consumers: gl.constexpr = CFG.CONSUMERS
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    descs = Descriptors(q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc)
    keys = resident_keys(descs, CFG)
    queries = query_ring(descs, CFG)
    p_smem = gl.allocate_shared_memory(dtype, [consumers, ROWS, ROWS], layout)
    ds_smem = gl.allocate_shared_memory(dtype, [consumers, ROWS, ROWS], layout)
    ready, free, done = (
        barriers(1, consumers).index(0),
        barriers(1, consumers).index(0),
        barriers(1, consumers).index(0),
    )
    exchange = Exchange(p_smem, ds_smem, ready, free, done)
    steps = step_infos(DENSE_FIELDS if cu_seqlens is None else PACKED_FIELDS)
    work = work_channel(2, consumers)
    fence_async_shared()

    mask = Mask(block_lists, mask_batch_step, mask_head_step)
    lengths, heads, band = Lengths(q_len, kv_len), Heads(q_heads, group_size), Band(left, right)
    shared = Shared(mask, keys, queries, steps, work, lengths, heads, band, cu_seqlens)
    order = WorkOrder(
        work_ptrs.counter, work_ptrs.order, work_ptrs.ranks, work_ptrs.visits, visit_heads,
        num_batch_heads, raster_group, 1,
    )  # fmt: skip
    outputs = Outputs(dk_desc, dv_desc, score, Sums(sums_ptr, work_ptrs.semaphore, head_rows))
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume, (exchange, outputs, shared, 0, CFG)),
            (_consume, (exchange, outputs, shared, 1, CFG)),
            (produce_steps, (descs, order, shared, CFG)),
        ],
        [4, 1],
        [registers, producer_registers],
    )
