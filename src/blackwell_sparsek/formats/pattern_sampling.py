"""Uniform choice of blocks, in memory of the blocks chosen."""

import torch

from .pattern_parts import CPU, expand


def sample_blocks(
    limits: torch.Tensor, counts: torch.Tensor, width: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In each row, `counts` of the columns `0 .. limits`, every such set being equally likely.

    Parameters
    ----------
    limits, counts : int64 `[rows]` on the CPU, with counts <= limits <= width

    Returns
    -------
    rows, cols : int64 `[sum of counts]`, sorted
    """
    # rows that keep more than half draw what they leave out, so that most draws are new
    inverted = counts * 2 > limits
    drawn = _distinct(limits, torch.where(inverted, limits - counts, counts), width, generator)
    first_keys = torch.arange(limits.numel(), device=CPU) * width
    candidates = expand(first_keys, torch.where(inverted, limits, 0))
    kept = candidates[~torch.isin(candidates, drawn)]
    straight = drawn[~inverted[drawn // max(width, 1)]]
    keys, _ = torch.sort(torch.cat([straight, kept]))
    return keys // max(width, 1), keys % max(width, 1)


def _distinct(
    limits: torch.Tensor, counts: torch.Tensor, width: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Keys `row * width + column`: drawn with replacement until each row has enough distinct."""
    rows = torch.arange(limits.numel(), device=CPU)
    keys = torch.empty(0, dtype=torch.int64, device=CPU)
    missing = counts
    while bool(missing.any()):
        row = torch.repeat_interleave(rows, missing)
        uniform = torch.rand(row.numel(), dtype=torch.float64, generator=generator, device=CPU)
        column = (uniform * limits[row]).to(torch.int64)
        keys = torch.unique(torch.cat([keys, row * width + column]))
        missing = counts - torch.bincount(keys // width, minlength=limits.numel())
    return keys
