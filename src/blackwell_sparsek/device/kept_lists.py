"""Lists of kept blocks, from one value for each block: 0 absent, 1 full, 2 + its bit mask partial.

Two launches, whatever the size: programs count the blocks of their rows, then each finds where its
rows begin by adding up what the programs before it counted, and lists them. The number of blocks
stays on the device, so lists may have room for more blocks than there are.

`launch_spread` is the way back, from lists to values, turned over on the way.
"""

import torch
import triton
import triton.language as tl

from ..core.launch import RecordedLaunches, cdiv, launch, scratch
from .recorded import launch_recorded

TILE_ROWS = 8
TILE_COLS = 128
TILE_ENTRIES = 32
# Counts that each program adds up; a program takes more rows where there would be more programs.
MAX_PROGRAMS = 1024
_SIZES = ["step_b", "step_h", "step_r", "step_c", "heads", "mb", "nb", "rows", "chunk"]


@triton.jit
def block_values(map_ptr, steps, row, first_col, heads, mb, nb, last, TILE_COLS: tl.constexpr):
    """Values of TILE_COLS blocks of each `row` before `last`, int32."""
    plane = row // mb
    at = (plane // heads).to(tl.int64) * steps[0] + (plane % heads).to(tl.int64) * steps[1]
    at += (row % mb).to(tl.int64) * steps[2]
    col = first_col + tl.arange(0, TILE_COLS)
    at = at[:, None] + col.to(tl.int64)[None, :] * steps[3]
    there = (row < last)[:, None] & (col < nb)[None, :]
    return tl.load(map_ptr + at, mask=there, other=0).to(tl.int32)


@triton.jit
def _kinds(value):
    """1 for partial blocks, and 1 for full ones."""
    return (value > 1).to(tl.int32), (value == 1).to(tl.int32)


@triton.jit
def _counts(map_ptr, steps, row, heads, mb, nb, last, TILE_COLS: tl.constexpr):
    """How many partial and full blocks each `row` before `last` has."""
    partial_count = tl.zeros_like(row)
    full_count = tl.zeros_like(row)
    for first_col in range(0, nb, TILE_COLS):
        value = block_values(map_ptr, steps, row, first_col, heads, mb, nb, last, TILE_COLS)
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
    """How many blocks are kept in the `chunk` rows of this program."""
    steps = (step_b, step_h, step_r, step_c)
    pid = tl.program_id(0)
    last = tl.minimum((pid + 1) * chunk, rows)
    counts = tl.zeros([TILE_ROWS], tl.int32)
    for first in range(pid * chunk, last, TILE_ROWS):
        row = first + tl.arange(0, TILE_ROWS)
        partial, full = _counts(map_ptr, steps, row, heads, mb, nb, last, TILE_COLS)
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
    steps = (step_b, step_h, step_r, step_c)
    pid = tl.program_id(0)
    before = tl.arange(0, MAX_PROGRAMS)
    base = tl.sum(tl.load(totals_ptr + before, mask=before < pid, other=0), 0)
    if pid == 0:
        tl.store(indptr_ptr, 0)
    last = tl.minimum((pid + 1) * chunk, rows)
    for first in range(pid * chunk, last, TILE_ROWS):
        row = first + tl.arange(0, TILE_ROWS)
        partial_count, full_count = _counts(map_ptr, steps, row, heads, mb, nb, last, TILE_COLS)
        count = partial_count + full_count
        end = base + tl.cumsum(count, 0)
        full_place = end - full_count
        partial_place = full_place - partial_count
        tl.store(indptr_ptr + 1 + row, end, mask=row < last)
        tl.store(partial_end_ptr + row, full_place, mask=row < last)
        base += tl.sum(count, 0)
        for first_col in range(0, nb, TILE_COLS):
            value = block_values(map_ptr, steps, row, first_col, heads, mb, nb, last, TILE_COLS)
            partial, full = _kinds(value)
            entry = tl.where(
                partial != 0,
                partial_place[:, None] + tl.cumsum(partial, 1),
                full_place[:, None] + tl.cumsum(full, 1),
            )
            col = tl.zeros_like(value) + (first_col + tl.arange(0, TILE_COLS))[None, :]
            tl.store(indices_ptr + entry - 1, col, mask=value != 0)
            tl.store(bits_id_ptr + entry - 1, tl.maximum(value - 2, -1), mask=value != 0)
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
    plane = (row // mb).to(tl.int64) * nb
    for skip in range(0, tl.max(end - entry, 0), TILE_ENTRIES):
        at = (entry + skip)[:, None] + tl.arange(0, TILE_ENTRIES)[None, :]
        there = at < end[:, None]
        col = tl.load(indices_ptr + at, mask=there, other=0)
        value = tl.load(bits_id_ptr + at, mask=there, other=0) + 2
        to = (plane[:, None] + col) * mb + (row % mb)[:, None]
        tl.store(map_ptr + to, value.to(map_ptr.dtype.element_ty), mask=there)


def launch_kept_lists(
    indptr: torch.Tensor,
    partial_end: torch.Tensor,
    indices: torch.Tensor,
    bits_id: torch.Tensor,
    values: torch.Tensor,
) -> RecordedLaunches | None:
    """Fill lists; entries past the last kept block are left as they are.

    Returns what `recorded.repeat_at` takes with other tensors like these.

    Parameters
    ----------
    indptr : int32 [B * H * Mb + 1]
    partial_end : int32 [B * H * Mb]
    indices, bits_id : int32, as many as there are blocks or more
    values : bool, int8 or int32 [B, H, Mb, Nb], not empty, of any strides
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
    """Write the values of listed blocks where they stand in the transposed mask.

    Returns what `recorded.repeat_at` takes with other tensors like these.

    Parameters
    ----------
    values : int8 or int32 [B, H, Nb, Mb], contiguous, zero; int8 where all blocks are full
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
