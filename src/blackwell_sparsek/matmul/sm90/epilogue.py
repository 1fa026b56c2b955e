# mypy: ignore-errors
"""The epilogue of the Hopper products: activation(sums + bias) + residual, in fp32 registers.

Every product kernel of this folder calls `finish_values` on its sums before it rounds and stores
them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.epilogue import activate


class Epilogue(NamedTuple):
    """The terms added to the sums, and the size of the result, which bounds the loads."""

    bias_ptr: Any  # [n_rows] or None, added before the activation
    residual_ptr: Any  # [n_rows, n_cols] or None, added after it
    residual_strides: Any  # of rows and columns; None without a residual
    n_rows: Any
    n_cols: Any


@gluon.jit
def finish_values(acc, rows, cols, epilogue, ACTIVATION: gl.constexpr):
    """activation(acc + bias) + residual, for `rows` and `cols` that broadcast to `acc`.

    Rows and columns may lie outside the result; the caller must not store those values.
    """
    present = (rows >= 0) & (rows < epilogue.n_rows)
    if epilogue.bias_ptr is not None:
        acc += gl.load(epilogue.bias_ptr + rows, mask=present, other=0.0).to(gl.float32)
    acc = activate(acc, ACTIVATION)
    if epilogue.residual_ptr is not None:
        row_stride, col_stride = epilogue.residual_strides
        offsets = rows.to(gl.int64) * row_stride + cols.to(gl.int64) * col_stride
        inside = present & (cols < epilogue.n_cols)
        acc += gl.load(epilogue.residual_ptr + offsets, mask=inside, other=0.0).to(gl.float32)
    return acc
