"""A decode call: its arguments, and what the choice of an implementation depends on."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..core.arch import Arch, arch_of
from ..masks.band import EVERYTHING, Band
from .attention import empty_lse, empty_out, tma_takes


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """One decode call after validation and defaults, as every implementation takes it.

    Without `page_table` the caches are contiguous, [B, Hkv, S, D]; with it they are pages,
    [pages, page_size, Hkv, D].
    """

    q: torch.Tensor
    """[B, Hq, Sq, D]"""
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    """As `k_cache`, with Dv in place of D."""
    cache_seqlens: torch.Tensor
    """int32 [B]: keys of each sequence, including those at the positions of the queries."""
    scale: float
    page_table: torch.Tensor | None = None
    """int32 [B, max_pages]: the indices of the pages of each sequence, in order."""
    kv_blocks: torch.Tensor | None = None
    """int32 [B, Hkv, n]: blocks to read, -1 for none; the pages of a sequence are such blocks."""
    kv_block_size: int = 0
    """Tokens of a block of `kv_blocks`, 0 without."""
    band: Band = EVERYTHING
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    """fp32, one element or [Hkv]: the factor of the keys of an fp8 cache."""
    v_scale: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    """fp32 [Hq] or [B, Hq]"""
    out: torch.Tensor | None = None
    """[B, Hq, Sq, Dv]: the tensor for the result, written completely; None for a new one."""

    def empty_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that output and lse are written to."""
        out = empty_out(self.q, self.v_cache.shape[-1]) if self.out is None else self.out
        return out, empty_lse(self.q)

    @property
    def page_size(self) -> int | None:
        """Tokens of a page, None for a contiguous cache."""
        return None if self.page_table is None else self.k_cache.shape[1]

    @property
    def kv_heads(self) -> int:
        """KV heads of a cache of either layout."""
        return self.k_cache.shape[1 if self.page_table is None else 2]

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence can have."""
        if self.page_table is None:
            return self.k_cache.shape[2]
        return self.page_table.shape[1] * self.k_cache.shape[1]

    @cached_property
    def problem(self) -> "DecodeProblem":
        """The properties that the choice of an implementation and of tiles depends on."""
        return DecodeProblem(
            arch=arch_of(self.q.device),
            dtype=self.q.dtype,
            cache_dtype=self.k_cache.dtype,
            batch=self.q.shape[0],
            heads_q=self.q.shape[1],
            heads_kv=self.kv_heads,
            q_len=self.q.shape[2],
            capacity=self.capacity,
            head_dim=self.q.shape[3],
            head_dim_v=self.v_cache.shape[3],
            page_size=self.page_size,
            block_size=None if self.kv_blocks is None else self.kv_block_size,
            banded=self.band != (None, None),
            softcap=self.softcap != 0.0,
            sinks=self.sinks is not None,
            tma=tma_takes(self.k_cache) and tma_takes(self.v_cache),
            latent=values_are_keys(self.k_cache, self.v_cache),
            alibi=self.alibi_slopes is not None,
        )


def values_are_keys(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the values are a view of the first columns of the keys, and there are fewer."""
    if k_cache.is_meta or not values_lie_as_in_keys(k_cache, v_cache):
        return False
    return k_cache.data_ptr() == v_cache.data_ptr()


def values_lie_as_in_keys(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the values have the dtype and strides of such a view, at whatever address."""
    if k_cache.dtype != v_cache.dtype or k_cache.stride() != v_cache.stride():
        return False
    return v_cache.shape[-1] < k_cache.shape[-1]


@dataclass(frozen=True)
class DecodeProblem:
    """One decode call without its data; the lengths are data too."""

    arch: Arch
    dtype: torch.dtype
    cache_dtype: torch.dtype
    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    capacity: int
    """The most keys of a sequence."""
    head_dim: int
    head_dim_v: int
    page_size: int | None
    """None for a contiguous cache."""
    block_size: int | None
    """Tokens of a listed block, None when all keys are read."""
    banded: bool
    softcap: bool
    sinks: bool
    tma: bool = False
    """Whether TMA can copy the caches: addresses and strides in steps of 16 bytes."""
    latent: bool = False
    """Whether the values are a view of the first columns of the keys."""
    alibi: bool = False

    @property
    def rows(self) -> int:
        """Rows that share a KV head: the queries of all its query heads."""
        return self.q_len * self.heads_q // max(self.heads_kv, 1)

    def __str__(self) -> str:
        extras = ["causal or window"] if self.banded else []
        extras += [name for name in ("softcap", "sinks", "alibi") if getattr(self, name)]
        if self.page_size is not None:
            extras.append(f"pages of {self.page_size}")
        if self.block_size is not None:
            extras.append(f"listed blocks of {self.block_size}")
        return (
            f"decode on {self.arch}, {self.dtype}, cache {self.cache_dtype}, batch {self.batch}, "
            f"heads {self.heads_q}:{self.heads_kv}, queries {self.q_len}, keys up to "
            f"{self.capacity}, head dim {self.head_dim}/{self.head_dim_v}"
            + (f", {', '.join(extras)}" if extras else "")
        )
