# mypy: ignore-errors
"""Packing low blocks into taller ones: several block rows share the union of their columns.

The Hopper kernel multiplies 64 rows at a time. Block rows of 16 or 32 rows are grouped by 64 rows;
a packed block exists where any row of the group has a block, and is zero where the others have
none. The pattern is packed once (`pack_pattern`), the values at every product (`launch_pack`),
because they may have changed; that reads and writes them once, a few percent of the product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import made_outside_pool

# Packed patterns by the row pointers they were made from, which live as long as their pattern, and
# by the number of block rows that were packed into one.
_PACKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class PackedPattern(NamedTuple):
    """Pattern of the packed matrix and where its parts come from.

    `source` [nnz, group] holds the entry of the original pattern behind each part, or -1.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    source: torch.Tensor

    def trimmed(self) -> "PackedPattern":
        """Without the blocks past the last row; waits for their number."""
        count = int(self.indptr[-1])
        return PackedPattern(self.indptr, self.indices[:count].clone(), self.source[:count].clone())


def pack_pattern(
    indptr: torch.Tensor, indices: torch.Tensor, cols_b: int, group: int
) -> PackedPattern:
    """Group `group` consecutive block rows into one.

    Nothing waits for the device, so that graphs can capture it: there are as many packed blocks as
    there were blocks, and those past the last row belong to none.
    """
    rows_b, nnz = indptr.numel() - 1, indices.numel()
    device = indptr.device
    counts = torch.diff(indptr).long()
    row = torch.repeat_interleave(torch.arange(rows_b, device=device), counts, output_size=nnz)
    key, entry = torch.sort((row // group) * cols_b + indices.long())
    is_new = torch.ones_like(key)
    is_new[1:] = key[1:] != key[:-1]
    packed = is_new.cumsum(0) - 1
    source = torch.full((nnz, group), -1, dtype=torch.int32, device=device)
    source[packed, row[entry] % group] = entry.int()
    columns = torch.zeros(nnz, dtype=torch.int32, device=device)
    columns[packed] = (key % max(cols_b, 1)).int()
    per_row = torch.zeros(cdiv(rows_b, group), dtype=torch.int64, device=device)
    per_row.index_add_(0, key // max(cols_b, 1), is_new)
    packed_indptr = torch.nn.functional.pad(per_row.cumsum(0), (1, 0)).int()
    return PackedPattern(packed_indptr, columns, source)


def packed_pattern(
    indptr: torch.Tensor, indices: torch.Tensor, cols_b: int, group: int
) -> PackedPattern:
    """`pack_pattern` without unused blocks, cached; during the capture of a graph, neither."""
    packed = _PACKED.setdefault(indptr, {})
    if group in packed:
        return packed[group]
    pattern = (indptr, indices, cols_b, group)
    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        # part of the graph, so not kept
        return pack_pattern(*pattern)
    made = made_outside_pool(lambda: pack_pattern(*pattern).trimmed(), indptr.device)
    if indptr.is_cuda:
        # the next product with this pattern may run on another stream
        torch.cuda.current_stream(indptr.device).synchronize()
    packed[group] = made
    return made


# Rows one program copies: blocks of 16 x 16 are too small to give each its own.
TILE_ROWS = 256


@triton.jit
def _pack_kernel(
    packed_ptr,
    values_ptr,
    source_ptr,
    perm_ptr,
    num_rows,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """Copy or zero TILE_ROWS rows of the packed blocks; with `perm`, out of transposed storage."""
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    mask_row = row < num_rows
    part = row // BLOCK_H
    row_in_block = row % BLOCK_H
    block = tl.load(source_ptr + part, mask=mask_row, other=-1).to(tl.int64)
    present = block >= 0
    if perm_ptr is not None:
        block = tl.load(perm_ptr + block, mask=present, other=0).to(tl.int64)
        row_offset = block * (BLOCK_H * BLOCK_W) + row_in_block
        col_stride: tl.constexpr = BLOCK_H
    else:
        row_offset = block * (BLOCK_H * BLOCK_W) + row_in_block * BLOCK_W
        col_stride: tl.constexpr = 1
    for start in tl.static_range(0, BLOCK_W, TILE_W):
        cols = start + tl.arange(0, TILE_W)
        offsets = row_offset[:, None] + (cols * col_stride)[None, :]
        tile = tl.load(values_ptr + offsets, mask=present[:, None], other=0.0)
        tl.store(packed_ptr + row[:, None] * BLOCK_W + cols[None, :], tile, mask=mask_row[:, None])


def launch_pack(
    packed: torch.Tensor,
    values: torch.Tensor,
    source: torch.Tensor,
    perm: torch.Tensor | None,
) -> None:
    """Fill `packed` [nnz, group * bh, bw] from `values`; `perm` says the storage is transposed."""
    group = source.shape[1]
    packed_h, block_w = packed.shape[1:]
    num_rows = packed.shape[0] * packed_h
    if num_rows == 0:
        return
    with on_device_of(values):
        tile_w = min(block_w & -block_w, 32)
        args = (packed, values, source, perm, num_rows)
        constants = (packed_h // group, block_w, TILE_ROWS, tile_w)
        launch(_pack_kernel, cdiv(num_rows, TILE_ROWS), (*args, *constants), num_warps=8)
