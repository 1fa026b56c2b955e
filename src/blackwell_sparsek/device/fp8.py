# mypy: ignore-errors
"""fp8: rounding to e4m3 and e5m2, and conversion of e4m3 to the fp16 operands of tensor cores.

Rounding is integer arithmetic, so that every GPU and the interpreter give the same bits: Triton
converts to e4m3 only from sm_89 on, and its interpreter truncates.

Operands are read as words of four values and converted to fp16. A tensor core takes two values that
are adjacent along the reduction in one register. Along the columns of a row, memory already has
this order. Across rows, the bytes of two words are paired before they become fp16. Threads read as
many bytes at once as they can, which permutes the columns; the other operand is permuted in the
same way, or the product is permuted back.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
# 2^-6, the smallest normal number of e4m3, as bits of an fp32
_SMALLEST_NORMAL = tl.constexpr(121 << 23)
# 2^14: adding it to a subnormal leaves the rounded e4m3 mantissa in the lowest bits
_SUBNORMAL_SHIFT = tl.constexpr(141 << 23)
# moves the exponent's bias from 127 to 7 and rounds half up, except for the last bit
_REBIAS_AND_ROUND = tl.constexpr(((7 - 127) << 23) + 0x7FFFF)


@triton.jit
def e4m3_bits(x):
    """fp32 `x` as bits (uint8) of e4m3fn: to nearest even, saturating at 448; NaN becomes 0x7F."""
    is_nan = x != x
    magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    shifted = magnitude + tl.full([], _SUBNORMAL_SHIFT, tl.int32).to(tl.float32, bitcast=True)
    subnormal = shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_SHIFT
    normal = (bits + _REBIAS_AND_ROUND + ((bits >> 20) & 1)) >> 20
    rounded = tl.where(bits < _SMALLEST_NORMAL, subnormal, normal)
    sign = tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)
    return tl.where(is_nan, 0x7F, rounded | sign).to(tl.uint8)


# 2^-14, the smallest normal number of e5m2, and 2^7, which leaves its subnormals in the lowest bits
_SMALLEST_NORMAL_E5M2 = tl.constexpr(113 << 23)
_SUBNORMAL_SHIFT_E5M2 = tl.constexpr(134 << 23)
_REBIAS_AND_ROUND_E5M2 = tl.constexpr(((15 - 127) << 23) + 0xFFFFF)
E5M2_MAX = tl.constexpr(57344.0)


@triton.jit
def e5m2_bits(x):
    """fp32 `x` as bits (uint8) of e5m2: to nearest even, saturating at 57344; NaN becomes 0x7F."""
    is_nan = x != x
    magnitude = tl.minimum(tl.abs(x), E5M2_MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    shifted = magnitude + tl.full([], _SUBNORMAL_SHIFT_E5M2, tl.int32).to(tl.float32, bitcast=True)
    subnormal = shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_SHIFT_E5M2
    normal = (bits + _REBIAS_AND_ROUND_E5M2 + ((bits >> 21) & 1)) >> 21
    rounded = tl.where(bits < _SMALLEST_NORMAL_E5M2, subnormal, normal)
    sign = tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)
    return tl.where(is_nan, 0x7F, rounded | sign).to(tl.uint8)


@triton.jit
def e4m3_values(bits):
    """The fp32 values of e4m3fn given as uint8; exact, on GPUs without fp8 as well."""
    magnitude = (bits & 0x7F).to(tl.int16)
    # fp16 has one more exponent bit: the shifted bits, subnormals too, mean a value 2^8 too small
    value = (magnitude << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where((bits & 0x80) != 0, -value, value)


# a word in, its four values out
FOUR = tl.constexpr("""
{
.reg .b32 f;
.reg .b16 x, y;
mov.b32 {x, y}, $4;
cvt.rn.f16x2.e4m3x2 f, x;
mov.b32 {$0, $1}, f;
cvt.rn.f16x2.e4m3x2 f, y;
mov.b32 {$2, $3}, f;
}
""")

# words of two rows in, (row 0, row 1) of each of the four columns out
_PAIRS = tl.constexpr("""
{
.reg .b32 lo, hi, f;
.reg .b16 x, y;
prmt.b32 lo, $8, $9, 0x5140;
prmt.b32 hi, $8, $9, 0x7362;
mov.b32 {x, y}, lo;
cvt.rn.f16x2.e4m3x2 f, x;
mov.b32 {$0, $1}, f;
cvt.rn.f16x2.e4m3x2 f, y;
mov.b32 {$2, $3}, f;
mov.b32 {x, y}, hi;
cvt.rn.f16x2.e4m3x2 f, x;
mov.b32 {$4, $5}, f;
cvt.rn.f16x2.e4m3x2 f, y;
mov.b32 {$6, $7}, f;
}
""")


@triton.jit
def halves(words):
    """int32 words [rows, words] as fp16 [rows, 4 * words], columns in the order of `as_halves`."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    words = tl.reshape(tl.permute(tl.reshape(words, (N, W // 16, 4, 4)), (0, 1, 3, 2)), (N, W))
    x0, x1, x2, x3 = tl.inline_asm_elementwise(
        FOUR, "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1
    )
    # [rows, 16 columns, thread, high, low]
    every = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (N, W // 4, 4, 2, 2))
    return tl.reshape(tl.permute(every, (0, 1, 3, 2, 4)), (N, 4 * W))


@triton.jit
def as_halves(x):
    """Permute the columns of [rows, columns] into the order of `halves`."""
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    # [rows, 64 columns, thread, word, high, low]
    x = tl.permute(tl.reshape(x, (M, D // 64, 4, 4, 2, 2)), (0, 1, 3, 4, 2, 5))
    return tl.reshape(x, (M, D))


@triton.jit
def turned_halves(words):
    """int32 words [rows, words] as fp16 [4 * words, rows]: transposed, with columns permuted."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(words, (N // 2, 2, W)), (0, 2, 1)))
    a0, b0, a1, b1, a2, b2, a3, b3 = tl.inline_asm_elementwise(
        _PAIRS, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd],
        dtype=(tl.float16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    low = tl.join(tl.join(a0, b0), tl.join(a1, b1))
    high = tl.join(tl.join(a2, b2), tl.join(a3, b3))
    # [pairs of rows, 8 words, word, row, column low, high]
    every = tl.reshape(tl.join(low, high), (N // 2, W // 8, 8, 2, 2, 2))
    return tl.reshape(tl.permute(every, (5, 1, 4, 2, 0, 3)), (4 * W, N))


@triton.jit
def turned_back(x):
    """Permute a product [columns, ...] with `turned_halves` back to the column order of memory."""
    D: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (2, D // 32, 2, 8, M)), (1, 3, 0, 2, 4))
    return tl.reshape(x, (D, M))


@triton.jit
def e4m3_operand(bits, CONVERTS_FP8: tl.constexpr):
    """e4m3 given as uint8, as fp16; exact. CONVERTS_FP8: by the instruction of sm_89 and newer."""
    if CONVERTS_FP8:
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        value = e4m3_values(bits).to(tl.float16)
    return value
