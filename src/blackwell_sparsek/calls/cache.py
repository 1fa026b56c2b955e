"""Calls on KV caches: their arguments, and what the choice of an implementation depends on."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..core.arch import Arch, arch_of
from .decode import values_are_keys


@dataclass(frozen=True)
class CacheProblem:
    """One call without its data: where it runs, the dtypes of its inputs and of the cache."""

    arch: Arch
    dtype: torch.dtype
    stored: torch.dtype
    paged: bool

    def __str__(self) -> str:
        cache = "pages" if self.paged else "a contiguous cache"
        return f"{cache} on {self.arch}, {self.dtype}, cache {self.stored}"


@dataclass(frozen=True, eq=False)
class AppendCall:
    """New keys and values, and where in the caches they go; see `bsk.kv_append`."""

    k_cache: torch.Tensor
    """[B, Hkv, S, D], or [pages, page_size, Hkv, D] with a page table."""
    v_cache: torch.Tensor
    k: torch.Tensor
    """[B, Hkv, T, D]"""
    v: torch.Tensor
    cache_seqlens: torch.Tensor
    """int32 [B]: tokens that each sequence holds before the call."""
    counts: torch.Tensor | None = None
    """int32 [B]: how many of the T tokens are appended."""
    page_table: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    """fp32, one element or [Hkv]: fp8 caches hold `k / k_scale`."""
    v_scale: torch.Tensor | None = None

    @cached_property
    def problem(self) -> CacheProblem:
        """The properties that the choice of an implementation depends on."""
        return _problem(self.k, self.k_cache, self.page_table)


@dataclass(frozen=True, eq=False)
class SlotsCall:
    """New keys and values of a packed batch, and the slots that they go to; see `bsk.kv_append`."""

    k_cache: torch.Tensor
    """[pages, page_size, Hkv, D]"""
    v_cache: torch.Tensor
    k: torch.Tensor
    """[T, Hkv, D]"""
    v: torch.Tensor
    slot_mapping: torch.Tensor
    """int32 or int64 [T]; -1 skips a token."""
    cos: torch.Tensor | None = None
    """[positions, R / 2]: rotates the first R numbers of keys and queries."""
    sin: torch.Tensor | None = None
    interleaved: bool = False
    """Whether neighbours are rotated together; otherwise number i and number i + R / 2."""
    positions: torch.Tensor | None = None
    """int32 or int64 [T]"""
    q: torch.Tensor | None = None
    """[T, Hq, D]"""
    q_out: torch.Tensor | None = None
    """Where the rotated queries go."""
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @cached_property
    def problem(self) -> CacheProblem:
        """The properties that the choice of an implementation depends on."""
        return CacheProblem(arch_of(self.k.device), self.k.dtype, self.k_cache.dtype, True)


def keys_hold_values(call: AppendCall | SlotsCall) -> bool:
    """Whether writing the keys writes the values too, as in a latent cache."""
    return values_are_keys(call.k_cache, call.v_cache) and values_are_keys(call.k, call.v)


@dataclass(frozen=True, eq=False)
class SummariesCall:
    """Keys to be summarised page by page, and where the summaries go; see `bsk.page_summaries`."""

    low: torch.Tensor
    """[pages, Hkv, D], or [B, blocks, Hkv, D] for a contiguous cache; the mean without `high`."""
    high: torch.Tensor | None
    k_cache: torch.Tensor
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor | None
    page_size: int
    new_tokens: int | None
    """Summarise only pages that hold the last `new_tokens` tokens of a sequence; None for all."""

    @cached_property
    def problem(self) -> CacheProblem:
        """The properties that the choice of an implementation depends on."""
        return _problem(self.low, self.k_cache, self.page_table)


@dataclass(frozen=True, eq=False)
class TopkCall:
    """Queries, and the summaries of the pages to choose from; see `bsk.topk_pages`."""

    q: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor | None
    page_size: int
    k: int
    keep_first: int
    keep_last: int
    reduce: str
    """`max` or `sum`, over the queries that share a KV head."""

    @cached_property
    def problem(self) -> CacheProblem:
        """The properties that the choice of an implementation depends on."""
        return _problem(self.q, self.low, self.page_table)


def _problem(x: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor | None) -> CacheProblem:
    return CacheProblem(arch_of(x.device), x.dtype, cache.dtype, page_table is not None)
