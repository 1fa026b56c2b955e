"""What Hopper's products do to their sums before they store them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.activations import activate


@gluon.jit
def finish_values(acc, rows, cols, extras, sizes, ACTIVATION: gl.constexpr):
    """activation(acc + bias) + residual, for `rows` and `cols` that broadcast to `acc`.

    Rows and columns outside of `sizes` may come; what they get is not to be stored.
    """
    bias_ptr, residual_ptr, residual_strides = extras
    present = (rows >= 0) & (rows < sizes[0])
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + rows, mask=present, other=0.0).to(gl.float32)
    acc = activate(acc, ACTIVATION)
    if residual_ptr is not None:
        offsets = rows.to(gl.int64) * residual_strides[0] + cols.to(gl.int64) * residual_strides[1]
        inside = present & (cols < sizes[1])
        acc += gl.load(residual_ptr + offsets, mask=inside, other=0.0).to(gl.float32)
    return acc
