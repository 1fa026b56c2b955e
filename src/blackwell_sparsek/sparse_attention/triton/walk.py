# mypy: ignore-errors
"""The rows of a tile, the entries that they selected, and the keys of entries; for all kernels.

The rows of a tile are GROUP_SIZE query heads of some queries: row r is head r % GROUP_SIZE of query
r // GROUP_SIZE. Rows of one query have the same list. The lists of a tile ascend, so walking
through their union is a merge: the next block is the smallest that any row has not passed, and
those rows that have it pass it.

Lists and tables of pages come from the user and may hold anything: what is out of range is not
read, and marks the rows that depend on it as *wrong*.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...calls.sparse_attention import SparseAttentionCall
from ...device.masks import exists, within_bounds
from ...device.records import Strides

# No block has this number.
NO_BLOCK = tl.constexpr(2**31 - 1)


class ListPointers(NamedTuple):
    """Pointers to ids, counts and gates; `gate` is None without gates."""

    ids: Any
    counts: Any
    gate: Any


class ListStrides(NamedTuple):
    """Strides of batch, head and query of each list; without gates, the last are those of ids."""

    ids: Strides
    counts: Strides
    gate: Strides


class Pages(NamedTuple):
    """Table of pages, lengths of the sequences, elements from row to row of the table."""

    table: Any
    lengths: Any
    table_stride: Any
    page_size: Any
    num_pages: Any
    capacity: Any
    """Keys that the pages of a sequence hold."""


class HeadCounts(NamedTuple):
    """Query heads, and how many of them share a KV head and a list."""

    q: Any
    group: Any
    per_list: Any


class Rows(NamedTuple):
    """The rows of a tile: queries within the sequence, heads, and whether there is such a row."""

    token: Any
    head: Any
    real: Any


class RowLists(NamedTuple):
    """Where the list of each row begins, how many entries it has, and whether that is wrong."""

    ids: Any
    count: Any
    wrong: Any


class KeyPlaces(NamedTuple):
    """Where the keys of a sequence and KV head lie."""

    k: Any
    v: Any
    k_stride: Any
    v_stride: Any
    k_page: Any
    v_page: Any
    batch: Any
    kv_len: Any


class KeyRows(NamedTuple):
    """Offsets of keys and values, which of them may be read, and which have a wrong page.

    Kernels that return records cannot leave a field empty in every release of Triton, so `wrong` is
    there without pages too, and false.
    """

    k: Any
    v: Any
    live: Any
    wrong: Any


@triton.jit
def rows_of_tile(offs, q_start, q_len, first_head, GROUP_SIZE: tl.constexpr, TILE_T: tl.constexpr):
    """The rows `offs` of the tile of TILE_T queries from `q_start` on."""
    token = q_start + offs // GROUP_SIZE
    real = (offs < TILE_T * GROUP_SIZE) & exists(token, q_len)
    return Rows(tl.where(real, token, q_start), first_head + offs % GROUP_SIZE, real)


@triton.jit
def offsets_of(batch, head, token, strides):
    """Element offsets of (batch, head, token), int64; each may be a vector."""
    return (
        tl.cast(batch, tl.int64) * strides.batch
        + tl.cast(head, tl.int64) * strides.head
        + tl.cast(token, tl.int64) * strides.token
    )


@triton.jit
def row_offsets(head, token, batch, heads, head_stride, cu_seqlens_q):
    """Offsets of rows in lse and delta: [B, H, S], or [H, T] if packed."""
    row = tl.cast(head, tl.int64)
    if cu_seqlens_q is None:
        row += tl.cast(batch, tl.int64) * heads
    return row * head_stride + token


@triton.jit
def lists_of_rows(lists, strides, batch, list_head, token, real, most):
    """The `RowLists` of queries `token`, counted through all packed sequences."""
    ids = lists.ids + offsets_of(batch, list_head, token, strides.ids)
    at = lists.counts + offsets_of(batch, list_head, token, strides.counts)
    count = tl.load(at, mask=real, other=0)
    wrong = (count < 0) | (count > most)
    return RowLists(ids, tl.where(wrong, 0, count), wrong)


@triton.jit
def next_block(rows, cursor):
    """The smallest block that any row has yet to pass, and which rows have it."""
    left = cursor < rows.count
    own = tl.load(rows.ids + cursor, mask=left, other=NO_BLOCK)
    block = tl.min(own, 0)
    return block, left & (own == block)


@triton.jit
def length_of(pages, batch, kv_len):
    """Keys of a sequence, and whether the given length is wrong."""
    length = kv_len
    wrong = batch < 0
    if pages is not None:
        length = tl.load(pages.lengths + batch)
        wrong = (length < 0) | (length > pages.capacity)
        length = tl.where(wrong, 0, length)
    return length, wrong


@triton.jit
def places_of_keys(k_ptr, v_ptr, k_strides, v_strides, batch, kv_head, kv_first, kv_len, pages):
    """The `KeyPlaces` of a sequence and KV head."""
    if pages is None:
        k_ptr += offsets_of(batch, kv_head, kv_first, k_strides)
        v_ptr += offsets_of(batch, kv_head, kv_first, v_strides)
    else:
        k_ptr += tl.cast(kv_head, tl.int64) * k_strides.head
        v_ptr += tl.cast(kv_head, tl.int64) * v_strides.head
    return KeyPlaces(
        k_ptr, v_ptr, k_strides.token, v_strides.token, k_strides.batch, v_strides.batch,
        batch, kv_len,
    )  # fmt: skip


@triton.jit
def key_rows(places, pages, kv_pos, wanted):
    """The `KeyRows` of positions; those not `wanted` or past the length are not read."""
    live = wanted & exists(kv_pos, places.kv_len)
    if pages is None:
        k = tl.cast(kv_pos, tl.int64) * places.k_stride
        v = tl.cast(kv_pos, tl.int64) * places.v_stride
        wrong = kv_pos < 0
    else:
        size = pages.page_size
        table_row = pages.table + tl.cast(places.batch, tl.int64) * pages.table_stride
        page = tl.load(table_row + kv_pos // size, mask=live, other=0)
        there = (page >= 0) & (page < pages.num_pages)
        wrong = live & (there == 0)
        live = live & there
        slot = tl.cast(kv_pos % size, tl.int64)
        k = tl.cast(page, tl.int64) * places.k_page + slot * places.k_stride
        v = tl.cast(page, tl.int64) * places.v_page + slot * places.v_stride
    return KeyRows(k, v, live, wrong)


@triton.jit
def load_at(ptr, offsets, live, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr):
    """Rows [n, TILE_D] at element offsets [n], 0 where not live."""
    offs_d = tl.arange(0, TILE_D)
    mask = live[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(ptr + offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def seen_of_block(kv_pos, limits, near):
    """Which keys of a selected block each row sees: keys within limits that are not near."""
    inside = within_bounds(kv_pos, limits.first, limits.last)
    return inside & (within_bounds(kv_pos, near.first, near.last) == 0)


def list_arguments(call: SparseAttentionCall) -> tuple[ListPointers, ListStrides]:
    """Pointers and strides of a selection and its gates."""
    chosen, gate = call.spec.selection, call.spec.gate
    pointers = ListPointers(chosen.ids, chosen.counts, gate)
    strides = [_list_strides(x) for x in (chosen.ids, chosen.counts)]
    return pointers, ListStrides(*strides, strides[0] if gate is None else _list_strides(gate))


def _list_strides(x: torch.Tensor) -> Strides:
    # one selection for all sequences does not step from batch to batch
    return Strides(x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2))


def page_arguments(call: SparseAttentionCall) -> Pages | None:
    """Tables and sizes of pages, if there are any."""
    table, lengths = call.spec.page_table, call.spec.cache_seqlens
    if table is None or lengths is None:
        return None
    pages, size = call.k.shape[:2]
    return Pages(table, lengths, table.stride(0), size, pages, table.shape[1] * size)


def key_strides(x: torch.Tensor, call: SparseAttentionCall) -> Strides:
    """Strides of batch (or page), head and token of keys or values."""
    if call.spec.page_table is not None:
        return Strides(x.stride(0), x.stride(2), x.stride(1))
    if x.dim() == 3:
        return Strides(0, x.stride(1), x.stride(0))
    return Strides(*x.stride()[:3])


def head_counts(call: SparseAttentionCall) -> HeadCounts:
    """Query heads, and how many share a KV head and a list."""
    heads = call.q.shape[1]
    return HeadCounts(heads, heads // call.kv_heads, heads // call.spec.selection.heads)


def local_sides(call: SparseAttentionCall) -> tuple[int, int]:
    """The sides of the band of near keys; -1 without one, which shows no key."""
    return (-1, -1) if call.spec.local is None else call.spec.local.scalars()
