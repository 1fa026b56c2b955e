"""KV caches for tests: inputs of an append, and its expected result slot by slot."""

from typing import NamedTuple

import torch

from . import inputs
from .poison import poison_


class AppendCase(NamedTuple):
    """One append: poisoned caches, new tokens, lengths, tables."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache_seqlens: torch.Tensor
    counts: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def copy(self) -> "AppendCase":
        """The same case with copies of the caches, in the same layout."""
        return self._replace(k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())


def append_case(
    lengths: list[int],
    tokens: int,
    *,
    capacity: int = 0,
    heads: int = 2,
    dims: tuple[int, int] = (16, 16),
    counts: list[int] | None = None,
    page_size: int | None = None,
    spare_pages: int = 3,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    scales: tuple[float, float] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AppendCase:
    """Random tokens for sequences of `lengths`; pages are shuffled."""
    batch = len(lengths)
    capacity = capacity or max(lengths) + tokens
    k, v = (
        inputs.normal(batch, heads, tokens, d, seed=seed + i, dtype=dtype, device=device, scale=3.0)
        for i, d in enumerate(dims)
    )
    table = None
    if page_size is None:
        shapes = [(batch, heads, capacity, d) for d in dims]
    else:
        width = -(-capacity // page_size)
        pages = batch * width + spare_pages
        shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        table = shuffled[: batch * width].view(batch, width).int().to(device)
        shapes = [(pages, page_size, heads, d) for d in dims]
    k_cache, v_cache = (torch.empty(s, dtype=stored or dtype, device=device) for s in shapes)
    per_head = None
    if scales is not None:
        per_head = [s * (1 + torch.arange(heads, device=device).float()) for s in scales]
    return AppendCase(
        poison_(k_cache),
        poison_(v_cache),
        k,
        v,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        None if counts is None else torch.tensor(counts, dtype=torch.int32, device=device),
        table,
        *(per_head or (None, None)),
    )


def appended(case: AppendCase) -> tuple[torch.Tensor, torch.Tensor]:
    """What the caches must hold afterwards, written slot by slot in the dtype of the caches."""
    caches = [x.cpu().clone() for x in (case.k_cache, case.v_cache)]
    lengths = case.cache_seqlens.tolist()
    tokens = case.k.shape[2]
    counts = [tokens] * len(lengths) if case.counts is None else case.counts.tolist()
    table = None if case.page_table is None else case.page_table.tolist()
    new = ((case.k, case.k_scale), (case.v, case.v_scale))
    for cache, (x, scale) in zip(caches, new, strict=True):
        rows = x.cpu()
        if cache.dtype == torch.float8_e4m3fn:
            factor = torch.ones(1) if scale is None else 1 / scale.cpu()
            rows = (rows.float() * factor.view(-1, 1, 1)).clamp(-448, 448)
            rows = torch.where(rows.isnan(), torch.nan, rows).to(cache.dtype)
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            for t in range(min(count, tokens)):
                place = _place(cache, b, length + t, table) if length >= 0 else None
                if place is not None:
                    place.copy_(rows[b, :, t])
    return caches[0], caches[1]


def _place(
    cache: torch.Tensor, b: int, slot: int, table: list[list[int]] | None
) -> torch.Tensor | None:
    """The rows [Hkv, D] of one slot, or None if the slot does not exist."""
    if table is None:
        return cache[b, :, slot] if slot < cache.shape[2] else None
    pages, page_size = cache.shape[:2]
    ordinal = slot // page_size
    if ordinal >= len(table[b]) or not 0 <= table[b][ordinal] < pages:
        return None
    return cache[table[b][ordinal], slot % page_size]


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless both are equal bit by bit, NaN included."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[expected.element_size()]
    got, expected = (x.cpu().contiguous().view(kind) for x in (got, expected))
    different = got != expected
    if different.any():
        first = different.nonzero()[0].tolist()
        raise AssertionError(f"{int(different.sum())} elements differ, the first at {first}")
