# mypy: ignore-errors
"""Unions of the lists of neighbouring queries, for kernels that gather small entries.

A *tile of queries* is TOKENS neighbouring queries with one list each, FIRST of them in its first
half; a kernel may have different warps for the halves. For each tile a warp merges the lists (see
`walk.py`) and stores every entry once, as one number: its block, and from bit 32 on a bit for each
query that chose it. Entries of both halves, of the first alone and of the second alone are three
sections:

    [both, ascending ... first alone, descending | second alone, ascending ...]

The first two cannot meet: each of their entries takes one place of a list of the first half, and
`capacity` is what all lists hold. That is so for any lists, ascending or not. Numbers out of range
are left out, and the bits of the queries that have one are kept.

A kernel goes through a union in KV tiles of some keys: those near the queries, those of both
halves, then those of each half in turns, and what one of the halves has left (`owner_of`).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...calls.sparse_attention import SparseAttentionCall
from ...device.masks import exists, position_bits, positions_from
from ...device.schedule import token_span
from ...launch.launcher import cdiv, launch, on_device_of
from .walk import NO_BLOCK, list_arguments, lists_of_rows

# Queries of a tile, at most: a word has a bit for each of them.
MOST_TOKENS = 32
LANES = tl.constexpr(MOST_TOKENS)
# Numbers that are kept of a tile: entries of each section, and bits of wrong lists.
COUNTS = tl.constexpr(4)
# The owner of a KV tile: a half of the tile of queries, 0 or 1, or both of them.
BOTH = tl.constexpr(2)


class Unions(NamedTuple):
    """Entries int64 [tiles, capacity], and `COUNTS` of each tile.

    Tiles are numbered by sequence, list head, and place in the sequence.
    """

    entries: Any
    counts: Any
    capacity: Any


class UnionWalk(NamedTuple):
    """How many KV tiles there are, and entries in each of the sections."""

    near_tiles: Any
    """Of keys near the queries: the first ones."""
    common: Any
    """Near tiles and tiles of both halves."""
    first_tiles: Any
    second_tiles: Any
    both: Any
    first: Any
    second: Any
    half: Any
    """Where the second half of the entries begins."""


class QueriesAt(NamedTuple):
    """Queries of a tile: the position of the first one, bits of all, their keys and bands."""

    first_pos: Any
    real: Any
    kv_len: Any
    limit_right: Any
    near_lo: Any
    """The first of the keys near them."""
    near_left: Any
    near_right: Any


class EntryPlaces(NamedTuple):
    """Where the entries of the keys of a KV tile are in a union, and whether there are any."""

    at: Any
    listed: Any


class UnionKeys(NamedTuple):
    """Positions of the keys of a KV tile, and bits of the queries that attend to them."""

    kv_pos: Any
    words: Any


@triton.jit
def union_walk(both, first, second, capacity, near_tiles, PER_TILE: tl.constexpr):
    """The `UnionWalk` of a union in KV tiles of PER_TILE entries."""
    return UnionWalk(
        near_tiles, near_tiles + (both + PER_TILE - 1) // PER_TILE,
        (first + PER_TILE - 1) // PER_TILE, (second + PER_TILE - 1) // PER_TILE,
        both, first, second, capacity // 2,
    )  # fmt: skip


@triton.jit
def owner_of(number, common, first_tiles, second_tiles):
    """The owner of KV tile `number`: half 0, half 1, or BOTH."""
    behind = number - common
    turns = 2 * tl.minimum(first_tiles, second_tiles)
    longer = tl.where(first_tiles > second_tiles, 0, 1)
    alone = tl.where(behind < turns, behind & 1, longer)
    return tl.where(behind < 0, BOTH, alone)


@triton.jit
def entry_places(walk, number, key, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The `EntryPlaces` of the keys `key` of a KV tile, none for near keys and past the end."""
    owner = owner_of(number, walk.common, walk.first_tiles, walk.second_tiles)
    behind = number - walk.common
    fewer = tl.minimum(walk.first_tiles, walk.second_tiles)
    alone = tl.where(behind < 2 * fewer, behind >> 1, behind - fewer)
    place = tl.where(owner == BOTH, number - walk.near_tiles, alone)
    of_half = tl.where(owner == 0, walk.first, walk.second)
    count = tl.where(owner == BOTH, walk.both, of_half)
    start = tl.where(owner == BOTH, 0, tl.where(owner == 0, walk.half - 1, walk.half))
    entry = (place * TILE_N + key) // BLOCK_KV
    listed = (number >= walk.near_tiles) & (entry < count)
    return EntryPlaces(start + tl.where(owner == 0, -1, 1) * entry, listed)


@triton.jit
def keys_of_tile(
    queries, entries, near_tiles, number, key,
    TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """The `UnionKeys` of a KV tile with these `entries`, 0 where there is none."""
    kv_pos = entries.to(tl.int32) * BLOCK_KV + key % BLOCK_KV
    members = (entries >> 32).to(tl.int32)
    first_pos, kv_len = queries.first_pos, queries.kv_len
    words = members & positions_from(kv_pos, first_pos, kv_len, queries.limit_right)
    if LOCAL:
        # a key counts once: as a near one where it is both
        is_near = number < near_tiles
        kv_pos = tl.where(is_near, queries.near_lo + number * TILE_N + key, kv_pos)
        near = position_bits(kv_pos, first_pos, kv_len, queries.near_left, queries.near_right)
        words = tl.where(is_near, queries.real & near, words & ~near)
    return UnionKeys(kv_pos, words)


@triton.jit
def _entry_at(rows, cursor):
    """The entry of each list at `cursor`; NO_BLOCK past its end, and nowhere else."""
    left = cursor < rows.count
    block = tl.load(rows.ids + cursor, mask=left, other=0)
    return tl.where(left, tl.minimum(block, NO_BLOCK - 1), NO_BLOCK)


@triton.jit(do_not_specialize=["q_len", "num_tiles", "num_lists", "most", "num_blocks"])
def _sparse_attn_unions_kernel(
    unions,
    lists,
    list_strides,
    cu_seqlens_q,
    q_len,
    num_tiles,
    num_lists,
    most,
    num_blocks,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
):
    """One tile of queries, by one warp: a lane has the list of a query."""
    program = tl.program_id(0)
    batch = program // num_tiles // num_lists
    list_head = program // num_tiles % num_lists
    q_first, q_len = token_span(cu_seqlens_q, batch, q_len)
    q_start = program % num_tiles * TOKENS
    if q_start >= q_len:
        return
    lane = tl.arange(0, LANES)
    real = (lane < TOKENS) & exists(q_start + lane, q_len)
    token = q_first + q_start + tl.where(real, lane, 0)
    rows = lists_of_rows(lists, list_strides, batch, list_head, token, real, most)
    bit = tl.full([LANES], 1, tl.int32) << lane
    wrong = tl.sum(tl.where(rows.wrong, bit, 0), 0)
    half = unions.capacity // 2
    base = program.to(tl.int64) * unions.capacity
    both = program - program
    first = both
    second = both
    cursor = rows.count - rows.count
    current = _entry_at(rows, cursor)
    # loaded a step before it is needed
    ahead = _entry_at(rows, cursor + 1)
    block = tl.min(current, 0)
    while block != NO_BLOCK:
        member = current == block
        word = tl.sum(tl.where(member, bit, 0), 0)
        inside = (block >= 0) & (block < num_blocks)
        wrong |= tl.where(inside, 0, word)
        in_first = (word & ((1 << FIRST) - 1)) != 0
        in_second = (word >> FIRST) != 0
        alone = tl.where(in_first, half - 1 - first, half + second)
        at = base + tl.where(in_first & in_second, both, alone)
        entry = (word.to(tl.int64) << 32) | block.to(tl.int64)
        tl.store(unions.entries + at, entry, mask=inside)
        both += (inside & in_first & in_second).to(tl.int32)
        first += (inside & in_first & (in_second == 0)).to(tl.int32)
        second += (inside & in_second & (in_first == 0)).to(tl.int32)
        cursor += member.to(tl.int32)
        current = tl.where(member, ahead, current)
        ahead = _entry_at(rows, cursor + 1)
        block = tl.min(current, 0)
    counts = unions.counts + program * COUNTS
    tl.store(counts, both)
    tl.store(counts + 1, first)
    tl.store(counts + 2, second)
    tl.store(counts + 3, wrong)


def merge_lists(call: SparseAttentionCall, tokens: int) -> Unions:
    """The `Unions` of all tiles of `tokens` queries, half of them in each half of a tile.

    They take twice the memory of the lists, of which no more than the unions is touched.
    """
    spec, chosen = call.spec, call.spec.selection
    assert tokens <= MOST_TOKENS and tokens % 2 == 0, f"{tokens=}"
    num_tiles = cdiv(spec.max_q, tokens)
    tiles = call.batch * chosen.heads * num_tiles
    capacity = tokens * chosen.most
    unions = Unions(
        torch.empty(tiles, capacity, dtype=torch.int64, device=call.q.device),
        torch.empty(tiles, COUNTS.value, dtype=torch.int32, device=call.q.device),
        capacity,
    )
    if tiles == 0:
        return unions
    lists, list_strides = list_arguments(call)
    with on_device_of(call.q):
        args = (
            unions,
            # gates are not merged
            lists._replace(gate=None),
            list_strides,
            spec.cu_seqlens_q,
            spec.max_q,
            num_tiles,
            chosen.heads,
            chosen.most,
            chosen.num_blocks,
            tokens,
            tokens // 2,
        )
        launch(_sparse_attn_unions_kernel, tiles, args, num_warps=1)
    return unions
