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

For lists of many index heads, `scores.py` stores the scores of some queries at a time, and
`choose.py` chooses from them.

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
from ..device.ordering import HIGHEST, LOWEST, ordered_int
from ..device.records import Strides
from ..launch.launcher import cdiv, launch, on_device_of
from ..launch.workspace import scratch
from .choose import (
    TILE_CLEARED,
    Buffer,
    Held,
    Rows,
    Rule,
    entry_scores,
    keep_the_best,
    launch_choose,
)
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


class Buffers(NamedTuple):
    """Scores as integers; numbers in the lists, and past their end; room for one query."""

    keys: Any
    ids: Any
    spare: Any
    capacity: Any


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
def _keep_the_best(held, buffers, list_rows, most, TILE_M: tl.constexpr, TILE_C: tl.constexpr):
    """Leave at most `most` entries in each buffer; `list_rows` are offsets of the lists."""
    count, floor = held
    offs_m = tl.arange(0, TILE_M)
    for row in tl.range(0, TILE_M):
        own = offs_m == row
        of_row = Held(tl.sum(tl.where(own, count, 0), 0), tl.sum(tl.where(own, floor, 0), 0))
        if of_row.count > most:
            buffer = Buffer(
                buffers.keys + row * buffers.capacity,
                buffers.ids + tl.sum(tl.where(own, list_rows, 0), 0),
                buffers.spare + row * (buffers.capacity - most),
            )
            of_row = keep_the_best(buffer, of_row, most, TILE_C)
            count = tl.where(own, of_row.count, count)
            floor = tl.where(own, of_row.floor, floor)
    return Held(count, floor)


@triton.jit(
    do_not_specialize=[
        "q_len",
        "kv_len",
        "right",
        "capacity",
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
    """Lists of TILE_M queries after another; a program has buffers of its own."""
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
    for tile in tl.range(program, num_tiles, num_programs):
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
        for start in tl.range(0, tl.max(last_key, 0) + 1, TILE_N):
            kv_pos = start + offs_n
            entry = start // BLOCK_KV + offs_e
            s = _key_scores(
                q_ptr, k_ptr, weights_ptr, strides, batch, first_head, heads, token, real,
                kv_pos, kv_len, RELU, HEAD_DIM, SHARED_KEYS, TILE_M, TILE_N, TILE_D,
            )  # fmt: skip
            s = entry_scores(s, kv_pos, entry, last_key, MEAN, BLOCK_KV, TILE_M, ENTRIES)
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
            launch_select_keys(ids, counts, call, select_config(call.problem))
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
        rows = Rows(first, first_row(end) - first)
        launch_choose(ids, counts, call, scores, rows, config.choose)


def launch_select_keys(
    ids: torch.Tensor, counts: torch.Tensor, call: SelectCall, config: SelectConfig
) -> None:
    """Fill `ids`, int32 [B, lists, Tq, most], and `counts`, int32 [B, lists, Tq]."""
    q, k, weights, given = call
    heads, q_len, dim = q.shape[1:]
    tiles_of_list = cdiv(q_len, config.tile_m)
    tiles = counts.shape[:2].numel() * tiles_of_list
    programs = min(tiles, config.programs)
    rows = programs * config.tile_m
    operands = (as_loaded(x) for x in (q, k))
    of_weights = Strides(*(q if weights is None else weights).stride()[:3])
    args = (
        ids,
        counts,
        scratch((rows, config.capacity), torch.int32, q.device),
        scratch((rows, config.capacity - given.most), torch.int32, q.device),
        *operands,
        weights,
        SelectStrides(token_strides(q), token_strides(k), of_weights),
        HeadsOfList(given.lists, heads // given.lists, heads // k.shape[1]),
        Rule(given.most, given.force_first, given.force_last),
        q_len,
        k.shape[2],
        given.right,
        config.capacity,
        tiles,
        tiles_of_list,
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
