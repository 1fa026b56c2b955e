"""Append to KV caches in plain PyTorch: the kernel's contract, on any device, without a sync."""

import torch

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
        _put(slots, outer, slot, live.flatten(), rows)


def _put(
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
