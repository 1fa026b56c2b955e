# mypy: ignore-errors
"""One step of the backward pass of attention: recomputed probabilities, gradients of the products.

    p  = 2^(s * scale_log2 - shift)           delta = sum_d out * dout - dlse
    ds = p * (dp - delta) * cap'(s)           with dp = dout v^T

`s` and `dp` are [queries, keys] or [keys, queries]: the caller passes the per-query terms, `shift`
and `delta`, with an axis of 1 in place of the keys. `ds` is the gradient of q k^T without the
scale, which is applied once to the final sums of `ds k` and `ds^T q`. Nothing here creates a
tensor, so Triton and Gluon kernels share it.
"""

import triton
import triton.language as tl

from .scores import cap
from .softmax import LOG2_E


@triton.jit
def shift_of_rows(lse, NATURAL: tl.constexpr = False):
    """The shift that `probabilities` subtracts: lse in its units, +inf for rows that see no key."""
    shift = lse if NATURAL else lse * LOG2_E
    return tl.where(lse == -float("inf"), float("inf"), shift)


@triton.jit
def probabilities(s, visible, shift, score, NATURAL: tl.constexpr = False, added=None):
    """Weights of the keys from raw products `s`, and the capped scores for `score_gradients`.

    `visible` is None if every key is visible; `added` is what `scores.added_scores` returns, or
    None. The factor of the `Score` may have any sign: lse is known, so masking can follow the
    scaling. With NATURAL, factor and shift are in units of e instead of base-2 exponents. That
    costs one more multiplication and saves a rounding of lse, which matters only with fp32
    operands.
    """
    capped = cap(s, score.inverse_cap)
    exponent = capped * score.factor
    if added is not None:
        exponent += added if NATURAL else added * LOG2_E
    exponent = exponent - shift
    if NATURAL:
        exponent = exponent * LOG2_E
    if visible is not None:
        exponent = tl.where(visible, exponent, -float("inf"))
    return tl.exp2(exponent), capped


@triton.jit
def score_gradients(p, capped, dp, delta, score):
    """Gradient of the products q k^T without the scale, from the results of `probabilities`."""
    ds = p * (dp - delta)
    if score.inverse_cap is not None:
        # derivative of tanh, taken of unmasked scores because it does not exist at -inf
        ds = ds * ((1.0 - capped) * (1.0 + capped))
    return ds


@triton.jit
def sink_gradients(sink, lse, delta):
    """The contribution of each query to the gradient of a sink, which is a key whose value is 0."""
    p = tl.exp2((sink.to(tl.float32) - shift_of_rows(lse, True)) * LOG2_E)
    return -p * delta
