"""Attention over a cache as a formula: each sequence's keys are written out, then attended to.

Token by token, head by head, in fp64; a block that is listed twice counts twice.
"""

import torch

from ..calls.attention import AttnSpec, lse_dtype
from ..calls.decode import DecodeSpec, kv_heads
from .attention import _attend


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    spec: DecodeSpec,
    precision: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Hq, Sq, Dv] and lse [B, Hq, Sq] of q [B, Hq, Sq, D] over the caches."""
    batch, heads_q, q_len, _ = q.shape
    heads = kv_heads(k_cache, spec)
    group = heads_q // max(heads, 1)
    out = q.new_zeros((batch, heads_q, q_len, v_cache.shape[-1]), dtype=precision)
    lse = q.new_zeros((batch, heads_q, q_len), dtype=precision)
    lengths = spec.cache_seqlens.tolist()
    for b in range(batch):
        for h in range(heads):
            tokens = _visited(spec, b, h, lengths[b])
            visible = _visible(q_len, lengths[b], tokens, spec)
            # nothing is known of keys that no query sees: their pages may be gone
            tokens = [t for t, seen in zip(tokens, visible.any(0).tolist(), strict=True) if seen]
            visible = _visible(q_len, lengths[b], tokens, spec).to(q.device)
            k = _rows(k_cache, spec, b, h, tokens, spec.k_scale, precision)
            v = _rows(v_cache, spec, b, h, tokens, spec.v_scale, precision)
            own = slice(h * group, (h + 1) * group)
            options = AttnSpec(
                spec.scale,
                softcap=spec.softcap,
                sinks=None if spec.sinks is None else spec.sinks[own],
            )
            own_out, own_lse = _attend(
                q[b : b + 1, own].to(precision), k[None, None], v[None, None], options, visible
            )
            out[b, own], lse[b, own] = own_out[0], own_lse[0]
    return out.to(q.dtype), lse.to(lse_dtype(q.dtype))


def _visited(spec: DecodeSpec, b: int, h: int, length: int) -> list[int]:
    """Positions of the keys that are there, in the order in which they are listed."""
    if spec.kv_blocks is None:
        return list(range(length))
    size = spec.kv_block_size
    blocks = [block for block in spec.kv_blocks[b, h].tolist() if block >= 0]
    positions = [block * size + i for block in blocks for i in range(size)]
    return [position for position in positions if position < length]


def _rows(
    cache: torch.Tensor,
    spec: DecodeSpec,
    b: int,
    h: int,
    tokens: list[int],
    scale: torch.Tensor | None,
    precision: torch.dtype,
) -> torch.Tensor:
    """The rows of `tokens`, [n, D], times their scale."""
    if spec.page_table is None:
        rows = [cache[b, h, t] for t in tokens]
    else:
        size = cache.shape[1]
        rows = [cache[int(spec.page_table[b, t // size]), t % size, h] for t in tokens]
    dense = torch.stack(rows) if rows else cache.new_empty((0, cache.shape[-1]))
    dense = dense.to(precision)
    if scale is not None:
        dense = dense * scale.reshape(-1)[h if scale.numel() > 1 else 0].to(precision)
    return dense


def _visible(q_len: int, length: int, tokens: list[int], spec: DecodeSpec) -> torch.Tensor:
    """bool [Sq, n]: query i is at position i + length - Sq and sees the band around it."""
    position = torch.arange(q_len)[:, None] + (length - q_len)
    key = torch.tensor(tokens, dtype=torch.int64)[None, :]
    visible = torch.ones(q_len, len(tokens), dtype=torch.bool)
    if spec.band.left is not None:
        visible &= key >= position - spec.band.left
    if spec.band.right is not None:
        visible &= key <= position + spec.band.right
    return visible
