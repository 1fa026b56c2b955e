"""The first step of `flash_attn_with_kvcache`: append new keys and values to the cache."""

from typing import Any, NamedTuple

import torch

from ...core.checks import check_rank, check_shape, check_tensor, message
from ...core.errors import InvalidInput
from ...decode.inputs import check_indices
from ...kv_cache.append import kv_append
from ...kv_cache.layout import INDICES
from ...kv_cache.slots import Rotary
from ...masks.packed import check_cu_seqlens, check_cu_seqlens_values
from ...ragged.inputs import checked_maximum


def lengths_of(
    op: str,
    given: int | torch.Tensor | None,
    batch: int,
    device: torch.device,
    k_cache: torch.Tensor,
    pages: torch.Tensor | None,
    k: torch.Tensor | None,
) -> torch.Tensor:
    """Lengths [B] of the sequences in a cache before new keys `k`; without any, it is full."""
    if isinstance(given, torch.Tensor):
        return given
    most = k_cache.shape[1]
    if pages is not None:
        check_rank(op, "block_table/page_table", pages, "[B, max_pages]")
        most *= pages.shape[1]
    if given is None:
        if k is not None:
            expected = "an int or int32 [B] where k and v are appended"
            raise InvalidInput(message(op, "cache_seqlens", "is missing", expected, None))
        given = most
    if checked_maximum(op, "cache_seqlens", given) > most:
        expected = f"at most {most}, what the cache holds"
        raise InvalidInput(message(op, "cache_seqlens", "is out of range", expected, given))
    return torch.full((batch,), given, dtype=torch.int32, device=device)


def check_numbers(
    op: str,
    q: torch.Tensor,
    batch: int,
    lengths: dict[str, Any],
    pages: torch.Tensor | None,
    rows: torch.Tensor | None,
) -> None:
    """Check `lengths` [B], the table of pages, and which `rows` of it or of a cache are used.

    Tensors are indexed with them here. An index that is not there stops the device, and a table or
    a list of another batch would be read without an error.
    """
    for arg, x in {**lengths, "cache_batch_idx": rows}.items():
        if x is not None:
            check_indices(op, arg, x, [batch], q)
    if pages is not None:
        of_table = batch if rows is None else "rows"
        check_indices(op, "block_table/page_table", pages, [of_table, "max_pages"], q, INDICES)


def check_new(
    op: str,
    batch: int,
    new: dict[str, torch.Tensor],
    caches: dict[str, torch.Tensor],
    offsets: torch.Tensor | None,
) -> None:
    """Check new k and v of `batch` sequences, packed if they have offsets, against the caches.

    Caches have rank 4, and heads and channels last, like k and v.
    """
    for arg, x in new.items():
        check_tensor(op, arg, x)
        check_rank(op, arg, x, "[B, T, Hkv, D]" if offsets is None else "[T, Hkv, D]")
    k = new["k"]
    tokens = (batch, k.shape[1]) if offsets is None else k.shape[:1]
    for arg, x in new.items():
        check_shape(op, arg, x, (*tokens, *caches[arg].shape[2:]))
    if offsets is None:
        return
    arg = "cu_seqlens_k_new"
    check_cu_seqlens(op, arg, offsets, device=k.device)
    check_shape(op, arg, offsets, (batch + 1,))
    # elsewhere it would wait for the device
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        end = int(offsets[-1])
        check_cu_seqlens_values(op, arg, offsets, end)
        if end > k.shape[0]:
            expected = f"at most {k.shape[0]}, the tokens of k"
            raise InvalidInput(message(op, f"{arg}[{batch}]", "is out of range", expected, end))


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
    if pages is not None and pages.shape[1] == 0:
        # there is no page to look up
        page, room = torch.zeros_like(slot), slot < 0
    elif pages is not None:
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
    # elsewhere looking at numbers would wait for the device
    readable = slots.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable:
        _check_room(op, k_cache, new, lengths, pages, rows, slot, slots)
    k_scale, v_scale = scales
    how = None if cos is None or sin is None else Rotary(cos, sin, interleaved)
    positions = None
    if how is not None:
        positions = slot
        if rotary_lengths is not None:
            positions = rotary_lengths.long()[new.sequence] + new.ordinal
        if readable:
            _check_angles(op, how, positions, new)
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


def _check_room(
    op: str,
    k_cache: torch.Tensor,
    new: TokenPlaces,
    lengths: torch.Tensor,
    pages: torch.Tensor | None,
    rows: torch.Tensor | None,
    slot: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Raise for the first token whose `slots` is none of the cache; `slot` is that of its sequence.

    The error names what says where it goes: a length, a page or a row.
    """
    size = k_cache.shape[1]
    outside = (slots == k_cache.shape[0] * size).nonzero()
    if not len(outside):
        return
    token = int(outside[0])
    b, at = int(new.sequence[token]), int(slot[token])
    room = size if pages is None else size * pages.shape[1]
    if not 0 <= at < room:
        of_sequence = new.sequence == b
        count = int((of_sequence if new.exists is None else of_sequence & new.exists).sum())
        expected = f"0 to {room - count}, for {count} more in the {room} slots of the sequence"
        if count > room:
            expected = f"at most {room} new keys, the slots of the sequence"
        problem = "leaves no room for k and v"
        raise InvalidInput(message(op, f"cache_seqlens[{b}]", problem, expected, int(lengths[b])))
    expected = f"0 to {k_cache.shape[0] - 1}"
    if pages is None:
        assert rows is not None
        arg, got = f"cache_batch_idx[{b}]", int(rows[b])
    else:
        page = at // size
        arg, got = f"block_table/page_table[{b}, {page}]", int(pages[b, page])
    raise InvalidInput(message(op, arg, "is out of range", expected, got))


def _check_angles(op: str, rotary: Rotary, positions: torch.Tensor, new: TokenPlaces) -> None:
    """Raise if a position of a new key has no angles."""
    used = positions if new.exists is None else positions[new.exists]
    if not used.numel() or not isinstance(rotary.cos, torch.Tensor) or rotary.cos.dim() != 2:
        return
    first, last = (int(x) for x in torch.aminmax(used))
    if first < 0 or last >= rotary.cos.shape[0]:
        arg, problem = "rotary_cos", "does not reach all positions of k"
        expected = f"rows for positions {first} to {last}"
        raise InvalidInput(message(op, arg, problem, expected, f"{rotary.cos.shape[0]} rows"))
