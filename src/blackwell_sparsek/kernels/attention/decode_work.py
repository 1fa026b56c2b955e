"""Which keys a program of the decode kernel reads: its stretch of the tiles of all sequences."""

import triton
import triton.language as tl

from ...device.masks import kv_range
from ...device.paging import cache_tile, prefetch_cache_rows, visited_tiles
from ...device.shares import share_of

# Sequences whose lengths are read at a time: as many as a warp scans without the others.
SCAN = tl.constexpr(32)


@triton.jit
def keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right):
    """Length, and the keys that some query sees; a length out of range counts as 0 keys, -1."""
    kv_len = tl.load(seqlens_ptr + sequence, mask=exists, other=0)
    kv_len = tl.where((kv_len >= 0) & (kv_len <= capacity), kv_len, -1)
    lo, hi = kv_range(0, q_len, q_len, tl.maximum(kv_len, 0), left, right)
    return kv_len, lo, hi


@triton.jit
def _tiles_of_sequences(
    seqlens_ptr, first, batch, q_len, capacity, num_blocks, left, right, planes,
    TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Tiles of the next SCAN sequences: `planes` times those of their visited keys."""
    sequence = first + tl.arange(0, SCAN)
    exists = sequence < batch
    _, lo, hi = keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right)
    _, count = visited_tiles(lo, hi, num_blocks, TILE_N, BLOCK_KV)
    return tl.where(exists, count * planes, 0)


@triton.jit
def find_share(
    seqlens_ptr, batch, q_len, capacity, num_blocks, left, right, planes,
    TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """All tiles, the programs that share them, this one's stretch, where that begins.

    The last two are the sequence and the first of its tiles. The first SCAN sequences are read
    once, which is all there is to most batches.
    """
    first_counts = _tiles_of_sequences(
        seqlens_ptr, 0, batch, q_len, capacity, num_blocks, left, right, planes, TILE_N, BLOCK_KV
    )
    until = tl.cumsum(first_counts, 0)
    total = tl.max(until, 0)
    before = total
    for first in range(SCAN, batch, SCAN):
        counts = _tiles_of_sequences(
            seqlens_ptr, first, batch, q_len, capacity, num_blocks, left, right, planes,
            TILE_N, BLOCK_KV,
        )  # fmt: skip
        total += tl.sum(counts, 0)
    # a program that reads less than this costs more to wait for than it saves
    programs = tl.minimum(tl.num_programs(0), (total + LEAST - 1) // LEAST)
    begin, end = share_of(tl.program_id(0), total, programs)
    end = tl.where(tl.program_id(0) < programs, end, begin)

    sequence = tl.sum(((first_counts > 0) & (until <= begin)).to(tl.int32), 0)
    first_tile = tl.max(tl.where(until <= begin, until, 0), 0)
    for first in range(SCAN, batch, SCAN):
        counts = _tiles_of_sequences(
            seqlens_ptr, first, batch, q_len, capacity, num_blocks, left, right, planes,
            TILE_N, BLOCK_KV,
        )  # fmt: skip
        until = before + tl.cumsum(counts, 0)
        sequence += tl.sum(((counts > 0) & (until <= begin)).to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(until <= begin, until, 0), 0))
        before = tl.max(until, 0)
    return total, programs, begin, end, sequence, first_tile


@triton.jit
def share_of_one(
    seqlens_ptr, q_len, capacity, num_blocks, left, right, planes,
    TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """`find_share` of a single sequence, which needs no scan."""
    _, lo, hi = keys_seen(seqlens_ptr, 0, True, q_len, capacity, left, right)
    _, count = visited_tiles(lo, hi, num_blocks, TILE_N, BLOCK_KV)
    total = planes * count
    programs = tl.minimum(tl.num_programs(0), (total + LEAST - 1) // LEAST)
    begin, end = share_of(tl.program_id(0), total, programs)
    end = tl.where(tl.program_id(0) < programs, end, begin)
    nothing = total - total
    return total, programs, begin, end, nothing, nothing


@triton.jit
def prefetch_tiles(
    tile, end, sequence, sequence_tile, inputs, tables, strides, table_strides, band, sizes,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, TILE_N: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Ask the L2 for the first PREFETCH tiles of the stretch `[tile, end)` that one head holds.

    band (q_len, left, right), sizes (capacity, num_pages, num_blocks, q_tiles).
    """
    offs_n = tl.arange(0, TILE_N)
    _kv_len, kv_lo, kv_hi = keys_seen(
        tables[0], sequence, tile < end, band[0], sizes[0], band[1], band[2]
    )
    first_tile, count = visited_tiles(kv_lo, kv_hi, sizes[2], TILE_N, BLOCK_KV)
    plane = (tile - sequence_tile) // count
    plane_tile = sequence_tile + plane * count
    kv_head = tl.cast(plane // sizes[3], tl.int64)
    rows_of_tables = (
        tables[1], tables[2],
        tl.cast(sequence, tl.int64) * table_strides[0],
        tl.cast(sequence, tl.int64) * table_strides[1] + kv_head * table_strides[2],
    )  # fmt: skip
    cache = (rows_of_tables, sequence, sizes[1], sizes[2], sizes[0], kv_lo, kv_hi)
    shift = first_tile - plane_tile
    stop = tl.minimum(tl.minimum(end, plane_tile + count), tile + PREFETCH)
    k_head = inputs[1] + kv_head * strides.k[1]
    v_head = inputs[2] + kv_head * strides.v[1]
    for asked in range(tile + shift, stop + shift):
        places = cache_tile(asked, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
        slab, row, live = places[1], places[2], places[3]
        prefetch_cache_rows(k_head, slab, row, strides.k, live, HEAD_DIM)
        prefetch_cache_rows(v_head, slab, row, strides.v, live, HEAD_DIM_V)
