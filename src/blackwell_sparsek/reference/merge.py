"""Merging two attention results over disjoint sets of keys, as a formula.

Each partial result is the pair (out, lse): a weighted mean of values, and the log of the total
weight behind it. The merged mean weighs both by their share of the total.
"""

import torch


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge `o_*` [..., S, Dv] with `lse_*` [..., S] in fp64.

    A side with lse -inf has seen nothing: its `o` is ignored, whatever it holds. Two such sides
    give 0 and -inf.
    """
    dtype, lse_type = o_a.dtype, lse_a.dtype
    lse_a, lse_b = lse_a.double(), lse_b.double()
    empty_a, empty_b = lse_a == -torch.inf, lse_b == -torch.inf
    both_empty = empty_a & empty_b

    peak = torch.maximum(lse_a, lse_b).detach()
    peak = torch.where(both_empty, 0.0, peak)
    weight_a, weight_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = torch.where(both_empty, 1.0, weight_a + weight_b)

    share_a, share_b = (weight_a / total).unsqueeze(-1), (weight_b / total).unsqueeze(-1)
    o_a = torch.where(empty_a.unsqueeze(-1), 0.0, o_a.double())
    o_b = torch.where(empty_b.unsqueeze(-1), 0.0, o_b.double())
    lse = torch.where(both_empty, -torch.inf, peak + torch.log(total))
    return (share_a * o_a + share_b * o_b).to(dtype), lse.to(lse_type)
