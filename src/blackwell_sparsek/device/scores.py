"""What happens to a score between the dot product and the softmax: scale, softcap.

Scores enter the softmax raw; one positive factor `scale_log2` turns them into base-2 exponents
there, in the same multiply-add that subtracts the maximum. A negative factor would turn the
maximum into a minimum, so its sign moves into the queries.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Stands for a scale of zero: smallest normal fp32. Zero itself would turn -inf into NaN.
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def fold_sign(q, scale_log2):
    """Queries and a positive factor whose product is that of the given ones."""
    sign = tl.where(scale_log2 < 0.0, -1.0, 1.0)
    # through fp32: exact, and the interpreter has no bf16 arithmetic
    return (q.to(tl.float32) * sign).to(q.dtype), tl.maximum(tl.abs(scale_log2), TINY)


@triton.jit
def tanh(x):
    """Hyperbolic tangent, within 4 ulp of fp32."""
    # 1 - 2 / (e^2x + 1) cancels near 0; its Taylor series is exact to fp32 below 1/4 in 6 terms
    square = x * x
    series = -1382.0 / 155925.0 * square + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = x + x * square * series
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def cap(s, inverse_cap):
    """Softcap up to its factor: tanh(s * scale / softcap), with `inverse_cap` = scale / softcap.

    The factor softcap is part of `scale_log2`. None leaves the score raw.
    """
    if inverse_cap is not None:
        s = tanh(s * inverse_cap)
    return s
