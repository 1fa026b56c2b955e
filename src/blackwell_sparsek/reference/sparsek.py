"""SparseK as a formula: the projection on the weights between 0 and 1 that add up to k.

    p = argmin |p - z|^2  with  0 <= p <= 1,  sum p = k,   so  p = clip(z - tau, 0, 1)

tau is the smallest number for which the weights add up to at most k, and -inf for a row of at most
k entries. It is found by sorting: between neighbours among the numbers z and z - 1, the sum of the
weights is linear in tau. Entries of -inf do not exist.
"""

import torch

from ..calls.attention import compute_dtype
from ..calls.sparsek import PrefixSparsekCall, SparsekCall


def forward(call: SparsekCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in the dtype of z, and thresholds."""
    k = call.k if isinstance(call.k, torch.Tensor) else call.z.new_full((), call.k).double()
    p, tau = sparsek(call.z, k, call.lengths)
    return p.to(call.z.dtype), tau.to(compute_dtype(call.z.dtype))


def prefixes(call: PrefixSparsekCall) -> torch.Tensor:
    """Thresholds of each prefix of a row."""
    return sparsek_causal(call.u, call.k).to(compute_dtype(call.u.dtype))


def sparsek(
    z: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None = None,
    precision: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [..., n] and thresholds [...]; differentiable by autograd."""
    size = z.shape[-1]
    rows = z.to(precision).reshape(-1, size)
    limits = k.to(precision).expand(z.shape[:-1]).reshape(-1)
    counts = [size] * len(rows)
    if lengths is not None:
        counts = lengths.expand(z.shape[:-1]).reshape(-1).tolist()
    weights, thresholds = [], []
    for row, limit, count in zip(rows, limits, counts, strict=True):
        p, tau = _row(row[:count], limit)
        weights.append(torch.cat([p, row.new_zeros(size - count)]))
        thresholds.append(tau)
    if not weights:
        return z.new_zeros(z.shape, dtype=precision), z.new_zeros(z.shape[:-1], dtype=precision)
    return torch.stack(weights).view(z.shape), torch.stack(thresholds).view(z.shape[:-1])


def sparsek_causal(
    u: torch.Tensor, k: torch.Tensor, precision: torch.dtype = torch.float64
) -> torch.Tensor:
    """Thresholds [..., n] of u[..., :1], u[..., :2] and so on."""
    size = u.shape[-1]
    if size == 0:
        return u.to(precision)
    steps = [sparsek(u[..., : t + 1], k, precision=precision)[1] for t in range(size)]
    return torch.stack(steps, -1)


def _row(z: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [n] and threshold of one row."""
    there = z.detach() > -torch.inf
    if (z.isnan() | (z == torch.inf)).any() or k.isnan() or k < 0:
        return torch.full_like(z, torch.nan), z.new_full((), torch.nan)
    if k >= there.sum():
        return there.to(z.dtype), z.new_full((), -torch.inf)
    live = z[there]
    bends = torch.cat([live, live - 1]).detach().sort().values
    totals = (live.detach() - bends[:, None]).clamp(0, 1).sum(-1)
    # the first bend past which the weights no longer add up to more than k
    right = int((totals <= k).nonzero()[0])
    tau = bends[right]
    if totals[right] < k:
        # left of the bend the sum falls by one for each active entry
        full = live.detach() - 1 >= bends[right]
        active = (live.detach() >= bends[right]) & ~full
        ones = full.sum()
        tau = (live[active].sum() + ones - k) / active.sum()
    p = torch.where(there, (torch.where(there, z, 0.0) - tau).clamp(0, 1), 0.0)
    return p, tau
