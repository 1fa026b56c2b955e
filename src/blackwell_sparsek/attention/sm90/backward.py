# mypy: ignore-errors
"""Attention backward on Hopper: dq, dk and dv in one pass over the scores.

q, out, dout [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv]. Programs take pieces of work until none
is left; a piece is a tile of keys of one KV head, with all queries of all heads that see them. Two
consumer warp groups keep 64 keys each, dk and dv in registers, and compute

    s^T = k q^T    dp^T = v dout^T    dv += p^T dout    dk += ds^T q    dq = ds k

so that p^T is where the product for dv reads it, as ds^T is for dk where registers are left for it.
ds goes through shared memory to the product for dq, which both warp groups share; writer warps add
dq to fp32 sums in memory by TMA, in no fixed order unless `ORDERED` (`bwd_sm90_dq`). A producer
warp finds the query tiles (`bwd_sm90_work`) and copies them, with lse in base 2 and delta; queries
past the end, where lse is +inf, count for nothing. The product for dq of a step waits for the next
step, so that no warp group waits for ds of the other.

In order, a tile of keys adds to dq of a tile of queries when as many have done so as come before
it. Pieces are taken from a counter, a program takes them in turn. Without a mask each waits only
for earlier ones: the earliest that is not done waits for nobody, so that programs never wait in a
circle. Tiles of keys begin where others are not (`bwd_sm90_work`): few have to wait. Under a mask
turns are planned (`bwd_visits`), and so is which program takes which pieces: it waits for what is
planned earlier, wherever that runs, so that all programs have to run at the same time.

Called as impl "sm90" of `bsk::attn_bwd`, between the kernels of `bwd_sm90_rows`. Limits: those of
`fwd_sm90`; key blocks of masks of 128 or 256; for those of 64 see `bwd_sm90_keys`
and `bwd_sm90_queries`.
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
from ...device.gluon.memory import await_turn, finish_turn, tma_add
from ...device.gluon.pipeline import barriers, take, tiles, work_channel
from ...device.masks import bit_visible, column_bounds, exists, q_range, within_bounds
from ...launch.descriptors import GROUP_ROWS
from . import config as config
from .backward_producer import heads_of_visits, padded_queries, produce_steps, read_info, step_info

# What a warp group of the Hopper backward does with one tile of queries.
#
# Tiles are [keys, queries] here: s^T, p^T, ds^T. `CFG.TILE_M` queries meet a warp group's 64 keys.

ROWS = gl.constexpr(GROUP_ROWS)


@gluon.jit
def zero_of(step):
    """0, which the compiler does not know: it would keep addresses that contain only constants in
    registers all along, and spill them. They are cheap to compute again."""
    return step >> 31


@gluon.jit
def start_products(rows, tiles, step, CFG: gl.constexpr):
    """Start the products of 64 keys or values with the queries or output gradients of a step."""
    tile_m: gl.constexpr = CFG.TILE_M
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    nothing = gl.zeros([ROWS, tile_m], gl.float32, layout)
    columns = tiles.index(step % CFG.STAGES).permute((1, 0))
    return warpgroup_mma(rows, columns, nothing, use_acc=False, is_async=True)


@gluon.jit
def numbers_of_queries(numbers, step, CFG: gl.constexpr):
    """lse or delta, which came with a tile, as [1, queries]."""
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    return numbers.index(step % CFG.STAGES).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _visible(shared, step, kv_index, CFG: gl.constexpr):
    """Which of 64 keys each query of a step sees."""
    lists, info, lengths, band = shared[0][0], shared[3], shared[5], shared[7]
    tile_m: gl.constexpr = CFG.TILE_M
    two_units: gl.constexpr = CFG.parts == 2
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    offs_m = gl.arange(0, tile_m, gl.SliceLayout(0, layout))
    q_index = read_info(info, step, 1, 4) + offs_m
    if two_units:
        q_index = gl.where(offs_m < ROWS, q_index, read_info(info, step, 2, 4) - ROWS + offs_m)
    # bounds of keys take two registers, where those of queries take two for each
    first, last = column_bounds(kv_index, lengths[0], lengths[1], band[0], band[1])
    last = gl.where(exists(kv_index, lengths[1]), last, -1)
    visible = within_bounds(q_index[None, :], first[:, None], last[:, None])
    if lists is not None:
        words: gl.constexpr = (CFG.BLOCK_KV + 31) // 32
        bits_id = read_info(info, step, 3, 4) + (offs_m - offs_m)
        if two_units:
            bits_id = gl.where(offs_m < ROWS, bits_id, read_info(info, step, 4, 4))
        kv_in_block = kv_index % CFG.BLOCK_KV
        row = (bits_id.to(gl.int64) * CFG.UNIT + q_index % CFG.UNIT) * words
        place = lists[4] + row[None, :] + (kv_in_block // 32)[:, None]
        has_bits = (kv_in_block >= 0)[:, None] & (bits_id >= 0)[None, :]
        word = gl.load(place, has_bits, other=-1)
        visible = visible & bit_visible(word, kv_in_block[:, None])
    return visible


@gluon.jit
def sees_nothing(step, kv_tile, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Whether no query of a step sees a key of a warp group, by the band alone."""
    info, lengths, band = shared[3], shared[5], shared[7]
    first = kv_tile * CFG.tile_n + GROUP * ROWS
    lo, hi = q_range(first, first + ROWS, lengths[0], lengths[1], band[0], band[1])
    q_row = read_info(info, step, 1, 4)
    return (q_row + CFG.TILE_M <= lo) | (q_row >= hi)


@gluon.jit
def hide(p, step, kv_index, shared, CFG: gl.constexpr):
    """p^T without the keys that a query does not see, whatever the exponential gave there."""
    return gl.where(_visible(shared, step, kv_index, CFG), p, 0.0)


@gluon.jit
def score_step(
    s_started, dp_started, step, masked, kv_index, score, shared,
    EARLY: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """p^T and ds^T of a step whose products were started.

    EARLY: registers are left for the numbers of queries to come while products are under way.
    """
    lse_smem, delta_smem = shared[2][2], shared[2][3]
    if EARLY:
        lse_log2 = numbers_of_queries(lse_smem, step, CFG)
    s = warpgroup_mma_wait(1, deps=(s_started,))
    if not EARLY:
        lse_log2 = numbers_of_queries(lse_smem, step, CFG)
    p, capped = probabilities(s, None, lse_log2, score)
    if masked:
        p = hide(p, step, kv_index, shared, CFG)
    if EARLY:
        delta = numbers_of_queries(delta_smem, step, CFG)
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    if not EARLY:
        delta = numbers_of_queries(delta_smem, step, CFG)
    return p, score_gradients(p, capped, dp, delta, score)


@gluon.jit
def ds_place(ds_ring, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Where a warp group's ds^T of a step lies, and the barrier that says it is there."""
    smem, ready = ds_ring
    buffer = step % CFG.DS_STAGES
    tile = smem.index(buffer * CFG.CONSUMERS + GROUP)
    return tile, ready.index(buffer)


@gluon.jit
def hand_over(x, smem, filled):
    """Give a tile to whoever reads it from shared memory asynchronously."""
    smem.store(x)
    fence_async_shared()
    mbarrier.arrive(filled, count=1)


# dq of the Hopper backward: products of a step, and adding them to the sums in memory.
#
# Sums are fp32, in tiles of [64, 64] that lie in memory as in the registers of a warp group.

SUM_ROWS = gl.constexpr(config.SUM_ROWS)
SUM_COLUMNS = gl.constexpr(config.SUM_COLUMNS)


@gluon.jit
def start_dq(ds_ring, k_smem, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Start a [64, 64] tile of dq: rows or columns of its own for each warp group."""
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
    """A [64, 64] tile of dq with four sums of a thread side by side, and so the threads of a warp.

    `bwd_sm90_rows` puts them back. Stored as a tile, rows would meet in the same banks.
    """
    # row: warp, half of its 16 rows, thread; column: eighth, thread, one of two
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return dq.reshape([SUM_ROWS, SUM_COLUMNS])


@gluon.jit
def give_dq(dq, dq_ring, step, GROUP: gl.constexpr):
    """Hand a tile of dq to the writer, once it has taken the one before."""
    smem, full, empty = dq_ring
    dq = in_register_order(dq)
    mbarrier.wait(empty.index(GROUP), (step & 1) ^ 1)
    hand_over(dq, smem.index(GROUP + zero_of(step)), full.index(GROUP))


@gluon.jit
def write_dq(dq_desc, sums_turn_ptr, q_len, dq_ring, info, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Add what a warp group hands over to the sums of dq in memory, in turn where that is asked."""
    smem, full, empty = dq_ring
    row_field: gl.constexpr = 1 + GROUP if CFG.dq_by_rows else 1
    step = 0
    plane = 0
    while plane >= 0:
        mbarrier.wait(full.index(GROUP), step & 1)
        plane = read_info(info, step, 0, 1)
        if plane >= 0:
            column = 0 if CFG.dq_by_rows else GROUP
            row = read_info(info, step, row_field, 1)
            place = [plane, (row // ROWS * (CFG.TILE_D // 64) + column) * SUM_ROWS, 0]
            turn = 1
            if CFG.ORDERED:
                rows = padded_queries(q_len)
                tile = plane.to(gl.int64) * (rows // ROWS) + row // CFG.UNIT * (CFG.UNIT // ROWS)
                # either warp group may get a unit that fills half a tile
                turn_ptr = sums_turn_ptr + tile * 2 + (0 if CFG.parts == 2 else GROUP)
                # a part without queries has no turn; all of a unit goes in one, last rows first
                has_turn = (row < rows) if CFG.parts == 2 else True
                tile_in_unit = row % CFG.UNIT // CFG.TILE_M
                turn = read_info(info, step, 4 + row_field, 1)
                if has_turn & (tile_in_unit == CFG.last_in_unit):
                    await_turn(turn_ptr, turn)
            if turn == 0:
                # nobody was here: sums begin
                tma.async_copy_shared_to_global(dq_desc, place, smem.index(GROUP))
            else:
                tma_add(dq_desc, place, smem.index(GROUP))
            tma.store_wait(0)
            mbarrier.arrive(empty.index(GROUP), count=1)
            if CFG.ORDERED:  # noqa: SIM102 - a constant decides whether `has_turn` exists
                if has_turn & (tile_in_unit == 0):
                    finish_turn(turn_ptr)
        step += 1


@gluon.jit
def _step(
    dk, dv, step, masked, keep, consume, shared,
    FIRST: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Scores and gradients of one tile of queries; dq only of the step before."""
    k_smem, v_smem, kv_index = keep[0], keep[1], keep[2]
    k = k_smem.index(GROUP + zero_of(step))
    v = v_smem.index(GROUP + zero_of(step))
    score, ds_ring, dq_ring = consume[2], consume[3], consume[4]
    q_smem, dout_smem, _, _, full, empty, dout_full, dout_empty = shared[2]
    dtype: gl.constexpr = k.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_DV), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_D), 2)
    stage = step % CFG.STAGES
    mbarrier.wait(full.index(stage), (step // CFG.STAGES) & 1)
    s_started = start_products(k, q_smem, step, CFG)
    if CFG.SPLIT_RING:
        mbarrier.wait(dout_full.index(stage), (step // CFG.STAGES) & 1)
    dp_started = start_products(v, dout_smem, step, CFG)
    early: gl.constexpr = CFG.TILE_M == 64 and score[1] is None
    p, ds = score_step(
        s_started, dp_started, step, masked, kv_index, score, shared, early, CFG
    )  # fmt: skip
    ds_tile, ds_bar = ds_place(ds_ring, step, GROUP, CFG)
    if not FIRST:
        # what the other warp group is done with by then frees the memory for ds, too
        _, last_bar = ds_place(ds_ring, step - 1, GROUP, CFG)
        mbarrier.wait(last_bar, ((step - 1) // CFG.DS_STAGES) & 1)
    ds = ds.to(dtype)
    hand_over(ds, ds_tile, ds_bar)
    ds_operand = gl.convert_layout(ds, ds_layout) if CFG.DK_REGISTERS else ds_tile
    p = gl.convert_layout(p.to(dtype), p_layout)
    q = q_smem.index(stage)
    dout = dout_smem.index(stage)
    if FIRST:
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dk_started = warpgroup_mma(ds_operand, q, dk, is_async=True)
    elif CFG.SPLIT_RING:
        # dv first, whose end frees the output gradients
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dq_started = start_dq(ds_ring, k_smem, step - 1, GROUP, CFG)
        dk_started = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dv_started, dq = warpgroup_mma_wait(1, deps=(dv_started, dq_started))
        give_dq(dq, dq_ring, step - 1, GROUP)
        mbarrier.arrive(dout_empty.index(stage), count=1)
    else:
        dq_started = start_dq(ds_ring, k_smem, step - 1, GROUP, CFG)
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dk_started = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=(dq_started,))
        give_dq(dq, dq_ring, step - 1, GROUP)
    dv, dk = warpgroup_mma_wait(0, deps=(dv_started, dk_started))
    mbarrier.arrive(empty.index(stage), count=1)
    if CFG.SPLIT_RING and FIRST:
        mbarrier.arrive(dout_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _last_dq(step, keep, consume, GROUP: gl.constexpr, CFG: gl.constexpr):
    """dq of the last step, whose turn would be in the one after."""
    ds_ring, dq_ring = consume[3], consume[4]
    _, bar = ds_place(ds_ring, step, GROUP, CFG)
    mbarrier.wait(bar, (step // CFG.DS_STAGES) & 1)
    dq_started = start_dq(ds_ring, keep[0], step, GROUP, CFG)
    dq = warpgroup_mma_wait(0, deps=(dq_started,))
    give_dq(dq, dq_ring, step, GROUP)


@gluon.jit
def _empty_step(
    step, keep, consume, shared, FIRST: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """A step whose queries see none of a warp group's keys: dq of the step before, and no ds."""
    ds_ring, empty = consume[3], shared[2][5]
    tile_m: gl.constexpr = CFG.TILE_M
    dtype: gl.constexpr = keep[0].dtype
    ds_tile, ds_bar = ds_place(ds_ring, step, GROUP, CFG)
    if not FIRST:
        _, last_bar = ds_place(ds_ring, step - 1, GROUP, CFG)
        mbarrier.wait(last_bar, ((step - 1) // CFG.DS_STAGES) & 1)
    hand_over(gl.zeros([ROWS, tile_m], dtype, CFG.accumulator_layout(tile_m)), ds_tile, ds_bar)
    if not FIRST:
        _last_dq(step - 1, keep, consume, GROUP, CFG)
    mbarrier.arrive(empty.index(step % CFG.STAGES), count=1)


@gluon.jit
def _masked_step(
    dk, dv, step, masked, keep, consume, shared,
    FIRST: gl.constexpr, GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """A step that may see none of a warp group's keys."""
    if CFG.halves:
        mbarrier.wait(shared[2][4].index(step % CFG.STAGES), (step // CFG.STAGES) & 1)
        if sees_nothing(step, keep[3], shared, GROUP, CFG):
            _empty_step(step, keep, consume, shared, FIRST, GROUP, CFG)
        else:
            dk, dv = _step(dk, dv, step, masked, keep, consume, shared, FIRST, GROUP, CFG)
    else:
        dk, dv = _step(dk, dv, step, masked, keep, consume, shared, FIRST, GROUP, CFG)
    return dk, dv


@gluon.jit
def _store_gradient(desc, x, smem, place):
    """Round a gradient of keys or values and copy it to memory."""
    smem.store(x)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, place, smem)
    tma.store_wait(0)


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Gradients of 64 keys, piece by piece of work."""
    dk_desc, dv_desc, score = consume[0], consume[1], consume[2]
    dq_ring = consume[4]
    kv_ring, work, heads = shared[1], shared[4], shared[6]
    k_smem, v_smem, kv_full, kv_empty = kv_ring
    tile_d: gl.constexpr = CFG.TILE_D
    tile_dv: gl.constexpr = CFG.TILE_DV
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    k_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_D)
    v_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    dtype: gl.constexpr = k_smem.dtype
    dk_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_d], dtype)
    dv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_dv], dtype)
    # a tile of 16-bit numbers is half as large as one of sums, or a quarter
    bits: gl.constexpr = dq_ring[0].dtype.primitive_bitwidth // dtype.primitive_bitwidth
    room: gl.constexpr = bits * dq_ring[0].shape[1] * dq_ring[0].shape[2]
    dk_room: gl.constexpr = [room // (ROWS * tile_d), ROWS, tile_d]
    dv_room: gl.constexpr = [room // (ROWS * tile_dv), ROWS, tile_dv]
    dk_tile = dq_ring[0].index(GROUP)._reinterpret(dtype, dk_room, dk_layout).index(0)
    dv_tile = dq_ring[0].index(GROUP)._reinterpret(dtype, dv_room, dv_layout).index(0)
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)) + GROUP * ROWS
    kv_heads = heads[0] // heads[1]
    visits, _ = heads_of_visits(shared[0][0], shared[5], shared[7], heads[1], CFG)
    step = 0
    turn = 1
    pieces = 0
    plane, kv_tile = take(work, 0)
    while plane >= 0:
        kv_index = kv_tile * CFG.tile_n + keys
        keep = (k_smem, v_smem, kv_index, kv_tile)
        dk = gl.zeros([ROWS, tile_d], gl.float32, k_layout)
        dv = gl.zeros([ROWS, tile_dv], gl.float32, v_layout)
        mbarrier.wait(kv_full, pieces & 1)
        for _ in range(visits * CFG.visits):
            q_tiles, masked_tiles = take(work, turn)
            turn += 1
            if q_tiles > 0:
                masked = masked_tiles > 0
                dk, dv = _masked_step(dk, dv, step, masked, keep, consume, shared, True, GROUP, CFG)
                step += 1
                for _ in range(1, masked_tiles):
                    dk, dv = _masked_step(
                        dk, dv, step, True, keep, consume, shared, False, GROUP, CFG
                    )
                    step += 1
                # a loop of its own: what masks spill would be reloaded here
                for _ in range(gl.maximum(masked_tiles, 1), q_tiles):
                    dk, dv = _step(dk, dv, step, False, keep, consume, shared, False, GROUP, CFG)
                    step += 1
                _last_dq(step - 1, keep, consume, GROUP, CFG)
        # the keys are read for the last time: the next ones may come
        mbarrier.arrive(kv_empty, count=1)
        # the writer must have taken the last tile of dq, whose memory comes in handy
        mbarrier.wait(dq_ring[2].index(GROUP), (step & 1) ^ 1)
        row = kv_tile * CFG.tile_n + GROUP * ROWS
        place = [plane // kv_heads, plane % kv_heads, row, 0]
        _store_gradient(dv_desc, dv.to(dtype), dv_tile, place)
        _store_gradient(dk_desc, (dk * score[2]).to(dtype), dk_tile, place)
        pieces += 1
        plane, kv_tile = take(work, turn)
        turn += 1
    # the writer finds that there is no such step, and ends
    mbarrier.arrive(dq_ring[1].index(GROUP), count=1)


@gluon.jit(
    do_not_specialize=[
        "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right", "num_planes",
        "section", "visit_heads", "q_heads", "group_size",
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
    num_planes,
    section,
    visit_heads,
    q_heads,
    group_size,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles.

    `work_ptrs` are a counter, an order of the tiles of keys or None and, to add in order, how many
    have added to each [64, 64] of dq, int32 [planes, rows / 64, 2], the turns of the blocks of a
    mask, and in which order `visit_heads` heads visit them, if that is planned: then the order
    begins with the places of each program's tiles. `score` is what `gradient_factors` gives.
    """
    counter_ptr, order_ptr, sums_turn_ptr, turns_ptr, visits_ptr = work_ptrs
    consumers: gl.constexpr = CFG.CONSUMERS
    stages: gl.constexpr = CFG.STAGES
    ds_stages: gl.constexpr = CFG.DS_STAGES
    tile_m: gl.constexpr = CFG.TILE_M
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    dtype: gl.constexpr = q_desc.dtype
    vector: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_m], dtype)
    k_smem = tiles(k_desc, consumers, ROWS)
    v_smem = tiles(v_desc, consumers, ROWS)
    q_smem = tiles(q_desc, stages, tile_m)
    dout_smem = tiles(dout_desc, stages, tile_m)
    lse_smem = gl.allocate_shared_memory(gl.float32, [stages, tile_m], vector)
    delta_smem = gl.allocate_shared_memory(gl.float32, [stages, tile_m], vector)
    ds_smem = gl.allocate_shared_memory(dtype, [ds_stages * consumers, ROWS, tile_m], ds_layout)
    dq_smem = tiles(dq_desc, consumers, SUM_ROWS)
    kv_ring = (k_smem, v_smem, barriers(1, 1).index(0), barriers(1, consumers).index(0))
    q_bars = (barriers(stages, 1), barriers(stages, consumers))
    dout_bars = q_bars
    if CFG.SPLIT_RING:
        dout_bars = (barriers(stages, 1), barriers(stages, consumers))
    q_ring = (q_smem, dout_smem, lse_smem, delta_smem) + q_bars + dout_bars  # noqa: RUF005
    # each warp group waits for both halves of ds
    ds_ring = (ds_smem, barriers(ds_stages, consumers))
    dq_ring = (dq_smem, barriers(consumers, 1), barriers(consumers, 1))
    info = step_info()
    work = work_channel(2, consumers)
    fence_async_shared()

    mask = (block_lists, mask_batch_step, mask_head_step)
    heads = (q_heads, group_size)
    schedule = (order_ptr, turns_ptr, visits_ptr, visit_heads, num_planes, section)
    lengths = (q_len, kv_len)
    shared = (mask, kv_ring, q_ring, info, work, lengths, heads, (left, right))
    produce = ((q_desc, dout_desc, lse_desc, delta_desc), k_desc, v_desc, counter_ptr, schedule)
    consume = (dk_desc, dv_desc, score, ds_ring, dq_ring)
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume, (consume, shared, 0, CFG)),
            (_consume, (consume, shared, 1, CFG)),
            (produce_steps, (produce, shared, CFG)),
            (write_dq, (dq_desc, sums_turn_ptr, q_len, dq_ring, info, 0, CFG)),
            (write_dq, (dq_desc, sums_turn_ptr, q_len, dq_ring, info, 1, CFG)),
        ],
        [4, 1, 1, 1],
        [registers, producer_registers, producer_registers, producer_registers],
    )
