"""Packed queries over a cache in plain PyTorch, with work proportional to the keys that are seen.

Sequences are handled one by one, QUERIES at a time: their lengths are read back to the host, and
the keys that these queries may see are gathered.
"""

import torch

from ..calls.attention import compute_dtype
from ..calls.ragged import RaggedCall
from ..decode.eager import alibi_bias, attend_sequence
from .lengths import Sequence, sequences

# Queries at a time: bounds the scores that are in memory, and skips keys outside of the band.
QUERIES = 128


def attention_ragged(call: RaggedCall) -> None:
    """Fill `out` [Tq, Hq, Dv] and `lse` [Hq, Tq]."""
    call.out.zero_()
    call.lse.fill_(-torch.inf)
    for sequence in sequences(call):
        for first in range(0, sequence.q_len, QUERIES):
            end = min(first + QUERIES, sequence.q_len)
            _attend_queries(call, sequence, first, end)


def _attend_queries(call: RaggedCall, sequence: Sequence, first: int, end: int) -> None:
    """The queries `[first, end)` of one sequence."""
    heads, device = call.kv_heads, call.q.device
    lo, hi = sequence.kv_range(call, first, end)
    if call.kv_blocks is None:
        kv_pos = torch.arange(lo, hi, device=device).expand(heads, -1)
    else:
        size = call.kv_block_size
        blocks = call.kv_blocks[sequence.number].long()
        kv_pos = (blocks[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
    exists = (kv_pos >= lo) & (kv_pos < hi)
    k, v = (_gather(x, call, sequence, kv_pos, exists) for x in (call.k, call.v))
    q_pos = torch.arange(first, end, device=device) + sequence.shift
    seen = _visible(call, q_pos[:, None], kv_pos[:, None, None, :]) & exists[:, None, None, :]
    rows = slice(sequence.first_row + first, sequence.first_row + end)
    queries = call.q[rows].transpose(0, 1)
    bias = alibi_bias(call, sequence.number, q_pos[:, None], kv_pos[:, None, None, :])
    out, lse = attend_sequence(queries, k, v, seen, call, bias)
    call.out[rows] = out.transpose(0, 1)
    call.lse[:, rows] = lse


def _gather(
    keys: torch.Tensor,
    call: RaggedCall,
    sequence: Sequence,
    kv_pos: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Rows [Hkv, n, D] at the positions of each head; 0 where not `wanted`."""
    heads = torch.arange(kv_pos.shape[0], device=keys.device)[:, None].expand_as(kv_pos)[wanted]
    at = kv_pos[wanted]
    if call.page_table is not None:
        size = keys.shape[1]
        rows = keys[call.page_table[sequence.number].long()[at // size], at % size, heads]
    elif call.cu_seqlens_k is not None:
        rows = keys[sequence.first_slot + at, heads]
    else:
        rows = keys[sequence.slab, heads, at]
    gathered = rows.new_zeros((*kv_pos.shape, keys.shape[-1]), dtype=compute_dtype(keys.dtype))
    gathered[wanted] = rows.to(gathered.dtype)
    return gathered


def _visible(call: RaggedCall, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
    """Which keys band and chunk leave to each query; the two broadcast."""
    left, right = call.band.scalars()
    visible = (kv_pos >= q_pos - left) & (kv_pos <= q_pos + right)
    if call.chunk:
        visible &= kv_pos // call.chunk == q_pos // call.chunk
    return visible
