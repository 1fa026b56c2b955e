"""Which keys a program of the decode kernel reads: its stretch of the tiles of all sequences."""

import triton
import triton.language as tl

from ...device.masks import kv_range
from ...device.paging import visited_tiles
from ...device.shares import share_of

# Sequences whose lengths are read at a time: as many as a warp scans without the others.
SCAN = tl.constexpr(32)


@triton.jit
def keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right):
    """Length, and the keys that some query sees; a length out of range counts as 0 keys, -1."""
    kv_len = tl.load(seqlens_ptr + sequence, mask=exists, other=0)
    return keys_of_length(kv_len, q_len, capacity, left, right)


@triton.jit
def keys_of_length(kv_len, q_len, capacity, left, right):
    """`keys_seen` of a length that is known."""
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
    TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """All tiles, this program's stretch of them, its first sequence, and that one's first tile.

    The first SCAN sequences are read once, which is all there is to most batches.
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
    begin, end = share_of(tl.program_id(0), total, tl.num_programs(0))

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
    return total, begin, end, sequence, first_tile
