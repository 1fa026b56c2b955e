"""Attention backward on Hopper, the gradients of keys and values alone: half of a pair of kernels.

    s^T = k q^T    dp^T = v dout^T    dv += p^T dout    dk += ds^T q

A program owns 64 keys of one KV head and walks over the queries of all heads that see them; the
producer is that of `bwd_sm90`. Without dq, warp groups have nothing to exchange and nothing to add
up in memory: sums have one order, so that bits are the same in every run, and each warp group is a
program of its own. Two of them share an SM: one computes exponentials while the other multiplies.

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

from ...device.gluon.pipeline import barriers, take, tiles, work_channel
from ..sm90 import GROUP_ROWS
from .bwd_sm90_steps import score_step, start_products, zero_of
from .bwd_sm90_work import produce_steps, step_info

ROWS = gl.constexpr(GROUP_ROWS)


@gluon.jit
def _step(dk, dv, step, keep, score, shared, MASKED: gl.constexpr, CFG: gl.constexpr):
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
def _consume(consume, shared, CFG: gl.constexpr):
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
                dk, dv = _step(dk, dv, step, keep, score, shared, True, CFG)
                step += 1
            # a loop of its own: what masks spill would be reloaded here
            for _ in range(masked_tiles, q_tiles):
                dk, dv = _step(dk, dv, step, keep, score, shared, False, CFG)
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
            (_consume, ((dk_desc, dv_desc, score), shared, CFG)),
            (produce_steps, (produce, shared, CFG)),
        ],
        [1],
        [producer_registers],
    )
