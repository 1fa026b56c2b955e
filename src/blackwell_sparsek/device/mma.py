"""Adding one product of tiles to a sum of many."""

import triton
import triton.language as tl


@triton.jit
def add_product(acc, a, b, count, INPUT_PRECISION: tl.constexpr):
    """acc + a @ b in fp32; `count` is any runtime integer that is not negative.

    A float32 product without tensor cores adds one term at a time, and over a long sum its rounding
    grows with the length. There each tile is summed by itself and added once, as a GEMM that splits
    its sum does.
    """
    if a.dtype == tl.float32 and INPUT_PRECISION == "ieee":
        # Zero, but only at run time: the compiler would fold a constant one into a longer sum.
        zero = tl.where(count < 0, 1.0, 0.0)
        acc += tl.dot(a, b, tl.zeros_like(acc) + zero, input_precision=INPUT_PRECISION)
    else:
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
    return acc
