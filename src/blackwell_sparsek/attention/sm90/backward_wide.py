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

With `CFG.ONE_WAY` it computes dk and dv alone, and `backward_wide_queries` dq. Tiles have 64
queries, and each warp group two products:

    s^T = k q^T        dv += p^T dout   p^T goes from registers to its product, and to the other
    dp^T = v dout^T    dk += ds^T q     ds^T goes from registers to its product

p goes one way through shared memory, in fp32 and in the order of registers, so that a thread reads
what the same thread of the other warp group has written. Nothing comes back: the warp group of dv
is up to `CFG.DS_STAGES` steps ahead, and one multiplies while the other computes exponentials.

Without `CFG.SHARED_KEYS` each warp group keeps dk and dv of 64 keys of its own, which takes 160
registers of a thread for 320 columns. Scores of the rest have room for tiles of 32 queries. Queries
are read for 128 keys at a time, and nothing is exchanged.
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
from triton.language.extra.cuda import gdc_launch_dependents

from ...device.backprop import probabilities
from ...device.gluon.compat import async_store, placed, thread_barrier
from ...device.gluon.memory import acquire_by_group, add_vectors, release_by_group, store_vectors
from ...device.gluon.pipeline import barriers, take, tile_at, work_channel
from ...device.records import Band, GradientScore, Heads, Lengths, Mask
from .backward import (
    SUM_COLUMNS,
    SUM_ROWS,
    block_semaphore,
    hand_over,
    hide,
    in_register_order,
    row_terms,
    score_step,
    zero_of,
)
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


class OneWay(NamedTuple):
    """Stages of fp32 weights from the warp group of dv to that of dk, in the order of registers.

    A weight is p, times the derivative of the softcap if there is one: what ds is dp - delta times.
    """

    weights: Any
    ready: Any
    free: Any
    done: Any
    """As in `Exchange`."""


class Sums(NamedTuple):
    """Where dq is summed, and the semaphores of ordered accumulation."""

    sums_ptr: Any
    semaphore_ptr: Any
    head_rows: Any
    """Rows of a head of packed sequences, else None."""


class Outputs(NamedTuple):
    """The results of a consumer."""

    dk_desc: Any
    dv_desc: Any
    score: GradientScore
    sums: Sums
    exchange: Any
    """`Exchange`, `OneWay`, or None where warp groups have keys of their own."""


@gluon.jit
def _start_scores(
    rows, columns, stage, step,
    SLICES: gl.constexpr, PART: gl.constexpr, CFG: gl.constexpr, GROUP: gl.constexpr = 0,
):  # fmt: skip
    """Start the product of the GROUP-th 64 keys or values with a part of the queries or dout."""
    queries: gl.constexpr = CFG.scored_queries
    layout: gl.constexpr = CFG.accumulator_layout(CFG.scored_queries)
    product = gl.zeros([ROWS, queries], gl.float32, layout)
    for i in gl.static_range(SLICES):
        part = columns.index(placed(stage * SLICES + i)).slice(PART * queries, queries, dim=0)
        row = rows.index(GROUP * SLICES + i + zero_of(step))
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
def _from_register_order(x):
    """The tile that `in_register_order` has reordered."""
    # eighth of the columns, warp, row and column of a thread, half of 16 rows, one of two
    return x.reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, ROWS])


@gluon.jit
def _start_own_gradients(
    acc, weights, rows, stage, SLICES: gl.constexpr, CFG: gl.constexpr, FIRST: gl.constexpr = 0
):
    """Start adding the products of p^T or ds^T, from registers, with dout or queries to `acc`.

    Gradients of rows are those of `acc` from the FIRST on.
    """
    dtype: gl.constexpr = rows.dtype
    width: gl.constexpr = rows.shape[2]
    layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(width), 2)
    weights = gl.convert_layout(weights.to(dtype), layout)
    started = ()
    for i in gl.static_range(SLICES):
        tile = rows.index(placed(stage * SLICES + i))
        started = started + (warpgroup_mma(weights, tile, acc[FIRST + i], is_async=True),)  # noqa: RUF005
    return started


@gluon.jit
def _add_to_own(
    acc, step, kv_index, score, shared,
    MASKED: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to dk and dv of a warp group's own keys."""
    ring, keys = shared.queries, shared.keys
    stage = step % CFG.STAGES
    dout_stage = step % CFG.DOUT_STAGES
    mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
    s_started = _start_scores(
        keys.k_smem, ring.q_smem, stage, step, CFG.d_slices, 0, CFG, GROUP
    )  # fmt: skip
    mbarrier.wait(ring.dout_full.index(dout_stage), (step // CFG.DOUT_STAGES) & 1)
    dp_started = _start_scores(
        keys.v_smem, ring.dout_smem, dout_stage, step, CFG.dv_slices, 0, CFG, GROUP
    )
    p, ds = score_step(s_started, dp_started, step, MASKED, kv_index, score, shared, True, CFG)
    slices: gl.constexpr = CFG.d_slices
    dv = _start_own_gradients(acc, p, ring.dout_smem, dout_stage, CFG.dv_slices, CFG, slices)
    dk = _start_own_gradients(acc, ds, ring.q_smem, stage, CFG.d_slices, CFG)
    acc = _await_gradients(dk + dv, 0)
    mbarrier.arrive(ring.dout_empty.index(dout_stage), count=1)
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return acc


@gluon.jit
def _add_to_values(acc, step, kv_index, outputs, shared, MASKED: gl.constexpr, CFG: gl.constexpr):
    """Scores of one tile of queries, their weights for the other warp group, and dv."""
    exchange, score = outputs.exchange, outputs.score
    ring = shared.queries
    stage = step % CFG.STAGES
    dout_stage = step % CFG.DOUT_STAGES
    place = step % CFG.DS_STAGES
    mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
    s_started = _start_scores(shared.keys.k_smem, ring.q_smem, stage, step, CFG.d_slices, 0, CFG)
    lse_log2 = row_terms(ring.lse_smem, stage, 0, CFG)
    s = warpgroup_mma_wait(0, deps=(s_started,))
    p, capped = probabilities(s, None, lse_log2, score)
    if MASKED:
        p = hide(p, step, kv_index, shared, 0, CFG)
    weight = p
    if score.inverse_cap is not None:
        weight = p * ((1.0 - capped) * (1.0 + capped))
    mbarrier.wait(exchange.free.index(place), ((step // CFG.DS_STAGES) & 1) ^ 1)
    exchange.weights.index(place).store(in_register_order(weight))
    # every thread has stored, and so has used its lse
    thread_barrier()
    mbarrier.arrive(exchange.ready.index(place), count=1)
    mbarrier.arrive(ring.empty.index(stage), count=1)
    mbarrier.wait(ring.dout_full.index(dout_stage), (step // CFG.DOUT_STAGES) & 1)
    started = _start_own_gradients(acc, p, ring.dout_smem, dout_stage, CFG.dv_slices, CFG)
    acc = _await_gradients(started, 0)
    mbarrier.arrive(ring.dout_empty.index(dout_stage), count=1)
    return acc


@gluon.jit
def _add_to_keys(acc, step, exchange, shared, CFG: gl.constexpr):
    """dp of one tile of queries, and with the weights of the other warp group ds and dk."""
    ring = shared.queries
    layout: gl.constexpr = CFG.accumulator_layout(ROWS)
    stage = step % CFG.STAGES
    dout_stage = step % CFG.DOUT_STAGES
    place = step % CFG.DS_STAGES
    mbarrier.wait(ring.dout_full.index(dout_stage), (step // CFG.DOUT_STAGES) & 1)
    dp_started = _start_scores(
        shared.keys.v_smem, ring.dout_smem, dout_stage, step, CFG.dv_slices, 0, CFG
    )
    delta = row_terms(ring.delta_smem, dout_stage, 0, CFG)
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    gradient = dp - delta
    mbarrier.wait(exchange.ready.index(place), (step // CFG.DS_STAGES) & 1)
    like_weights = in_register_order(gradient)
    in_order: gl.constexpr = like_weights.type.layout
    weight = _from_register_order(exchange.weights.index(place).load(in_order))
    ds = gl.convert_layout(weight, layout) * gradient
    mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
    started = _start_own_gradients(acc, ds, ring.q_smem, stage, CFG.d_slices, CFG)
    acc = _await_gradients(started, 0)
    # not before a product had ds: a barrier does not wait for weights that are being loaded
    mbarrier.arrive(exchange.free.index(place), count=1)
    mbarrier.arrive(ring.dout_empty.index(dout_stage), count=1)
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return acc


@gluon.jit
def _add_queries(
    acc, step, kv_index, outputs, shared,
    MASKED: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to dk or dv."""
    if not CFG.SHARED_KEYS:
        acc = _add_to_own(acc, step, kv_index, outputs.score, shared, MASKED, GROUP, CFG)
    elif not CFG.ONE_WAY:
        acc = _step(acc, step, kv_index, outputs, shared, MASKED, GROUP, CFG)
    elif GROUP == 0:
        acc = _add_to_keys(acc, step, outputs.exchange, shared, CFG)
    else:
        acc = _add_to_values(acc, step, kv_index, outputs, shared, MASKED, CFG)
    return acc


@gluon.jit
def _step(
    acc, step, kv_index, outputs, shared,
    MASKED: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Scores and gradients of one tile of queries."""
    exchange = outputs.exchange
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
def _store_gradient(
    desc, acc, factor, smem, place, row,
    SLICES: gl.constexpr, FIRST: gl.constexpr = 0, GROUP: gl.constexpr = 0,
):  # fmt: skip
    """Round a gradient of keys or values and copy it to memory, by way of their own tiles.

    SLICES of `acc` from the FIRST on are that of the GROUP-th 64 rows.
    """
    dtype: gl.constexpr = smem.dtype
    width: gl.constexpr = smem.shape[2]
    for i in gl.static_range(SLICES):
        smem.index(GROUP * SLICES + i).store((acc[FIRST + i] * factor).to(dtype))
    fence_async_shared()
    for i in gl.static_range(SLICES):
        async_store(desc, tile_at(place, row, i * width), smem.index(GROUP * SLICES + i))
    tma.store_wait(0)


@gluon.jit
def _no_gradients(SLICES: gl.constexpr, WIDTH: gl.constexpr, CFG: gl.constexpr):
    """Zeros for the slices of a gradient."""
    layout: gl.constexpr = CFG.accumulator_layout(WIDTH)
    acc = ()
    for _ in gl.static_range(SLICES):
        acc = acc + (gl.zeros([ROWS, WIDTH], gl.float32, layout),)  # noqa: RUF005
    return acc


@gluon.jit
def _consume(outputs, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """dk or dv of the 64 keys of each work tile, or both of a half of 128; and dq, if any."""
    work, heads, exchange = shared.work, shared.heads, outputs.exchange
    k_smem, v_smem, kv_full, kv_empty = shared.keys
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.scored_queries)
    # of the keys of a work tile
    part: gl.constexpr = 0 if CFG.SHARED_KEYS else GROUP
    offs_n = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    kv_heads = heads.q // heads.group_size
    visits, _ = heads_of_visits(shared, CFG)
    step = 0
    slot = 1
    work_tiles = 0
    batch_head, kv_tile = take(work, 0)
    while batch_head >= 0:
        kv_index = kv_tile * CFG.tile_n + offs_n
        if not CFG.SHARED_KEYS:
            acc = _no_gradients(CFG.d_slices, CFG.slice_d, CFG) + _no_gradients(
                CFG.dv_slices, CFG.slice_dv, CFG
            )
        elif GROUP == 0:
            acc = _no_gradients(CFG.d_slices, CFG.slice_d, CFG)
        else:
            acc = _no_gradients(CFG.dv_slices, CFG.slice_dv, CFG)
        mbarrier.wait(kv_full, work_tiles & 1)
        for _ in range(visits * CFG.visits_per_head):
            q_tiles, masked_tiles = take(work, slot)
            slot += 1
            for _ in range(masked_tiles):
                acc = _add_queries(acc, step, kv_index, outputs, shared, True, GROUP, CFG)
                step += 1
            # a loop of its own: what masks spill would be reloaded here
            for _ in range(masked_tiles, q_tiles):
                acc = _add_queries(acc, step, kv_index, outputs, shared, False, GROUP, CFG)
                step += 1
        if CFG.SHARED_KEYS:
            mbarrier.arrive(exchange.done, count=1)
            mbarrier.wait(exchange.done, work_tiles & 1)
        # found here, and not before: registers are scarce in the loops
        place = place_of_keys(shared, batch_head, kv_heads)
        d_slices: gl.constexpr = CFG.d_slices
        dv_slices: gl.constexpr = CFG.dv_slices
        scale = outputs.score.scale
        row = kv_tile * CFG.tile_n + part * ROWS
        if GROUP == 0 or not CFG.SHARED_KEYS:
            _store_gradient(outputs.dk_desc, acc, scale, k_smem, place, row, d_slices, 0, part)
        if GROUP == 1 or not CFG.SHARED_KEYS:
            first: gl.constexpr = 0 if CFG.SHARED_KEYS else CFG.d_slices
            _store_gradient(outputs.dv_desc, acc, 1.0, v_smem, place, row, dv_slices, first, part)
        mbarrier.arrive(kv_empty, count=1)
        work_tiles += 1
        batch_head, kv_tile = take(work, slot)
        slot += 1


@gluon.jit
def _exchange(dtype: gl.constexpr, CFG: gl.constexpr):
    """Allocate what the warp groups hand to each other."""
    consumers: gl.constexpr = CFG.CONSUMERS
    done = barriers(1, consumers).index(0)
    if CFG.ONE_WAY:
        stages: gl.constexpr = CFG.DS_STAGES
        in_order: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [SUM_ROWS, SUM_COLUMNS], gl.float32
        )
        weights = gl.allocate_shared_memory(gl.float32, [stages, SUM_ROWS, SUM_COLUMNS], in_order)
        exchange = OneWay(weights, barriers(stages, 1), barriers(stages, 1), done)
    else:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
        p_smem = gl.allocate_shared_memory(dtype, [consumers, ROWS, ROWS], layout)
        ds_smem = gl.allocate_shared_memory(dtype, [consumers, ROWS, ROWS], layout)
        ready, free = barriers(1, consumers).index(0), barriers(1, consumers).index(0)
        exchange = Exchange(p_smem, ds_smem, ready, free, done)
    return exchange


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

    `cu_seqlens` and `head_rows` are as in `Shared`, or None if sequences are not packed. With
    `CFG.ONE_WAY` there are no sums.
    """
    # PDL: postprocess may start wherever there is room; it waits for this kernel to end
    gdc_launch_dependents()
    consumers: gl.constexpr = CFG.CONSUMERS
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    dtype: gl.constexpr = q_desc.dtype
    descs = Descriptors(q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc)
    keys = resident_keys(descs, CFG)
    queries = query_ring(descs, CFG)
    exchange = None
    if CFG.SHARED_KEYS:
        exchange = _exchange(dtype, CFG)
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
    sums = Sums(sums_ptr, work_ptrs.semaphore, head_rows)
    outputs = Outputs(dk_desc, dv_desc, score, sums, exchange)
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume, (outputs, shared, 0, CFG)),
            (_consume, (outputs, shared, 1, CFG)),
            (produce_steps, (descs, order, shared, CFG)),
        ],
        [4, 1],
        [registers, producer_registers],
    )
