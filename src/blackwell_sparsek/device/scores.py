# mypy: ignore-errors
"""Scale and softcap, which a score passes between the dot product and the softmax.

Scores enter the softmax raw; there, a positive factor `scale_log2` turns them into base-2
exponents, in the same multiply-add that subtracts the maximum. A negative factor would turn the
maximum into a minimum, so its sign moves into the queries.
"""

import triton
import triton.language as tl

from .softmax import tanh


@triton.jit
def fold_sign(q, scale_log2):
    """Queries and a positive factor whose product equals `q * scale_log2`."""
    # a scale of zero moves into the queries: as a factor it would turn the -inf of masks into NaN
    sign = tl.where(scale_log2 < 0.0, -1.0, tl.where(scale_log2 == 0.0, 0.0, 1.0))
    factor = tl.where(scale_log2 == 0.0, 1.0, tl.abs(scale_log2))
    # through fp32: exact, and the interpreter has no bf16 arithmetic
    return (q.to(tl.float32) * sign).to(q.dtype), factor


@triton.jit
def cap(s, inverse_cap):
    """Softcap without its factor: tanh(s * scale / softcap), with `inverse_cap` = scale / softcap.

    The factor softcap is part of `scale_log2`. None leaves the score raw.
    """
    if inverse_cap is not None:
        s = tanh(s * inverse_cap)
    return s


@triton.jit
def add_slopes(exponents, alibi, kv_pos):
    """Base-2 exponents [rows, keys] less the slope of each row times its distance to each key."""
    distance = tl.abs(alibi.q_pos[:, None] - kv_pos[None, :]).to(tl.float32)
    return exponents - alibi.slope_log2[:, None] * distance
