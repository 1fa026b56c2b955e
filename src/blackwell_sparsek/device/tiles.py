"""Moving tiles of rows between memory and registers through pointers.

Rows are token indices; their offsets are computed in int64. Columns are padded to a power of two
that tensor cores take: `offs_d` may reach past HEAD_DIM, where loads give 0 and stores do nothing.
"""

import triton
import triton.language as tl

from .masks import exists


@triton.jit
def row_pointers(base_ptr, rows, row_stride, offs_d):
    """Pointers [rows, columns]."""
    return base_ptr + (tl.cast(rows, tl.int64) * row_stride)[:, None] + offs_d[None, :]


@triton.jit
def load_rows(base_ptr, rows, row_stride, offs_d, length, HEAD_DIM: tl.constexpr):
    """Load rows, 0 for those at or past `length`; with `length` None all of them exist."""
    PADDED: tl.constexpr = offs_d.shape[0] != HEAD_DIM
    ptrs = row_pointers(base_ptr, rows, row_stride, offs_d)
    if length is None:
        if PADDED:
            tile = tl.load(ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(ptrs)
    else:
        live = exists(rows, length)[:, None]
        if PADDED:
            live = live & (offs_d < HEAD_DIM)[None, :]
        tile = tl.load(ptrs, mask=live, other=0.0)
    return tile


@triton.jit
def store_rows(base_ptr, rows, row_stride, offs_d, tile, length, HEAD_DIM: tl.constexpr):
    """Store the rows before `length`, rounded to the type of `base_ptr`."""
    live = exists(rows, length)[:, None]
    if offs_d.shape[0] != HEAD_DIM:
        live = live & (offs_d < HEAD_DIM)[None, :]
    ptrs = row_pointers(base_ptr, rows, row_stride, offs_d)
    tl.store(ptrs, tile.to(base_ptr.dtype.element_ty), mask=live)
