"""Calls of sparse attention: tensors and options, and the `SparseAttnProblem` they pose."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ..core.arch import Arch, arch_of
from ..core.checks import message
from ..core.errors import InvalidInput
from ..masks.band import EVERYTHING, Band
from ..masks.key_selection import KeySelection
from ..masks.packed import check_cu_seqlens_values
from .attention import empty_lse, empty_out, tma_takes
from .decode import values_are_keys


class SparseAttnSpec(NamedTuple):
    """The options of one call, after validation and defaults.

    A query sees the keys that it selected and the keys of `local`, each once, if they are in
    `limit`.
    """

    scale: float
    selection: KeySelection
    limit: Band = EVERYTHING
    """The keys that `causal` leaves visible."""
    local: Band | None = None
    """The window of near keys, within `limit`; None without a window."""
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    """A factor of exp(score) for the keys of each entry, except keys of the window."""
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    page_table: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None

    @property
    def is_varlen(self) -> bool:
        """Whether sequences are packed along one token axis."""
        return self.cu_seqlens_q is not None

    @property
    def limit_right(self) -> int:
        """How many keys past its own position a query may see: `limit.right`, or UNBOUNDED."""
        _, right = self.limit.scalars()
        return right


class SparseAttnGradients(NamedTuple):
    """The tensors that receive the gradients of a call; None if a gradient is not needed."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dsinks: torch.Tensor | None
    dgate: torch.Tensor | None


@dataclass(frozen=True)
class SparseAttnProblem:
    """One call of sparse attention, forward or backward, without its data."""

    arch: Arch
    dtype: torch.dtype
    batch: int
    heads_q: int
    heads_kv: int
    lists: int
    """Lists of selected keys along the heads: 1, KV heads or query heads."""
    max_q: int
    max_k: int
    head_dim: int
    head_dim_v: int
    granularity: int
    most: int
    """Entries that a query may have."""
    varlen: bool
    page_size: int | None
    local: bool
    softcap: bool
    sinks: bool
    gate: bool
    tma: bool
    """Whether TMA can copy tiles of the keys and values."""
    latent: bool = False
    """Whether the values are a view of the first columns of the keys."""
    backward: bool = False

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        flags = ("varlen", "local", "softcap", "sinks", "gate")
        extras = [name for name in flags if getattr(self, name)]
        if self.page_size is not None:
            extras.append(f"pages of {self.page_size}")
        return (
            f"{direction} on {self.arch}, {self.dtype}, batch {self.batch}, heads {self.heads_q}:"
            f"{self.heads_kv}, queries {self.max_q}, keys {self.max_k}, head dim {self.head_dim}"
            f"/{self.head_dim_v}, {self.most} entries of {self.granularity} in {self.lists} lists"
            + (f", {', '.join(extras)}" if extras else "")
        )


@dataclass(eq=False)
class SparseAttentionCall:
    """One checked call, the argument of every implementation of the forward pass.

    q [B, Hq, Sq, D] with k, v [B, Hkv, Sk, D | Dv], or pages [pages, page_size, Hkv, D | Dv] where
    the spec has a page table; or all of them packed, [T, H, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: SparseAttnSpec
    out: torch.Tensor | None = None
    """Where the output goes, written completely; None for a new tensor."""

    def empty_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that output and lse are written to."""
        out = empty_out(self.q, self.v.shape[-1]) if self.out is None else self.out
        return out, empty_lse(self.q)

    @cached_property
    def problem(self) -> SparseAttnProblem:
        """The properties that the choice of an implementation and of tiles depends on."""
        q, spec = self.q, self.spec
        paged = spec.page_table is not None
        return SparseAttnProblem(
            arch=arch_of(q.device),
            dtype=q.dtype,
            batch=self.batch,
            heads_q=q.shape[1],
            heads_kv=self.kv_heads,
            lists=spec.selection.heads,
            max_q=spec.max_q,
            max_k=spec.max_k,
            head_dim=q.shape[-1],
            head_dim_v=self.v.shape[-1],
            granularity=spec.selection.granularity,
            most=spec.selection.most,
            varlen=spec.is_varlen,
            page_size=self.k.shape[1] if paged else None,
            local=spec.local is not None,
            softcap=spec.softcap != 0.0,
            sinks=spec.sinks is not None,
            gate=spec.gate is not None,
            tma=tma_takes(self.k) and tma_takes(self.v),
            latent=values_are_keys(self.k, self.v),
        )

    @property
    def batch(self) -> int:
        """Sequences."""
        offsets = self.spec.cu_seqlens_q
        return int(self.q.shape[0]) if offsets is None else offsets.numel() - 1

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return int(self.k.shape[1 if self.spec.page_table is None else 2])

    def check_values(self) -> None:
        """Check lengths, pages and entries, for implementations that read them on the host."""
        spec, op = self.spec, "sparse_attention"
        if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
            tokens_q, tokens_k = self.q.shape[0], self.k.shape[0]
            check_cu_seqlens_values(op, "cu_seqlens_q", spec.cu_seqlens_q, tokens_q, spec.max_q)
            check_cu_seqlens_values(op, "cu_seqlens_k", spec.cu_seqlens_k, tokens_k, spec.max_k)
        if spec.page_table is not None:
            _check_pages(op, self)
        spec.selection.validate()


def _check_pages(op: str, call: SparseAttentionCall) -> None:
    """Check that lengths fit into the pages, and that the pages of all tokens exist."""
    spec = call.spec
    assert spec.page_table is not None and spec.cache_seqlens is not None
    pages, page_size = call.k.shape[:2]
    table: list[list[int]] = spec.page_table.tolist()
    for b, length in enumerate(spec.cache_seqlens.tolist()):
        if not 0 <= length <= spec.max_k:
            arg, expected = f"cache_seqlens[{b}]", f"0 to {spec.max_k}, what the pages hold"
            raise InvalidInput(message(op, arg, "is out of range", expected, length))
        for i in range(-(-length // page_size)):
            if not 0 <= table[b][i] < pages:
                arg, expected = f"page_table[{b}, {i}]", f"0 to {pages - 1}"
                raise InvalidInput(message(op, arg, "is out of range", expected, table[b][i]))


@dataclass(eq=False)
class SparseBackwardCall:
    """The backward pass of a call; only the `gradients` that are not None are needed.

    `dout` and `dlse` are the gradients of `out` and `lse`; `dlse` is None if there is none.
    """

    forward: SparseAttentionCall
    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    gradients: SparseAttnGradients

    @cached_property
    def problem(self) -> SparseAttnProblem:
        """The properties that the choice of an implementation and of tiles depends on."""
        return replace(self.forward.problem, backward=True)
