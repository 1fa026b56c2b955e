# mypy: ignore-errors
"""The softmax of every attention kernel: the online step, the final step, merging partial results.

`lse` is a natural logarithm in fp32 wherever it is stored. Inside kernels, names of quantities in
units of log2 end in `_log2`; the hardware computes exp2. State per row: `m_log2`, the running
maximum of the base-2 exponents, and `row_sum`, the running sum of 2^(exponent - m_log2). A row that
has seen no key has m_log2 = -inf and row_sum = 0, and ends with output 0 and lse -inf; the guards
against -inf - -inf live here and nowhere else. Accumulators stay with the caller: functions return
the factors for them, since a kernel may hold them in another layout. No other device code computes
exponentials.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def init_state(q_pos):
    """State of rows that have seen no key, in the layout of `q_pos`."""
    row_sum = (q_pos - q_pos).to(tl.float32)
    return row_sum - float("inf"), row_sum


@triton.jit
def safe_shift(m_log2):
    """The shift to subtract from exponents: the maximum, or 0 for rows that have seen no key."""
    return tl.where(m_log2 == -float("inf"), 0.0, m_log2)


@triton.jit
def weigh(m_log2, s, scale_log2):
    """Update the maximum with raw scores `s` [rows, keys], -inf where masked; `scale_log2` > 0.

    Returns the new maximum, the weights p [rows, keys], and the factor that rescales the older sums
    and accumulators of each row.
    """
    return weigh_below(m_log2, tl.max(s, 1), s, scale_log2)


@triton.jit
def weigh_below(m_log2, top, s, scale_log2, SLACK: tl.constexpr = 0):
    """As `weigh`, for scores whose maximum in each row is `top`.

    The maximum is only raised, and older sums rescaled, if weights would exceed 2**SLACK.
    """
    m_new, shift, rescale = raise_maximum(m_log2, top, scale_log2, SLACK)
    return m_new, tl.exp2(s * scale_log2 - shift[:, None]), rescale


@triton.jit
def raise_maximum(m_log2, top, scale_log2, SLACK: tl.constexpr = 0, HEADROOM: tl.constexpr = 0):
    """Update the maximum with the largest raw score of each row, see `weigh_below`.

    Returns the new maximum, the shift to subtract from exponents, and the factor for older sums and
    accumulators. HEADROOM is subtracted from the maximum, so that weights reach 2**HEADROOM; all
    other functions take the result in place of the maximum.
    """
    m_new = top * scale_log2
    if HEADROOM > 0:
        m_new -= HEADROOM
    if SLACK > 0:
        m_new = tl.where(m_new > m_log2 + SLACK, m_new, m_log2)
    else:
        m_new = tl.maximum(m_log2, m_new)
    shift = safe_shift(m_new)
    return m_new, shift, tl.exp2(m_log2 - shift)


@triton.jit
def weights_of(s, scale_log2, shift):
    """Weights of raw scores `s` [rows, keys], with the `shift` that `raise_maximum` returned."""
    return tl.exp2(s * scale_log2 - shift[:, None])


@triton.jit
def softmax_step(m_log2, row_sum, s, scale_log2, SLACK: tl.constexpr = 0):
    """Update the state with raw scores `s` [rows, keys], -inf where masked; `scale_log2` > 0.

    Returns the new state, the weights p [rows, keys], and the factor that rescales the older
    accumulators of each row. SLACK is that of `weigh_below`.
    """
    m_new, p, rescale = weigh_below(m_log2, tl.max(s, 1), s, scale_log2, SLACK)
    return m_new, row_sum * rescale + tl.sum(p, 1), p, rescale


@triton.jit
def softmax_step_down(m_log2, sums, s, scale_log2):
    """As `softmax_step` for scores [keys, rows], with a `scale_log2` for each row.

    `sums` [keys, rows] are not yet reduced over keys.
    """
    m_new = tl.maximum(m_log2, tl.max(s, 0) * scale_log2)
    shift = safe_shift(m_new)
    p = tl.exp2(s * scale_log2[None, :] - shift[None, :])
    rescale = tl.exp2(m_log2 - shift)
    return m_new, sums * rescale[None, :] + p, p, rescale


@triton.jit
def add_sink(m_log2, row_sum, sink):
    """Add one more logit (natural units) without a value; returns the state and rescale factor."""
    sink_log2 = sink.to(tl.float32) * LOG2_E
    m_new = tl.maximum(m_log2, sink_log2)
    shift = safe_shift(m_new)
    rescale = tl.exp2(m_log2 - shift)
    return m_new, row_sum * rescale + tl.exp2(sink_log2 - shift), rescale


@triton.jit
def rescale_to(m_log2, shift):
    """The factor that brings sums and accumulators relative to `m_log2` to a common `shift`."""
    return tl.exp2(m_log2 - shift)


@triton.jit
def join_state(m_log2, row_sum, m_part, sum_part):
    """Merge in the state of another softmax over the same rows.

    Returns the new state, and the factors for the older accumulators and for those of the other.
    """
    m_new = tl.maximum(m_log2, m_part)
    shift = safe_shift(m_new)
    rescale = tl.exp2(m_log2 - shift)
    factor = tl.exp2(m_part - shift)
    return m_new, row_sum * rescale + sum_part * factor, rescale, factor


@triton.jit
def join_states(m_log2, row_sum, m_parts, sum_parts):
    """Merge the states [rows, parts, 1] of other softmaxes over the same rows into one [rows, 1].

    Returns the new state, the factor for its older accumulators, and the factor for each part's.
    """
    m_new = tl.maximum(m_log2, tl.max(m_parts, 1))
    shift = safe_shift(m_new)
    rescale = tl.exp2(m_log2 - shift)
    factors = tl.exp2(m_parts - shift[:, None, :])
    return m_new, row_sum * rescale + tl.sum(sum_parts * factors, 1), rescale, factors


@triton.jit
def finalise(m_log2, row_sum):
    """Factor that turns accumulators into outputs, and the natural-log lse; 0 and -inf if empty."""
    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    return inverse, (m_log2 + tl.log2(row_sum)) * LN_2


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

    The output of an empty partial is ignored: whatever it holds does not reach the result.
    """
    o_a = tl.where(weight_a[:, None] == 0.0, 0.0, o_a)
    o_b = tl.where(weight_b[:, None] == 0.0, 0.0, o_b)
    return o_a * weight_a[:, None] + o_b * weight_b[:, None]


@triton.jit
def tanh(x):
    """Hyperbolic tangent, within 4 ulp of fp32."""
    # 1 - 2 / (e^2x + 1) cancels near 0; below 1/4, 6 terms of the Taylor series are exact to fp32
    square = x * x
    series = -1382.0 / 155925.0 * square + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = x + x * square * series
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)
