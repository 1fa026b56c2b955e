# mypy: ignore-errors
"""Loads and stores of tiles through pointers, and products of tiles.

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
    """Load rows, 0 for those at or past `length`; None means that all of them exist."""
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


@triton.jit
def offsets_2d(rows, cols, row_stride, col_stride):
    """Element offsets [len(rows), len(cols)] in int64: even a single stride may exceed 2^31."""
    return rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * col_stride


@triton.jit
def add_product(acc, a, b, count, INPUT_PRECISION: tl.constexpr):
    """acc + a @ b in fp32; `count` is any nonnegative runtime integer.

    A float32 product without tensor cores adds one term at a time, so its rounding error grows with
    the length of the sum. In that case each tile is summed separately and added once, as in a GEMM
    that splits its sum.
    """
    if a.dtype == tl.float32 and INPUT_PRECISION == "ieee":
        # Zero at run time: given a constant, the compiler would merge both sums into a longer one.
        zero = tl.where(count < 0, 1.0, 0.0)
        acc += tl.dot(a, b, tl.zeros_like(acc) + zero, input_precision=INPUT_PRECISION)
    else:
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
    return acc
