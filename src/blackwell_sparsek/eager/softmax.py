"""The softmax of attention, tile by tile: the only place in `eager` that knows about exp and -inf.

Scores are in base 2 (the scale carries log2(e)), because exp2 is the cheaper function. A state is
updated in place, one tile of keys after another; `rows` below counts all queries of a tile, those
of a KV head's whole group stacked on top of each other.
"""

import math
from typing import NamedTuple

import torch

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


class SoftmaxState(NamedTuple):
    """Running softmax of a tile of queries."""

    peak_log2: torch.Tensor
    """[n, rows, 1] largest score so far, -inf before the first."""
    total: torch.Tensor
    """[n, rows, 1] sum of exp2(score - peak)."""
    acc: torch.Tensor
    """[n, rows, Dv] sum of exp2(score - peak) * v."""


def start(
    n: int, rows: int, head_dim_v: int, like: torch.Tensor, sinks_log2: torch.Tensor | None
) -> SoftmaxState:
    """The state before any key. A sink is a key without a value: its logit is there already.

    `sinks_log2` is [n, rows, 1] in base 2.
    """
    acc = like.new_zeros((n, rows, head_dim_v))
    if sinks_log2 is not None:
        return SoftmaxState(sinks_log2.clone(), like.new_ones((n, rows, 1)), acc)
    return SoftmaxState(
        like.new_full((n, rows, 1), -torch.inf), like.new_zeros((n, rows, 1)), acc
    )


def step(
    state: SoftmaxState,
    scores_log2: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None = None,
) -> None:
    """Take in keys with scores [n, rows, keys] (overwritten) and values [n, keys, Dv].

    Hidden keys have score -inf. `visible` is given only when `v` may hold NaN or inf at keys that
    some of the rows do not see.
    """
    peak, total, acc = state
    new_peak = torch.maximum(peak, scores_log2.amax(-1, keepdim=True))
    # rows without a key so far: subtract 0 instead of -inf, and exp2 gives 0 instead of NaN
    shift = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
    p = scores_log2.sub_(shift).exp2_()
    decay = torch.exp2(peak - shift)
    total.mul_(decay).add_(p.sum(-1, keepdim=True))
    # bmm and add, not baddbmm: on some CPUs that is one small product after another
    acc.mul_(decay).add_(torch.bmm(p, v) if visible is None else visible_product(p, v, visible))
    peak.copy_(new_peak)


def finish(state: SoftmaxState) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, rows, Dv] and natural-log lse [n, rows]; 0 and -inf for rows without a key."""
    peak, total, acc = state
    out = acc.div_(total.masked_fill(total == 0, 1.0))
    return out, (peak + total.log2()).mul_(LN_2).squeeze(-1)


def hide(scores: torch.Tensor, visible: torch.Tensor) -> None:
    """Set hidden scores to -inf in place, whatever they are.

    fmin drops a NaN where the bound is -inf. Where the bound is +inf it turns a NaN into +inf,
    which the softmax turns back into NaN. It is several times faster than masked_fill on a CPU.
    """
    bound = torch.where(visible, torch.inf, -torch.inf).to(scores.dtype)
    torch.fmin(scores, bound, out=scores)


def probabilities(scores_log2: torch.Tensor, lse_log2: torch.Tensor) -> torch.Tensor:
    """exp2(scores - lse) in place. `lse_log2` [n, rows, 1] is +inf for rows without a key."""
    return scores_log2.sub_(lse_log2).exp2_()


def lse_for_backward(lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """lse in base 2, with +inf for empty rows, so that their probabilities come out as 0."""
    return (lse.to(dtype) * LOG2_E).masked_fill(lse == -torch.inf, torch.inf)


def visible_product(weights: torch.Tensor, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`weights @ x`, with NaN and inf of `x` reaching only the rows that see them.

    `weights` [n, rows, keys] is 0 wherever `visible` (broadcastable to it) is False.
    """
    finite = x.isfinite()
    clean = torch.bmm(weights, torch.where(finite, x, 0.0))
    hits = torch.matmul(visible.to(x.dtype), (~finite).to(x.dtype))
    return torch.where(hits > 0, torch.bmm(weights, x), clean)
