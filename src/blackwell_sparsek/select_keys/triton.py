# mypy: ignore-errors
"""Choosing keys by scores, the portable kernel: sm_80 and newer, and the interpreter.

    s[t, j] = sum_h weights[h, t] * activation(q_index[h, t] . k_index[h, j])
    S[t, c] = max or mean of s[t, j] over the keys of entry c that query t sees
    ids[t]  = the `most` entries of highest S[t], of equal ones the lower, ascending

q_index [B, Hi, Tq, D], k_index [B, Hk, Tk, D], weights [B, Hi, Tq], ids [B, lists, Tq, most]. A
program takes TILE_M queries of a list at a time and passes over the keys once. It keeps the entries
that may still be chosen in a buffer of each query: their scores as ordered integers in a workspace,
their numbers in `ids` and, past its end, in a workspace. When the buffers are full, only the `most`
best of each stay, and what comes later must be better than the worst of them. Numbers ascend in a
buffer at all times. Called by `bsk::select_keys`.

For lists of many index heads, `scores.py` stores the scores of some queries at a time, and a
program chooses from those of one query.

Workspaces are there for the queries of running programs alone: at most twice the memory of the
lists, or 12 bytes for each entry of one step where lists are short. fp8 is multiplied as fp16,
which holds every e4m3 value.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..attention.operands import token_strides
from ..calls.select_keys import SelectCall
from ..device.masks import position, row_bounds
from ..device.ordering import HIGHEST, LOWEST, midpoint, ordered_int
from ..device.records import Strides
from ..launch.launcher import cdiv, launch, on_device_of
from ..launch.workspace import scratch
from .scores import (
    Chunk,
    HeadsOfList,
    SelectStrides,
    as_loaded,
    launch_scores,
    load_rows,
    plain_numbers,
)
from .tuning import ScoresConfig, SelectConfig, scores_config, scores_stride, select_config

# Places of a list that are cleared at a time.
TILE_CLEARED = tl.constexpr(64)


class Rule(NamedTuple):
    """Entries of a list, and how many of the first and latest ones are always taken."""

    most: Any
    force_first: Any
    force_last: Any


class Buffers(NamedTuple):
    """Scores as integers; numbers in the lists, and past their end; room for one query."""

    keys: Any
    ids: Any
    spare: Any
    capacity: Any


class Tiles(NamedTuple):
    """Tiles of queries that a launch takes: the first one, and how many."""

    first: int
    count: int


class Held(NamedTuple):
    """How many entries the buffer of each query holds, and what later ones must be above."""

    count: Any
    floor: Any


@triton.jit
def _keys_of_head(
    k_ptr, strides, batch, head, heads, kv_pos, there,
    HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """The keys [TILE_N, TILE_D] that an index head reads."""
    at = batch * strides.k.batch + head // heads.per_key_head * strides.k.head
    return load_rows(k_ptr, at, kv_pos, strides.k.token, there, HEAD_DIM, TILE_D)


@triton.jit
def _key_scores(
    q_ptr, k_ptr, weights_ptr, strides, batch, first_head, heads, token, real, kv_pos, kv_len,
    RELU: tl.constexpr, HEAD_DIM: tl.constexpr, SHARED_KEYS: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """s [TILE_M, TILE_N]; numbers only, without negative zeros."""
    s = tl.zeros([TILE_M, TILE_N], tl.float32)
    there = kv_pos < kv_len
    shared = None
    if SHARED_KEYS:
        # read, and in fp8 converted, once for all heads
        head = first_head.to(tl.int64)
        shared = _keys_of_head(k_ptr, strides, batch, head, heads, kv_pos, there, HEAD_DIM, TILE_D)
    for i in tl.range(0, heads.each):
        head = (first_head + i).to(tl.int64)
        q_at = batch * strides.q.batch + head * strides.q.head
        q = load_rows(q_ptr, q_at, token, strides.q.token, real, HEAD_DIM, TILE_D)
        if SHARED_KEYS:
            k = shared
        else:
            k = _keys_of_head(k_ptr, strides, batch, head, heads, kv_pos, there, HEAD_DIM, TILE_D)
        own = tl.dot(q, tl.trans(k), input_precision="ieee")
        if RELU:
            own = tl.where(own < 0.0, 0.0, own)
        if weights_ptr is not None:
            at = batch * strides.weights.batch + head * strides.weights.head
            at += token.to(tl.int64) * strides.weights.token
            own *= tl.load(weights_ptr + at, mask=real, other=0.0).to(tl.float32)[:, None]
        s += own
    return plain_numbers(s)


@triton.jit
def _stored_scores(scores_row, kv_pos, length):
    """Scores of keys; those after the last key that the query sees are not to be used."""
    return tl.load(scores_row + kv_pos, mask=kv_pos < length, other=0.0)


@triton.jit
def _entry_scores(
    s, kv_pos, entry, last_key,
    MEAN: tl.constexpr, BLOCK_KV: tl.constexpr, TILE_M: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """S [TILE_M, ENTRIES] of entries that have a key up to `last_key`, that of their query."""
    if BLOCK_KV == 1:
        return s
    seen = kv_pos[None, :] <= last_key[:, None]
    if MEAN:
        sums = tl.reshape(tl.where(seen, s, 0.0), [TILE_M, ENTRIES, BLOCK_KV])
        keys = tl.minimum(last_key[:, None] + 1 - entry[None, :] * BLOCK_KV, BLOCK_KV)
        # rounded once, so that equal means of different counts are equal
        return tl.div_rn(tl.sum(sums, 2), tl.maximum(keys, 1).to(tl.float32))
    return tl.max(tl.reshape(tl.where(seen, s, -float("inf")), [TILE_M, ENTRIES, BLOCK_KV]), 2)


@triton.jit
def _kth_largest(keys, k):
    """The largest number that at least k of the keys reach."""
    threshold = tl.full([], LOWEST, tl.int32)
    above = tl.full([], HIGHEST, tl.int32)
    for _ in range(32):
        middle = midpoint(threshold, above)
        enough = tl.sum((keys >= middle).to(tl.int32), 0) >= k
        threshold = tl.where(enough, middle, threshold)
        above = tl.where(enough, above, middle - 1)
    return threshold


@triton.jit
def _keep_the_best(held, buffers, list_rows, most, TILE_M: tl.constexpr, TILE_C: tl.constexpr):
    """Leave at most `most` entries in each buffer; `list_rows` are offsets of the lists."""
    count, floor = held
    offs_m = tl.arange(0, TILE_M)
    offs = tl.arange(0, TILE_C)
    # threads read what others have written
    tl.debug_barrier()
    for row in tl.range(0, TILE_M):
        own = offs_m == row
        held_here = tl.sum(tl.where(own, count, 0), 0)
        if held_here > most:
            keys_row = buffers.keys + row * buffers.capacity
            spare_row = buffers.spare + row * (buffers.capacity - most)
            ids_row = buffers.ids + tl.sum(tl.where(own, list_rows, 0), 0)
            live = offs < held_here
            in_list = offs < most
            keys = tl.load(keys_row + offs, mask=live, other=LOWEST)
            number = tl.load(ids_row + offs, mask=in_list, other=0)
            number += tl.load(spare_row + offs - most, mask=live & (in_list == 0), other=0)
            threshold = _kth_largest(keys, most)
            above = live & (keys > threshold)
            level = live & (keys == threshold)
            room = most - tl.sum(above.to(tl.int32), 0)
            kept = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
            place = tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.debug_barrier()
            tl.store(keys_row + place, keys, mask=kept)
            tl.store(ids_row + place, number, mask=kept)
            count = tl.where(own, most, count)
            floor = tl.where(own, threshold, floor)
    tl.debug_barrier()
    return Held(count, floor)


@triton.jit(
    do_not_specialize=[
        "q_len",
        "kv_len",
        "right",
        "capacity",
        "first_tile",
        "num_tiles",
        "tiles_of_list",
        "num_programs",
    ]
)
def _select_keys_kernel(
    ids_ptr,
    counts_ptr,
    keys_ptr,
    spare_ptr,
    scores_ptr,
    scores_stride,
    q_ptr,
    k_ptr,
    weights_ptr,
    strides,
    heads,
    rule,
    q_len,
    kv_len,
    right,
    capacity,
    first_tile,
    num_tiles,
    tiles_of_list,
    num_programs,
    RELU: tl.constexpr,
    MEAN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SHARED_KEYS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Lists of TILE_M queries after another; a program has buffers of its own.

    Where scores were stored, TILE_M is 1 and their first row is that of `first_tile`.
    """
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    ENTRIES: tl.constexpr = TILE_N // BLOCK_KV
    program = tl.program_id(0)
    offs_m = tl.arange(0, TILE_M)
    offs_n = tl.arange(0, TILE_N)
    offs_e = tl.arange(0, ENTRIES)
    first_row = program.to(tl.int64) * TILE_M
    keys_ptr += first_row * capacity
    spare_ptr += first_row * (capacity - rule.most)
    buffers = Buffers(keys_ptr, ids_ptr, spare_ptr, capacity)
    for tile in tl.range(first_tile + program, first_tile + num_tiles, num_programs):
        # (batch, list)
        row = tile // tiles_of_list
        batch = (row // heads.lists).to(tl.int64)
        first_head = row % heads.lists * heads.each
        token = tile % tiles_of_list * TILE_M + offs_m
        real = token < q_len
        last_key = row_bounds(position(token, q_len, kv_len), kv_len, 0, right).last
        last_key = tl.where(real, last_key, -1)
        latest = tl.where(last_key < 0, -1, last_key // BLOCK_KV)
        query = row.to(tl.int64) * q_len + tl.where(real, token, 0)
        list_rows = query * rule.most
        held = Held(offs_m * 0, offs_m * 0 + LOWEST)
        if scores_ptr is not None:
            # a tile is a query; scores are read one step ahead
            scores_row = scores_ptr + (tile - first_tile).to(tl.int64) * scores_stride
            ahead = _stored_scores(scores_row, offs_n, scores_stride)
        for start in tl.range(0, tl.max(last_key, 0) + 1, TILE_N):
            kv_pos = start + offs_n
            entry = start // BLOCK_KV + offs_e
            if scores_ptr is not None:
                s = ahead[None, :]
                ahead = _stored_scores(scores_row, kv_pos + TILE_N, scores_stride)
            else:
                s = _key_scores(
                    q_ptr, k_ptr, weights_ptr, strides, batch, first_head, heads, token, real,
                    kv_pos, kv_len, RELU, HEAD_DIM, SHARED_KEYS, TILE_M, TILE_N, TILE_D,
                )  # fmt: skip
            s = _entry_scores(s, kv_pos, entry, last_key, MEAN, BLOCK_KV, TILE_M, ENTRIES)
            from_end = latest[:, None] - entry[None, :]
            forced = (entry < rule.force_first)[None, :] | (from_end < rule.force_last)
            keys = tl.where(forced, HIGHEST, ordered_int(s))
            if tl.max(held.count, 0) + ENTRIES > capacity:
                held = _keep_the_best(held, buffers, list_rows, rule.most, TILE_M, TILE_C)
            better = (from_end >= 0) & (keys > held.floor[:, None])
            place = held.count[:, None] + tl.cumsum(better.to(tl.int32), 1) - 1
            number = tl.broadcast_to(entry[None, :], [TILE_M, ENTRIES])
            tl.store(keys_ptr + offs_m[:, None] * capacity + place, keys, mask=better)
            in_list = place < rule.most
            tl.store(ids_ptr + list_rows[:, None] + place, number, mask=better & in_list)
            spare = spare_ptr + offs_m[:, None] * (capacity - rule.most) + place - rule.most
            tl.store(spare, number, mask=better & (in_list == 0))
            held = Held(held.count + tl.sum(better.to(tl.int32), 1), held.floor)
        held = _keep_the_best(held, buffers, list_rows, rule.most, TILE_M, TILE_C)
        tl.store(counts_ptr + query, held.count, mask=real)
        for start in tl.range(0, rule.most, TILE_CLEARED):
            place = start + tl.arange(0, TILE_CLEARED)
            unused = (place[None, :] >= held.count[:, None]) & (place < rule.most)[None, :]
            zeros = tl.zeros([TILE_M, TILE_CLEARED], tl.int32)
            at = list_rows[:, None] + place[None, :]
            tl.store(ids_ptr + at, zeros, mask=real[:, None] & unused)


def forward(call: SelectCall) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and counts; places that hold no entry are 0."""
    q, given = call.q_index, call.options
    shape = (q.shape[0], given.lists, q.shape[2])
    ids = torch.empty((*shape, given.most), dtype=torch.int32, device=q.device)
    counts = torch.empty(shape, dtype=torch.int32, device=q.device)
    if not counts.numel():
        return ids, counts
    if not given.most:
        return ids, counts.zero_()
    with on_device_of(q):
        stored = scores_config(call.problem, call.k_index.shape[1])
        if stored is None:
            config = select_config(call.problem)
            tiles = counts.shape[:2].numel() * cdiv(q.shape[2], config.tile_m)
            launch_select_keys(ids, counts, call, None, Tiles(0, tiles), config)
        else:
            _select_in_chunks(ids, counts, call, stored)
    return ids, counts


def _select_in_chunks(
    ids: torch.Tensor, counts: torch.Tensor, call: SelectCall, config: ScoresConfig
) -> None:
    """Store scores of as many queries as there is room for, choose from them, and so on."""
    q, keys = call.q_index, call.k_index
    if keys.dtype.itemsize == 1:
        # once for all tiles of queries
        keys = scratch(keys.shape, torch.float16, q.device).copy_(keys)
    q_len = q.shape[2]
    scores = scratch((config.rows, scores_stride(keys.shape[2])), torch.float32, q.device)
    tiles_of_list = cdiv(q_len, config.queries)
    tiles = counts.shape[:2].numel() * tiles_of_list
    step = config.rows // config.queries

    def first_row(tile: int) -> int:
        return tile // tiles_of_list * q_len + tile % tiles_of_list * config.queries

    for start in range(0, tiles, step):
        end = min(start + step, tiles)
        first = first_row(start)
        launch_scores(scores, keys, call, Chunk(start, end - start, first), config)
        rows = Tiles(first, first_row(end) - first)
        launch_select_keys(ids, counts, call, scores, rows, config.select)


def launch_select_keys(
    ids: torch.Tensor,
    counts: torch.Tensor,
    call: SelectCall,
    scores: torch.Tensor | None,
    tiles: Tiles,
    config: SelectConfig,
) -> None:
    """Fill `ids`, int32 [B, lists, Tq, most], and `counts`, int32 [B, lists, Tq], for `tiles`.

    `scores` are those of the tiles, if they were stored.
    """
    q, k, weights, given = call
    heads, q_len, dim = q.shape[1:]
    programs = min(tiles.count, config.programs)
    rows = programs * config.tile_m
    operands = (as_loaded(x) for x in (q, k))
    of_weights = Strides(*(q if weights is None else weights).stride()[:3])
    args = (
        ids,
        counts,
        scratch((rows, config.capacity), torch.int32, q.device),
        scratch((rows, config.capacity - given.most), torch.int32, q.device),
        scores,
        0 if scores is None else scores.stride(0),
        *operands,
        weights,
        SelectStrides(token_strides(q), token_strides(k), of_weights),
        HeadsOfList(given.lists, heads // given.lists, heads // k.shape[1]),
        Rule(given.most, given.force_first, given.force_last),
        q_len,
        k.shape[2],
        given.right,
        config.capacity,
        tiles.first,
        tiles.count,
        cdiv(q_len, config.tile_m),
        programs,
        given.activation == "relu",
        given.pool == "mean",
        dim,
        # all index heads of a list read the same keys
        heads // k.shape[1] % (heads // given.lists) == 0,
        given.granularity,
        config.tile_m,
        config.tile_n,
        config.tile_c,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch(_select_keys_kernel, programs, args, **options)
