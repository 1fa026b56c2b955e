"""Attention over a cache in plain PyTorch on any device, with work proportional to the keys read.

Sequences are handled one by one: their lengths are read back to the host, and their pages or blocks
are gathered.
"""

import torch

from ..calls.attention import compute_dtype
from ..calls.decode import DecodeCall
from ..calls.ragged import RaggedCall
from ..masks.band import kv_range


def attention_decode(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Hq, Sq, Dv] and lse [B, Hq, Sq]."""
    q, caches = call.q, (call.k_cache, call.v_cache)
    out, lse = call.empty_results()
    heads, q_len = call.kv_heads, q.shape[2]
    for b, length in enumerate(call.cache_seqlens.tolist()):
        lo, hi = kv_range(call.band, 0, q_len, q_len, length)
        if call.kv_blocks is None:
            kv_pos = torch.arange(lo, hi, device=q.device).expand(heads, -1)
            k, v = (_span(cache, call, b, lo, hi) for cache in caches)
        else:
            kv_pos, listed = _listed(call.kv_blocks[b], call.kv_block_size, lo, hi)
            k, v = (_gather(cache, call, b, kv_pos, listed) for cache in caches)
            kv_pos = torch.where(listed, kv_pos, hi)
        q_pos = torch.arange(q_len, device=q.device) + (length - q_len)
        visible = _visible(q_pos, kv_pos, hi, call)
        bias = alibi_bias(call, b, q_pos[:, None], kv_pos[:, None, None, :])
        out[b], lse[b] = attend_sequence(q[b], k, v, visible, call, bias)
    return out, lse


def _span(cache: torch.Tensor, call: DecodeCall, b: int, lo: int, hi: int) -> torch.Tensor:
    """The rows of keys `[lo, hi)`: [Hkv, n, D]."""
    if call.page_table is None:
        return cache[b, :, lo:hi]
    size = cache.shape[1]
    first = lo // size
    pages = cache[call.page_table[b, first : -(-hi // size)].long()]
    rows = pages.flatten(0, 1)[lo - first * size : hi - first * size]
    return rows.transpose(0, 1)


def _listed(blocks: torch.Tensor, size: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [Hkv, n * size] of the keys of the listed blocks, and which lie in `[lo, hi)`."""
    kv_pos = blocks.long()[:, :, None] * size + torch.arange(size, device=blocks.device)
    kv_pos = kv_pos.flatten(1)
    return kv_pos, (kv_pos >= lo) & (kv_pos < hi)


def _gather(
    cache: torch.Tensor, call: DecodeCall, b: int, kv_pos: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Rows [Hkv, n, D] at the positions of each head; 0 where not `wanted`."""
    heads = torch.arange(kv_pos.shape[0], device=cache.device)[:, None].expand_as(kv_pos)[wanted]
    at = kv_pos[wanted]
    if call.page_table is None:
        rows = cache[b, heads, at]
    else:
        size = cache.shape[1]
        rows = cache[call.page_table[b].long()[at // size], at % size, heads]
    gathered = rows.new_zeros((*kv_pos.shape, cache.shape[-1]), dtype=compute_dtype(cache.dtype))
    gathered[wanted] = rows.to(gathered.dtype)
    return gathered


def _visible(q_pos: torch.Tensor, kv_pos: torch.Tensor, hi: int, call: DecodeCall) -> torch.Tensor:
    """bool [Hkv, 1, Sq, n]."""
    left, right = call.band.scalars()
    q_pos, kv_pos = q_pos[:, None], kv_pos[:, None, None, :]
    return (kv_pos >= q_pos - left) & (kv_pos <= q_pos + right) & (kv_pos < hi)


def alibi_bias(
    call: DecodeCall | RaggedCall, b: int, q_pos: torch.Tensor, kv_pos: torch.Tensor
) -> torch.Tensor | None:
    """The terms added to the scores of sequence `b`, [Hkv, group, queries, keys]."""
    if call.alibi_slopes is None:
        return None
    slopes = call.alibi_slopes if call.alibi_slopes.dim() == 1 else call.alibi_slopes[b]
    slopes = slopes.to(compute_dtype(call.q.dtype)).view(call.kv_heads, -1, 1, 1)
    return -slopes * (q_pos - kv_pos).abs()


def attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    call: DecodeCall | RaggedCall,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [Hq, Sq, D], k [Hkv, n, D], v [Hkv, n, Dv]; a bias [Hkv, group, Sq, n]."""
    heads, dtype = k.shape[0], compute_dtype(q.dtype)
    group = q.shape[0] // max(heads, 1)
    grouped = q.to(dtype).reshape(heads, group, *q.shape[1:])
    scores = grouped @ k.to(dtype).unsqueeze(1).mT * (call.scale * _scale(call.k_scale, dtype))
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    # an additional column holds the sink; -inf means no sink
    column = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if call.sinks is not None:
        column = call.sinks.to(dtype).view(heads, group, 1, 1).expand_as(column)
    logits = torch.cat([scores, column], -1)
    peak = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - peak.masked_fill(peak == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    # values that no query sees may hold anything
    v = v.to(dtype).masked_fill(~visible.any(-2).squeeze(1).unsqueeze(-1), 0.0)
    out = weights[..., :-1] @ v.unsqueeze(1) / total.masked_fill(total == 0.0, 1.0)
    lse = (peak + torch.log(total)).squeeze(-1)
    out = out * _scale(call.v_scale, dtype)
    return out.flatten(0, 1).to(q.dtype), lse.flatten(0, 1)


def _scale(scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | float:
    """The scale as a factor of [Hkv, group, Sq, n]."""
    return 1.0 if scale is None else scale.to(dtype).view(-1, 1, 1, 1)
