"""Addresses of tiles in strided matrices."""

import triton
import triton.language as tl


@triton.jit
def offsets_2d(rows, cols, row_stride, col_stride):
    """Element offsets [len(rows), len(cols)] in int64: a stride alone may pass 2^31."""
    return rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * col_stride
