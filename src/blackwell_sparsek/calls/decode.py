"""The facts about a decode call that the choice of an implementation may depend on."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.arch import Arch, arch_of
from ..masks.band import EVERYTHING, Band
from .attention import tma_takes

# What a decode call asks for besides q and the caches: one object for every implementation.


class DecodeSpec(NamedTuple):
    """The options of one decode call, after validation and defaults.

    Without `page_table` caches are contiguous, [B, Hkv, S, D]; with it they are pages,
    [pages, page_size, Hkv, D].
    """

    scale: float
    cache_seqlens: torch.Tensor
    """int32 [B]: keys of each sequence, those of the queries included."""
    page_table: torch.Tensor | None = None
    """int32 [B, max_pages]: where page p of a sequence lies."""
    kv_blocks: torch.Tensor | None = None
    """int32 [B, Hkv, n]: blocks to read, -1 for none; the pages of a sequence are such blocks."""
    kv_block_size: int = 0
    """Tokens of a block of `kv_blocks`, 0 without."""
    band: Band = EVERYTHING
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    """fp32, one element or [Hkv]: what keys of an fp8 cache are multiplied with."""
    v_scale: torch.Tensor | None = None


def page_size(k_cache: torch.Tensor, spec: DecodeSpec) -> int | None:
    """Tokens of a page, None for a contiguous cache."""
    return None if spec.page_table is None else k_cache.shape[1]


def kv_heads(k_cache: torch.Tensor, spec: DecodeSpec) -> int:
    """KV heads of a cache of either layout."""
    return k_cache.shape[1 if spec.page_table is None else 2]


def capacity(k_cache: torch.Tensor, spec: DecodeSpec) -> int:
    """The most tokens that a sequence can have."""
    if spec.page_table is None:
        return k_cache.shape[2]
    return spec.page_table.shape[1] * k_cache.shape[1]


@dataclass(frozen=True)
class DecodeProblem:
    """One decode call without its data; lengths are data."""

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

    @classmethod
    def of(
        cls, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spec: DecodeSpec
    ) -> "DecodeProblem":
        """Describe a call."""
        return cls(
            arch=arch_of(q.device),
            dtype=q.dtype,
            cache_dtype=k_cache.dtype,
            batch=q.shape[0],
            heads_q=q.shape[1],
            heads_kv=kv_heads(k_cache, spec),
            q_len=q.shape[2],
            capacity=capacity(k_cache, spec),
            head_dim=q.shape[3],
            head_dim_v=v_cache.shape[3],
            page_size=page_size(k_cache, spec),
            block_size=None if spec.kv_blocks is None else spec.kv_block_size,
            banded=spec.band != (None, None),
            softcap=spec.softcap != 0.0,
            sinks=spec.sinks is not None,
            tma=tma_takes(k_cache) and tma_takes(v_cache),
        )

    @property
    def rows(self) -> int:
        """Rows that share a KV head: the queries of all its query heads."""
        return self.q_len * self.heads_q // max(self.heads_kv, 1)

    def __str__(self) -> str:
        extras = [name for name in ("banded", "softcap", "sinks") if getattr(self, name)]
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
