# mypy: ignore-errors
"""Floats as ordered integers, and their midpoints: to find the k-th largest by bisection."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def ordered_int(x):
    """int32 that sort like fp32 `x`: negative floats are reversed, NaN counts as infinity."""
    x = tl.where(x != x, float("inf"), x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def midpoint(low, high):
    """The midpoint of two int32, rounded up, even where their difference overflows int32."""
    half = (low >> 1) + (high >> 1)
    return half + (((low & 1) + (high & 1) + 1) >> 1)
