"""What happens to a finished product: activation(product + bias) + residual, rounded once."""

import triton
import triton.language as tl

from .activations import activate


@triton.jit
def finish(acc, bias, residual, ACTIVATION: tl.constexpr, OUT_DTYPE: tl.constexpr):
    """Take an fp32 product to the output.

    `bias` and `residual` are values in registers that broadcast against `acc`, or None.
    """
    if bias is not None:
        acc += bias.to(tl.float32)
    acc = activate(acc, ACTIVATION)
    if residual is not None:
        acc += residual.to(tl.float32)
    return acc.to(OUT_DTYPE)
