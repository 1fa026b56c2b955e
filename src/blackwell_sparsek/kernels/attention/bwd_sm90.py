"""Attention backward on Hopper: dq, dk and dv in one pass over the scores.

q, out, dout [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv]. Programs take pieces of work until none
is left; a piece is 128 keys of one KV head, with all queries of all heads that see them. Two
consumer warp groups keep 64 keys each, dk and dv in registers, and compute

    s^T = k q^T    dp^T = v dout^T    dv += p^T dout    dk += ds^T q    dq = ds k

so that p^T and ds^T are where the products for dv and dk read them. `ds` goes through shared memory
to the product for dq, which both warp groups share; a writer warp adds it to fp32 sums in memory by
TMA, in no fixed order. A producer warp finds the query tiles (`bwd_sm90_work`) and copies them.
The products of step i for dq and dk run beside the scores and the softmax of step i + 1.

`lse` in base 2 and `delta` come by TMA with the tiles; queries past the end, where lse is +inf,
count for nothing.

Called as impl "sm90" of `bsk::attn_bwd`, between the kernels of `bwd_sm90_rows`. Limits: those of
`fwd_sm90`; key blocks of masks are multiples of 128.
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
from ...device.gluon.tma_reduce import tma_add
from ...device.masks import bit_visible, position, row_bounds, within_bounds
from ..sm90 import GROUP_ROWS
from .bwd_sm90_work import produce_steps, read_info, step_info

ROWS = gl.constexpr(GROUP_ROWS)


@gluon.jit
def _visible(mask, info, step, kv_index, lengths, band, CFG: gl.constexpr):
    """Which keys [64] each query [TILE_M] of a step sees, as [keys, queries]."""
    lists, _, _ = mask
    tile_m: gl.constexpr = CFG.TILE_M
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    offs_m = gl.arange(0, tile_m, gl.SliceLayout(0, layout))
    q_index = read_info(info, step, 1, 4) + offs_m
    if CFG.parts == 2:
        q_index = gl.where(offs_m < ROWS, q_index, read_info(info, step, 2, 4) - ROWS + offs_m)
    first, last = row_bounds(position(q_index, lengths[0], lengths[1]), lengths[1], band[0], band[1])
    visible = within_bounds(kv_index[:, None], first[None, :], last[None, :])
    if lists is not None:
        words: gl.constexpr = (CFG.BLOCK_KV + 31) // 32
        bits_id = read_info(info, step, 3, 4) + (offs_m - offs_m)
        if CFG.parts == 2:
            bits_id = gl.where(offs_m < ROWS, bits_id, read_info(info, step, 4, 4))
        kv_in_block = kv_index % CFG.BLOCK_KV
        row = (bits_id.to(gl.int64) * CFG.UNIT + q_index % CFG.UNIT) * words
        place = lists[4] + row[None, :] + (kv_in_block // 32)[:, None]
        has_bits = (kv_in_block >= 0)[:, None] & (bits_id >= 0)[None, :]
        word = gl.load(place, has_bits, other=-1)
        visible = visible & bit_visible(word, kv_in_block[:, None])
    return visible


@gluon.jit
def _start_scores(rows, ring, step, STAGES: gl.constexpr, CFG: gl.constexpr):
    """Start the products of 64 keys or values with all queries or output gradients of a step."""
    smem, _, full, _ = ring
    tile_m: gl.constexpr = CFG.TILE_M
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    nothing = gl.zeros([ROWS, tile_m], gl.float32, layout)
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    columns = smem.index(stage).permute((1, 0))
    return warpgroup_mma(rows, columns, nothing, use_acc=False, is_async=True)


@gluon.jit
def _of_queries(ring, step, STAGES: gl.constexpr, CFG: gl.constexpr):
    """The numbers that came with a tile of queries, as [1, TILE_M]."""
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    return ring[1].index(step % STAGES).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _weigh(s, masked, step, kv_index, shared, score, CFG: gl.constexpr):
    """p^T, and the capped scores that `score_gradients` wants."""
    mask, kv_ring, q_ring, dout_ring, info, work, lengths, heads, band = shared
    lse_log2 = _of_queries(q_ring, step, CFG.STAGES, CFG)
    p, capped = probabilities(s, None, lse_log2, score)
    if masked:
        visible = _visible(mask, info, step, kv_index, lengths, band, CFG)
        p = gl.where(visible, p, 0.0)
    return p, capped


@gluon.jit
def _start_dq(ds_smem, k_smem, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Start this warp group's share of dq: 64 rows or 64 columns."""
    layout: gl.constexpr = CFG.accumulator_layout(64)
    consumers: gl.constexpr = CFG.CONSUMERS
    dq = gl.zeros([ROWS, 64], gl.float32, layout)
    for g in gl.static_range(consumers):
        ds = ds_smem.index(step % 2 * consumers + g)
        if CFG.dq_by_rows:
            ds_t = ds.slice(GROUP * ROWS, ROWS, dim=1).permute((1, 0))
            k = k_smem.index(g)
        else:
            ds_t = ds.permute((1, 0))
            k = k_smem.index(g).slice(GROUP * 64, 64, dim=1)
        dq = warpgroup_mma(ds_t, k, dq, use_acc=g > 0, is_async=True)
    return dq


@gluon.jit
def _hand_over(x, smem, filled):
    """Give a tile to whoever copies it out of shared memory."""
    smem.store(x)
    fence_async_shared()
    mbarrier.arrive(filled, count=1)


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Gradients of 64 keys, piece by piece of work."""
    dk_desc, dv_desc, score, scale, ds_smem, ds_ready, dq_smem, dq_full, dq_empty = consume
    mask, kv_ring, q_ring, dout_ring, info, work, lengths, heads, band = shared
    k_smem, v_smem, kv_full, kv_empty = kv_ring
    q_smem, q_empty = q_ring[0], q_ring[3]
    dout_smem, dout_empty = dout_ring[0], dout_ring[3]
    consumers: gl.constexpr = CFG.CONSUMERS
    tile_d: gl.constexpr = CFG.TILE_D
    tile_dv: gl.constexpr = CFG.TILE_DV
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    k_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_D)
    v_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    dtype: gl.constexpr = q_smem.dtype
    k = k_smem.index(GROUP)
    v = v_smem.index(GROUP)
    dq_tile = dq_smem.index(GROUP)
    dk_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_d], dtype)
    dv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_dv], dtype)
    dk_tile = dq_tile._reinterpret(dtype, [ROWS, tile_d], dk_layout)
    dv_tile = dq_tile._reinterpret(dtype, [ROWS, tile_dv], dv_layout)
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)) + GROUP * ROWS
    kv_heads = heads[0] // heads[1]
    step = 0
    turn = 1
    pieces = 0
    plane, kv_tile = take(work, 0)
    while plane >= 0:
        kv_index = kv_tile * CFG.tile_n + keys
        dk = gl.zeros([ROWS, tile_d], gl.float32, k_layout)
        dv = gl.zeros([ROWS, tile_dv], gl.float32, v_layout)
        mbarrier.wait(kv_full, pieces & 1)
        for _ in range(heads[1]):
            q_tiles, masked_tiles = take(work, turn)
            turn += 1
            if q_tiles > 0:
                s_started = _start_scores(k, q_ring, step, CFG.STAGES, CFG)
                dp_started = _start_scores(v, dout_ring, step, CFG.DOUT_STAGES, CFG)
                s = warpgroup_mma_wait(1, deps=(s_started,))
                p, capped = _weigh(s, masked_tiles > 0, step, kv_index, shared, score, CFG)
                dp = warpgroup_mma_wait(0, deps=(dp_started,))
                delta = _of_queries(dout_ring, step, CFG.DOUT_STAGES, CFG)
                ds = score_gradients(p, capped, dp, delta, score).to(dtype)
                _hand_over(ds, ds_smem.index(step % 2 * consumers + GROUP), ds_ready.index(step % 2))
                p_operand = gl.convert_layout(p.to(dtype), p_layout)
                for q_tile in range(1, q_tiles):
                    dout = dout_smem.index(step % CFG.DOUT_STAGES)
                    dv_started = warpgroup_mma(p_operand, dout, dv, is_async=True)
                    mbarrier.wait(ds_ready.index(step % 2), (step // 2) & 1)
                    dq_started = _start_dq(ds_smem, k_smem, step, GROUP, CFG)
                    dv = warpgroup_mma_wait(consumers, deps=(dv_started,))
                    mbarrier.arrive(dout_empty.index(step % CFG.DOUT_STAGES), count=1)
                    s_started = _start_scores(k, q_ring, step + 1, CFG.STAGES, CFG)
                    dq = warpgroup_mma_wait(1, deps=(dq_started,))
                    mbarrier.wait(dq_empty.index(GROUP), (step & 1) ^ 1)
                    _hand_over(dq, dq_tile, dq_full.index(GROUP))
                    dp_started = _start_scores(v, dout_ring, step + 1, CFG.DOUT_STAGES, CFG)
                    q = q_smem.index(step % CFG.STAGES)
                    ds_t = ds_smem.index(step % 2 * consumers + GROUP)
                    dk_started = warpgroup_mma(ds_t, q, dk, is_async=True)
                    s = warpgroup_mma_wait(2, deps=(s_started,))
                    p, capped = _weigh(
                        s, q_tile < masked_tiles, step + 1, kv_index, shared, score, CFG
                    )
                    dp = warpgroup_mma_wait(1, deps=(dp_started,))
                    delta = _of_queries(dout_ring, step + 1, CFG.DOUT_STAGES, CFG)
                    ds = score_gradients(p, capped, dp, delta, score).to(dtype)
                    # the store also keeps ptxas from moving all of this below the wait
                    buffer = (step + 1) % 2
                    _hand_over(ds, ds_smem.index(buffer * consumers + GROUP), ds_ready.index(buffer))
                    dk = warpgroup_mma_wait(0, deps=(dk_started,))
                    mbarrier.arrive(q_empty.index(step % CFG.STAGES), count=1)
                    p_operand = gl.convert_layout(p.to(dtype), p_layout)
                    step += 1
                dout = dout_smem.index(step % CFG.DOUT_STAGES)
                dv_started = warpgroup_mma(p_operand, dout, dv, is_async=True)
                mbarrier.wait(ds_ready.index(step % 2), (step // 2) & 1)
                dq_started = _start_dq(ds_smem, k_smem, step, GROUP, CFG)
                q = q_smem.index(step % CFG.STAGES)
                ds_t = ds_smem.index(step % 2 * consumers + GROUP)
                dk_started = warpgroup_mma(ds_t, q, dk, is_async=True)
                dv, dq = warpgroup_mma_wait(1, deps=(dv_started, dq_started))
                mbarrier.arrive(dout_empty.index(step % CFG.DOUT_STAGES), count=1)
                mbarrier.wait(dq_empty.index(GROUP), (step & 1) ^ 1)
                _hand_over(dq, dq_tile, dq_full.index(GROUP))
                dk = warpgroup_mma_wait(0, deps=(dk_started,))
                mbarrier.arrive(q_empty.index(step % CFG.STAGES), count=1)
                step += 1
        # the keys are read for the last time: the next ones may come
        mbarrier.arrive(kv_empty, count=1)
        place = [plane // kv_heads, plane % kv_heads, kv_tile * CFG.tile_n + GROUP * ROWS, 0]
        mbarrier.wait(dq_empty.index(GROUP), (step & 1) ^ 1)
        dv_tile.store(dv.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv_desc, place, dv_tile)
        tma.store_wait(0)
        dk_tile.store((dk * scale).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, place, dk_tile)
        tma.store_wait(0)
        pieces += 1
        plane, kv_tile = take(work, turn)
        turn += 1
    # the writer finds that there is no such step, and ends
    mbarrier.arrive(dq_full.index(GROUP), count=1)


@gluon.jit
def _write_dq(write, info, CFG: gl.constexpr):
    """Add what the warp groups hand over to the sums of dq in memory."""
    dq_desc, dq_smem, dq_full, dq_empty = write
    consumers: gl.constexpr = CFG.CONSUMERS
    step = 0
    plane = 0
    while plane >= 0:
        for g in gl.static_range(consumers):
            mbarrier.wait(dq_full.index(g), step & 1)
            if g == 0:
                plane = read_info(info, step, 0, 1)
            if plane >= 0:
                if CFG.dq_by_rows:
                    place = [plane, read_info(info, step, 1 + g, 1), 0]
                else:
                    place = [plane, read_info(info, step, 1, 1), g * 64]
                tma_add(dq_desc, place, dq_smem.index(g))
        for g in gl.static_range(consumers):
            tma.store_wait(consumers - 1 - g)
            mbarrier.arrive(dq_empty.index(g), count=1)
        step += 1


@gluon.jit(
    do_not_specialize=[
        "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right", "num_planes",
        "section", "dynamic", "q_heads", "group_size",
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
    section,
    dynamic,
    q_heads,
    group_size,
    score,
    scale,
    CFG: gl.constexpr,
):
    """Set up rings and roles."""
    consumers: gl.constexpr = CFG.CONSUMERS
    stages: gl.constexpr = CFG.STAGES
    dout_stages: gl.constexpr = CFG.DOUT_STAGES
    tile_m: gl.constexpr = CFG.TILE_M
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    dtype: gl.constexpr = q_desc.dtype
    vector: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=0, element_bitwidth=32, rank=1
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tile_m], dtype)
    k_smem = tiles(k_desc, consumers, ROWS)
    v_smem = tiles(v_desc, consumers, ROWS)
    q_smem = tiles(q_desc, stages, tile_m)
    dout_smem = tiles(dout_desc, dout_stages, tile_m)
    lse_smem = gl.allocate_shared_memory(gl.float32, [stages, tile_m], vector)
    delta_smem = gl.allocate_shared_memory(gl.float32, [dout_stages, tile_m], vector)
    ds_smem = gl.allocate_shared_memory(dtype, [2 * consumers, ROWS, tile_m], ds_layout)
    dq_smem = tiles(dq_desc, consumers, ROWS)
    kv_ring = (k_smem, v_smem, barriers(1, 1).index(0), barriers(1, consumers).index(0))
    q_ring = (q_smem, lse_smem, barriers(stages, 1), barriers(stages, consumers))
    dout_ring = (dout_smem, delta_smem, barriers(dout_stages, 1), barriers(dout_stages, consumers))
    ds_ready = barriers(2, consumers)
    dq_full = barriers(consumers, 1)
    dq_empty = barriers(consumers, 1)
    info = step_info()
    work = work_channel(2, consumers)
    fence_async_shared()

    mask = (block_lists, mask_batch_step, mask_head_step)
    heads = (q_heads, group_size)
    schedule = (order_ptr, num_planes, section, dynamic)
    lengths = (q_len, kv_len)
    shared = (mask, kv_ring, q_ring, dout_ring, info, work, lengths, heads, (left, right))
    produce = ((q_desc, dout_desc, lse_desc, delta_desc), k_desc, v_desc, counter_ptr, schedule)
    consume = (dk_desc, dv_desc, score, scale, ds_smem, ds_ready, dq_smem, dq_full, dq_empty)
    write = (dq_desc, dq_smem, dq_full, dq_empty)
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume, (consume, shared, 0, CFG)),
            (_consume, (consume, shared, 1, CFG)),
            (produce_steps, (produce, shared, CFG)),
            (_write_dq, (write, info, CFG)),
        ],
        [4, 1, 1],
        [registers, producer_registers, producer_registers],
    )
