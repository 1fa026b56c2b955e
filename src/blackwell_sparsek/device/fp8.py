"""Rounding to fp8 by integer arithmetic: the same bits on every GPU and in the interpreter.

Triton converts to e4m3 only from sm_89 on, and its interpreter truncates.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
# 2^-6, the smallest normal number of e4m3, as bits of an fp32
_SMALLEST_NORMAL = tl.constexpr(121 << 23)
# 2^14: adding it to a subnormal leaves the rounded e4m3 mantissa in the lowest bits
_SUBNORMAL_SHIFT = tl.constexpr(141 << 23)
# moves the exponent's bias from 127 to 7 and rounds half up but for the last bit
_REBIAS_AND_ROUND = tl.constexpr(((7 - 127) << 23) + 0x7FFFF)


@triton.jit
def e4m3_bits(x):
    """The bits (uint8) of fp32 `x` as e4m3fn: nearest even; past 448 it saturates; NaN is 0x7F."""
    is_nan = x != x
    magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    shifted = magnitude + tl.full([], _SUBNORMAL_SHIFT, tl.int32).to(tl.float32, bitcast=True)
    subnormal = shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_SHIFT
    normal = (bits + _REBIAS_AND_ROUND + ((bits >> 20) & 1)) >> 20
    rounded = tl.where(bits < _SMALLEST_NORMAL, subnormal, normal)
    sign = tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)
    return tl.where(is_nan, 0x7F, rounded | sign).to(tl.uint8)


@triton.jit
def e4m3_values(bits):
    """The fp32 values of e4m3fn given as uint8; exact, on GPUs without fp8 as well."""
    magnitude = (bits & 0x7F).to(tl.int16)
    # fp16 has one exponent bit more: its subnormals take in those of e4m3, 2^8 times smaller
    value = (magnitude << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where((bits & 0x80) != 0, -value, value)
