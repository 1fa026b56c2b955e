"""Lists of kept blocks that are equally long in all rows, so that sizes depend on no data."""

import torch
import triton
import triton.language as tl

from ..core.launch import cdiv, launch
from .kept_lists import TILE_COLS, TILE_ROWS, block_values
from .recorded import launch_recorded


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
    """List `most` blocks of TILE_ROWS rows: the last not kept, as partial, then the kept ones."""
    steps = (step_b, step_h, step_r, step_c)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    count = tl.zeros_like(row)
    for first_col in range(0, nb, TILE_COLS):
        count += tl.sum(
            block_values(keep_ptr, steps, row, first_col, heads, mb, nb, rows, TILE_COLS), 1
        )
    spare = tl.maximum(most - count, 0)
    start = row * most
    tl.store(indptr_ptr + row, start, mask=row < rows)
    tl.store(indptr_ptr + 1 + row, start + most, mask=row == rows - 1)
    tl.store(partial_end_ptr + row, start + spare, mask=row < rows)
    # how many of the blocks that are not kept come before those that fill up the row
    passed_over = (nb - count - spare)[:, None]
    seen = tl.zeros_like(row)
    for first_col in range(0, nb, TILE_COLS):
        kept = block_values(keep_ptr, steps, row, first_col, heads, mb, nb, rows, TILE_COLS)
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
    """Fill lists of `most` blocks in each row, as `formats.pattern_kept` describes them.

    Parameters
    ----------
    indptr : int32 [B * H * Mb + 1]
    partial_end : int32 [B * H * Mb]
    indices, bits_id : int32 [B * H * Mb * most]
    keep : bool [B, H, Mb, Nb], not empty, of any strides
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
