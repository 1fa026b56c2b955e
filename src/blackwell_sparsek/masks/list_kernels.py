# mypy: ignore-errors
"""Kernels that build the lists of a block mask, and their launchers.

`launch_kept_lists` makes lists from a value for each block: 0 if absent, 1 if full, 2 + the row of
its bit mask if partial. It takes two launches, whatever the size: programs count the blocks of
their rows; then each adds up the counts of the programs before it to find where its rows begin, and
lists their blocks. The number of blocks stays on the device, so lists may be longer than needed.
`launch_spread` goes the opposite way, from lists to the values of the transposed mask.
`launch_bounded_lists` makes lists of equal length, `launch_band_lists` those of a band.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch.launcher import cdiv, launch
from ..launch.replay import launch_recorded
from ..launch.templates import RecordedLaunches
from ..launch.workspace import scratch

TILE_ROWS = 8
TILE_COLS = 128
TILE_ENTRIES = 32
# Each program adds up at most this many counts; beyond it, programs take more rows instead.
MAX_PROGRAMS = 1024
_SIZES = ["step_b", "step_h", "step_r", "step_c", "heads", "mb", "nb", "rows", "chunk"]


class BlockMap(NamedTuple):
    """A value for each block, `[B, H, Mb, Nb]` with any strides, as kernels read it."""

    ptr: torch.Tensor
    step_b: int
    step_h: int
    step_r: int
    step_c: int
    heads: int
    mb: int
    nb: int


@triton.jit
def block_values(blocks, row, first_col, last, TILE_COLS: tl.constexpr):
    """Values of TILE_COLS blocks of each `row` before `last`, int32."""
    batch_head = row // blocks.mb
    at = (batch_head // blocks.heads).to(tl.int64) * blocks.step_b
    at += (batch_head % blocks.heads).to(tl.int64) * blocks.step_h
    at += (row % blocks.mb).to(tl.int64) * blocks.step_r
    col = first_col + tl.arange(0, TILE_COLS)
    at = at[:, None] + col.to(tl.int64)[None, :] * blocks.step_c
    there = (row < last)[:, None] & (col < blocks.nb)[None, :]
    return tl.load(blocks.ptr + at, mask=there, other=0).to(tl.int32)


@triton.jit
def _kinds(value):
    """Two indicators: 1 for partial blocks, and 1 for full ones."""
    return (value > 1).to(tl.int32), (value == 1).to(tl.int32)


@triton.jit
def _counts(blocks, row, last, TILE_COLS: tl.constexpr):
    """How many partial and full blocks each `row` before `last` has."""
    partial_count = tl.zeros_like(row)
    full_count = tl.zeros_like(row)
    for first_col in range(0, blocks.nb, TILE_COLS):
        value = block_values(blocks, row, first_col, last, TILE_COLS)
        partial, full = _kinds(value)
        partial_count += tl.sum(partial, 1)
        full_count += tl.sum(full, 1)
    return partial_count, full_count


@triton.jit(do_not_specialize=_SIZES)
def _count_kept_kernel(
    totals_ptr,
    map_ptr,
    step_b,
    step_h,
    step_r,
    step_c,
    heads,
    mb,
    nb,
    rows,
    chunk,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """Count the blocks that are kept in the `chunk` rows of this program."""
    blocks = BlockMap(map_ptr, step_b, step_h, step_r, step_c, heads, mb, nb)
    pid = tl.program_id(0)
    last = tl.minimum((pid + 1) * chunk, rows)
    counts = tl.zeros([TILE_ROWS], tl.int32)
    for first in range(pid * chunk, last, TILE_ROWS):
        row = first + tl.arange(0, TILE_ROWS)
        partial, full = _counts(blocks, row, last, TILE_COLS)
        counts += partial + full
    tl.store(totals_ptr + pid, tl.sum(counts, 0))


@triton.jit(do_not_specialize=_SIZES)
def _list_kept_kernel(
    indptr_ptr,
    partial_end_ptr,
    indices_ptr,
    bits_id_ptr,
    totals_ptr,
    map_ptr,
    step_b,
    step_h,
    step_r,
    step_c,
    heads,
    mb,
    nb,
    rows,
    chunk,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """List the kept blocks of `chunk` rows."""
    blocks = BlockMap(map_ptr, step_b, step_h, step_r, step_c, heads, mb, nb)
    pid = tl.program_id(0)
    before = tl.arange(0, MAX_PROGRAMS)
    base = tl.sum(tl.load(totals_ptr + before, mask=before < pid, other=0), 0)
    if pid == 0:
        tl.store(indptr_ptr, 0)
    last = tl.minimum((pid + 1) * chunk, rows)
    for first in range(pid * chunk, last, TILE_ROWS):
        row = first + tl.arange(0, TILE_ROWS)
        partial_count, full_count = _counts(blocks, row, last, TILE_COLS)
        count = partial_count + full_count
        end = base + tl.cumsum(count, 0)
        full_place = end - full_count
        partial_place = full_place - partial_count
        tl.store(indptr_ptr + 1 + row, end, mask=row < last)
        tl.store(partial_end_ptr + row, full_place, mask=row < last)
        base += tl.sum(count, 0)
        for first_col in range(0, nb, TILE_COLS):
            value = block_values(blocks, row, first_col, last, TILE_COLS)
            partial, full = _kinds(value)
            entry = tl.where(
                partial != 0,
                partial_place[:, None] + tl.cumsum(partial, 1),
                full_place[:, None] + tl.cumsum(full, 1),
            )
            col = tl.zeros_like(value) + (first_col + tl.arange(0, TILE_COLS))[None, :]
            tl.store(indices_ptr + entry - 1, col, mask=value != 0)
            tl.store(bits_id_ptr + entry - 1, value - 2, mask=value != 0)
            partial_place += tl.sum(partial, 1)
            full_place += tl.sum(full, 1)


@triton.jit(do_not_specialize=["rows", "mb", "nb"])
def _spread_kernel(
    map_ptr,
    indptr_ptr,
    indices_ptr,
    bits_id_ptr,
    rows,
    mb,
    nb,
    TILE_ROWS: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
):
    """Write the values of the blocks in TILE_ROWS lists into a map of the transposed mask."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    entry = tl.load(indptr_ptr + row, mask=row < rows, other=0)
    end = tl.load(indptr_ptr + 1 + row, mask=row < rows, other=0)
    first_list = (row // mb).to(tl.int64) * nb
    for skip in range(0, tl.max(end - entry, 0), TILE_ENTRIES):
        at = (entry + skip)[:, None] + tl.arange(0, TILE_ENTRIES)[None, :]
        there = at < end[:, None]
        col = tl.load(indices_ptr + at, mask=there, other=0)
        value = tl.load(bits_id_ptr + at, mask=there, other=0) + 2
        to = (first_list[:, None] + col) * mb + (row % mb)[:, None]
        tl.store(map_ptr + to, value.to(map_ptr.dtype.element_ty), mask=there)


def launch_kept_lists(
    indptr: torch.Tensor,
    partial_end: torch.Tensor,
    indices: torch.Tensor,
    bits_id: torch.Tensor,
    values: torch.Tensor,
) -> RecordedLaunches | None:
    """Fill lists; entries past the last kept block are left as they are.

    Returns the recorded launches, which can be replayed with other tensors of the same sizes.

    Parameters
    ----------
    indptr : int32 [B * H * Mb + 1]
    partial_end : int32 [B * H * Mb]
    indices, bits_id : int32, at least as many as there are blocks
    values : bool, int8 or int32 [B, H, Mb, Nb], not empty, with any strides
    """
    _, heads, mb, nb = values.shape
    rows = partial_end.numel()
    chunk = TILE_ROWS * cdiv(rows, TILE_ROWS * MAX_PROGRAMS)
    programs = cdiv(rows, chunk)
    sizes = (*values.stride(), heads, mb, nb, rows, chunk, TILE_ROWS, TILE_COLS)
    outputs = (indptr, partial_end, indices, bits_id)

    def launches() -> None:
        totals = scratch((programs,), torch.int32, values.device)
        launch(_count_kept_kernel, programs, (totals, values, *sizes), num_warps=4)
        args = (*outputs, totals, values, *sizes, MAX_PROGRAMS)
        launch(_list_kept_kernel, programs, args, num_warps=4)

    return launch_recorded(("kept_lists", values.dtype, sizes), (*outputs, values), launches)


def launch_spread(
    values: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, bits_id: torch.Tensor
) -> RecordedLaunches | None:
    """Write the values of listed blocks to their places in the transposed mask.

    Returns the recorded launches, which can be replayed with other tensors of the same sizes.

    Parameters
    ----------
    values : int8 or int32 [B, H, Nb, Mb], contiguous, zero; int8 if all blocks are full
    indptr : int32 [B * H * Mb + 1]
    indices, bits_id : int32, not empty
    """
    batch, heads, nb, mb = values.shape
    rows = batch * heads * mb
    lists = (indptr, indices, bits_id)
    args = (values, *lists, rows, mb, nb, TILE_ROWS, TILE_ENTRIES)
    return launch_recorded(
        ("spread", values.dtype, rows, mb, nb),
        (values, *lists),
        lambda: launch(_spread_kernel, cdiv(rows, TILE_ROWS), args, num_warps=4),
    )


# Lists of kept blocks that are equally long in all rows, so that sizes do not depend on the data.


@triton.jit(
    do_not_specialize=["step_b", "step_h", "step_r", "step_c", "heads", "mb", "nb", "rows", "most"]
)
def _bounded_lists_kernel(
    indptr_ptr,
    partial_end_ptr,
    indices_ptr,
    bits_id_ptr,
    keep_ptr,
    step_b,
    step_h,
    step_r,
    step_c,
    heads,
    mb,
    nb,
    rows,
    most,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """List `most` blocks in each of TILE_ROWS rows: fillers as partial blocks, then kept blocks."""
    blocks = BlockMap(keep_ptr, step_b, step_h, step_r, step_c, heads, mb, nb)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    count = tl.zeros_like(row)
    for first_col in range(0, nb, TILE_COLS):
        count += tl.sum(block_values(blocks, row, first_col, rows, TILE_COLS), 1)
    spare = tl.maximum(most - count, 0)
    start = row * most
    tl.store(indptr_ptr + row, start, mask=row < rows)
    tl.store(indptr_ptr + 1 + row, start + most, mask=row == rows - 1)
    tl.store(partial_end_ptr + row, start + spare, mask=row < rows)
    # fillers are the last blocks that are not kept; this many come before them
    passed_over = (nb - count - spare)[:, None]
    seen = tl.zeros_like(row)
    for first_col in range(0, nb, TILE_COLS):
        kept = block_values(blocks, row, first_col, rows, TILE_COLS)
        col = tl.zeros_like(kept) + (first_col + tl.arange(0, TILE_COLS))[None, :]
        before = seen[:, None] + tl.cumsum(kept, 1) - kept
        place = tl.where(kept != 0, spare[:, None] + before, col - before - passed_over)
        there = (place >= 0) & (place < most) & (row < rows)[:, None] & (col < nb)
        at = start[:, None] + place
        tl.store(indices_ptr + at, col, mask=there)
        tl.store(bits_id_ptr + at, -kept, mask=there)
        seen += tl.sum(kept, 1)


def launch_bounded_lists(
    indptr: torch.Tensor,
    partial_end: torch.Tensor,
    indices: torch.Tensor,
    bits_id: torch.Tensor,
    keep: torch.Tensor,
    most: int,
) -> None:
    """Fill lists of `most` blocks in each row, as `topk.kept_blocks` describes them.

    Parameters
    ----------
    indptr : int32 [B * H * Mb + 1]
    partial_end : int32 [B * H * Mb]
    indices, bits_id : int32 [B * H * Mb * most]
    keep : bool [B, H, Mb, Nb], not empty, with any strides
    most : 1 .. Nb
    """
    _, heads, mb, nb = keep.shape
    rows = partial_end.numel()
    roles = (indptr, partial_end, indices, bits_id, keep)
    sizes = (*keep.stride(), heads, mb, nb, rows, most, TILE_ROWS, TILE_COLS)
    launch_recorded(
        ("bounded_lists", sizes),
        roles,
        lambda: launch(_bounded_lists_kernel, cdiv(rows, TILE_ROWS), (*roles, *sizes), num_warps=4),
    )


# Lists and bit masks of a band, computed from its two sides without any input tensor.
#
# There is one launch. A program either lists the blocks of a few rows, after adding up the lengths
# of all rows before them, or makes one of the few bit masks of blocks on the edges of a band.

# Rows that a program adds up at once.
TILE_BEFORE = 1024


class BandSizes(NamedTuple):
    """A band over a problem, as the kernel takes it."""

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
    """Distances from key block to query block at which an edge crosses the block: `count_near` of
    them from `first_near` on, the others from `first_far` on."""
    step: int
    heights: int
    widths: int
    """2 if the last block is cut short, else 1."""
    pool: int
    """Number of bit masks."""


@triton.jit
def _clamp(x, low, high):
    """`x` clamped to `low .. high`."""
    return tl.minimum(tl.maximum(x, low), high)


class RowRuns(NamedTuple):
    """Blocks `start .. end` of each row, of which `full_start .. full_end` are full; int32."""

    start: tl.tensor
    full_start: tl.tensor
    full_end: tl.tensor
    end: tl.tensor


@triton.jit
def _runs(row, sizes, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The runs of blocks of each `row` that the band shows."""
    sk = sizes.sk
    first = row.to(tl.int64) * BLOCK_Q + (sk - sizes.sq)
    last = tl.minimum(first + BLOCK_Q, sk) - 1
    some_lo = _clamp(first - sizes.left, 0, sk)
    some_hi = _clamp(last + sizes.right + 1, 0, sk)
    every_lo = _clamp(last - sizes.left, 0, sk)
    every_hi = _clamp(first + sizes.right + 1, 0, sk)
    start = some_lo // BLOCK_KV
    end = tl.where(some_lo < some_hi, (some_hi + BLOCK_KV - 1) // BLOCK_KV, start)
    full_start = _clamp((every_lo + BLOCK_KV - 1) // BLOCK_KV, start, end)
    # a last block that is cut short is full if all of its existing keys are visible
    full_end = _clamp(tl.where(every_hi >= sk, sizes.nb, every_hi // BLOCK_KV), full_start, end)
    return RowRuns(
        start.to(tl.int32), full_start.to(tl.int32), full_end.to(tl.int32), end.to(tl.int32)
    )


@triton.jit
def _band_bits(pool_ptr, mask_id, sizes, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Make one bit mask of the pool."""
    where = mask_id // (sizes.heights * sizes.widths)
    distance = tl.where(
        where < sizes.count_near,
        sizes.first_near + where * sizes.step,
        sizes.first_far + (where - sizes.count_near) * sizes.step,
    )
    is_short = mask_id // sizes.widths % sizes.heights == 1
    height = tl.where(is_short, sizes.sq % BLOCK_Q, BLOCK_Q)
    width = tl.where(mask_id % sizes.widths == 1, sizes.sk % BLOCK_KV, BLOCK_KV)
    WORDS: tl.constexpr = (BLOCK_KV + 31) // 32
    i = tl.arange(0, BLOCK_Q)
    word = tl.arange(0, WORDS)
    diagonal = distance.to(tl.int64) + i
    lo = _clamp(diagonal - sizes.left, 0, BLOCK_KV)
    hi = tl.where(i < height, tl.minimum(diagonal + sizes.right + 1, width), 0)
    hi = _clamp(hi, 0, BLOCK_KV)
    begin = _clamp(lo[:, None] - word[None, :] * 32, 0, 32)
    end = tl.maximum(_clamp(hi[:, None] - word[None, :] * 32, 0, 32), begin)
    one = tl.full([BLOCK_Q, WORDS], 1, tl.int64)
    bits = (one << end) - (one << begin)
    at = (mask_id.to(tl.int64) * BLOCK_Q + i)[:, None] * WORDS + word[None, :]
    # the highest bit of a word is its sign
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
    sizes = BandSizes(
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
    )
    pid = tl.program_id(0)
    if pid < pool:
        _band_bits(pool_ptr, pid, sizes, BLOCK_Q, BLOCK_KV)
    else:
        first_row = (pid - pool) * TILE_ROWS
        lengths = tl.zeros([TILE_BEFORE], tl.int32)
        for before in range(0, first_row, TILE_BEFORE):
            row = before + tl.arange(0, TILE_BEFORE)
            runs = _runs(row, sizes, BLOCK_Q, BLOCK_KV)
            lengths += tl.where(row < first_row, runs.end - runs.start, 0)
        row = first_row + tl.arange(0, TILE_ROWS)
        runs = _runs(row, sizes, BLOCK_Q, BLOCK_KV)
        count = tl.where(row < mb, runs.end - runs.start, 0)
        row_end = tl.sum(lengths, 0) + tl.cumsum(count, 0)
        row_start = row_end - count
        head = runs.full_start - runs.start
        partial = head + runs.end - runs.full_end
        if pid == pool:
            tl.store(indptr_ptr, 0)
        tl.store(indptr_ptr + 1 + row, row_end, mask=row < mb)
        tl.store(partial_end_ptr + row, row_start + partial, mask=row < mb)
        for first in range(0, tl.max(count, 0), TILE_ENTRIES):
            t = first + tl.arange(0, TILE_ENTRIES)[None, :]
            is_partial = t < partial[:, None]
            behind = tl.where(
                is_partial, (runs.full_end - head)[:, None], (runs.full_start - partial)[:, None]
            )
            col = t + tl.where(t < head[:, None], runs.start[:, None], behind)
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
    # nothing is written to an empty pool, but the kernel needs a pointer
    outputs = (indptr, partial_end, indices, bits_id, pool if sizes.pool else indptr)
    args = (*outputs, *sizes, *block, TILE_ROWS, TILE_ENTRIES, TILE_BEFORE)
    launch_recorded(
        ("band_lists", sizes, block),
        outputs if sizes.pool else outputs[:4],
        lambda: launch(_band_lists_kernel, programs, args, num_warps=4),
    )
