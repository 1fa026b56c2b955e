"""Prototype: one warp group without a producer, three programs on an SM."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.gluon.pipeline import barriers, tiles
from ...device.gluon.row_parts import pin_above, row_parts, scale_rows, softmax_step_parts
from ...device.softmax import finalise, init_state
from ..sm90 import GROUP_ROWS

ROWS = gl.constexpr(GROUP_ROWS)
SLACK = gl.constexpr(8)


@gluon.jit
def _get(desc, bar, plane, block, smem):
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [plane[0], plane[1], block * 64, 0], bar, smem)


@gluon.jit(do_not_specialize=["q_len", "q_blocks", "q_heads", "group_size"])
def _solo_kernel(
    out_desc, lse_ptr, q_desc, k_desc, v_desc, order_ptr, indptr_ptr, indices_ptr,
    q_len, q_blocks, q_heads, group_size, scale_log2, CFG: gl.constexpr,
):
    s_layout: gl.constexpr = CFG.accumulator_layout(64)
    o_layout: gl.constexpr = CFG.accumulator_layout(128)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_smem = tiles(q_desc, 1, ROWS)
    k_smem = tiles(k_desc, 1, 64)
    v_smem = tiles(v_desc, 2, 64)
    q_bar = barriers(1, 1)
    k_bar = barriers(1, 1)
    v_bar = barriers(2, 1)
    fence_async_shared()
    entry = gl.load(order_ptr + gl.program_id(0))
    plane = entry // q_blocks
    row = entry % q_blocks
    batch = plane // q_heads
    head = plane % q_heads
    kv_plane = (batch, head // group_size)
    _get(q_desc, q_bar.index(0), (batch, head), row, q_smem.index(0))
    begin = gl.load(indptr_ptr + entry)
    count = gl.load(indptr_ptr + entry + 1) - begin
    q_index = row * 64 + gl.arange(0, ROWS, s_rows)
    m_log2, row_sum = init_state(q_index)
    acc = gl.zeros([ROWS, 128], gl.float32, o_layout)
    no_scores = gl.zeros([ROWS, 64], gl.float32, s_layout)
    sums = row_parts(no_scores)
    q = q_smem.index(0)
    mbarrier.wait(q_bar.index(0), 0)
    if count > 0:
        at = indices_ptr + begin
        block = gl.load(at)
        _get(k_desc, k_bar.index(0), kv_plane, block, k_smem.index(0))
        _get(v_desc, v_bar.index(0), kv_plane, block, v_smem.index(0))
        block = gl.load(at + gl.minimum(1, count - 1))
        k = k_smem.index(0).permute((1, 0))
        mbarrier.wait(k_bar.index(0), 0)
        scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(scores,))
        gl.thread_barrier()
        if count > 1:
            _get(k_desc, k_bar.index(0), kv_plane, block, k_smem.index(0))
        m_log2, sums, weights, rescale = softmax_step_parts(m_log2, sums, s, scale_log2, SLACK)
        p = gl.convert_layout(weights.to(q.dtype), p_layout)
        for i in range(1, count):
            after = gl.load(at + gl.minimum(i + 1, count - 1))
            _get(v_desc, v_bar.index(i & 1), kv_plane, block, v_smem.index(i & 1))
            mbarrier.wait(k_bar.index(0), i & 1)
            scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_bar.index((i - 1) & 1), ((i - 1) >> 1) & 1)
            product = warpgroup_mma(p, v_smem.index((i - 1) & 1), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(scores,))
            gl.thread_barrier()
            if i + 1 < count:
                _get(k_desc, k_bar.index(0), kv_plane, after, k_smem.index(0))
            m_log2, sums, weights, rescale = softmax_step_parts(m_log2, sums, s, scale_log2, SLACK)
            pin_above(sums)
            acc = warpgroup_mma_wait(0, deps=(product,))
            gl.thread_barrier()
            acc = scale_rows(acc, gl.convert_layout(rescale, o_rows)[:, None])
            p = gl.convert_layout(weights.to(q.dtype), p_layout)
            block = after
        last = count - 1
        mbarrier.wait(v_bar.index(last & 1), (last >> 1) & 1)
        product = warpgroup_mma(p, v_smem.index(last & 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(product,))
    row_sum = gl.convert_layout(gl.sum(sums, 1), s_rows)
    inverse, lse = finalise(m_log2, row_sum)
    out = acc * gl.convert_layout(inverse, o_rows)[:, None]
    gl.thread_barrier()
    q.store(out.to(q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [batch, head, row * 64, 0], q)
    gl.store(lse_ptr + plane.to(gl.int64) * q_len + q_index, lse, mask=q_index < q_len)
    tma.store_wait(0)
