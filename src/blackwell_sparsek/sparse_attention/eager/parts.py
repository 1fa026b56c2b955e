"""The parts of a call: one sequence, and query heads that share a KV head and a list of keys."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...calls.attention import compute_dtype
from ...calls.sparse_attention import SparseAttentionCall


@dataclass
class Part:
    """Query heads of one sequence that share a KV head and a list; P of them, T queries."""

    call: SparseAttentionCall
    sequence: int
    tokens: slice
    """Its queries among packed ones; all of them if they are dense."""
    heads: slice
    kv_head: int
    list_head: int
    kv_first: int
    kv_len: int
    q_len: int

    @property
    def dtype(self) -> torch.dtype:
        """The precision of sums."""
        return compute_dtype(self.call.q.dtype)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This part [T, P, D] of a tensor laid out as q."""
        if self.call.spec.is_varlen:
            return x[self.tokens, self.heads]
        return x[self.sequence, self.heads].transpose(0, 1)

    def own_lse(self, x: torch.Tensor) -> torch.Tensor:
        """This part [T, P] of a tensor laid out as lse."""
        if self.call.spec.is_varlen:
            return x[self.heads, self.tokens].T
        return x[self.sequence, self.heads].T

    def lists(self, x: torch.Tensor) -> torch.Tensor:
        """This part [T, ...] of a tensor laid out as the lists of keys."""
        row = 0 if x.shape[0] == 1 else self.sequence
        return x[row, self.list_head, self.tokens]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values [Sk, D] of this part, without pages."""
        if self.call.spec.is_varlen:
            return x[self.kv_first : self.kv_first + self.kv_len, self.kv_head]
        return x[self.sequence, self.kv_head]

    def gather(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys or values [..., D] at positions within the sequence."""
        spec = self.call.spec
        if spec.page_table is None:
            return self.keys(x)[positions]
        size = x.shape[1]
        pages = spec.page_table[self.sequence].long()[positions // size]
        return x[pages, positions % size, self.kv_head]

    def positions(self) -> torch.Tensor:
        """Position of each query among the keys, int64 [T]."""
        device = self.call.q.device
        return torch.arange(self.q_len, device=device) + (self.kv_len - self.q_len)


def parts_of(call: SparseAttentionCall) -> Iterator[Part]:
    """All parts that have queries."""
    spec, heads_q = call.spec, call.q.shape[1]
    if not heads_q:
        return
    group, per_list = heads_q // call.kv_heads, heads_q // spec.selection.heads
    pack = min(group, per_list)
    for b in range(call.batch):
        tokens, kv_first = slice(None), 0
        q_len, kv_len = spec.max_q, spec.max_k
        if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
            first, end = spec.cu_seqlens_q[b : b + 2].tolist()
            kv_first, kv_end = spec.cu_seqlens_k[b : b + 2].tolist()
            tokens, q_len, kv_len = slice(first, end), end - first, kv_end - kv_first
        elif spec.cache_seqlens is not None:
            kv_len = int(spec.cache_seqlens[b])
        if not q_len:
            continue
        for head in range(0, heads_q, pack):
            yield Part(
                call,
                b,
                tokens,
                slice(head, head + pack),
                head // group,
                head // per_list,
                kv_first,
                kv_len,
                q_len,
            )
