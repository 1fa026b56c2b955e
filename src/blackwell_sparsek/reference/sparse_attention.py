"""Sparse attention as a formula: dense, sequence by sequence, in fp64.

    w[i, j] = gate of the entry of key j                1 in the window, 0 where not visible
    lse[i]  = log(sum_j w[i, j] exp(s[i, j]) + exp(sink))
    out[i]  = sum_j w[i, j] exp(s[i, j] - lse[i]) v[j]

with the scores s of `attention.py`. Gradients come from plain autograd.
"""

from typing import Any

import torch

from ..calls.attention import fill_gradients, lse_dtype
from ..calls.sparse_attention import SparseAttentionCall, SparseAttnSpec, SparseBackwardCall
from .attention import _visible_products, _visible_sum, band_elements


def forward(call: SparseAttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as by other implementations."""
    call.check_values()
    exact, lse = sparse_attention(call)
    out, _ = call.empty_results()
    return out.copy_(exact), lse


def backward(call: SparseBackwardCall) -> None:
    """Fill the gradients that are asked for."""
    fill_gradients(call.gradients, sparse_attention_backward(call.forward, call.dout, call.dlse))


def sparse_attention(
    call: SparseAttentionCall, precision: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the layout and dtype of q, and lse."""
    spec, batch = call.spec, call.batch
    outs, lses = [], []
    for b in range(batch):
        q, k, v = _sequence(call, b, precision)
        tokens = slice(None)
        if spec.cu_seqlens_q is not None:
            first, end = spec.cu_seqlens_q[b : b + 2].tolist()
            tokens = slice(first, end)
        row = 0 if spec.selection.batch == 1 else b
        visible, weights = _weights(spec, row, tokens, q, k.shape[1], precision)
        out, lse = _attend(q, k, v, visible, weights, spec)
        outs.append(out)
        lses.append(lse)
    dtype, lse_type = call.q.dtype, lse_dtype(call.q.dtype)
    if spec.is_varlen:
        outs.append(call.q.new_zeros((call.q.shape[1], 0, call.v.shape[-1]), dtype=precision))
        lses.append(call.q.new_zeros((call.q.shape[1], 0), dtype=precision))
        out, lse = torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)
        return out.to(dtype), lse.to(lse_type)
    if not outs:
        shape = call.q.shape[:3]
        return call.q.new_zeros((*shape, call.v.shape[-1])), call.q.new_zeros(shape, dtype=lse_type)
    return torch.stack(outs).to(dtype), torch.stack(lses).to(lse_type)


def _sequence(
    call: SparseAttentionCall, b: int, precision: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [Hq, Sq, D], keys and values [Hq, Sk, D | Dv] of one sequence."""
    spec, q = call.spec, call.q
    if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
        first, end = spec.cu_seqlens_q[b : b + 2].tolist()
        q = q[first:end].transpose(0, 1)
        first, end = spec.cu_seqlens_k[b : b + 2].tolist()
        k, v = (x[first:end].transpose(0, 1) for x in (call.k, call.v))
    elif spec.page_table is not None and spec.cache_seqlens is not None:
        q, length = q[b], int(spec.cache_seqlens[b])
        size = call.k.shape[1]
        places = [(int(spec.page_table[b, t // size]), t % size) for t in range(length)]
        k, v = (
            torch.stack([x[page, slot] for page, slot in places], 1)
            if places
            else x.new_zeros((x.shape[2], 0, x.shape[3]))
            for x in (call.k, call.v)
        )
    else:
        q, k, v = q[b], call.k[b], call.v[b]
    group = q.shape[0] // max(k.shape[0], 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return q.to(precision), k.to(precision), v.to(precision)


def _weights(
    spec: SparseAttnSpec,
    row: int,
    tokens: slice,
    q: torch.Tensor,
    sk: int,
    precision: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys are visible, bool [Hq, Sq, Sk], and the factors of their exp(score)."""
    chosen, size = spec.selection, spec.selection.granularity
    repeats = q.shape[0] // max(chosen.heads, 1)
    ids = chosen.ids[row, :, tokens].cpu()
    counts = chosen.counts[row, :, tokens].tolist()
    # the place in its list of the entry that holds a key; -1 for keys that were not chosen
    place = torch.full((*ids.shape[:2], sk), -1)
    for h in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            for j in range(counts[h][t]):
                start = int(ids[h, t, j]) * size
                place[h, t, start : start + size] = j
    place = place.to(q.device).repeat_interleave(repeats, 0)
    limit = band_elements(q.shape[1], sk, spec.limit).to(q.device)
    visible = place >= 0
    weights = torch.ones((), dtype=precision, device=q.device).expand(place.shape)
    if spec.gate is not None and chosen.most:
        gate = spec.gate[row, :, tokens].to(precision).repeat_interleave(repeats, 0)
        weights = gate.gather(-1, place.clamp(min=0))
    if spec.local is not None:
        near = band_elements(q.shape[1], sk, spec.local).to(q.device)
        visible = visible | near
        weights = torch.where(near, 1.0, weights)
    return visible & limit, weights


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    weights: torch.Tensor,
    spec: SparseAttnSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Hq, Sq, Dv] and lse [Hq, Sq]."""
    scores = _visible_products(q, k, visible) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    # a key of weight 0 takes no part, except in the gradient of its weight
    scores = torch.where(visible, scores, -torch.inf)
    counted = torch.where(weights.detach() > 0, scores.detach(), -torch.inf)
    sink = scores.new_full((q.shape[0], q.shape[1], 1), -torch.inf)
    if spec.sinks is not None:
        sink = spec.sinks.to(q.dtype).view(-1, 1, 1).expand_as(sink)
    peak = torch.cat([counted, sink.detach()], -1).amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    parts = weights * torch.exp(scores - peak)
    total = parts.sum(-1, keepdim=True) + torch.exp(sink - peak)
    empty = total == 0
    # a query without keys has zero gradients, also of gates that are 0
    total, parts = torch.where(empty, 1.0, total), torch.where(empty, 0.0, parts)
    lse = torch.where(empty, -torch.inf, peak + torch.log(total))
    return _visible_sum(parts / total, v, visible), lse.squeeze(-1)


def sparse_attention_backward(
    call: SparseAttentionCall, dout: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v, the sinks and the gate; None for what the call does not have."""
    spec = call.spec
    optional = {"sinks": spec.sinks, "gate": spec.gate}
    names = [name for name, x in optional.items() if x is not None]
    leaves = [x for x in optional.values() if x is not None]

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given: dict[str, Any] = dict(zip(names, others, strict=True))
        options = spec._replace(**given)
        return sparse_attention(SparseAttentionCall(q, k, v, options))

    outputs, pull_back, *_ = torch.func.vjp(run, call.q, call.k, call.v, *leaves)
    dlse = torch.zeros_like(outputs[1]) if dlse is None else dlse
    dq, dk, dv, *others = pull_back((dout, dlse))
    rest = dict(zip(names, others, strict=True))
    return dq, dk, dv, rest.get("sinks"), rest.get("gate")
