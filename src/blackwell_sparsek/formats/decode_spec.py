"""What a decode call asks for besides q and the caches: one object for every implementation."""

from typing import NamedTuple

import torch

from .band import EVERYTHING, Band


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
