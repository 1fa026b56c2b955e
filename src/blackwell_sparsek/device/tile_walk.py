# mypy: ignore-errors
"""How portable attention kernels traverse tiles: visit plans, and tiles with mask code.

A forward or dQ kernel owns a tile of queries and loops over keys; a dK/dV kernel owns a tile of
keys and loops over queries, through the transposed lists. These functions create vectors, which
Gluon kernels cannot share; those build the same from `masks` and `visits`.
"""

import triton
import triton.language as tl

from .masks import bit_visible, kv_range, kv_range_of_all, q_range, q_range_of_all, within_bounds
from .records import KeyTile, QueryTile
from .schedule import batch_and_heads, raster_group_size, raster_place, token_span
from .visits import (
    bits_of_query_tile,
    bits_of_tile,
    keys_of_tile,
    masked_block,
    plan_blocks,
    plan_dense,
    tile_ordinal,
)

# Entries of a mask row read at a time: a row of 16k keys in blocks of 128 is one read.
SCAN = tl.constexpr(128)


@triton.jit
def place_query_tile(
    cu_seqlens, q_len, kv_len, heads, KV_BYTES: tl.constexpr, TILE_M: tl.constexpr
):
    """The `QueryTile` that a program owns."""
    q_heads, group_size = heads
    cu_seqlens_q, cu_seqlens_kv = cu_seqlens
    q_tiles = (q_len + TILE_M - 1) // TILE_M
    group = raster_group_size(kv_len, group_size, KV_BYTES)
    batch_head, q_tile = raster_place(
        tl.program_id(0), tl.num_programs(0) // q_tiles, q_tiles, group
    )
    place = batch_and_heads(batch_head, q_heads, group_size)
    q_span = token_span(cu_seqlens_q, place.batch, q_len)
    kv_span = token_span(cu_seqlens_kv, place.batch, kv_len)
    return QueryTile(place, q_span, kv_span, q_tile * TILE_M)


@triton.jit
def plan_keys(
    lists,
    mask_row,
    q_start,
    lengths,
    band,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Plan over the keys that the queries `[q_start, q_start + TILE_M)` see.

    `mask_row` is the mask's row of the first query of their batch and head.
    """
    q_len, kv_len = lengths
    left, right = band
    q_end = q_start + TILE_M
    kv_lo, kv_hi = kv_range(q_start, q_end, q_len, kv_len, left, right)
    all_lo, all_hi = kv_range_of_all(q_start, q_end, q_len, kv_len, left, right)
    if lists is None:
        plan = plan_dense(kv_lo, kv_hi, all_lo, all_hi, TILE_N)
    else:
        scan = tl.arange(0, SCAN)
        row = mask_row + q_start // lists.row_tokens
        plan = plan_blocks(lists, row, kv_lo, kv_hi, all_lo, all_hi, scan, TILE_N, BLOCK_KV)
    return plan


@triton.jit
def masked_key_tile(
    lists, plan, num_blocks, kv_tile, row_limits, offs_m, q_start, kv_len,
    TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Positions of the keys of a tile with mask code, and which of them each query sees.

    `row_limits` are the `row_bounds` of the queries `offs_m`, the tile from `q_start` on.
    """
    ordinal, kv_in_block = tile_ordinal(kv_tile, tl.arange(0, TILE_N), TILE_N, BLOCK_KV)
    entry = masked_block(plan, ordinal)
    kv_pos = keys_of_tile(lists, entry, ordinal, num_blocks, kv_in_block, kv_len, TILE_N, BLOCK_KV)
    visible = within_bounds(kv_pos[None, :], row_limits.first[:, None], row_limits.last[:, None])
    if lists is not None:
        q_in_block = offs_m - q_start // lists.row_tokens * lists.row_tokens
        words = bits_of_tile(
            lists, entry, ordinal, num_blocks, q_in_block, kv_in_block, TILE_N, BLOCK_KV
        )
        visible = visible & bit_visible(words, kv_in_block[None, :])
    return KeyTile(kv_pos, visible)


@triton.jit
def full_tile(lists, plan, num_blocks, tile, length, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of the keys (or queries) of a tile without mask code."""
    ordinal, in_block = tile_ordinal(tile, tl.arange(0, TILE), TILE, BLOCK)
    entry = plan.full_begin + ordinal
    return keys_of_tile(lists, entry, ordinal, num_blocks, in_block, length, TILE, BLOCK)


@triton.jit
def plan_queries(
    lists,
    mask_row,
    kv_start,
    lengths,
    band,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Plan over the queries that see the keys `[kv_start, kv_start + TILE_N)`.

    `mask_row` is the transposed mask's row of the first key of their batch and head.
    """
    q_len, kv_len = lengths
    left, right = band
    kv_end = kv_start + TILE_N
    q_lo, q_hi = q_range(kv_start, kv_end, q_len, kv_len, left, right)
    all_lo, all_hi = q_range_of_all(kv_start, kv_end, q_len, kv_len, left, right)
    if lists is None:
        plan = plan_dense(q_lo, q_hi, all_lo, all_hi, TILE_M)
    else:
        scan = tl.arange(0, SCAN)
        row = mask_row + kv_start // lists.row_tokens
        plan = plan_blocks(lists, row, q_lo, q_hi, all_lo, all_hi, scan, TILE_M, BLOCK_Q)
    return plan


@triton.jit
def masked_query_tile(
    lists, plan, num_blocks, q_tile, column_limits, kv_pos, kv_start, q_len,
    TILE_M: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Indices of the queries of a tile with mask code, and which keys they see, [keys, queries].

    `column_limits` are the `column_bounds` of the keys `kv_pos`, the tile from `kv_start` on.
    """
    ordinal, q_in_block = tile_ordinal(q_tile, tl.arange(0, TILE_M), TILE_M, BLOCK_Q)
    entry = masked_block(plan, ordinal)
    q_index = keys_of_tile(lists, entry, ordinal, num_blocks, q_in_block, q_len, TILE_M, BLOCK_Q)
    visible = within_bounds(
        q_index[None, :], column_limits.first[:, None], column_limits.last[:, None]
    )
    if lists is not None:
        kv_in_block = kv_pos - kv_start // lists.row_tokens * lists.row_tokens
        words = bits_of_query_tile(
            lists, entry, ordinal, num_blocks, kv_in_block, q_in_block, TILE_M, BLOCK_Q
        )
        visible = visible & bit_visible(words, kv_in_block[:, None])
    return KeyTile(q_index, visible)
