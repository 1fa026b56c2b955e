# mypy: ignore-errors
"""Attention backward on Hopper: dq, dk and dv in one pass over the scores.

q, out, dout [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv]. Persistent programs take work tiles; a
work tile is a KV tile of one KV head, with all queries of all heads that see it. Two consumer warp
groups keep 64 keys each, dk and dv in registers, and compute

    s^T = k q^T    dp^T = v dout^T    dv += p^T dout    dk += ds^T q    dq = ds k

so that p^T is already in the registers from which the product for dv reads it, and so is ds^T for
dk if there are enough registers. ds goes through shared memory to the product for dq, which both
warp groups share; writer warps add dq to fp32 sums in memory by TMA, in no fixed order unless
`ORDERED`. A producer warp finds the query tiles (`backward_producer`) and copies them, with lse in
base 2 and delta; queries past the end have lse +inf and contribute nothing. The product for dq of a
step is issued one step later, so that neither warp group waits for the other's ds.

Ordered accumulation (deterministic dq): each query block has a semaphore that counts the KV tiles
that have added to its dq, and each KV tile has a rank: it adds when the semaphore has reached it.
Work tiles come from a counter, and a program finishes one before it takes the next. Without a mask
every rank refers to earlier work tiles only, so the earliest unfinished one never waits and there
is no deadlock. KV tiles start at different query blocks (`_ascends`), so that few have to wait.
Under a mask `dq_order` plans ranks, and which program takes which work tiles: a program waits for
what was planned earlier, wherever that runs, so all programs have to be resident at the same time.

A few KV heads with many query heads each make few, long work tiles. With `SPLIT_HEADS`, several
work tiles share the query heads of a KV tile and add dk and dv to fp32 sums, which a kernel of
`backward_preprocess` rounds; with ordered accumulation each has its own sums, which that kernel
adds up.

Packed sequences have the same steps: the producer finds the sequence of a KV tile and describes it
with each step (`backward_shared.StepInfo`), and tensor maps end at the end of a sequence.

Called as impl "sm90" of `bsk::attn_bwd`, between the kernels of `backward_preprocess`. Limits: as
in `forward`, and masks with key blocks of 128 or 256. Key blocks of 64 go to `backward_split`, head
dims above 128 to `backward_wide`.
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

from ...device.backprop import probabilities, score_gradients
from ...device.gluon.compat import async_atomic_add, async_store, placed, reinterpret
from ...device.gluon.memory import acquire_semaphore, release_semaphore
from ...device.gluon.pipeline import barriers, take, tile_at, tiles, work_channel
from ...device.gluon.records import Ring
from ...device.masks import bit_visible, column_bounds, exists, q_range, within_bounds
from ...device.records import Band, GradientScore, Heads, Lengths, Mask
from . import config as config
from .backward_producer import heads_of_visits, produce_steps
from .backward_shared import (
    BATCH_HEAD,
    BITS_ID,
    DENSE_FIELDS,
    PACKED_FIELDS,
    Q_ROW,
    RANK,
    ROWS,
    Descriptors,
    Shared,
    WorkOrder,
    lengths_of_step,
    place_of_keys,
    query_ring,
    read_info,
    resident_keys,
    step_infos,
    sum_row,
)

# dq is summed in fp32, in tiles of [64, 64] that lie in memory as in the registers of a warp group.
SUM_ROWS = gl.constexpr(config.SUM_ROWS)
SUM_COLUMNS = gl.constexpr(config.SUM_COLUMNS)


class DsRing(NamedTuple):
    """ds^T of each warp group, and barriers that tell when the ds^T of a step is complete."""

    smem: Any
    ready: Any


class Outputs(NamedTuple):
    """The results of a consumer, and the shared memory that they pass through."""

    dk_desc: Any
    dv_desc: Any
    score: GradientScore
    ds_ring: DsRing
    dq_ring: Ring
    head_splits: Any


class OwnKeys(NamedTuple):
    """The keys of a consumer: shared memory of all, their indices [64], the KV tile."""

    k_smem: Any
    v_smem: Any
    kv_index: Any
    kv_tile: Any


# One tile of `CFG.TILE_M` queries and the 64 keys of a warp group. Tiles are transposed here,
# [keys, queries]: s^T, p^T, ds^T.


@gluon.jit
def zero_of(step):
    """0, unknown to the compiler, which would otherwise keep constant addresses in registers all
    the time and spill them. They are cheap to compute again."""
    return placed(step >> 31)


@gluon.jit
def start_products(rows, tiles, step, DEPTH: gl.constexpr, CFG: gl.constexpr):
    """Start the product of 64 keys or values with the queries or output gradients of a step.

    Only the first DEPTH columns can be nonzero: all of them, or 96 of 128, which take a product of
    64 columns and one of 32.
    """
    tile_m: gl.constexpr = CFG.TILE_M
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    product = gl.zeros([ROWS, tile_m], gl.float32, layout)
    columns = tiles.index(placed(step % CFG.STAGES))
    if DEPTH == 96:
        left = columns.slice(0, 64, dim=1).permute((1, 0))
        right = columns.slice(64, 32, dim=1).permute((1, 0))
        product = warpgroup_mma(
            rows.slice(0, 64, dim=1), left, product, use_acc=False, is_async=True
        )
        product = warpgroup_mma(rows.slice(64, 32, dim=1), right, product, is_async=True)
    else:
        product = warpgroup_mma(
            rows, columns.permute((1, 0)), product, use_acc=False, is_async=True
        )
    return product


@gluon.jit
def row_terms(terms, stage, PART: gl.constexpr, CFG: gl.constexpr):
    """lse or delta of the queries that a warp group scores, as [1, queries]."""
    layout: gl.constexpr = CFG.accumulator_layout(CFG.scored_queries)
    numbers = terms.index(stage)
    if CFG.SHARED_KEYS:
        numbers = numbers.slice(PART * ROWS, ROWS, dim=0)
    return numbers.load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _visible(shared, step, kv_index, PART: gl.constexpr, CFG: gl.constexpr):
    """Which of 64 keys each query that a warp group scores sees."""
    lists, steps, band = shared.mask.lists, shared.steps, shared.band
    lengths = lengths_of_step(shared, step)
    queries: gl.constexpr = CFG.scored_queries
    # the queries of one part are all of the same block
    two_blocks: gl.constexpr = CFG.parts == 2 and not CFG.SHARED_KEYS
    layout: gl.constexpr = CFG.accumulator_layout(CFG.scored_queries)
    offs_m = gl.arange(0, queries, gl.SliceLayout(0, layout))
    q_index = read_info(steps, step, Q_ROW + PART, 4) + offs_m
    if two_blocks:
        second_q_row = read_info(steps, step, Q_ROW + 1, 4)
        q_index = gl.where(offs_m < ROWS, q_index, second_q_row - ROWS + offs_m)
    # bounds per key take two registers in all; bounds per query would take two for each query
    first, last = column_bounds(kv_index, lengths.q, lengths.kv, band.left, band.right)
    last = gl.where(exists(kv_index, lengths.kv), last, -1)
    visible = within_bounds(q_index[None, :], first[:, None], last[:, None])
    if lists is not None:
        words: gl.constexpr = (CFG.BLOCK_KV + 31) // 32
        bits_id = read_info(steps, step, BITS_ID + PART, 4) + (offs_m - offs_m)
        if two_blocks:
            second_bits_id = read_info(steps, step, BITS_ID + 1, 4)
            bits_id = gl.where(offs_m < ROWS, bits_id, second_bits_id)
        kv_in_block = kv_index % CFG.BLOCK_KV
        row = (bits_id.to(gl.int64) * CFG.BLOCK_Q + q_index % CFG.BLOCK_Q) * words
        place = lists.bits + row[None, :] + (kv_in_block // 32)[:, None]
        has_bits = (kv_in_block >= 0)[:, None] & (bits_id >= 0)[None, :]
        word = gl.load(place, has_bits, other=-1)
        visible = visible & bit_visible(word, kv_in_block[:, None])
    return visible


@gluon.jit
def sees_nothing(step, kv_tile, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Whether no query of a step sees a key of a warp group, by the band alone."""
    lengths, band = lengths_of_step(shared, step), shared.band
    first = kv_tile * CFG.tile_n + GROUP * ROWS
    lo, hi = q_range(first, first + ROWS, lengths.q, lengths.kv, band.left, band.right)
    q_row = read_info(shared.steps, step, Q_ROW, 4)
    return (q_row + CFG.TILE_M <= lo) | (q_row >= hi)


@gluon.jit
def hide(p, step, kv_index, shared, PART: gl.constexpr, CFG: gl.constexpr):
    """p^T with 0 for keys that a query does not see, whatever the exponential is there."""
    return gl.where(_visible(shared, step, kv_index, PART, CFG), p, 0.0)


@gluon.jit
def score_step(
    s_started, dp_started, step, masked, kv_index, score, shared,
    EARLY: gl.constexpr, CFG: gl.constexpr, PART: gl.constexpr = 0,
):  # fmt: skip
    """p^T and ds^T of a step whose products were started.

    EARLY: there are enough registers to load lse and delta while the products are in flight. PART:
    the half of the queries that this warp group scores, if it shares its keys.
    """
    lse_smem, delta_smem = shared.queries.lse_smem, shared.queries.delta_smem
    stage = step % CFG.STAGES
    dout_stage = step % CFG.DOUT_STAGES
    if EARLY:
        lse_log2 = row_terms(lse_smem, stage, PART, CFG)
    s = warpgroup_mma_wait(CFG.dp_products, deps=(s_started,))
    if not EARLY:
        lse_log2 = row_terms(lse_smem, stage, PART, CFG)
    p, capped = probabilities(s, None, lse_log2, score)
    if masked:
        p = hide(p, step, kv_index, shared, PART, CFG)
    if EARLY:
        delta = row_terms(delta_smem, dout_stage, PART, CFG)
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    if not EARLY:
        delta = row_terms(delta_smem, dout_stage, PART, CFG)
    return p, score_gradients(p, capped, dp, delta, score)


@gluon.jit
def ds_place(ds_ring, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """The shared memory of a warp group's ds^T of a step, and the barrier of that step."""
    stage = step % CFG.DS_STAGES
    tile = ds_ring.smem.index(stage * CFG.CONSUMERS + GROUP)
    return tile, ds_ring.ready.index(stage)


@gluon.jit
def hand_over(x, smem, filled):
    """Store a tile to shared memory for asynchronous reads, and signal that it is there."""
    smem.store(x)
    fence_async_shared()
    mbarrier.arrive(filled, count=1)


@gluon.jit
def start_dq(ds_ring, k_smem, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Start a [64, 64] tile of dq; each warp group computes its own rows or columns."""
    layout: gl.constexpr = CFG.accumulator_layout(64)
    consumers: gl.constexpr = CFG.CONSUMERS
    dq = gl.zeros([ROWS, 64], gl.float32, layout)
    for g in gl.static_range(consumers):
        ds, _ = ds_place(ds_ring, step, g, CFG)
        if CFG.dq_by_rows:
            ds = ds.slice(GROUP * ROWS, ROWS, dim=1)
            k = k_smem.index(g + zero_of(step))
        else:
            k = k_smem.index(g + zero_of(step)).slice(GROUP * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=g > 0, is_async=True)
    return dq


@gluon.jit
def in_register_order(dq):
    """A [64, 64] tile of dq in the order of registers: thread by thread, four sums at a time.

    Stored row by row, rows would conflict in shared-memory banks. The postprocess kernel
    (`backward_preprocess`) restores the order of rows and columns.
    """
    # row: warp, half of its 16 rows, thread; column: eighth, thread, one of two
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return dq.reshape([SUM_ROWS, SUM_COLUMNS])


@gluon.jit
def give_dq(dq, dq_ring, step, GROUP: gl.constexpr):
    """Hand a tile of dq to the writer, once it has read the previous one."""
    dq = in_register_order(dq)
    mbarrier.wait(dq_ring.empty.index(GROUP), (step & 1) ^ 1)
    hand_over(dq, dq_ring.tiles.index(GROUP + zero_of(step)), dq_ring.full.index(GROUP))


@gluon.jit
def block_semaphore(semaphore_ptr, batch_head, row, rows, GROUP: gl.constexpr, CFG: gl.constexpr):
    """The semaphore of the query block that contains `row`; heads have `rows` rows."""
    first_in_block = row // CFG.BLOCK_Q * (CFG.BLOCK_Q // ROWS)
    tile = batch_head.to(gl.int64) * (rows // ROWS) + first_in_block
    # either warp group may get a block that fills half a tile
    return semaphore_ptr + tile * 2 + (0 if CFG.parts == 2 else GROUP)


@gluon.jit
def write_dq(
    dq_desc, semaphore_ptr, q_len, head_rows, dq_ring, steps, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Add the tiles of a warp group to the sums of dq in memory; by rank if `CFG.ORDERED`."""
    smem, full, empty = dq_ring
    part: gl.constexpr = GROUP if CFG.dq_by_rows else 0
    step = 0
    batch_head = 0
    while batch_head >= 0:
        mbarrier.wait(full.index(GROUP), step & 1)
        batch_head = read_info(steps, step, BATCH_HEAD, 1)
        if batch_head >= 0:
            column = 0 if CFG.dq_by_rows else GROUP
            row, rows = sum_row(steps, head_rows, q_len, step, part, 1)
            place = [batch_head, (row // ROWS * (CFG.TILE_D // 64) + column) * SUM_ROWS, 0]
            rank = 1
            if CFG.ORDERED:
                block_ptr = block_semaphore(semaphore_ptr, batch_head, row, rows, GROUP, CFG)
                # a part without queries has no rank; a KV tile adds all rows of a block, the last
                # rows first, before the next KV tile may add to it
                has_rank = (row < rows) if CFG.parts == 2 else True
                tile_in_block = row % CFG.BLOCK_Q // CFG.TILE_M
                rank = read_info(steps, step, RANK + part, 1)
                if has_rank & (tile_in_block == CFG.last_in_block):
                    acquire_semaphore(block_ptr, rank)
            if rank == 0:
                # the first KV tile of this block: stores, so that sums need no zeroing
                async_store(dq_desc, place, smem.index(GROUP))
            else:
                async_atomic_add(dq_desc, place, smem.index(GROUP))
            tma.store_wait(0)
            mbarrier.arrive(empty.index(GROUP), count=1)
            if CFG.ORDERED:  # noqa: SIM102 - a constant decides whether `has_rank` exists
                if has_rank & (tile_in_block == 0):
                    release_semaphore(block_ptr)
        step += 1


@gluon.jit
def _step(
    dk, dv, step, masked, keys, outputs, shared,
    FIRST: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Scores, dk and dv of one tile of queries, and dq of the step before."""
    k_smem = keys.k_smem
    k = k_smem.index(GROUP + zero_of(step))
    v = keys.v_smem.index(GROUP + zero_of(step))
    score, ds_ring, dq_ring = outputs.score, outputs.ds_ring, outputs.dq_ring
    ring = shared.queries
    q_smem, dout_smem = ring.q_smem, ring.dout_smem
    dtype: gl.constexpr = k.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_DV), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_D), 2)
    stage = step % CFG.STAGES
    mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
    s_started = start_products(k, q_smem, step, CFG.SCORE_D, CFG)
    if CFG.SPLIT_RING:
        mbarrier.wait(ring.dout_full.index(stage), (step // CFG.STAGES) & 1)
    dp_started = start_products(v, dout_smem, step, CFG.SCORE_DV, CFG)
    early: gl.constexpr = CFG.TILE_M == 64 and score.inverse_cap is None
    p, ds = score_step(
        s_started, dp_started, step, masked, keys.kv_index, score, shared, early, CFG
    )  # fmt: skip
    ds_tile, ds_bar = ds_place(ds_ring, step, GROUP, CFG)
    if not FIRST:
        # then the other warp group has also finished reading the previous ds of this stage
        _, last_bar = ds_place(ds_ring, step - 1, GROUP, CFG)
        mbarrier.wait(last_bar, ((step - 1) // CFG.DS_STAGES) & 1)
    ds = ds.to(dtype)
    hand_over(ds, ds_tile, ds_bar)
    ds_operand = gl.convert_layout(ds, ds_layout) if CFG.DK_REGISTERS else ds_tile
    p = gl.convert_layout(p.to(dtype), p_layout)
    q = q_smem.index(placed(stage))
    dout = dout_smem.index(placed(stage))
    if FIRST:
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dk_started = warpgroup_mma(ds_operand, q, dk, is_async=True)
    elif CFG.SPLIT_RING:
        # dv first, because its end frees the stage of output gradients
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dq_started = start_dq(ds_ring, k_smem, step - 1, GROUP, CFG)
        dk_started = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dv_started, dq = warpgroup_mma_wait(1, deps=(dv_started, dq_started))
        give_dq(dq, dq_ring, step - 1, GROUP)
        mbarrier.arrive(ring.dout_empty.index(stage), count=1)
    else:
        dq_started = start_dq(ds_ring, k_smem, step - 1, GROUP, CFG)
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dk_started = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=(dq_started,))
        give_dq(dq, dq_ring, step - 1, GROUP)
    dv, dk = warpgroup_mma_wait(0, deps=(dv_started, dk_started))
    mbarrier.arrive(ring.empty.index(stage), count=1)
    if CFG.SPLIT_RING and FIRST:
        mbarrier.arrive(ring.dout_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _last_dq(step, keys, outputs, GROUP: gl.constexpr, CFG: gl.constexpr):
    """dq of the last step, which the next one would have issued."""
    ds_ring, dq_ring = outputs.ds_ring, outputs.dq_ring
    _, bar = ds_place(ds_ring, step, GROUP, CFG)
    mbarrier.wait(bar, (step // CFG.DS_STAGES) & 1)
    dq_started = start_dq(ds_ring, keys.k_smem, step, GROUP, CFG)
    dq = warpgroup_mma_wait(0, deps=(dq_started,))
    give_dq(dq, dq_ring, step, GROUP)


@gluon.jit
def _empty_step(
    step, keys, outputs, shared, FIRST: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """A step whose queries see none of a warp group's keys: dq of the step before, and no ds."""
    ds_ring = outputs.ds_ring
    tile_m: gl.constexpr = CFG.TILE_M
    dtype: gl.constexpr = keys.k_smem.dtype
    ds_tile, ds_bar = ds_place(ds_ring, step, GROUP, CFG)
    if not FIRST:
        _, last_bar = ds_place(ds_ring, step - 1, GROUP, CFG)
        mbarrier.wait(last_bar, ((step - 1) // CFG.DS_STAGES) & 1)
    hand_over(gl.zeros([ROWS, tile_m], dtype, CFG.accumulator_layout(tile_m)), ds_tile, ds_bar)
    if not FIRST:
        _last_dq(step - 1, keys, outputs, GROUP, CFG)
    mbarrier.arrive(shared.queries.empty.index(step % CFG.STAGES), count=1)


@gluon.jit
def _masked_step(
    dk, dv, step, masked, keys, outputs, shared,
    FIRST: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """A step that may see none of a warp group's keys."""
    if CFG.halves:
        full = shared.queries.full
        mbarrier.wait(full.index(step % CFG.STAGES), (step // CFG.STAGES) & 1)
        if sees_nothing(step, keys.kv_tile, shared, GROUP, CFG):
            _empty_step(step, keys, outputs, shared, FIRST, GROUP, CFG)
        else:
            dk, dv = _step(dk, dv, step, masked, keys, outputs, shared, FIRST, GROUP, CFG)
    else:
        dk, dv = _step(dk, dv, step, masked, keys, outputs, shared, FIRST, GROUP, CFG)
    return dk, dv


@gluon.jit
def _store_gradient(desc, x, smem, place):
    """Round a gradient of keys or values and copy it to memory."""
    smem.store(x)
    fence_async_shared()
    async_store(desc, place, smem)
    tma.store_wait(0)


@gluon.jit
def _add_sums(desc, x, smem, place, CFG: gl.constexpr):
    """Add a [64, 64] tile of a gradient of keys or values to the sums, or store it if ORDERED."""
    smem.store(in_register_order(x))
    fence_async_shared()
    if CFG.ORDERED:
        async_store(desc, place, smem)
    else:
        async_atomic_add(desc, place, smem)
    tma.store_wait(0)


@gluon.jit
def _add_gradient(desc, x, smem, head, row, WIDTH: gl.constexpr, CFG: gl.constexpr):
    """As `_store_gradient`, for gradients that other work tiles add to as well, in fp32.

    Sums lie in memory in the same order as dq; `smem` holds 64 columns at a time.
    """
    place = row // ROWS * (WIDTH // 64) * SUM_ROWS
    if WIDTH == 64:
        _add_sums(desc, x, smem, [head, place, 0], CFG)
    else:
        layout: gl.constexpr = CFG.accumulator_layout(64)
        left, right = x.reshape([ROWS, 2, 64]).permute((0, 2, 1)).split()
        _add_sums(desc, gl.convert_layout(left, layout), smem, [head, place, 0], CFG)
        right = gl.convert_layout(right, layout)
        _add_sums(desc, right, smem, [head, place + SUM_ROWS, 0], CFG)


@gluon.jit
def _consume(outputs, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Gradients of 64 keys of each work tile."""
    dq_ring, work, heads = outputs.dq_ring, shared.work, shared.heads
    k_smem, v_smem, kv_full, kv_empty = shared.keys
    tile_d: gl.constexpr = CFG.TILE_D
    tile_dv: gl.constexpr = CFG.TILE_DV
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    k_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_D)
    v_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    dtype: gl.constexpr = k_smem.dtype
    dk_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_d], dtype)
    dv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_dv], dtype)
    # dk and dv leave through the memory of dq sums, where a 16-bit tile takes half or a quarter
    bits: gl.constexpr = dq_ring.tiles.dtype.primitive_bitwidth // dtype.primitive_bitwidth
    room: gl.constexpr = bits * dq_ring.tiles.shape[1] * dq_ring.tiles.shape[2]
    dk_room: gl.constexpr = [room // (ROWS * tile_d), ROWS, tile_d]
    dv_room: gl.constexpr = [room // (ROWS * tile_dv), ROWS, tile_dv]
    dk_tile = reinterpret(dq_ring.tiles.index(GROUP), dtype, dk_room, dk_layout).index(0)
    dv_tile = reinterpret(dq_ring.tiles.index(GROUP), dtype, dv_room, dv_layout).index(0)
    offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)) + GROUP * ROWS
    kv_heads = heads.q // heads.group_size
    visits, _ = heads_of_visits(shared, CFG)
    step = 0
    slot = 1
    work_tiles = 0
    batch_head, kv_tile = take(work, 0)
    while batch_head >= 0:
        kv_index = kv_tile * CFG.tile_n + offs_n
        keys = OwnKeys(k_smem, v_smem, kv_index, kv_tile)
        dk = gl.zeros([ROWS, tile_d], gl.float32, k_layout)
        dv = gl.zeros([ROWS, tile_dv], gl.float32, v_layout)
        mbarrier.wait(kv_full, work_tiles & 1)
        for _ in range(visits * CFG.visits_per_head):
            q_tiles, masked_tiles = take(work, slot)
            slot += 1
            if q_tiles > 0:
                masked = masked_tiles > 0
                dk, dv = _masked_step(dk, dv, step, masked, keys, outputs, shared, True, GROUP, CFG)
                step += 1
                for _ in range(1, masked_tiles):
                    dk, dv = _masked_step(
                        dk, dv, step, True, keys, outputs, shared, False, GROUP, CFG
                    )
                    step += 1
                # a loop of its own: what masks spill would be reloaded here
                for _ in range(gl.maximum(masked_tiles, 1), q_tiles):
                    dk, dv = _step(dk, dv, step, False, keys, outputs, shared, False, GROUP, CFG)
                    step += 1
                _last_dq(step - 1, keys, outputs, GROUP, CFG)
        # the keys have been read for the last time: the next ones may come
        mbarrier.arrive(kv_empty, count=1)
        # dv and dk reuse the memory of dq: the writer must have taken the last tile
        mbarrier.wait(dq_ring.empty.index(GROUP), (step & 1) ^ 1)
        row = kv_tile * CFG.tile_n + GROUP * ROWS
        if CFG.SPLIT_HEADS:
            sums_tile = dq_ring.tiles.index(GROUP)
            head = batch_head if CFG.ORDERED else batch_head // outputs.head_splits
            _add_gradient(outputs.dv_desc, dv, sums_tile, head, row, CFG.TILE_DV, CFG)
            _add_gradient(outputs.dk_desc, dk, sums_tile, head, row, CFG.TILE_D, CFG)
        else:
            place = tile_at(place_of_keys(shared, batch_head, kv_heads), row)
            _store_gradient(outputs.dv_desc, dv.to(dtype), dv_tile, place)
            _store_gradient(outputs.dk_desc, (dk * outputs.score.scale).to(dtype), dk_tile, place)
        work_tiles += 1
        batch_head, kv_tile = take(work, slot)
        slot += 1
    # the writer finds that there is no such step, and ends
    mbarrier.arrive(dq_ring.full.index(GROUP), count=1)


@gluon.jit(
    do_not_specialize=[
        "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right", "num_batch_heads",
        "raster_group", "visit_heads", "q_heads", "group_size", "head_splits",
    ]
)  # fmt: skip
def _attn_bwd_sm90_kernel(
    dq_desc,
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
    head_splits,
    cu_seqlens,
    head_rows,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles.

    `work_ptrs` are `WorkPointers`. `score` is what `gradient_factors` gives. With
    `CFG.SPLIT_HEADS`, `dk_desc` and `dv_desc` are those of sums, and `group_size` is that of a
    share of the query heads. `cu_seqlens` and `head_rows` are as in `Shared`, or None if sequences
    are not packed.
    """
    # PDL: postprocess may start wherever there is room; it waits for this kernel to end
    gdc_launch_dependents()
    consumers: gl.constexpr = CFG.CONSUMERS
    ds_stages: gl.constexpr = CFG.DS_STAGES
    tile_m: gl.constexpr = CFG.TILE_M
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_m], dtype)
    descs = Descriptors(q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc)
    keys = resident_keys(descs, CFG)
    queries = query_ring(descs, CFG)
    ds_smem = gl.allocate_shared_memory(dtype, [ds_stages * consumers, ROWS, tile_m], ds_layout)
    dq_smem = tiles(dq_desc, consumers, SUM_ROWS)
    # each warp group waits for both halves of ds
    ds_ring = DsRing(ds_smem, barriers(ds_stages, consumers))
    dq_ring = Ring(dq_smem, barriers(consumers, 1), barriers(consumers, 1))
    steps = step_infos(DENSE_FIELDS if cu_seqlens is None else PACKED_FIELDS)
    work = work_channel(2, consumers)
    fence_async_shared()

    mask = Mask(block_lists, mask_batch_step, mask_head_step)
    lengths, heads, band = Lengths(q_len, kv_len), Heads(q_heads, group_size), Band(left, right)
    shared = Shared(mask, keys, queries, steps, work, lengths, heads, band, cu_seqlens)
    order = WorkOrder(
        work_ptrs.counter, work_ptrs.order, work_ptrs.ranks, work_ptrs.visits, visit_heads,
        num_batch_heads, raster_group, head_splits,
    )  # fmt: skip
    outputs = Outputs(dk_desc, dv_desc, score, ds_ring, dq_ring, head_splits)
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume, (outputs, shared, 0, CFG)),
            (_consume, (outputs, shared, 1, CFG)),
            (produce_steps, (descs, order, shared, CFG)),
            (write_dq, (dq_desc, work_ptrs.semaphore, q_len, head_rows, dq_ring, steps, 0, CFG)),
            (write_dq, (dq_desc, work_ptrs.semaphore, q_len, head_rows, dq_ring, steps, 1, CFG)),
        ],
        [4, 1, 1, 1],
        [registers, producer_registers, producer_registers, producer_registers],
    )
