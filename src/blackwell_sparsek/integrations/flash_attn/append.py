"""What `flash_attn_with_kvcache` does before it attends: new keys and values go into the cache."""

from typing import NamedTuple

import torch

from ...core.checks import message
from ...core.errors import InvalidInput
from ...kv_cache.append import kv_append
from ...kv_cache.slots import Rotary


def rows_of_table(pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a page table; one that does not exist has no pages."""
    exists = (rows >= 0) & (rows < pages.shape[0])
    return torch.where(exists[:, None], pages[torch.where(exists, rows, 0).long()], -1)


class TokenPlaces(NamedTuple):
    """Of packed tokens: the sequence, which of its tokens each is, whether there is a sequence."""

    sequence: torch.Tensor
    ordinal: torch.Tensor
    exists: torch.Tensor | None
    """None if each has one."""


def places_alike(batch: int, length: int, device: torch.device) -> TokenPlaces:
    """Places in sequences of one length."""
    token = torch.arange(batch * length, device=device)
    sequence = token // max(length, 1)
    return TokenPlaces(sequence, token - sequence * length, None)


def places_packed(offsets: torch.Tensor, tokens: int) -> TokenPlaces:
    """Places in sequences that begin at `offsets`."""
    token = torch.arange(tokens, dtype=offsets.dtype, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    exists = sequence < offsets.numel() - 1
    sequence = torch.where(exists, sequence, 0)
    return TokenPlaces(sequence, (token - offsets[sequence]).long(), exists)


def append_new(
    op: str,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[TokenPlaces, torch.Tensor, torch.Tensor | None],
    rotary: tuple[torch.Tensor | None, torch.Tensor | None, bool],
    tables: tuple[torch.Tensor | None, torch.Tensor | None],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    fused: bool,
) -> torch.Tensor | None:
    """Write packed k and v behind what the cache holds, rotated if asked.

    `numbers` are the places of k, the lengths of the cache, and those for the rotation. `fused`: q
    has the same places, and is returned rotated if it has the dtype of k; otherwise None is.
    """
    q, k_cache, v_cache, k, v = tensors
    new, lengths, rotary_lengths = numbers
    cos, sin, interleaved = rotary
    pages, rows = tables
    if (cos is None) != (sin is None):
        missing = "rotary_cos" if cos is None else "rotary_sin"
        expected = "both of rotary_cos and rotary_sin"
        raise InvalidInput(message(op, missing, "is missing", expected, None))
    slot = lengths.long()[new.sequence] + new.ordinal
    size = k_cache.shape[1]
    if pages is not None:
        ordinal = (slot // size).clamp(0, pages.shape[1] - 1)
        page = pages.long()[new.sequence, ordinal]
        room = slot < pages.shape[1] * size
    else:
        page, room = new.sequence if rows is None else rows.long()[new.sequence], slot < size
    # a slot that is not there is refused, on a GPU not written; -1 skips a token of no sequence
    missing_slot = k_cache.shape[0] * size
    there = room & (slot >= 0) & (page >= 0) & (page < k_cache.shape[0])
    slots = torch.where(there, page * size + slot % size, missing_slot)
    if new.exists is not None:
        slots = torch.where(new.exists, slots, -1)
    k_scale, v_scale = scales
    how = None if cos is None or sin is None else Rotary(cos, sin, interleaved)
    positions = None
    if how is not None:
        positions = slot
        if rotary_lengths is not None:
            positions = rotary_lengths.long()[new.sequence] + new.ordinal
    return kv_append(
        k_cache,
        v_cache,
        k,
        v,
        slot_mapping=slots,
        rotary=how,
        positions=positions,
        q=q if how is not None and fused and q.dtype == k.dtype else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )
