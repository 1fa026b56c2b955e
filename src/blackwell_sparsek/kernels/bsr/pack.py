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

from ...core.launch import cdiv, on_device_of


class PackedPattern(NamedTuple):
    """Pattern of the packed matrix and where its parts come from.

    `source` [nnz, group] holds the entry of the original pattern behind each part, or -1.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    source: torch.Tensor


def pack_pattern(
    indptr: torch.Tensor, indices: torch.Tensor, cols_b: int, group: int
) -> PackedPattern:
    """Group `group` consecutive block rows into one; needs one sync for the packed count."""
    rows_b = indptr.numel() - 1
    counts = (indptr[1:] - indptr[:-1]).long()
    row = torch.repeat_interleave(torch.arange(rows_b, device=indptr.device), counts)
    key = (row // group) * cols_b + indices.long()
    packed_key, packed = torch.unique(key, return_inverse=True)
    source = torch.full((packed_key.numel(), group), -1, dtype=torch.int32, device=indptr.device)
    entry = torch.arange(indices.numel(), dtype=torch.int32, device=indptr.device)
    source[packed, row % group] = entry
    packed_rows = cdiv(rows_b, group)
    per_row = torch.bincount(packed_key // max(cols_b, 1), minlength=packed_rows)
    packed_indptr = torch.nn.functional.pad(per_row.cumsum(0), (1, 0)).to(torch.int32)
    return PackedPattern(packed_indptr, (packed_key % max(cols_b, 1)).to(torch.int32), source)


@triton.jit
def _pack_kernel(
    packed_ptr,
    values_ptr,
    source_ptr,
    perm_ptr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """Copy (or zero) one part of a packed block; with `perm`, out of transposed storage."""
    part = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + part)
    rows = tl.arange(0, BLOCK_H)
    for start in tl.static_range(0, BLOCK_W, TILE_W):
        cols = start + tl.arange(0, TILE_W)
        present = (rows[:, None] >= 0) & (cols[None, :] >= 0) & (source >= 0)
        if perm_ptr is not None:
            block = tl.load(perm_ptr + source, mask=source >= 0, other=0).to(tl.int64)
            offsets = rows[:, None] + cols[None, :] * BLOCK_H
        else:
            block = source.to(tl.int64)
            offsets = rows[:, None] * BLOCK_W + cols[None, :]
        tile = tl.load(values_ptr + block * BLOCK_H * BLOCK_W + offsets, mask=present, other=0.0)
        packed = packed_ptr + part * BLOCK_H * BLOCK_W + rows[:, None] * BLOCK_W + cols[None, :]
        tl.store(packed, tile)


def launch_pack(
    packed: torch.Tensor,
    values: torch.Tensor,
    source: torch.Tensor,
    perm: torch.Tensor | None,
) -> None:
    """Fill `packed` [nnz, group * bh, bw] from `values`; `perm` says the storage is transposed."""
    n_packed, group = source.shape
    block_h, block_w = packed.shape[1] // group, packed.shape[2]
    tile_w = block_w & -block_w
    with on_device_of(values):
        _pack_kernel[(n_packed * group,)](
            packed, values, source, perm, block_h, block_w, tile_w, num_warps=4
        )
