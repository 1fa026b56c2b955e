# mypy: ignore-errors
"""Scale, softcap and bias, which a score passes between the dot product and the softmax.

Scores enter the softmax raw; there, a positive factor `scale_log2` turns them into base-2
exponents, in the same multiply-add that subtracts the maximum. A negative factor would turn the
maximum into a minimum, so its sign moves into the queries.
"""

import triton
import triton.language as tl

from .masks import exists, position
from .softmax import tanh


@triton.jit
def fold_sign(q, scale_log2):
    """Queries and a positive factor whose product equals `q * scale_log2`."""
    # a scale of zero moves into the queries: as a factor it would turn the -inf of masks into NaN
    sign = tl.where(scale_log2 < 0.0, -1.0, tl.where(scale_log2 == 0.0, 0.0, 1.0))
    # through fp32: exact, and the interpreter has no bf16 arithmetic
    return (q.to(tl.float32) * sign).to(q.dtype), positive_factor(scale_log2)


@triton.jit
def positive_factor(scale_log2):
    """What remains of a scale when its sign is folded into queries."""
    return tl.where(scale_log2 == 0.0, 1.0, tl.abs(scale_log2))


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


@triton.jit
def slope_of_head(slopes, batch, head):
    """The ALiBi slope of a query head."""
    return tl.load(slopes.start + batch.to(tl.int64) * slopes.batch_step + head)


@triton.jit
def bias_of_head(bias, batch, head):
    """Pointer to the bias of a query head, [queries, keys]."""
    offset = batch.to(tl.int64) * bias.batch_step + head.to(tl.int64) * bias.head_step
    return bias.start + offset


@triton.jit
def added_scores(added, q_index, kv_pos):
    """What is added to the scores of queries and keys, in natural units; the two broadcast.

    Elements past the lengths are not read.
    """
    lengths = added.lengths
    total = 0.0
    if added.slope is not None:
        distance = tl.abs(position(q_index, lengths.q, lengths.kv) - kv_pos)
        total = -added.slope * distance.to(tl.float32)
    if added.bias is not None:
        there = exists(q_index, lengths.q) & exists(kv_pos, lengths.kv)
        at = q_index.to(tl.int64) * added.q_step + kv_pos.to(tl.int64) * added.kv_step
        total += tl.load(added.bias + at, mask=there, other=0.0).to(tl.float32)
    return total
