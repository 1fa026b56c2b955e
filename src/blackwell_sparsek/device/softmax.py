"""Softmax arithmetic of every attention kernel; the only place where exponentials are taken.

Conventions: `lse` is a natural logarithm in fp32 wherever it is stored. Inside kernels quantities
in units of log2 end in `_log2`, because exp2 is what the hardware has. A row that saw no key has
lse -inf and output 0; the guards against -inf - -inf live here and nowhere else.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merge_weights(lse_a, lse_b):
    """Weights of two partial softmax results and the lse of their union, all fp32 [M].

    The weights add up to 1, or are both 0 where both partials are empty (lse -inf).
    """
    top = tl.maximum(lse_a, lse_b)
    # both empty: any finite reference keeps the exponents at -inf instead of NaN
    top = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp2((lse_a - top) * LOG2_E)
    weight_b = tl.exp2((lse_b - top) * LOG2_E)
    total = weight_a + weight_b
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.log2(total) * LN_2)
    return weight_a / total, weight_b / total, lse


@triton.jit
def merge_partials(o_a, weight_a, o_b, weight_b):
    """Blend two partial outputs, fp32 [M, D], by the weights [M] of `merge_weights`.

    An empty partial is not looked at: whatever its output holds does not reach the result.
    """
    o_a = tl.where(weight_a[:, None] == 0.0, 0.0, o_a)
    o_b = tl.where(weight_b[:, None] == 0.0, 0.0, o_b)
    return o_a * weight_a[:, None] + o_b * weight_b[:, None]
