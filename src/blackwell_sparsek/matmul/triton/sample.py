# mypy: ignore-errors
"""Cutting the blocks of a pattern out of a dense product, in one pass over them.

product [M, N] with contiguous rows, out [nnzb, BLOCK_H, BLOCK_W]; zeros where a block reaches
beyond (M, N). One program writes up to TILE_ROWS rows of a block, rounded to the dtype of `out`.
"""

import torch
import triton
import triton.language as tl

from ...launch.launcher import launch, on_device_of
from .tuning import largest_tile

TILE_ROWS, TILE_COLS = 32, 128


@triton.jit(do_not_specialize=["m_size", "n_size"])
def _sample_kernel(
    out_ptr,
    product_ptr,
    rows_ptr,
    cols_ptr,
    row_stride,
    m_size,
    n_size,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """Copy TILE_ROWS rows of one block."""
    ROW_TILES: tl.constexpr = BLOCK_H // TILE_ROWS
    entry = tl.program_id(0) // ROW_TILES
    rows = tl.program_id(0) % ROW_TILES * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first_row = tl.load(rows_ptr + entry).to(tl.int64) * BLOCK_H
    first_col = tl.load(cols_ptr + entry).to(tl.int64) * BLOCK_W
    out_ptrs = out_ptr + (entry.to(tl.int64) * BLOCK_H + rows)[:, None] * BLOCK_W
    product_ptrs = product_ptr + (first_row + rows)[:, None] * row_stride
    for start in tl.static_range(0, BLOCK_W, TILE_COLS):
        cols = start + tl.arange(0, TILE_COLS)
        inside = (first_row + rows < m_size)[:, None] & (first_col + cols < n_size)[None, :]
        tile = tl.load(product_ptrs + (first_col + cols)[None, :], mask=inside, other=0.0)
        tl.store(out_ptrs + cols[None, :], tile.to(out_ptr.dtype.element_ty))


def launch_sample(
    out: torch.Tensor, product: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor
) -> None:
    """Write the blocks at block rows `rows` and block columns `cols` of `product` to `out`."""
    nnz_blocks, block_h, block_w = out.shape
    if out.numel() == 0:
        return
    m, n = product.shape
    tile_rows, tile_cols = largest_tile(block_h, TILE_ROWS), largest_tile(block_w, TILE_COLS)
    with on_device_of(out):
        args = (out, product, rows, cols, product.stride(0), m, n)
        constants = (block_h, block_w, tile_rows, tile_cols)
        grid = nnz_blocks * (block_h // tile_rows)
        launch(_sample_kernel, grid, (*args, *constants), num_warps=4)
