"""What is kept of the keys of each page to tell which pages a query needs."""

from typing import NamedTuple

import torch

from .kv_layout import FP8

KINDS = ("minmax", "mean")


class PageSummaries(NamedTuple):
    """Per channel, the smallest and largest key of each page; both the mean for kind "mean".

    `low`, `high`: `[pages, Hkv, D]`, or `[B, blocks, Hkv, D]` for a contiguous cache that is cut
    into blocks of `page_size` tokens. dtype of the cache; for fp8 caches, bf16 with the stored
    numbers, which are the keys divided by their scale.
    """

    low: torch.Tensor
    high: torch.Tensor
    page_size: int

    @property
    def kind(self) -> str:
        """`minmax` or `mean`."""
        return "mean" if self.low is self.high else "minmax"

    @property
    def paged(self) -> bool:
        """Whether a page table says which pages belong to which sequence."""
        return self.low.dim() == 3


def empty_summaries(
    k_cache: torch.Tensor, kind: str, page_size: int, *, paged: bool
) -> PageSummaries:
    """Summaries for all pages of a cache; 0 until they are made."""
    dtype = torch.bfloat16 if k_cache.dtype == FP8 else k_cache.dtype
    if paged:
        shape = (k_cache.shape[0], k_cache.shape[2], k_cache.shape[3])
    else:
        batch, heads, tokens, head_dim = k_cache.shape
        shape = (batch, -(-tokens // page_size), heads, head_dim)  # type: ignore[assignment]
    low = torch.zeros(shape, dtype=dtype, device=k_cache.device)
    return PageSummaries(low, low if kind == "mean" else torch.zeros_like(low), page_size)
