# mypy: ignore-errors
"""What portable kernels of attention do around their products: plans, and tiles with mask code.

A forward or dQ kernel owns a tile of queries and walks over keys; a dK/dV kernel owns a tile of
keys and walks over queries, through the transposed lists. These functions make vectors, so Gluon
kernels build the same out of `masks` and `visits`.
"""

import triton
import triton.language as tl

from .masks import bit_visible, kv_range, kv_range_of_all, q_range, q_range_of_all, within_bounds
from .schedule import batch_and_heads, place_in_sections, section_planes, token_span
from .visits import (
    bits_of_query_tile,
    bits_of_tile,
    keys_of_tile,
    masked_unit,
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
    """The tile of queries a program owns: (batch, query head, KV head), the spans of queries and
    keys as (first token, length), and the first query, which may lie past the sequence's end.
    """
    q_tiles = (q_len + TILE_M - 1) // TILE_M
    section = section_planes(kv_len, heads[1], KV_BYTES)
    plane, q_tile = place_in_sections(
        tl.program_id(0), tl.num_programs(0) // q_tiles, q_tiles, section
    )
    place = batch_and_heads(plane, heads[0], heads[1])
    q_span = token_span(cu_seqlens[0], place[0], q_len)
    return place, q_span, token_span(cu_seqlens[1], place[0], kv_len), q_tile * TILE_M


@triton.jit
def plan_keys(
    lists,
    plane_row,
    q_start,
    lengths,
    band,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Plan over the keys that the queries `[q_start, q_start + TILE_M)` see.

    `plane_row` is the mask's row of the first query of their batch and head.
    """
    q_end = q_start + TILE_M
    kv_lo, kv_hi = kv_range(q_start, q_end, lengths[0], lengths[1], band[0], band[1])
    all_lo, all_hi = kv_range_of_all(q_start, q_end, lengths[0], lengths[1], band[0], band[1])
    if lists is None:
        plan = plan_dense(kv_lo, kv_hi, all_lo, all_hi, TILE_N)
    else:
        scan = tl.arange(0, SCAN)
        row = plane_row + q_start // lists[5]
        plan = plan_blocks(lists, row, kv_lo, kv_hi, all_lo, all_hi, scan, TILE_N, BLOCK_KV)
    return plan


@triton.jit
def masked_key_tile(
    lists, plan, num_units, kv_tile, row_limits, offs_m, q_start, kv_len,
    TILE_N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Positions of the keys of a tile with mask code, and which of them each query sees.

    `row_limits` are the `row_bounds` of the queries `offs_m`, the tile from `q_start` on.
    """
    ordinal, kv_in_unit = tile_ordinal(kv_tile, tl.arange(0, TILE_N), TILE_N, UNIT)
    unit = masked_unit(plan, ordinal)
    kv_pos = keys_of_tile(lists, unit, ordinal, num_units, kv_in_unit, kv_len, TILE_N, UNIT)
    visible = within_bounds(kv_pos[None, :], row_limits[0][:, None], row_limits[1][:, None])
    if lists is not None:
        q_in_block = offs_m - q_start // lists[5] * lists[5]
        words = bits_of_tile(lists, unit, ordinal, num_units, q_in_block, kv_in_unit, TILE_N, UNIT)
        visible = visible & bit_visible(words, kv_in_unit[None, :])
    return kv_pos, visible


@triton.jit
def full_tile(lists, plan, num_units, tile, length, TILE: tl.constexpr, UNIT: tl.constexpr):
    """Positions of the keys (or queries) of a tile without mask code."""
    ordinal, in_unit = tile_ordinal(tile, tl.arange(0, TILE), TILE, UNIT)
    return keys_of_tile(lists, plan[3] + ordinal, ordinal, num_units, in_unit, length, TILE, UNIT)


@triton.jit
def plan_queries(
    lists,
    plane_row,
    kv_start,
    lengths,
    band,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Plan over the queries that see the keys `[kv_start, kv_start + TILE_N)`.

    `plane_row` is the transposed mask's row of the first key of their batch and head.
    """
    kv_end = kv_start + TILE_N
    q_lo, q_hi = q_range(kv_start, kv_end, lengths[0], lengths[1], band[0], band[1])
    all_lo, all_hi = q_range_of_all(kv_start, kv_end, lengths[0], lengths[1], band[0], band[1])
    if lists is None:
        plan = plan_dense(q_lo, q_hi, all_lo, all_hi, TILE_M)
    else:
        scan = tl.arange(0, SCAN)
        row = plane_row + kv_start // lists[5]
        plan = plan_blocks(lists, row, q_lo, q_hi, all_lo, all_hi, scan, TILE_M, BLOCK_Q)
    return plan


@triton.jit
def masked_query_tile(
    lists, plan, num_units, q_tile, column_limits, kv_pos, kv_start, q_len,
    TILE_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Indices of the queries of a tile with mask code, and which keys they see, [keys, queries].

    `column_limits` are the `column_bounds` of the keys `kv_pos`, the tile from `kv_start` on.
    """
    ordinal, q_in_unit = tile_ordinal(q_tile, tl.arange(0, TILE_M), TILE_M, UNIT)
    unit = masked_unit(plan, ordinal)
    q_index = keys_of_tile(lists, unit, ordinal, num_units, q_in_unit, q_len, TILE_M, UNIT)
    visible = within_bounds(q_index[None, :], column_limits[0][:, None], column_limits[1][:, None])
    if lists is not None:
        kv_in_block = kv_pos - kv_start // lists[5] * lists[5]
        words = bits_of_query_tile(
            lists, unit, ordinal, num_units, kv_in_block, q_in_unit, TILE_M, UNIT
        )
        visible = visible & bit_visible(words, kv_in_block[:, None])
    return q_index, visible
