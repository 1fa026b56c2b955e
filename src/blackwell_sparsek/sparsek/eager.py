"""SparseK in plain PyTorch, for any device.

The sum of the weights clip(z - tau, 0, 1) falls with tau and is linear between bends, so Newton's
method ends exactly once it reaches the right piece. It may jump past it, and then the interval that
holds tau is halved. Nothing is sorted; every step reads the rows once.

It begins at the threshold that entries of a logistic distribution with the same mean m and
deviation would have. With c their width, E[max(z - tau, 0)] = c log(1 + exp((m - tau) / c)), and
the mean weight is the difference of this at tau and tau + 1; equal to r = k / n it gives
tau = m - r - c (log(1 - exp(-r / c)) - log(1 - exp(-(1 - r) / c))).
"""

import torch

from ..calls.attention import compute_dtype
from ..calls.sparsek import PrefixSparsekCall, SparsekCall

# Steps that Newton's method may take without halving the interval: a row of normal numbers needs 3
# to 5 steps, where halving in every other one takes 10 to 25.
FREE_STEPS = 16
# Then halving an interval of doubles down to neighbours, every other step.
MAX_STEPS = FREE_STEPS + 160
# Width of the logistic distribution over the deviation. One with the same deviation (0.55) has
# longer tails than normal numbers, and Newton's method is slower from above the threshold.
WIDTH_OF_DEVIATION = 0.5
# Elements that are looked at together, so that they stay in a cache.
CHUNK = 2**18


def forward(call: SparsekCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in the dtype of z, and thresholds."""
    z = call.z
    size = z.shape[-1]
    p = z.new_empty(z.shape)
    tau = z.new_empty(z.shape[:-1], dtype=compute_dtype(z.dtype))
    if z.numel() == 0:
        return p, tau.fill_(-torch.inf)
    rows, weights, limits, found = z.reshape(-1, size), p.view(-1, size), flat_k(call), tau.view(-1)
    lengths = None if call.lengths is None else call.lengths.expand(tau.shape).reshape(-1)
    step = max(CHUNK // size, 1)
    for start in range(0, len(rows), step):
        own = slice(start, start + step)
        x = rows[own].to(tau.dtype)
        if lengths is not None:
            x = x.masked_fill(past(lengths[own], size), -torch.inf)
        found[own] = thresholds(x, limits[own])
        weights[own] = weights_above(x, found[own])
    return p, tau


def flat_k(call: SparsekCall | PrefixSparsekCall) -> torch.Tensor:
    """k of each row, in the precision of the thresholds."""
    z = call.z if isinstance(call, SparsekCall) else call.u
    dtype, rows = compute_dtype(z.dtype), z.shape[:-1]
    if not isinstance(call.k, torch.Tensor):
        return torch.full((rows.numel(),), call.k, dtype=dtype, device=z.device)
    return call.k.to(dtype).expand(rows).reshape(-1)


def past(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """bool [..., size]: which entries lie past the length of their row."""
    return torch.arange(size, device=lengths.device) >= lengths[..., None]


def weights_above(z: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """clip(z - tau, 0, 1), and 0 for entries that do not exist, whose z is -inf."""
    return torch.where(z == -torch.inf, 0.0, (z - tau[..., None]).clamp(0, 1))


def thresholds(z: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The smallest tau [...] for which the weights of z [..., n] add up to at most k [...].

    -inf for rows of at most k entries; NaN for rows with NaN or inf, and for k that is below 0 or
    NaN.
    """
    there = z > -torch.inf
    count = there.sum(-1)
    bad = (z.isnan() | (z == torch.inf)).any(-1) | ~(k >= 0)
    everything = k >= count
    settled = bad | everything
    high = torch.where(settled, 0.0, z.amax(-1))
    low = torch.where(settled, -1.0, torch.where(there, z, torch.inf).amin(-1) - 1)
    guess = _first_guess(torch.where(there, z, 0.0), count, k)
    tau = torch.where((guess > low) & (guess < high), guess, low + (high - low) / 2)
    last = torch.full_like(tau, -1)
    last_active, from_newton = last, torch.zeros_like(settled)
    for number in range(MAX_STEPS):
        over = z - tau[..., None]
        full = (over >= 1).sum(-1)
        between = (over > 0) & (over < 1)
        active = between.sum(-1)
        # full weights cancel against k exactly, which a sum of all weights would not
        excess = torch.where(between, over, 0.0).sum(-1) + (full - k)
        newton = tau + excess / active.clamp(min=1)
        # on the same piece as the step before, whose line led here: that line is the right one
        ended = from_newton & (full == last) & (active == last_active)
        # or the weights add up to k already
        ended |= torch.where(active > 0, excess == 0, full == k)
        fits = excess <= 0
        new_low, new_high = torch.where(fits, low, tau), torch.where(fits, tau, high)
        middle = new_low + (new_high - new_low) / 2
        ended |= (middle <= new_low) | (middle >= new_high)
        answer = torch.where(active > 0, newton, new_high)
        # at last every other step halves the interval, so that Newton's method cannot go in circles
        inside = (active > 0) & (newton > new_low) & (newton < new_high)
        use = inside if number < FREE_STEPS or number % 2 == 0 else torch.zeros_like(inside)
        moved = torch.where(use, newton, middle)
        tau = torch.where(settled, tau, torch.where(ended, answer, moved))
        low, high = torch.where(settled, low, new_low), torch.where(settled, high, new_high)
        last, last_active, from_newton = full, active, use
        settled = settled | ended
        if bool(settled.all()):
            break
    tau = _lowest(z, tau)
    tau = torch.where(everything, -torch.inf, tau)
    return torch.where(bad, torch.nan, tau)


def _first_guess(z: torch.Tensor, count: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Where Newton's method begins, NaN or infinite where this is of no use."""
    mean = z.sum(-1) / count
    variance = (z.square().sum(-1) / count - mean.square()).clamp(min=0)
    width = WIDTH_OF_DEVIATION * variance.sqrt()
    share = k / count
    below = torch.log(-torch.expm1(-share / width))
    return mean - share - width * (below - torch.log(-torch.expm1((share - 1) / width)))


def _lowest(z: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """tau, or, if no weight lies between 0 and 1, the largest z at or below it."""
    over = z - tau[..., None]
    between = ((over > 0) & (over < 1)).any(-1)
    below = torch.where(over > 0, -torch.inf, z).amax(-1)
    return torch.where(between, tau, below)


def backward(
    z: torch.Tensor,
    tau: torch.Tensor,
    lengths: torch.Tensor | None,
    dp: torch.Tensor | None,
    dtau: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of z and k: only weights between 0 and 1 move, and tau with their mean."""
    over = z.to(tau.dtype) - tau[..., None]
    active = (over > 0) & (over < 1)
    if lengths is not None:
        active = active & ~past(lengths.expand(tau.shape), z.shape[-1])
    count = active.sum(-1)
    own = torch.zeros_like(over) if dp is None else torch.where(active, dp.to(tau.dtype), 0.0)
    moved = -own.sum(-1) if dtau is None else dtau.to(tau.dtype) - own.sum(-1)
    share = torch.where(count > 0, moved / count.clamp(min=1), 0.0)
    return (own + torch.where(active, share[..., None], 0.0)).to(z.dtype), -share


def prefixes(call: PrefixSparsekCall) -> torch.Tensor:
    """Thresholds of each prefix of a row, from one chunk of entries to the next.

    They never fall, so an entry at or below one of them has no weight from then on: a chunk looks
    only at its own entries and at those that are left from before it.
    """
    u = call.u
    size = u.shape[-1]
    tau = u.new_empty(u.shape, dtype=compute_dtype(u.dtype))
    if u.numel() == 0:
        return tau
    rows, limits, found = u.reshape(-1, size).to(tau.dtype), flat_k(call), tau.view(-1, size)
    step = max(CHUNK // (2 * min(size, CAUSAL_CHUNK) ** 2), 1)
    for start in range(0, len(rows), step):
        own = slice(start, start + step)
        _causal_rows(rows[own], limits[own], found[own])
    return tau


# Entries of a chunk; twice as many gave the same time at k = 64 and more at k = 8.
CAUSAL_CHUNK = 128


def _causal_rows(u: torch.Tensor, k: torch.Tensor, tau: torch.Tensor) -> None:
    """Fill tau [R, n]."""
    left = u[:, :0]
    lowest = u.new_full((len(u), 1), -torch.inf)
    for start in range(0, u.shape[1], CAUSAL_CHUNK):
        new = u[:, start : start + CAUSAL_CHUNK]
        size = new.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=u.device).triu(1)
        begun = new[:, None].expand(-1, size, -1).masked_fill(later, -torch.inf)
        rows = torch.cat([left[:, None].expand(-1, size, -1), begun], -1)
        found = thresholds(rows, k[:, None].expand(-1, size))
        # entries that were dropped do not count here, though they bound the threshold from below
        own = tau[:, start : start + size]
        own.copy_(torch.maximum(found, lowest).cummax(-1).values)
        lowest = own[:, -1:]
        left = torch.cat([left, new], -1)
        # NaN drops nothing, and shows in every later threshold
        kept = ~(left <= lowest)
        # those that are kept first; rows that keep fewer are filled up with entries of -inf
        order = (~kept).to(torch.int8).sort(dim=-1, stable=True).indices
        order = order[:, : int(kept.sum(-1).max())]
        left = left.masked_fill(~kept, -torch.inf).gather(-1, order)


def causal_backward(
    u: torch.Tensor, tau: torch.Tensor, dtau: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of u and k from those of the thresholds.

    Entry j is active in row t if u[j] - 1 < tau[t] < u[j] and t >= j. Thresholds never fall, so
    these rows are a range, whose ends are found by bisection: counts of active entries and sums
    over rows become differences of running sums, in fp64 because differences cancel.
    """
    size = u.shape[-1]
    x, rows = u.to(tau.dtype).contiguous(), torch.arange(size, device=u.device)
    first = torch.searchsorted(tau.contiguous(), x - 1, right=True).maximum(rows)
    end = torch.searchsorted(tau.contiguous(), x).maximum(first)
    ends = torch.zeros((*u.shape[:-1], size + 1), dtype=torch.float64, device=u.device)
    one = torch.ones_like(first, dtype=torch.float64)
    ends.scatter_add_(-1, first, one).scatter_add_(-1, end, -one)
    count = ends.cumsum(-1)[..., :-1].round()
    share = torch.where(count > 0, dtau.to(torch.float64) / count.clamp(min=1), 0.0)
    sums = torch.nn.functional.pad(share.cumsum(-1), (1, 0))
    du = sums.gather(-1, end) - sums.gather(-1, first)
    return du.to(u.dtype), -share.sum(-1)
