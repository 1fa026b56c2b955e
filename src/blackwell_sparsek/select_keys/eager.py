"""Choosing keys in plain PyTorch, a chunk of queries at a time: scores of a chunk, then entries."""

import torch

from ..calls.attention import compute_dtype
from ..calls.select_keys import SelectCall, SelectOptions

# Scores that are held at a time.
SCORES = 2**22


def forward(call: SelectCall) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and counts; places that hold no entry are 0."""
    q, given = call.q_index, call.options
    batch, heads, q_len, _ = q.shape
    kv_len = call.k_index.shape[2]
    shape = (batch, given.lists, q_len)
    ids = torch.zeros((*shape, given.most), dtype=torch.int32, device=q.device)
    counts = torch.zeros(shape, dtype=torch.int32, device=q.device)
    if not kv_len or not heads or not given.most:
        return ids, counts
    step = max(1, SCORES // (heads * kv_len))
    for b in range(batch):
        for start in range(0, q_len, step):
            own = slice(start, min(start + step, q_len))
            position = torch.arange(own.start, own.stop, device=q.device) + (kv_len - q_len)
            entries, candidates = _entry_scores(call, b, own, position)
            taken = _taken(entries, candidates, position, given, kv_len)
            # entries move to the place that counts how many were taken before them
            place = torch.where(taken, taken.cumsum(-1) - 1, given.most)
            numbers = torch.arange(entries.shape[-1], dtype=torch.int32, device=q.device)
            row = ids.new_zeros((*entries.shape[:-1], given.most + 1))
            row.scatter_(-1, place, numbers.expand(place.shape))
            ids[b, :, own], counts[b, :, own] = row[..., :-1], taken.sum(-1)
    return ids, counts


def _entry_scores(
    call: SelectCall, b: int, own: slice, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [lists, C, entries], -inf where no key is seen, and which entries have a seen key."""
    q, k, given = call.q_index, call.k_index, call.options
    heads, kv_len, size = q.shape[1], k.shape[2], given.granularity
    dtype = compute_dtype(q.dtype)
    keys = k[b].to(dtype).repeat_interleave(heads // k.shape[1], 0)
    scores = q[b, :, own].to(dtype) @ keys.mT
    if given.activation == "relu":
        scores = scores.relu_()
    if call.weights is not None:
        scores = scores * call.weights[b, :, own, None].to(dtype)
    scores = scores.view(given.lists, -1, *scores.shape[1:]).sum(1)
    # NaN ranks below every number
    scores = torch.where(scores.isnan(), torch.finfo(dtype).min, scores)
    fill = -kv_len % size
    number = torch.arange(kv_len + fill, device=q.device)
    seen = (number < kv_len).expand(len(position), -1)
    if given.causal:
        seen = seen & (number <= position[:, None])
    scores = torch.nn.functional.pad(scores, (0, fill)).masked_fill_(~seen, -torch.inf)
    grid = scores.view(*scores.shape[:-1], -1, size)
    seen = seen.reshape(len(position), -1, size)
    counted = seen.sum(-1)
    candidates = (counted > 0).expand(grid.shape[:-1])
    if given.pool == "mean":
        sums = torch.where(seen, grid, 0.0).sum(-1)
        return torch.where(candidates, sums / counted.clamp(min=1), -torch.inf), candidates
    return grid.amax(-1), candidates


def _taken(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    position: torch.Tensor,
    given: SelectOptions,
    kv_len: int,
) -> torch.Tensor:
    """bool [lists, C, entries]: which entries each query takes."""
    entries = scores.shape[-1]
    number = torch.arange(entries, device=scores.device)
    latest = torch.full_like(position, kv_len - 1)
    if given.causal:
        latest = position.clamp(max=kv_len - 1)
    latest = torch.div(latest, given.granularity, rounding_mode="floor")[:, None]
    forced = (number < given.force_first) | (number > latest - given.force_last)
    forced = candidates & forced
    ranked = torch.where(forced, torch.inf, scores)
    most = min(given.most, entries)
    if not given.top_p:
        last = ranked.topk(most, -1).values[..., -1:]
        above, level = candidates & (ranked > last), candidates & (ranked == last)
        room = most - above.sum(-1, keepdim=True)
        return above | (level & (level.cumsum(-1) <= room))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    # a query that sees nothing has no shares, and no candidates either
    shares = torch.where(candidates, scores, -torch.inf).softmax(-1).nan_to_num(0.0)
    shares = shares.gather(-1, order)
    before = shares.cumsum(-1) - shares
    taken = (before < given.top_p) | forced.gather(-1, order)
    taken &= candidates.gather(-1, order) & (number < most)
    return torch.zeros_like(taken).scatter_(-1, order, taken)
