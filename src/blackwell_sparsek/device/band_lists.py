"""Lists and bit masks of a band, row by row from its two sides: nothing is read.

One launch: a program lists the blocks of a few rows, having added up the lengths of all rows
before them, or makes one of the few bit masks that blocks on the edges of a band have.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..core.launch import cdiv, launch
from .recorded import launch_recorded

TILE_ROWS = 8
TILE_ENTRIES = 32
# Rows that a program adds up at once.
TILE_BEFORE = 1024


class BandSizes(NamedTuple):
    """What a band and a problem come to."""

    sq: int
    sk: int
    left: int
    right: int
    mb: int
    nb: int
    """Blocks of queries and of keys."""
    first_near: int
    count_near: int
    first_far: int
    """Distances of query from key block that an edge crosses: `first_near` and so on, `count_near`
    of them, then `first_far` and so on."""
    step: int
    heights: int
    widths: int
    """2 where the last block is cut short, else 1."""
    pool: int
    """Number of bit masks."""


@triton.jit
def _clamp(x, low, high):
    """`x`, no less than `low` and no more than `high`."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _runs(row, sq, sk, left, right, nb, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Blocks `start .. end` of each `row`, of which `full_start .. full_end` are full."""
    first = row.to(tl.int64) * BLOCK_Q + (sk - sq)
    last = tl.minimum(first + BLOCK_Q, sk) - 1
    some_lo = _clamp(first - left, 0, sk)
    some_hi = _clamp(last + right + 1, 0, sk)
    every_lo = _clamp(last - left, 0, sk)
    every_hi = _clamp(first + right + 1, 0, sk)
    start = some_lo // BLOCK_KV
    end = tl.where(some_lo < some_hi, (some_hi + BLOCK_KV - 1) // BLOCK_KV, start)
    full_start = _clamp((every_lo + BLOCK_KV - 1) // BLOCK_KV, start, end)
    # a last block that is cut short is full when its existing keys are visible
    full_end = _clamp(tl.where(every_hi >= sk, nb, every_hi // BLOCK_KV), full_start, end)
    return start.to(tl.int32), full_start.to(tl.int32), full_end.to(tl.int32), end.to(tl.int32)


@triton.jit
def _band_bits(pool_ptr, mask_id, sizes, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Make one bit mask of the pool."""
    sq, sk, left, right, first_near, count_near, first_far, step, heights, widths = sizes
    where = mask_id // (heights * widths)
    distance = tl.where(
        where < count_near, first_near + where * step, first_far + (where - count_near) * step
    )
    height = tl.where(mask_id // widths % heights == 1, sq % BLOCK_Q, BLOCK_Q)
    width = tl.where(mask_id % widths == 1, sk % BLOCK_KV, BLOCK_KV)
    WORDS: tl.constexpr = (BLOCK_KV + 31) // 32
    i = tl.arange(0, BLOCK_Q)
    word = tl.arange(0, WORDS)
    diagonal = distance.to(tl.int64) + i
    lo = _clamp(diagonal - left, 0, BLOCK_KV)
    hi = _clamp(tl.where(i < height, tl.minimum(diagonal + right + 1, width), 0), 0, BLOCK_KV)
    begin = _clamp(lo[:, None] - word[None, :] * 32, 0, 32)
    end = tl.maximum(_clamp(hi[:, None] - word[None, :] * 32, 0, 32), begin)
    one = tl.full([BLOCK_Q, WORDS], 1, tl.int64)
    bits = (one << end) - (one << begin)
    at = (mask_id.to(tl.int64) * BLOCK_Q + i)[:, None] * WORDS + word[None, :]
    # the upper bit of a word is its sign
    tl.store(pool_ptr + at, tl.where(bits >= 2**31, bits - 2**32, bits).to(tl.int32))


@triton.jit(do_not_specialize=list(BandSizes._fields))
def _band_lists_kernel(
    indptr_ptr,
    partial_end_ptr,
    indices_ptr,
    bits_id_ptr,
    pool_ptr,
    sq,
    sk,
    left,
    right,
    mb,
    nb,
    first_near,
    count_near,
    first_far,
    step,
    heights,
    widths,
    pool,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
    TILE_BEFORE: tl.constexpr,
):
    """The first `pool` programs make bit masks, the others the lists of TILE_ROWS rows."""
    pid = tl.program_id(0)
    if pid < pool:
        sizes = (sq, sk, left, right, first_near, count_near, first_far, step, heights, widths)
        _band_bits(pool_ptr, pid, sizes, BLOCK_Q, BLOCK_KV)
    else:
        first_row = (pid - pool) * TILE_ROWS
        lengths = tl.zeros([TILE_BEFORE], tl.int32)
        for before in range(0, first_row, TILE_BEFORE):
            row = before + tl.arange(0, TILE_BEFORE)
            start, _, _, end = _runs(row, sq, sk, left, right, nb, BLOCK_Q, BLOCK_KV)
            lengths += tl.where(row < first_row, end - start, 0)
        row = first_row + tl.arange(0, TILE_ROWS)
        start, full_start, full_end, end = _runs(row, sq, sk, left, right, nb, BLOCK_Q, BLOCK_KV)
        count = tl.where(row < mb, end - start, 0)
        row_end = tl.sum(lengths, 0) + tl.cumsum(count, 0)
        row_start = row_end - count
        head = full_start - start
        partial = head + end - full_end
        if pid == pool:
            tl.store(indptr_ptr, 0)
        tl.store(indptr_ptr + 1 + row, row_end, mask=row < mb)
        tl.store(partial_end_ptr + row, row_start + partial, mask=row < mb)
        for first in range(0, tl.max(count, 0), TILE_ENTRIES):
            t = first + tl.arange(0, TILE_ENTRIES)[None, :]
            is_partial = t < partial[:, None]
            col = tl.where(is_partial, (full_end - head)[:, None], (full_start - partial)[:, None])
            col = t + tl.where(t < head[:, None], start[:, None], col)
            distance = row.to(tl.int64)[:, None] * BLOCK_Q + (sk - sq) - col.to(tl.int64) * BLOCK_KV
            # the near edge has the smaller distances
            near = (distance - first_near) // step
            far = count_near + (distance - first_far) // step
            which = tl.where((distance >= first_near) & (near < count_near), near, far)
            short = (heights == 2) & (row == mb - 1)[:, None]
            narrow = (widths == 2) & (col == nb - 1)
            which = (which * heights + short) * widths + narrow
            there = t < count[:, None]
            entry = row_start[:, None] + t
            tl.store(indices_ptr + entry, col, mask=there)
            tl.store(bits_id_ptr + entry, tl.where(is_partial, which, -1).to(tl.int32), mask=there)


def launch_band_lists(
    indptr: torch.Tensor,
    partial_end: torch.Tensor,
    indices: torch.Tensor,
    bits_id: torch.Tensor,
    pool: torch.Tensor,
    sizes: BandSizes,
    block: tuple[int, int],
) -> None:
    """Fill the lists and the pool of a band that has at least one row and one block.

    Parameters
    ----------
    indptr : int32 [Mb + 1]
    partial_end : int32 [Mb]
    indices, bits_id : int32 [nnz]
    pool : int32 [sizes.pool, bq, ceil(bk / 32)]
    """
    programs = sizes.pool + cdiv(sizes.mb, TILE_ROWS)
    # nothing is written to a pool of no bit masks, but an argument has to be there
    outputs = (indptr, partial_end, indices, bits_id, pool if sizes.pool else indptr)
    args = (*outputs, *sizes, *block, TILE_ROWS, TILE_ENTRIES, TILE_BEFORE)
    launch_recorded(
        ("band_lists", sizes, block),
        outputs if sizes.pool else outputs[:4],
        lambda: launch(_band_lists_kernel, programs, args, num_warps=4),
    )
