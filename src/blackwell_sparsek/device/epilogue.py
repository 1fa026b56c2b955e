# mypy: ignore-errors
"""The epilogue of products: activation(product + bias) + residual, rounded once.

Elementwise on values in registers: no loads and no layout, so Triton and Gluon kernels share it.
Activations are those of `core/activations.py`.
"""

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_NORMAL_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@triton.jit
def relu(x):
    """max(x, 0); NaN stays NaN, which `tl.maximum` would drop."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def gelu(x):
    """x Φ(x) with the exact erf, torch's default."""
    return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))


@triton.jit
def silu(x):
    """x σ(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the activation of that name; None is the identity."""
    if ACTIVATION == "relu":
        return relu(x)
    elif ACTIVATION == "gelu":
        return gelu(x)
    elif ACTIVATION == "silu":
        return silu(x)
    else:
        tl.static_assert(ACTIVATION is None, "unknown activation")
        return x


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation of that name at `x`."""
    if ACTIVATION == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        density = tl.exp(-0.5 * x * x) * _NORMAL_DENSITY_AT_0
        return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * density
    else:
        tl.static_assert(ACTIVATION == "silu", "unknown activation")
        gate = 1.0 / (1.0 + tl.exp(-x))
        return gate * (1.0 + x * (1.0 - gate))


@triton.jit
def finish(acc, bias, residual, ACTIVATION: tl.constexpr, OUT_DTYPE: tl.constexpr):
    """Turn an fp32 product into the output.

    `bias` and `residual` are values in registers that broadcast against `acc`, or None.
    """
    if bias is not None:
        acc += bias.to(tl.float32)
    acc = activate(acc, ACTIVATION)
    if residual is not None:
        acc += residual.to(tl.float32)
    return acc.to(OUT_DTYPE)
