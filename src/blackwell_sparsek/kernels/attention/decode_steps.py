"""The loops of the decode kernel over the keys of one KV head."""

import triton
import triton.language as tl

from ...device.fp8_words import column_order, paired_half
from ...device.masks import within_bounds
from ...device.paging import cache_tile, grouped_tile, load_cache_rows
from ...device.scores import cap
from ...device.softmax import init_state, join_states, softmax_step


@triton.jit
def attend_cache(
    q, first, last, k_ptr, v_ptr, cache, tile_begin, tile_end, strides, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr, HINT: tl.constexpr,
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
        k = load_cache_rows(k_ptr, slab, row, strides.k, live, offs_d, HEAD_DIM, HINT)
        if FP8:
            k = k.to(tl.float16)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if score[1] is not None:
            s = cap(s * score[2], score[1])
        visible = within_bounds(kv_pos[None, :], first[:, None], last[:, None]) & live[None, :]
        s = tl.where(wrong[None, :], float("nan"), tl.where(visible, s, -float("inf")))
        m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, score[0])
        v = load_cache_rows(v_ptr, slab, row, strides.v, live, offs_dv, HEAD_DIM_V, HINT)
        if FP8:
            v = v.to(tl.float16)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return m_log2, row_sum, acc


@triton.jit
def attend_by_warps(
    q, first, last, k_ptr, v_ptr, cache, tile_begin, tile_end, strides, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, TILE_N: tl.constexpr, HINT: tl.constexpr,
    GROUPS: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attend_cache`, for q [warps, TILE_M, columns]: each warp has its own keys of a tile.

    Batched products go to a warp each, so that no warp waits for another one's maximum or weights.
    """
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    FP8: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    MAY_BE_WRONG: tl.constexpr = PAGE_SIZE is not None or BLOCK_KV is not None
    offs_d = tl.arange(0, q.shape[2])
    offs_dv = tl.arange(0, TILE_DV)
    offs_w = tl.arange(0, TILE_DV // 4)
    word_strides = (strides.v[0] // 4, strides.v[1] // 4, strides.v[2] // 4)
    v_words = v_ptr.to(tl.pointer_type(tl.int32), bitcast=True) if WORDS else v_ptr
    m_log2, row_sum = init_state(tl.arange(0, GROUPS)[:, None] + first[None, :])
    acc = tl.zeros([GROUPS, q.shape[1], TILE_DV], tl.float32)
    # a page is looked up while the keys of the tile before it are waited for
    ahead = grouped_tile(tile_begin, cache, TILE_N, GROUPS, PAGE_SIZE, BLOCK_KV)
    for tile in tl.range(tile_begin, tile_end):
        kv_pos, slab, row, readable, listed, wrong = ahead
        ahead = grouped_tile(tile + 1, cache, TILE_N, GROUPS, PAGE_SIZE, BLOCK_KV)
        k = load_cache_rows(k_ptr, slab, row, strides.k, readable, offs_d, HEAD_DIM, HINT)
        s = tl.dot(q, tl.permute(k.to(q.dtype), 0, 2, 1), input_precision=PRECISION)
        if SCALED:
            s *= score[3][None, :, None]
        if score[1] is not None:
            s = cap(s * score[2], score[1])
        visible = within_bounds(kv_pos[:, None, :], first[None, :, None], last[None, :, None])
        if BLOCK_KV is not None:
            visible = visible & listed[:, None, :]
        s = tl.where(visible, s, -float("inf"))
        m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, score[0])
        if MAY_BE_WRONG:
            some_wrong = tl.max(wrong.to(tl.int32), 1)
            row_sum = tl.where(some_wrong[:, None] > 0, float("nan"), row_sum)
        if WORDS:
            v = paired_half(
                load_cache_rows(
                    v_words, slab, row, word_strides, readable, offs_w, HEAD_DIM_V // 4, HINT
                )
            )
        else:
            v = load_cache_rows(v_ptr, slab, row, strides.v, readable, offs_dv, HEAD_DIM_V, HINT)
            if FP8:
                v = v.to(tl.float16)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, :, None], input_precision=PRECISION)
    m_all, sum_all = init_state(first)
    m_all, sum_all, _, factors = join_states(m_all, sum_all, m_log2, row_sum)
    acc_all = tl.sum(acc * factors[:, :, None], 0)
    if WORDS:
        acc_all = column_order(acc_all)
    return m_all, sum_all, acc_all


@triton.jit
def half_rows(q):
    """Queries in fp16, rows scaled by powers of two into its range, and the factors [rows] left."""
    top = tl.max(tl.abs(q.to(tl.float32)), 1)
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * down[:, None]).to(tl.float16), up
