"""Merging two partial attention results, and the gradients of that, in plain PyTorch."""

import torch

from ..formats.attention_spec import compute_dtype


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
    """Gradients of o_a, lse_a, o_b and lse_b; 0 for sides and rows that saw nothing."""
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
