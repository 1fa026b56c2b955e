"""Packed queries over a cache as a formula: each sequence's keys are gathered, then attended to.

    s[i, j] = softcap(scale * q[i] . k[j]) - slope * |p_i - j|      where query i sees key j

Query by query and key by key in fp64, one sequence and one KV head at a time; a block that is
listed twice counts twice. Queries that no sequence uses see nothing: output 0, lse -inf.
"""

import torch

from ..calls.attention import AttnSpec, lse_dtype
from ..calls.ragged import RaggedCall
from .attention import _attend
from .decode import listed_positions


def attention_ragged(
    call: RaggedCall, precision: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Tq, Hq, Dv] and lse [Hq, Tq]."""
    q = call.q
    tokens, heads_q, _ = q.shape
    group = heads_q // max(call.kv_heads, 1)
    out = q.new_zeros((tokens, heads_q, call.v.shape[-1]), dtype=precision)
    lse = q.new_full((heads_q, tokens), -torch.inf, dtype=precision)
    offsets = call.cu_seqlens_q.tolist()
    for b in range(call.batch):
        q_len = offsets[b + 1] - offsets[b]
        if call.seqused_q is not None:
            q_len = int(call.seqused_q[b])
        rows = slice(offsets[b], offsets[b] + q_len)
        length = _length(call, b)
        position = [i if call.top_left else i + length - q_len for i in range(q_len)]
        for h in range(call.kv_heads):
            listed = listed_positions(call, b, h, length)
            visible = _visible(call, b, position, listed, length)
            # keys that no query sees must not be read: their pages may be gone
            keys = [t for t, seen in zip(listed, visible.any(0).tolist(), strict=True) if seen]
            visible = _visible(call, b, position, keys, length).to(q.device)
            k = _rows(call.k, call, b, h, keys, call.k_scale, precision)
            v = _rows(call.v, call, b, h, keys, call.v_scale, precision)
            own = slice(h * group, (h + 1) * group)
            options = AttnSpec(
                call.scale,
                softcap=call.softcap,
                sinks=None if call.sinks is None else call.sinks[own],
            )
            queries = q[rows, own].to(precision).transpose(0, 1)[None]
            bias = _alibi(call, b, own, position, keys, precision)
            own_out, own_lse = _attend(
                queries, k[None, None], v[None, None], options, visible, bias
            )
            out[rows, own], lse[own, rows] = own_out[0].transpose(0, 1), own_lse[0]
    return out.to(q.dtype), lse.to(lse_dtype(q.dtype))


def _length(call: RaggedCall, b: int) -> int:
    if call.seqlens_k is not None:
        return int(call.seqlens_k[b])
    assert call.cu_seqlens_k is not None
    return int(call.cu_seqlens_k[b + 1] - call.cu_seqlens_k[b])


def _visible(
    call: RaggedCall, b: int, positions: list[int], keys: list[int], length: int
) -> torch.Tensor:
    """bool [queries, keys]."""
    position = torch.tensor(positions, dtype=torch.int64)[:, None]
    key = torch.tensor(keys, dtype=torch.int64)[None, :]
    visible = (key < length).expand(len(positions), -1).clone()
    if call.first_key is not None:
        visible &= key >= int(call.first_key[b])
    if call.band.left is not None:
        visible &= key >= position - call.band.left
    if call.band.right is not None:
        visible &= key <= position + call.band.right
    if call.chunk:
        visible &= key.div(call.chunk, rounding_mode="floor") == position.div(
            call.chunk, rounding_mode="floor"
        )
    return visible


def _alibi(
    call: RaggedCall,
    b: int,
    heads: slice,
    positions: list[int],
    keys: list[int],
    precision: torch.dtype,
) -> torch.Tensor | None:
    """The terms added to the scores, [1, heads, queries, keys]."""
    if call.alibi_slopes is None:
        return None
    slopes = call.alibi_slopes if call.alibi_slopes.dim() == 1 else call.alibi_slopes[b]
    position = torch.tensor(positions, dtype=precision, device=slopes.device)[:, None]
    key = torch.tensor(keys, dtype=precision, device=slopes.device)[None, :]
    return -slopes[heads].to(precision)[None, :, None, None] * (position - key).abs()


def _rows(
    cache: torch.Tensor,
    call: RaggedCall,
    b: int,
    h: int,
    keys: list[int],
    scale: torch.Tensor | None,
    precision: torch.dtype,
) -> torch.Tensor:
    """The rows of `keys`, [n, D], times their scale."""
    if call.page_table is not None:
        size = cache.shape[1]
        rows = [cache[int(call.page_table[b, t // size]), t % size, h] for t in keys]
    elif call.cu_seqlens_k is not None:
        start = int(call.cu_seqlens_k[b])
        rows = [cache[start + t, h] for t in keys]
    else:
        slab = b if call.slabs is None else int(call.slabs[b])
        rows = [cache[slab, h, t] for t in keys]
    dense = torch.stack(rows) if rows else cache.new_empty((0, cache.shape[-1]))
    dense = dense.to(precision)
    if scale is not None:
        dense = dense * scale.reshape(-1)[h if scale.numel() > 1 else 0].to(precision)
    return dense
