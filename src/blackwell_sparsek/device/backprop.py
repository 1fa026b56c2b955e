# mypy: ignore-errors
"""One step of the backward pass of attention: probabilities again, and gradients of the products.

    p  = 2^(s * scale_log2 - shift)           delta = sum_d out * dout - dlse
    ds = p * (dp - delta) * cap'(s)           with dp = dout v^T

`s` and `dp` are [queries, keys] or [keys, queries]: whoever calls gives the terms of the queries,
`shift` and `delta`, with an axis of 1 where the keys are. `ds` is the gradient of q k^T up to
the scale, which the sums of `ds k` and `ds^T q` take once, at the end. Nothing here makes a tensor,
so Triton and Gluon kernels share it.
"""

import triton
import triton.language as tl

from .scores import cap
from .softmax import LOG2_E


@triton.jit
def shift_of_rows(lse, NATURAL: tl.constexpr = False):
    """What `probabilities` subtracts: lse in its units, +inf for rows that see nothing."""
    shift = lse if NATURAL else lse * LOG2_E
    return tl.where(lse == -float("inf"), float("inf"), shift)


@triton.jit
def probabilities(s, visible, shift, score, NATURAL: tl.constexpr = False):
    """Weights of the keys from raw products `s`, and the capped scores for `score_gradients`.

    `visible` is None where all is; `score` is a `Score`, its factor to base-2 exponents of any
    sign: with lse known, masking can wait until after it. NATURAL says that factor
    and shift are in units of e instead. That is one more product, and saves a rounding of lse that
    only fp32 operands can show.
    """
    capped = cap(s, score.inverse_cap)
    exponent = capped * score.factor - shift
    if NATURAL:
        exponent = exponent * LOG2_E
    if visible is not None:
        exponent = tl.where(visible, exponent, -float("inf"))
    return tl.exp2(exponent), capped


@triton.jit
def score_gradients(p, capped, dp, delta, score):
    """Gradient of the products q k^T up to the scale, from what `probabilities` gave."""
    ds = p * (dp - delta)
    if score.inverse_cap is not None:
        # derivative of tanh; not of masked scores, whose -inf has none
        ds = ds * ((1.0 - capped) * (1.0 + capped))
    return ds


@triton.jit
def sink_gradients(sink, lse, delta):
    """What each query adds to the gradient of a sink: a key whose value is 0."""
    p = tl.exp2((sink.to(tl.float32) - shift_of_rows(lse, True)) * LOG2_E)
    return -p * delta
