"""A call with packed queries over a cache: its arguments, and what the choice depends on."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..core.arch import Arch, arch_of
from ..masks.band import EVERYTHING, Band
from .attention import tma_takes
from .decode import DecodeProblem


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """One call after validation and defaults, as every implementation takes it.

    Queries of all sequences lie end to end. Keys are a contiguous cache [B, Hkv, S, D], pages
    [pages, page_size, Hkv, D] with `page_table`, or, with `cu_seqlens_k`, packed [Tk, Hkv, D].
    """

    out: torch.Tensor
    """[Tq, Hq, Dv]: where the result goes; all of it is written."""
    lse: torch.Tensor
    """[Hq, Tq]: likewise."""
    q: torch.Tensor
    """[Tq, Hq, D]"""
    k: torch.Tensor
    v: torch.Tensor
    """As `k`, with Dv in place of D."""
    cu_seqlens_q: torch.Tensor
    """int32 [B + 1]: sequence b owns the queries `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]`."""
    max_q: int
    """At least the most queries of a sequence."""
    max_k: int
    """At least the most keys of a sequence."""
    scale: float
    seqlens_k: torch.Tensor | None = None
    """int32 [B]: keys of each sequence; None to use all keys of `cu_seqlens_k`."""
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    """int32 or int64 [B, max_pages]: where page p of a sequence lies."""
    slabs: torch.Tensor | None = None
    """int32 [B]: the row of a contiguous cache that holds a sequence; None if that is b."""
    seqused_q: torch.Tensor | None = None
    """int32 [B]: how many of its queries a sequence uses; None for all."""
    first_key: torch.Tensor | None = None
    """int32 [B]: keys before this one do not exist."""
    kv_blocks: torch.Tensor | None = None
    """int32 [B, Hkv, n]: blocks to read, -1 for none; the pages of a sequence are such blocks."""
    kv_block_size: int = 0
    """Tokens of a block of `kv_blocks`, 0 without."""
    band: Band = EVERYTHING
    chunk: int = 0
    """Positions of a chunk: a query sees only the keys of its own chunk; 0 is off."""
    top_left: bool = False
    """Whether query i sits at position i; otherwise the last query sits at the last key."""
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    """fp32 [Hq] or [B, Hq]"""
    k_scale: torch.Tensor | None = None
    """fp32, one element or [Hkv]: the factor of the keys of an fp8 cache."""
    v_scale: torch.Tensor | None = None
    batch_invariant: bool = False
    """Whether a sequence's bits must not depend on the other sequences."""

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return self.cu_seqlens_q.numel() - 1

    @property
    def page_size(self) -> int | None:
        """Tokens of a page, None without pages."""
        return None if self.page_table is None else self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        """KV heads, in any layout of the keys."""
        contiguous_or_packed = self.page_table is None
        return self.k.shape[1 if contiguous_or_packed else 2]

    @property
    def slots(self) -> int:
        """The most keys that the memory of a sequence can hold."""
        if self.page_table is not None:
            return self.page_table.shape[1] * self.k.shape[1]
        return self.k.shape[0 if self.cu_seqlens_k is not None else 2]

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        return min(self.slots, self.max_k)

    @cached_property
    def problem(self) -> "RaggedProblem":
        """The properties that the choice of an implementation and of tiles depends on."""
        return RaggedProblem(
            arch=arch_of(self.q.device),
            dtype=self.q.dtype,
            cache_dtype=self.k.dtype,
            batch=self.batch,
            tokens=self.q.shape[0],
            heads_q=self.q.shape[1],
            heads_kv=self.kv_heads,
            max_q=self.max_q,
            capacity=self.capacity,
            head_dim=self.q.shape[2],
            head_dim_v=self.v.shape[-1],
            page_size=self.page_size,
            block_size=None if self.kv_blocks is None else self.kv_block_size,
            packed=self.cu_seqlens_k is not None,
            batch_invariant=self.batch_invariant,
            alibi=self.alibi_slopes is not None,
            tma=tma_takes(self.k) and tma_takes(self.v),
            tma_q=tma_takes(self.q),
            positive=self.softcap > 0 or self.scale > 0,
            steps=self._decodes,
        )

    @property
    def _decodes(self) -> bool:
        """Whether sequences have at most one query, and options that decoding has too."""
        others = (self.cu_seqlens_k, self.seqused_q, self.first_key)
        listed = self.slabs is not None and self.kv_blocks is not None
        if any(x is not None for x in others) or listed:
            return False
        return self.max_q <= 1 and not (self.chunk or self.top_left or self.batch_invariant)


@dataclass(frozen=True)
class RaggedProblem:
    """One call without its data; the lengths are data too."""

    arch: Arch
    dtype: torch.dtype
    cache_dtype: torch.dtype
    batch: int
    tokens: int
    """Queries of all sequences."""
    heads_q: int
    heads_kv: int
    max_q: int
    capacity: int
    """The most keys of a sequence."""
    head_dim: int
    head_dim_v: int
    page_size: int | None
    """None without pages."""
    block_size: int | None
    """Tokens of a listed block, None when all keys are read."""
    packed: bool
    batch_invariant: bool
    alibi: bool = False
    tma: bool = False
    """Whether TMA can copy the caches: addresses and strides in steps of 16 bytes."""
    tma_q: bool = False
    """Likewise the queries."""
    positive: bool = True
    """Whether scores have a factor above zero; the sign of others goes into the queries."""
    steps: bool = False
    """Whether sequences have at most one query, and options that decoding has too."""

    @property
    def decoding(self) -> DecodeProblem:
        """The problem of decoding whose sequences are the queries of this one."""
        return DecodeProblem(
            arch=self.arch,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            batch=self.tokens,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            q_len=1,
            capacity=self.capacity,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            page_size=self.page_size,
            block_size=self.block_size,
            banded=False,
            softcap=False,
            sinks=False,
            tma=self.tma,
            alibi=self.alibi,
        )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads_q // max(self.heads_kv, 1)

    def __str__(self) -> str:
        keys = "packed" if self.packed else "contiguous"
        extras = [keys if self.page_size is None else f"pages of {self.page_size}"]
        if self.block_size is not None:
            extras.append(f"listed blocks of {self.block_size}")
        if self.batch_invariant:
            extras.append("batch-invariant")
        return (
            f"ragged queries on {self.arch}, {self.dtype}, keys {self.cache_dtype}, batch "
            f"{self.batch}, heads {self.heads_q}:{self.heads_kv}, {self.tokens} queries, up to "
            f"{self.max_q} of a sequence, keys up to {self.capacity}, head dim {self.head_dim}"
            f"/{self.head_dim_v}, {', '.join(extras)}"
        )
