"""The softmax of attention, tile by tile: the only place in `eager` that knows about exp and -inf.

Scores are in base 2 (the scale carries log2(e)), because exp2 is the cheaper function. A state is
updated in place, one tile of keys after another; `rows` below counts all queries of a tile, those
of a KV head's whole group stacked on top of each other.
"""

import math
from typing import NamedTuple

import torch

from ...calls.attention import compute_dtype

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
    """The state before any key. A sink is a key without a value, so the state includes its logit.

    `sinks_log2` is [n, rows, 1] in base 2.
    """
    acc = like.new_zeros((n, rows, head_dim_v))
    if sinks_log2 is not None:
        return SoftmaxState(sinks_log2.clone(), like.new_ones((n, rows, 1)), acc)
    return SoftmaxState(like.new_full((n, rows, 1), -torch.inf), like.new_zeros((n, rows, 1)), acc)


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
    # bmm and add, not baddbmm, which runs small products one by one on some CPUs
    acc.mul_(decay).add_(torch.bmm(p, v) if visible is None else visible_product(p, v, visible))
    peak.copy_(new_peak)


def finish(state: SoftmaxState) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, rows, Dv] and natural-log lse [n, rows]; 0 and -inf for rows without a key."""
    peak, total, acc = state
    out = acc.div_(total.masked_fill(total == 0, 1.0))
    # fp64, so that lse is rounded once: every probability of the backward pass carries its error
    lse = (peak.double() + total.double().log2()) * LN_2
    return out, lse.to(acc.dtype).squeeze(-1)


def hide(scores: torch.Tensor, visible: torch.Tensor) -> None:
    """Set hidden scores to -inf in place, whatever they are."""
    hide_beyond(scores, bound_of(visible, scores.dtype))


def bound_of(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bound for `hide_beyond`: +inf where visible, -inf where hidden."""
    return torch.where(visible, torch.inf, -torch.inf).to(dtype)


def hide_beyond(scores: torch.Tensor, bound: torch.Tensor) -> None:
    """Hide scores in place, by a minimum; several times faster than masked_fill on a CPU.

    fmin drops a NaN where the bound is -inf. Where the bound is +inf it turns a NaN into +inf,
    which the softmax turns back into NaN.
    """
    torch.fmin(scores, bound, out=scores)


def probabilities(scores_log2: torch.Tensor, lse_log2: torch.Tensor) -> torch.Tensor:
    """exp2(scores - lse) in place. `lse_log2` [n, rows, 1] is +inf for rows without a key."""
    return scores_log2.sub_(lse_log2).exp2_()


def lse_for_backward(lse: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """lse in base 2 for `probabilities`, and the factor that corrects its rounding.

    Probabilities times the factor are those of the unrounded value. Empty rows get +inf, so that
    their probabilities come out as 0.
    """
    exact = lse.double() * LOG2_E
    rounded = exact.to(dtype)
    factor = torch.exp2(rounded.double() - exact).to(dtype)
    empty = lse == -torch.inf
    return rounded.masked_fill(empty, torch.inf), factor.masked_fill(empty, 1.0)


def visible_product(weights: torch.Tensor, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`weights @ x`, with NaN and inf of `x` reaching only the rows that see them.

    `weights` [n, rows, keys] is 0 wherever `visible` (broadcastable to it) is False.
    """
    finite = x.isfinite()
    clean = torch.bmm(weights, torch.where(finite, x, 0.0))
    hits = torch.matmul(visible.to(x.dtype), (~finite).to(x.dtype))
    return torch.where(hits > 0, torch.bmm(weights, x), clean)


# Merging two partial attention results, and its gradients, in plain PyTorch.


def _shares(
    lse_a: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The share of each side in the total weight, and the log of the total weight."""
    peak = torch.maximum(lse_a, lse_b)
    shift = peak.masked_fill(peak == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    divisor = total.masked_fill(total == 0, 1.0)
    return weight_a / divisor, weight_b / divisor, shift + torch.log(total)


def _without_empty(o: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return o.to(dtype).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge `o_*` [..., S, Dv] with `lse_*` [..., S]; a side with lse -inf is ignored."""
    dtype = compute_dtype(o_a.dtype)
    share_a, share_b, lse = _shares(lse_a.to(dtype), lse_b.to(dtype))
    o = share_a.unsqueeze(-1) * _without_empty(o_a, lse_a, dtype)
    o += share_b.unsqueeze(-1) * _without_empty(o_b, lse_b, dtype)
    return o.to(o_a.dtype), lse.to(lse_a.dtype)


def merge_states_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of o_a, lse_a, o_b and lse_b; 0 for sides and rows that saw no key."""
    dtype = compute_dtype(o_a.dtype)
    share_a, share_b, _ = _shares(lse_a.to(dtype), lse_b.to(dtype))
    do = do.to(dtype)
    difference = _without_empty(o_a, lse_a, dtype) - _without_empty(o_b, lse_b, dtype)
    pull = share_a * share_b * (do * difference).sum(-1)
    dlse_a, dlse_b = pull, -pull
    if dlse is not None:
        empty = torch.maximum(lse_a, lse_b) == -torch.inf
        dlse = dlse.to(dtype).masked_fill(empty, 0.0)
        dlse_a, dlse_b = dlse_a + share_a * dlse, dlse_b + share_b * dlse
    return (
        (share_a.unsqueeze(-1) * do).to(o_a.dtype),
        dlse_a.to(lse_a.dtype),
        (share_b.unsqueeze(-1) * do).to(o_b.dtype),
        dlse_b.to(lse_b.dtype),
    )
