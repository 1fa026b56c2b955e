"""fp8 values as the second operand of a product whose sum runs over their rows.

Tensor cores take pairs of rows of one column in a register, memory has four columns of one row in a
word. So words are read, and the bytes of two words are paired before they become fp16: the columns
then come in another order, which `column_order` undoes in the product.
"""

import triton
import triton.language as tl

# words of two rows in, (row 0, row 1) of each of the four columns out
_PAIR = tl.constexpr("""
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
def paired_half(words):
    """fp16 [groups, rows, 4 * words] of int32 words [groups, rows, words], columns reordered."""
    G: tl.constexpr = words.shape[0]
    N: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    pairs = tl.permute(tl.reshape(words, (G, N // 2, 2, W)), (0, 1, 3, 2))
    even, odd = tl.split(pairs)
    a0, b0, a1, b1, a2, b2, a3, b3 = tl.inline_asm_elementwise(
        _PAIR, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd],
        dtype=(tl.float16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    # [..., W, row] of the columns 0, 2 and 1, 3, then both, then the order of memory
    low = tl.join(tl.join(a0, b0), tl.join(a2, b2))
    high = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    every = tl.join(low, high)
    return tl.reshape(tl.permute(every, (0, 1, 3, 4, 5, 2)), (G, N, 4 * W))


@triton.jit
def column_order(x):
    """Columns of [rows, columns] in memory's order, of a product with `paired_half`."""
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, (M, 4, D // 4)), (0, 2, 1)), (M, D))
