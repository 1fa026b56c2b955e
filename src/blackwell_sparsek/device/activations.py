"""Activation functions on fp32 tiles, for the epilogue of a product."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply relu, gelu (exact) or silu to `x`, or nothing for None."""
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION is None, "unknown activation")
    return x
