# mypy: ignore-errors
"""Scores of some queries and all keys that they see, for lists of many index heads.

    scores[t, j] = sum_h weights[h, t] * activation(q_index[h, t] . k_index[j])

The keys are the rows of the product and (query, head) its columns, so that a thread holds scores of
one key for many heads and adds them in registers. A program keeps the queries and the weights of a
tile and passes over a strip of keys; programs that run side by side read the same strip.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..attention.operands import token_strides
from ..calls.select_keys import SelectCall
from ..core.arch import arch_of
from ..device.fp8 import e4m3_values
from ..device.masks import position, row_bounds
from ..device.records import Strides
from ..launch.launcher import cdiv, launch
from .tuning import ScoresConfig

# The score of a key whose product is NaN: below every other number.
NAN_SCORE = tl.constexpr(torch.finfo(torch.float32).min)


class SelectStrides(NamedTuple):
    """Strides of batch, head and token; those of q stand in for weights that are not there."""

    q: Strides
    k: Strides
    weights: Strides


class HeadsOfList(NamedTuple):
    """Lists, index heads of each, and index heads that read one head of keys."""

    lists: Any
    each: Any
    per_key_head: Any


class Chunk(NamedTuple):
    """Tiles of queries that a launch scores, and the query whose scores are stored first."""

    first_tile: int
    tiles: int
    first_row: int


@triton.jit
def load_rows(ptr, offset, rows, row_stride, there, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr):
    """Rows [n, TILE_D] as operands of a product, 0 where not `there`."""
    offs_d = tl.arange(0, TILE_D)
    at = offset + rows.to(tl.int64)[:, None] * row_stride + offs_d[None, :]
    return as_operand(tl.load(ptr + at, there[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0))


@triton.jit
def as_operand(x):
    """fp8 becomes fp16, which holds every e4m3 value."""
    if x.dtype == tl.uint8:
        x = e4m3_values(x).to(tl.float16)
    elif x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
    return x


@triton.jit
def plain_numbers(s):
    """Scores without NaN and without negative zeros."""
    s = tl.where(s != s, NAN_SCORE, s)
    return tl.where(s == 0.0, 0.0, s)


@triton.jit(
    do_not_specialize=[
        "q_len",
        "kv_len",
        "right",
        "first_tile",
        "tiles",
        "tiles_of_list",
        "first_row",
        "strips",
    ]
)
def _scores_kernel(
    scores_ptr,
    q_ptr,
    k_ptr,
    weights_ptr,
    strides,
    heads,
    q_len,
    kv_len,
    right,
    first_tile,
    tiles,
    tiles_of_list,
    first_row,
    row_stride,
    strips,
    RELU: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """scores [rows, row_stride] of QUERIES queries and one strip of the keys that they see."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    COLUMNS: tl.constexpr = QUERIES * HEADS
    program = tl.program_id(0)
    tile = first_tile + program % tiles
    row = tile // tiles_of_list
    batch = (row // heads.lists).to(tl.int64)
    first_head = (row % heads.lists * HEADS).to(tl.int64)
    first_token = tile % tiles_of_list * QUERIES
    # columns of the product
    offs_c = tl.arange(0, COLUMNS)
    token = first_token + offs_c // HEADS
    head = first_head + offs_c % HEADS
    real = token < q_len
    q_at = batch * strides.q.batch + head * strides.q.head + token.to(tl.int64) * strides.q.token
    q = load_rows(q_ptr, q_at[:, None], offs_c * 0, 0, real, HEAD_DIM, TILE_D)
    q = tl.trans(q)
    if weights_ptr is not None:
        at = batch * strides.weights.batch + head * strides.weights.head
        at += token.to(tl.int64) * strides.weights.token
        weights = tl.load(weights_ptr + at, mask=real, other=0.0).to(tl.float32)
    offs_n = tl.arange(0, TILE_N)
    offs_q = tl.arange(0, QUERIES)
    query = row.to(tl.int64) * q_len + first_token + offs_q - first_row
    scores_ptr += query[None, :] * row_stride
    stored = (first_token + offs_q < q_len)[None, :]
    k_at = batch * strides.k.batch + first_head // heads.per_key_head * strides.k.head
    # the last query of the tile sees most
    last_token = tl.minimum(first_token + QUERIES, q_len) - 1
    seen = row_bounds(position(last_token, q_len, kv_len), kv_len, 0, right).last + 1
    steps = tl.cdiv(tl.cdiv(tl.maximum(seen, 0), TILE_N), strips)
    first_key = program // tiles * steps * TILE_N
    for start in tl.range(first_key, tl.minimum(first_key + steps * TILE_N, seen), TILE_N):
        kv_pos = start + offs_n
        k = load_rows(k_ptr, k_at, kv_pos, strides.k.token, kv_pos < kv_len, HEAD_DIM, TILE_D)
        s = tl.dot(k, q, input_precision="ieee")
        if RELU:
            s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if weights_ptr is not None:
            s *= weights[None, :]
        s = plain_numbers(tl.sum(tl.reshape(s, [TILE_N, QUERIES, HEADS]), 2))
        tl.store(scores_ptr + kv_pos[:, None], s, mask=stored & (kv_pos < seen)[:, None])


def as_loaded(x: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes where the GPU has no instruction that converts it."""
    arch = arch_of(x.device)
    converts = arch.sm >= 89 and not arch.interpreted
    return x if x.dtype.itemsize > 1 or converts else x.view(torch.uint8)


def launch_scores(
    scores: torch.Tensor, keys: torch.Tensor, call: SelectCall, chunk: Chunk, config: ScoresConfig
) -> None:
    """Fill `scores`, fp32 [rows, Tk]; `keys` are those of the call, fp16 where they are fp8."""
    q, k, weights, given = call
    heads = q.shape[1]
    of_weights = Strides(*(q if weights is None else weights).stride()[:3])
    strips = config.strips(chunk.tiles, k.shape[2])
    args = (
        scores,
        as_loaded(q),
        keys,
        weights,
        SelectStrides(token_strides(q), token_strides(keys), of_weights),
        HeadsOfList(given.lists, heads // given.lists, heads // k.shape[1]),
        q.shape[2],
        k.shape[2],
        given.right,
        chunk.first_tile,
        chunk.tiles,
        cdiv(q.shape[2], config.queries),
        chunk.first_row,
        scores.stride(0),
        strips,
        given.activation == "relu",
        q.shape[3],
        heads // given.lists,
        config.queries,
        config.tile_n,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch(_scores_kernel, chunk.tiles * strips, args, **options)
