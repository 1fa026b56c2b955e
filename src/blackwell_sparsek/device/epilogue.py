# mypy: ignore-errors
"""What happens to a finished product: activation(product + bias) + residual, rounded once.

Activations are named as in `torch.nn.functional`. Elementwise on values in registers: no loads and
no layout, so Triton and Gluon kernels share them.
"""

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)


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
    tl.static_assert(
        ACTIVATION is None or ACTIVATION == "relu" or ACTIVATION == "gelu" or ACTIVATION == "silu",
        "unknown activation",
    )
    if ACTIVATION == "relu":
        return relu(x)
    elif ACTIVATION == "gelu":
        return gelu(x)
    elif ACTIVATION == "silu":
        return silu(x)
    else:
        return x


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
