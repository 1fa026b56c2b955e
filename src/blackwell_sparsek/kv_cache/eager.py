"""Summaries of pages and the choice of pages in plain PyTorch; nothing waits for the device."""

import torch

from .layout import FP8, PageSummaries

# Append to KV caches in plain PyTorch: the kernel's contract, on any device, without a sync.

E4M3_MAX = 448.0


def kv_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    counts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write k and v behind `cache_seqlens`; slots that do not exist are not written."""
    batch, tokens = k.shape[0], k.shape[2]
    if k.numel() == 0 and v.numel() == 0:
        return
    token = torch.arange(tokens, device=k.device)
    first = cache_seqlens.long().unsqueeze(1)
    slot = first + token
    live = (first >= 0).expand_as(slot)
    if counts is not None:
        live = live & (token < counts.unsqueeze(1))
    if page_table is None:
        k_slots, v_slots = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        outer = torch.arange(batch, device=k.device).unsqueeze(1).expand_as(slot)
    else:
        k_slots, v_slots = k_cache, v_cache
        page_size = k_cache.shape[1]
        ordinal, slot = slot // page_size, slot % page_size
        live = live & (ordinal < page_table.shape[1])
        if page_table.shape[1] == 0:
            return
        outer = page_table.long().gather(1, ordinal.clamp(0, page_table.shape[1] - 1))
    live = live & (outer >= 0) & (outer < k_slots.shape[0]) & (slot < k_slots.shape[1])
    if k_slots.shape[0] == 0 or k_slots.shape[1] == 0:
        return
    outer = outer.clamp(0, k_slots.shape[0] - 1).flatten()
    slot = slot.clamp(0, k_slots.shape[1] - 1).flatten()
    for slots, new, scale in ((k_slots, k, k_scale), (v_slots, v, v_scale)):
        rows = _stored(new, scale, slots.dtype).transpose(1, 2).flatten(0, 1)
        if slots.dtype == torch.float8_e4m3fn:
            slots = slots.view(torch.uint8)
        _put_tokens(slots, outer, slot, live.flatten(), rows)


def _put_tokens(
    slots: torch.Tensor,
    outer: torch.Tensor,
    slot: torch.Tensor,
    live: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """`slots[outer, slot] = rows` where `live`.

    Selecting the live rows would wait for the device. Instead the others repeat a write that is
    made anyway: that of the first live row, or of an old value where no row is live.
    """
    anchor = live.int().argmax(keepdim=True)
    to_outer, to_slot = outer[anchor], slot[anchor]
    kept = torch.where(live[anchor].view(1, 1, 1), rows[anchor], slots[to_outer, to_slot])
    at = (torch.where(live, outer, to_outer), torch.where(live, slot, to_slot))
    slots.index_put_(at, torch.where(live.view(-1, 1, 1), rows, kept))


def _stored(new: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Values as a cache of `dtype` holds them; fp8 as uint8, saturated at 448."""
    if dtype != torch.float8_e4m3fn:
        return new
    x = new.float()
    if scale is not None:
        x = x * scale.float().reciprocal().view(1, -1, 1, 1)
    # converted by an instruction of the GPU, NaN has no sign
    x = torch.where(x.isnan(), torch.nan, x.clamp(-E4M3_MAX, E4M3_MAX))
    return x.to(dtype).view(torch.uint8)


def page_summaries(
    low: torch.Tensor,
    high: torch.Tensor | None,
    k_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    page_size: int,
    new_tokens: int | None,
) -> None:
    """Write the summaries of the pages that hold the last `new_tokens` tokens, None for all."""
    if page_table is None:
        batch, heads, tokens, dim = k_cache.shape
        columns = low.shape[1]
        keys = k_cache.view(torch.uint8) if k_cache.dtype == FP8 else k_cache
        keys = torch.nn.functional.pad(keys, (0, 0, 0, columns * page_size - tokens))
        keys = keys.view(batch, heads, columns, page_size, dim).permute(0, 2, 3, 1, 4)
        keys = keys.view(FP8) if k_cache.dtype == FP8 else keys
        exists = torch.ones((), dtype=torch.bool, device=low.device)
        capacity = tokens
    else:
        columns = page_table.shape[1]
        exists = (page_table >= 0) & (page_table < k_cache.shape[0])
        keys = k_cache[page_table.clamp(0, k_cache.shape[0] - 1).long()]
        capacity = columns * page_size
    if columns == 0 or keys.numel() == 0:
        return
    length = cache_seqlens.clamp(0, capacity).long().view(-1, 1)
    page = torch.arange(columns, device=low.device)
    first = 0 if new_tokens is None else (length - new_tokens).clamp(min=0) // page_size
    live = exists & (page >= first) & (page * page_size < length)
    token = page.unsqueeze(1) * page_size + torch.arange(page_size, device=low.device)
    there = (token < length.unsqueeze(2)).view(-1, columns, page_size, 1, 1)
    keys = keys.float() if low.dtype != torch.float64 else keys
    if high is None:
        total = keys.masked_fill(~there, 0).sum(2)
        made = [(low, total / there.sum(2).clamp(min=1))]
    else:
        made = [
            (low, keys.masked_fill(~there, torch.inf).amin(2)),
            (high, keys.masked_fill(~there, -torch.inf).amax(2)),
        ]
    for summary, values in made:
        _put_rows(summary, values.to(summary.dtype), page_table, live)


def _put_rows(
    summary: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor | None,
    live: torch.Tensor,
) -> None:
    """Write `values` [B, columns, H, D] where `live`."""
    if page_table is None:
        summary.copy_(torch.where(live.view(*live.shape, 1, 1), values, summary))
        return
    # what is not live repeats a write that is made anyway; see eager/kv_append.py
    flat, pages = live.flatten(), page_table.long().clamp(0, summary.shape[0] - 1).flatten()
    anchor = flat.int().argmax(keepdim=True)
    rows, to = values.flatten(0, 1), pages[anchor]
    kept = torch.where(flat[anchor].view(1, 1, 1), rows[anchor], summary[to])
    at = torch.where(flat, pages, to)
    summary.index_put_((at,), torch.where(flat.view(-1, 1, 1), rows, kept))


def topk_pages(
    q: torch.Tensor,
    summaries: PageSummaries,
    k: int,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    keep_first: int,
    keep_last: int,
    reduce: str,
) -> torch.Tensor:
    """Ordinals [B, Hkv, k] of the best pages in ascending order, then -1."""
    low, high, page_size = summaries
    heads = low.shape[-2]
    columns = low.shape[1] if page_table is None else page_table.shape[1]
    out = torch.full((q.shape[0], heads, k), -1, dtype=torch.int32, device=q.device)
    if out.numel() == 0 or columns == 0 or q.shape[2] == 0:
        return out
    exists = torch.ones((), dtype=torch.bool, device=q.device)
    if page_table is not None:
        exists = ((page_table >= 0) & (page_table < low.shape[0])).unsqueeze(1)
        at = page_table.long().clamp(0, low.shape[0] - 1)
        low, high = low[at], high[at]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = q.to(dtype).reshape(q.shape[0], heads, -1, q.shape[-1])
    scores = rows.clamp(min=0) @ high.to(dtype).permute(0, 2, 3, 1)
    scores += rows.clamp(max=0) @ low.to(dtype).permute(0, 2, 3, 1)
    scores = scores.sum(2) if reduce == "sum" else scores.amax(2)
    scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf).masked_fill(~exists, -torch.inf)

    count = ((cache_seqlens.long().clamp(min=0) + page_size - 1) // page_size).clamp(max=columns)
    count = count.view(-1, 1, 1)
    page = torch.arange(columns, device=q.device)
    kept = (page < keep_first) | (page >= count - keep_last)
    # stable sorts by the lesser keys first: ordinal, score, kept before others, absent ones last
    order = scores.argsort(dim=-1, descending=True, stable=True)
    group = torch.where(page < count, (~kept).int(), 2).expand_as(scores).gather(-1, order)
    order = order.gather(-1, group.argsort(dim=-1, stable=True))
    best = order[..., :k]
    chosen = torch.arange(best.shape[-1], device=q.device) < count
    best = torch.where(chosen, best, columns).sort(dim=-1).values
    out[..., : best.shape[-1]] = torch.where(best < columns, best, -1)
    return out
