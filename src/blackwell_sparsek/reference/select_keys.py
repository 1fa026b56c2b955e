"""Choosing keys as a formula: query by query, with all scores in fp64.

    s[t, j] = sum_h weights[h, t] * activation(q_index[h, t] . k_index[h, j])
    S[t, c] = max or mean of s[t, j] over the keys of entry c that query t sees

Entries are taken from the highest S down, those of equal S from the lower number up: forced ones
first, until there are as many as asked for, or until their share of the softmax of S reaches top_p.
"""

import torch

from ..calls.select_keys import SelectCall


def forward(call: SelectCall) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and counts; places that hold no entry are 0."""
    q, given = call.q_index, call.options
    batch, heads, q_len, _ = q.shape
    ids = torch.zeros((batch, given.lists, q_len, given.most), dtype=torch.int32)
    counts = torch.zeros((batch, given.lists, q_len), dtype=torch.int32)
    each = heads // max(given.lists, 1)
    for b in range(batch):
        for h in range(given.lists):
            for t in range(q_len):
                chosen = _chosen(call, b, range(h * each, (h + 1) * each), t)
                ids[b, h, t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
                counts[b, h, t] = len(chosen)
    return ids.to(q.device), counts.to(q.device)


def _chosen(call: SelectCall, b: int, heads: range, t: int) -> list[int]:
    """Entries of one query, ascending."""
    q, k, given = call.q_index, call.k_index, call.options
    kv_len = k.shape[2]
    position = t + kv_len - q.shape[2]
    seen = min(position + 1, kv_len) if given.causal else kv_len
    if seen <= 0:
        return []
    group = q.shape[1] // k.shape[1]
    scores = torch.zeros(seen, dtype=torch.float64)
    for head in heads:
        own = k[b, head // group, :seen].double().cpu() @ q[b, head, t].double().cpu()
        if given.activation == "relu":
            own = own.clamp(min=0)
        if call.weights is not None:
            own = own * float(call.weights[b, head, t])
        scores += own
    entries = torch.split(scores, given.granularity)
    pooled = [float(x.mean() if given.pool == "mean" else x.max()) for x in entries]
    last = len(pooled) - 1
    forced = {c for c in range(last + 1) if c < given.force_first or c > last - given.force_last}
    order = sorted(range(len(pooled)), key=lambda c: (c not in forced, -pooled[c], c))
    if not given.top_p:
        return sorted(order[: given.most])
    shares = torch.tensor(pooled, dtype=torch.float64).softmax(0)
    taken: list[int] = []
    for c in order[: given.most]:
        if c not in forced and float(shares[taken].sum()) >= given.top_p:
            break
        taken.append(c)
    return sorted(taken)
