"""Attention over a cache as a formula: each sequence's keys are gathered, then attended to.

Token by token, head by head, in fp64; a block that is listed twice counts twice.
"""

import torch

from ..calls.attention import AttnSpec, lse_dtype
from ..calls.decode import DecodeCall
from ..calls.ragged import RaggedCall
from .attention import _attend


def attention_decode(
    call: DecodeCall, precision: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Hq, Sq, Dv] and lse [B, Hq, Sq]."""
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    batch, heads_q, q_len, _ = q.shape
    heads = call.kv_heads
    group = heads_q // max(heads, 1)
    out = q.new_zeros((batch, heads_q, q_len, v_cache.shape[-1]), dtype=precision)
    lse = q.new_zeros((batch, heads_q, q_len), dtype=precision)
    lengths = call.cache_seqlens.tolist()
    for b in range(batch):
        for h in range(heads):
            tokens = listed_positions(call, b, h, lengths[b])
            visible = _visible(q_len, lengths[b], tokens, call)
            # keys that no query sees must not be read: their pages may be gone
            tokens = [t for t, seen in zip(tokens, visible.any(0).tolist(), strict=True) if seen]
            visible = _visible(q_len, lengths[b], tokens, call).to(q.device)
            k = _rows(k_cache, call, b, h, tokens, call.k_scale, precision)
            v = _rows(v_cache, call, b, h, tokens, call.v_scale, precision)
            own = slice(h * group, (h + 1) * group)
            options = AttnSpec(
                call.scale,
                softcap=call.softcap,
                sinks=None if call.sinks is None else call.sinks[own],
            )
            added = _alibi(call, b, own, tokens, lengths[b], precision)
            own_q = q[b : b + 1, own].to(precision)
            own_out, own_lse = _attend(own_q, k[None, None], v[None, None], options, visible, added)
            out[b, own], lse[b, own] = own_out[0], own_lse[0]
    return out.to(q.dtype), lse.to(lse_dtype(q.dtype))


def listed_positions(call: DecodeCall | RaggedCall, b: int, h: int, length: int) -> list[int]:
    """Positions of the keys that exist, in the order of the list."""
    if call.kv_blocks is None:
        return list(range(length))
    size = call.kv_block_size
    blocks = [block for block in call.kv_blocks[b, h].tolist() if block >= 0]
    positions = [block * size + i for block in blocks for i in range(size)]
    return [position for position in positions if position < length]


def _rows(
    cache: torch.Tensor,
    call: DecodeCall,
    b: int,
    h: int,
    tokens: list[int],
    scale: torch.Tensor | None,
    precision: torch.dtype,
) -> torch.Tensor:
    """The rows of `tokens`, [n, D], times their scale."""
    if call.page_table is None:
        rows = [cache[b, h, t] for t in tokens]
    else:
        size = cache.shape[1]
        rows = [cache[int(call.page_table[b, t // size]), t % size, h] for t in tokens]
    dense = torch.stack(rows) if rows else cache.new_empty((0, cache.shape[-1]))
    dense = dense.to(precision)
    if scale is not None:
        dense = dense * scale.reshape(-1)[h if scale.numel() > 1 else 0].to(precision)
    return dense


def _visible(q_len: int, length: int, tokens: list[int], call: DecodeCall) -> torch.Tensor:
    """bool [Sq, n]: query i is at position i + length - Sq and sees the band around it."""
    position = torch.arange(q_len)[:, None] + (length - q_len)
    key = torch.tensor(tokens, dtype=torch.int64)[None, :]
    visible = torch.ones(q_len, len(tokens), dtype=torch.bool)
    if call.band.left is not None:
        visible &= key >= position - call.band.left
    if call.band.right is not None:
        visible &= key <= position + call.band.right
    return visible


def _alibi(
    call: DecodeCall, b: int, heads: slice, tokens: list[int], length: int, precision: torch.dtype
) -> torch.Tensor | None:
    """The terms added to the scores, [1, heads, Sq, n]."""
    slopes = call.alibi_slopes
    if slopes is None:
        return None
    slopes = (slopes if slopes.dim() == 1 else slopes[b])[heads].to(precision)
    q_len = call.q.shape[2]
    position = torch.arange(q_len, device=slopes.device)[:, None] + (length - q_len)
    key = torch.tensor(tokens, dtype=torch.int64, device=slopes.device)[None, :]
    return -slopes[None, :, None, None] * (position - key).abs()
