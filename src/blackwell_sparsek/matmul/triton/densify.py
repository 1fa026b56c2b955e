# mypy: ignore-errors
"""Densifying a block-sparse matrix in one pass over the result, for the dense product.

PyTorch fills the matrix with zeros and puts the blocks into it one index at a time: 0.49 ms for
8192 x 8192 in 16 bits on an H200, where writing the matrix and reading the blocks take 0.06. Here
each program writes a tile of one block row and finds in a table which block stands behind each
column. The table is made once for each pattern.
"""

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import made_outside_pool
from ...sparse.pattern import rows_of_entries
from .tuning import largest_tile

# Neighbours that one thread moves: 16 bytes of 16-bit values. A block is a multiple of it wide.
CHUNK = 8
TILE_ROWS, TILE_COLS = 16, 512
# Tables by the row pointers of their pattern, which live as long as it.
_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@triton.jit(do_not_specialize=["cols_b"])
def _densify_kernel(
    full_ptr,
    values_ptr,
    table_ptr,
    cols_b,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write TILE_ROWS rows of one block row, TILE_COLS columns."""
    CHUNKS: tl.constexpr = TILE_COLS // CHUNK
    width = cols_b * BLOCK_W
    strips = tl.cdiv(width, TILE_COLS)
    first_row = tl.program_id(0) // strips * TILE_ROWS
    chunk_col = tl.program_id(0) % strips * TILE_COLS + tl.arange(0, CHUNKS) * CHUNK
    inside = chunk_col < width
    block_row = first_row // BLOCK_H
    slot = block_row.to(tl.int64) * cols_b + chunk_col // BLOCK_W
    entry = tl.load(table_ptr + slot, mask=inside, other=-1).to(tl.int64)
    # [TILE_ROWS, CHUNKS, CHUNK]: threads move whole chunks
    row = tl.arange(0, TILE_ROWS)[:, None, None]
    along = tl.arange(0, CHUNK)[None, None, :]
    source = (entry * (BLOCK_H * BLOCK_W) + chunk_col % BLOCK_W)[None, :, None] + along
    source += (first_row % BLOCK_H + row) * BLOCK_W
    present = (entry >= 0)[None, :, None]
    tile = tl.load(values_ptr + source, mask=present, other=0.0)
    target = (first_row + row).to(tl.int64) * width + chunk_col[None, :, None] + along
    tl.store(full_ptr + target, tile, mask=inside[None, :, None])


def block_table(indptr: torch.Tensor, indices: torch.Tensor, cols_b: int) -> torch.Tensor:
    """int32 [rows_b, cols_b]: which entry of the pattern a block is, or -1.

    Kept for each pattern unless a CUDA graph is captured; synchronises when it is made, because the
    next product may run on another stream.
    """
    if indptr in _TABLES:
        return _TABLES[indptr]

    def make() -> torch.Tensor:
        entries = torch.arange(indices.shape[0], dtype=torch.int32, device=indices.device)
        rows = rows_of_entries(indptr, indices.shape[0])
        table = entries.new_full((indptr.shape[0] - 1, cols_b), -1)
        table[rows.long(), indices.long()] = entries
        return table

    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        return make()
    table = made_outside_pool(make, indptr.device)
    if indptr.is_cuda:
        torch.cuda.current_stream(indptr.device).synchronize()
    # only now: another thread, with another stream, may find it at once
    _TABLES[indptr] = table
    return table


def launch_densify(full: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> None:
    """Fill `full` [rows_b * bh, cols_b * bw], contiguous.

    Parameters
    ----------
    values : [nnzb, bh, bw] contiguous, bw a multiple of `CHUNK`
    table : as `block_table` makes it
    """
    block_h, block_w = values.shape[1:]
    rows, cols = full.shape
    if full.numel() == 0:
        return
    tile_rows = largest_tile(block_h, TILE_ROWS)
    with on_device_of(values):
        args = (full, values, table, table.shape[1])
        constants = (block_h, block_w, tile_rows, TILE_COLS, CHUNK)
        grid = rows // tile_rows * cdiv(cols, TILE_COLS)
        launch(_densify_kernel, grid, (*args, *constants), num_warps=4)
