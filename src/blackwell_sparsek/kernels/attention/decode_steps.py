"""The loops of the decode kernel over the keys of one KV head."""

import triton
import triton.language as tl

from ...device.fp8_words import as_halves, halves, turned_back, turned_halves
from ...device.masks import within_bounds
from ...device.paging import cache_tile, clamped_tile, listed_block, load_cache_rows
from ...device.scores import cap
from ...device.softmax import init_state, softmax_step, softmax_step_down


@triton.jit
def attend_cache(
    q, first, last, k_ptr, v_ptr, cache, tile_begin, tile_end, layout, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax state and accumulators over the tiles `[tile_begin, tile_end)` of one KV head."""
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    FP8: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, q.shape[1])
    offs_dv = tl.arange(0, TILE_DV)
    m_log2, row_sum = init_state(first)
    acc = tl.zeros([q.shape[0], TILE_DV], tl.float32)
    # a page is looked up while the keys of the tile before it are waited for
    ahead = cache_tile(tile_begin, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
    for tile in tl.range(tile_begin, tile_end):
        kv_pos, slab, row, live, wrong = ahead
        ahead = cache_tile(tile + 1, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
        k = load_cache_rows(k_ptr, slab, row, layout.k, live, offs_d, HEAD_DIM)
        if FP8:
            k = k.to(tl.float16)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if score[1] is not None:
            s = cap(s * score[2], score[1])
        visible = within_bounds(kv_pos[None, :], first[:, None], last[:, None]) & live[None, :]
        s = tl.where(wrong[None, :], float("nan"), tl.where(visible, s, -float("inf")))
        m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, score[0])
        v = load_cache_rows(v_ptr, slab, row, layout.v, live, offs_dv, HEAD_DIM_V)
        if FP8:
            v = v.to(tl.float16)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return m_log2, row_sum, acc


@triton.jit
def attend_across(
    q, first, last, k_ptr, v_ptr, cache, tile_begin, tile_end, layout, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attend_cache`, with keys down and rows across.

    Tensor cores of Hopper want 64 rows and read them from shared memory; keys are that many, and
    queries are not. Caches are fp8 as bytes, fp8 as words of four (int32), or like q.
    """
    TILE_M: tl.constexpr = q.shape[0]
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    FP8: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    WORDS: tl.constexpr = k_ptr.dtype.element_ty == tl.int32
    PACKED: tl.constexpr = 4 if WORDS else 1
    SCALED: tl.constexpr = (FP8 or WORDS) and q.dtype != tl.float16
    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, q.shape[1] // PACKED)
    offs_dv = tl.arange(0, TILE_DV // PACKED)
    scale_log2 = tl.zeros([TILE_M], tl.float32) + score[0]
    if SCALED:
        # keys become fp16 in one step, as bf16 they would need two
        q, up = half_rows(q)
        scale_log2 = scale_log2 * up if score[1] is None else scale_log2
    if WORDS:
        q = as_halves(q)
    q = tl.trans(q)
    m_log2, _ = init_state(first)
    # of each thread's keys, summed up at the end
    sums = tl.zeros([TILE_N, TILE_M], tl.float32)
    acc = tl.zeros([TILE_DV, TILE_M], tl.float32)
    # a page is looked up a tile before its keys are read, the block that tells which two before
    block = listed_block(tile_begin, offs_n, cache, TILE_N, BLOCK_KV)
    next_block = listed_block(tile_begin + 1, offs_n, cache, TILE_N, BLOCK_KV)
    ahead = clamped_tile(tile_begin, block, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
    for tile in tl.range(tile_begin, tile_end):
        kv_pos, slab, row, readable, listed, wrong = ahead
        ahead = clamped_tile(tile + 1, next_block, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
        next_block = listed_block(tile + 2, offs_n, cache, TILE_N, BLOCK_KV)
        k = load_cache_rows(k_ptr, slab, row, layout.k, readable, offs_d, HEAD_DIM // PACKED)
        if WORDS:
            k = halves(k)
        s = tl.dot(k.to(q.dtype), q, input_precision=PRECISION)
        if score[1] is not None:
            s = cap((s * up[None, :] if SCALED else s) * score[2], score[1])
        visible = within_bounds(kv_pos[:, None], first[None, :], last[None, :])
        if BLOCK_KV is not None:
            visible = visible & (listed[:, None] if len(listed.shape) == 1 else listed)
        s = tl.where(visible, s, -float("inf"))
        m_log2, sums, p, rescale = softmax_step_down(m_log2, sums, s, scale_log2)
        if PAGE_SIZE is not None or BLOCK_KV is not None:
            wrong = wrong[:, None] if len(wrong.shape) == 1 else wrong
            sums = tl.where(wrong, float("nan"), sums)
        v = load_cache_rows(v_ptr, slab, row, layout.v, readable, offs_dv, HEAD_DIM_V // PACKED)
        v = turned_halves(v) if WORDS else tl.trans(v.to(tl.float16) if FP8 else v)
        acc = tl.dot(v, p.to(v.dtype), acc * rescale[None, :], input_precision=PRECISION)
    if WORDS:
        acc = turned_back(acc)
    return m_log2, tl.sum(sums, 0), tl.trans(acc)


@triton.jit
def half_rows(q):
    """Queries in fp16, rows scaled by powers of two into its range, and the factors [rows] left."""
    top = tl.max(tl.abs(q.to(tl.float32)), 1)
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * down[:, None]).to(tl.float16), up
