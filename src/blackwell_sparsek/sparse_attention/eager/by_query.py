"""Sparse attention query by query: the keys of each are gathered.

For entries of few keys, few queries, and keys in pages. Positions of keys are [C, N] for C queries:
first those of the entries, then those of the window.
"""

from typing import NamedTuple

import torch

from .parts import Part

# Elements of gathered keys and values that are held at a time.
GATHERED = 2**23


class Visible(NamedTuple):
    """The keys of some queries, [C, N]: positions, whether visible, and factors of exp(score)."""

    positions: torch.Tensor
    seen: torch.Tensor
    weights: torch.Tensor
    chosen: int
    """The first of them are the keys of the entries, this many."""


def rows_at_once(part: Part) -> int:
    """Queries whose keys fit."""
    spec = part.call.spec
    keys = spec.selection.most * spec.selection.granularity + _local_size(part)
    dims = part.call.q.shape[-1] + part.call.v.shape[-1]
    return max(1, GATHERED // max(keys * dims, 1))


def _local_size(part: Part) -> int:
    if part.call.spec.local is None:
        return 0
    left, right = part.call.spec.local.scalars()
    reach = part.kv_len + part.q_len
    return min(left, reach) + min(right, reach) + 1


def visible_keys(part: Part, own: slice) -> Visible:
    """The keys that the queries `own` see."""
    spec, chosen = part.call.spec, part.call.spec.selection
    position = part.positions()[own][:, None]
    device, size = position.device, chosen.granularity
    ids, counts = part.lists(chosen.ids)[own].long(), part.lists(chosen.counts)[own]
    listed = torch.arange(chosen.most, device=device) < counts[:, None]
    keys = (ids[..., None] * size + torch.arange(size, device=device)).flatten(1)
    seen = listed.repeat_interleave(size, 1)
    weights = torch.ones(keys.shape, dtype=part.dtype, device=device)
    if spec.gate is not None:
        gate = part.lists(spec.gate)[own].to(part.dtype)
        weights = torch.where(listed, gate, 0.0).repeat_interleave(size, 1)
    count = keys.shape[1]
    if spec.local is not None:
        left, right = spec.local.scalars()
        seen = seen & ~((keys >= position - left) & (keys <= position + right))
        reach = part.kv_len + part.q_len
        steps = torch.arange(-min(left, reach), min(right, reach) + 1, device=device)
        near = position + steps
        keys = torch.cat([keys, near], 1)
        seen = torch.nn.functional.pad(seen, (0, len(steps)), value=True)
        weights = torch.nn.functional.pad(weights, (0, len(steps)), value=1.0)
    seen = seen & (keys >= 0) & (keys < part.kv_len) & (keys <= position + spec.limit_right)
    return Visible(torch.where(seen, keys, 0), seen, weights, count)


def _gathered(part: Part, x: torch.Tensor, keys: Visible) -> torch.Tensor:
    """Rows [C, N, D], 0 for what is not visible."""
    if not part.kv_len:
        shape = (*keys.positions.shape, x.shape[-1])
        return x.new_zeros(shape, dtype=part.dtype)
    rows = part.gather(x, keys.positions).to(part.dtype)
    return rows.masked_fill_(~keys.seen[..., None], 0.0)


def _scores(part: Part, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores [C, P, N] before masks."""
    spec = part.call.spec
    scores = (q @ k.mT) * spec.scale
    return spec.softcap * torch.tanh(scores / spec.softcap) if spec.softcap else scores


def attend(part: Part, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill `out` [T, P, Dv] and `lse` [T, P]."""
    call, spec = part.call, part.call.spec
    q = part.own(call.q)
    step = rows_at_once(part)
    sinks = None if spec.sinks is None else spec.sinks[part.heads].to(part.dtype)
    for start in range(0, part.q_len, step):
        own = slice(start, start + step)
        keys = visible_keys(part, own)
        k, v = _gathered(part, call.k, keys), _gathered(part, call.v, keys)
        counted = keys.seen & (keys.weights > 0)
        scores = _scores(part, q[own].to(part.dtype), k)
        scores = scores.masked_fill_(~counted[:, None], -torch.inf)
        peak = torch.full(scores.shape[:2], -torch.inf, dtype=part.dtype, device=q.device)
        if scores.shape[-1]:
            peak = scores.amax(-1)
        if sinks is not None:
            peak = torch.maximum(peak, sinks)
        shift = torch.where(peak == -torch.inf, 0.0, peak)
        p = (scores - shift[..., None]).exp_() * torch.where(counted, keys.weights, 0.0)[:, None]
        total = p.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks - shift)
        out[own] = ((p @ v) / torch.where(total == 0, 1.0, total)[..., None]).to(out.dtype)
        lse[own] = shift + torch.log(total)


def add_gradients(
    part: Part,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dgate: torch.Tensor | None,
) -> None:
    """Fill `dq` [T, P, D]; add to `dk` [Sk, D], `dv` [Sk, Dv] and `dgate` [T, K].

    `dout` [T, P, Dv], `lse` and `delta` [T, P]; all in the precision of sums.
    """
    call, spec, chosen = part.call, part.call.spec, part.call.spec.selection
    step = rows_at_once(part)
    for start in range(0, part.q_len, step):
        own = slice(start, start + step)
        keys = visible_keys(part, own)
        q, given = part.own(call.q)[own].to(part.dtype), dout[own]
        k, v = _gathered(part, call.k, keys), _gathered(part, call.v, keys)
        scores = _scores(part, q, k)
        shift = torch.where(lse[own] == -torch.inf, torch.inf, lse[own])[..., None]
        raw = (scores - shift).exp_().masked_fill_(~keys.seen[:, None], 0.0)
        weights = keys.weights[:, None]
        p = torch.where(weights > 0, raw * weights, 0.0)
        change = given @ v.mT - delta[own][..., None]
        if dgate is not None:
            moved = torch.where(keys.seen[:, None], raw * change, 0.0).sum(1)[:, : keys.chosen]
            dgate[own] += moved.view(len(moved), chosen.most, chosen.granularity).sum(-1)
        ds = p * change * spec.scale
        if spec.softcap:
            ds = ds * (1 - (scores / spec.softcap).square())
        dq[own] = ds @ k
        places = keys.positions.flatten()
        dk.index_add_(0, places, (ds.mT @ q).flatten(0, 1))
        dv.index_add_(0, places, (p.mT @ given).flatten(0, 1))
