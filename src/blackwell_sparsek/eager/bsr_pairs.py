"""Products of pairs of blocks, summed per block of the result, in plain PyTorch.

Blocks of the result that are sums of equally many pairs share one batched product: the sum over
pairs becomes part of the contraction, so nothing is rounded or scattered in between.
"""

import torch

from .bsr_matmul import accumulation_dtype
from .bsr_rows import row_groups, rows_at_once


def bsr_pair_products(
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: list[torch.Tensor],
    first_transposed: bool,
    second_transposed: bool,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """out[o] = sum of op(first[f]) @ op(second[s]) over the triples (f, s, o) of `pairs`."""
    first_of, second_of, _, order, out_ptr = pairs[:5]
    bm = first.shape[2] if first_transposed else first.shape[1]
    bn = second.shape[1] if second_transposed else second.shape[2]
    out = first.new_zeros(out_ptr.shape[0] - 1, bm, bn, dtype=out_dtype or first.dtype)
    compute = accumulation_dtype(first.dtype)
    for group in row_groups(out_ptr):
        pair = order[group.entries].long()
        per_row = pair.shape[1] * (first.shape[1:].numel() + second.shape[1:].numel())
        step = max(1, rows_at_once(first.device, per_row))
        for i in range(0, pair.shape[0], step):
            part = pair[i : i + step]
            x = _gather(first, first_of[part], compute)
            y = _gather(second, second_of[part], compute)
            left = _stack(x).mT if first_transposed else _beside(x)
            right = _beside(y).mT if second_transposed else _stack(y)
            out[group.row_ids[i : i + step]] = torch.bmm(left, right).to(out.dtype)
    return out


def _gather(blocks: torch.Tensor, entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[g, c, p, q]: the blocks [p, q] of each of g lists."""
    picked = blocks.index_select(0, entries.flatten()).to(dtype)
    return picked.view(*entries.shape, *blocks.shape[1:])


def _stack(x: torch.Tensor) -> torch.Tensor:
    """[g, c*p, q]: blocks below one another; a view."""
    return x.flatten(1, 2)


def _beside(x: torch.Tensor) -> torch.Tensor:
    """[g, p, c*q]: blocks side by side."""
    return x.transpose(1, 2).flatten(2)
