# mypy: ignore-errors
"""Operands copied into the layout that a Hopper product reads: fragments of A, transposed X.

Fragments, for `warps.py`: a block of 16 x 16 is the left operand of one `mma.sync.m16n8k16`, and
thread 4g + t of the warp holds eight of its elements: rows g and g + 8 of columns 2t, 2t + 1,
2t + 8 and 2t + 9. Stored in that order, a thread reads its share with one load of 16 bytes. A wider
block becomes several fragments of 16 columns. They are written for every product, because values
may have changed.

Transposed X, for `spmm.py`: where K is contiguous, TMA reads X one block width at a time. With
blocks 16 wide such copies of 32 bytes run at a third of the L2 rate, and transposing X first, one
pass over it, is faster.
"""

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import made_outside_pool, scratch

# Pairs of elements in a fragment, and fragments that one program writes.
PAIRS = 128
TILE_FRAGMENTS = 16
# Side of the tile that one program transposes.
TILE = 64
# Columns of fragments by the row pointers of their pattern, which live as long as it.
_COLUMNS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@triton.jit(do_not_specialize=["num_fragments"])
def _fragments_kernel(
    fragments_ptr,
    values_ptr,
    perm_ptr,
    num_fragments,
    BLOCK_W: tl.constexpr,
    TILE_FRAGMENTS: tl.constexpr,
):
    """Write TILE_FRAGMENTS fragments; with `perm`, blocks are stored transposed."""
    PAIRS: tl.constexpr = 128
    pair = tl.arange(0, TILE_FRAGMENTS * PAIRS)
    first = tl.program_id(0) * TILE_FRAGMENTS
    fragment = first + pair // PAIRS
    inside = fragment < num_fragments
    block = fragment // (BLOCK_W // 16)
    # a pair's place in its fragment: g, t, upper or lower half of k, of the rows
    place = pair % PAIRS
    row = (place % 2) * 8 + place // 16
    col = (fragment % (BLOCK_W // 16)) * 16 + (place // 2 % 2) * 8 + (place // 4 % 4) * 2
    if perm_ptr is not None:
        block = tl.load(perm_ptr + block, mask=inside, other=0)
        offset = block.to(tl.int64) * (16 * BLOCK_W) + (col * 16 + row)
        step: tl.constexpr = 16
    else:
        offset = block.to(tl.int64) * (16 * BLOCK_W) + (row * BLOCK_W + col)
        step: tl.constexpr = 1
    two = tl.arange(0, 2)
    x = tl.load(values_ptr + offset[:, None] + (two * step)[None, :], mask=inside[:, None])
    out_ptr = fragments_ptr + first.to(tl.int64) * (2 * PAIRS)
    tl.store(out_ptr + pair[:, None] * 2 + two[None, :], x, mask=inside[:, None])


def fragment_columns(indptr: torch.Tensor, indices: torch.Tensor, per_block: int) -> torch.Tensor:
    """Columns of fragments in steps of 16, from the block columns `indices` of a pattern.

    Cached for each pattern by its row pointers, unless a CUDA graph is captured. Building them
    synchronises, because the next product may run on another stream.
    """
    if per_block == 1:
        return indices
    if indptr in _COLUMNS:
        return _COLUMNS[indptr]

    def make() -> torch.Tensor:
        part = torch.arange(per_block, dtype=torch.int32, device=indices.device)
        return (indices[:, None] * per_block + part).flatten()

    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        return make()
    columns = made_outside_pool(make, indptr.device)
    if indptr.is_cuda:
        torch.cuda.current_stream(indptr.device).synchronize()
    # only now: another thread, with another stream, may find it at once
    _COLUMNS[indptr] = columns
    return columns


def in_fragments(
    values: torch.Tensor, block_w: int, perm: torch.Tensor | None, spare: int
) -> torch.Tensor:
    """Blocks as fragments, int32 [nnzb * block_w / 16 + spare, 128]; spare ones are uninitialised.

    Parameters
    ----------
    values : [nnzb, 16, block_w] of 16 bits, contiguous; [nnzb, block_w, 16] where there is `perm`
    perm : int32 [nnzb] or None, the stored block of each entry
    """
    count = values.numel() // (2 * PAIRS)
    fragments = scratch((count + spare, PAIRS), torch.int32, values.device)
    if count:
        with on_device_of(values):
            args = (fragments.view(values.dtype), values, perm, count, block_w, TILE_FRAGMENTS)
            launch(_fragments_kernel, cdiv(count, TILE_FRAGMENTS), args, num_warps=4)
    return fragments


@triton.jit(do_not_specialize=["rows", "cols"])
def _transpose_kernel(out_ptr, x_ptr, x_stride, out_stride, rows, cols, TILE: tl.constexpr):
    """out[j, i] = x[i, j] for one square tile of x [rows, cols]."""
    tiles = tl.cdiv(cols, TILE)
    offs_m = tl.program_id(0) // tiles * TILE + tl.arange(0, TILE)
    offs_n = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * x_stride + offs_n[None, :]
    tile = tl.load(x_ptrs, mask=inside, other=0.0)
    out_ptrs = out_ptr + offs_n.to(tl.int64)[:, None] * out_stride + offs_m[None, :]
    tl.store(out_ptrs, tl.trans(tile), mask=tl.trans(inside))


def launch_transpose(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write `x.T` to `out` [cols, rows]; both with contiguous rows."""
    rows, cols = x.shape
    with on_device_of(x):
        args = (out, x, x.stride(0), out.stride(0), rows, cols, TILE)
        launch(_transpose_kernel, cdiv(rows, TILE) * cdiv(cols, TILE), args, num_warps=4)
