# mypy: ignore-errors
"""Sparse attention forward, the portable kernel: sm_80 and newer, and the interpreter.

    w[i, j] = gate of the entry of key j where query i chose it, 1 where it is near
    out[i]  = sum_j w[i, j] exp(s[i, j] - lse[i]) v[j]
    lse[i]  = log(sum_j w[i, j] exp(s[i, j]) + exp(sink))

q, out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], or packed [T, H, D], or k and v in pages
[pages, page_size, Hkv, D | Dv]; ids and gate [B, Hs, Tq, K]. One program computes the rows of a
tile (see `walk.py`): it walks the keys near its queries, then the union of their entries, with the
keys of one entry, or TILE_N of them, in a step. Entries of 1 and 4 keys are gathered for a single
query, TILE_N keys in a step. Called by `bsk::sparse_attn_fwd`.

Limits: D and Dv up to 256, or the 576 and 512 of latent attention, lengths below 2**30. NaN in a
value that only some rows of a tile see reaches all of them. Rows that depend on a number out of
range get NaN.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...attention.operands import score_factors, token_strides
from ...calls.sparse_attention import SparseAttentionCall
from ...device.masks import kv_range, position, row_bounds, within_bounds
from ...device.records import CuSeqlens, Score, Strides
from ...device.schedule import token_span
from ...device.scores import cap, fold_sign
from ...device.softmax import add_sink, finalise, init_state, weigh
from ...dispatch.machine import fp32_precision
from ...launch.launcher import cdiv, launch, on_device_of
from .tuning import LARGEST_HEAD_DIM, SparseAttnConfig, sparse_attn_config
from .walk import (
    NO_BLOCK,
    ListStrides,
    head_counts,
    key_rows,
    key_strides,
    length_of,
    list_arguments,
    lists_of_rows,
    load_at,
    local_sides,
    next_block,
    offsets_of,
    page_arguments,
    places_of_keys,
    rows_of_tile,
    seen_of_block,
)

# Wider heads are two tiles, each a power of two.
SPLIT_ABOVE = tl.constexpr(LARGEST_HEAD_DIM)
# An open side of a band.
OPEN = tl.constexpr(2**30)


class ForwardStrides(NamedTuple):
    """Strides of batch, head and token of each tensor, and strides of the lists."""

    out: Strides
    q: Strides
    k: Strides
    v: Strides
    lists: ListStrides


class State(NamedTuple):
    """Softmax state of each row, its sum of values, and whether it met a number out of range."""

    m_log2: Any
    row_sum: Any
    acc: Any
    wrong: Any


@triton.jit
def _attend_tile(
    state, q, q_rest, places, pages, kv_pos, wanted, visible, weight, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take keys `kv_pos` into the state; `weight` None stands for 1.

    `q_rest` holds the columns past TILE_D, or is None if there are none.
    """
    m_log2, row_sum, acc, wrong = state
    keys = key_rows(places, pages, kv_pos, wanted)
    k = load_at(places.k, keys.k, keys.live, min(HEAD_DIM, TILE_D), TILE_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if q_rest is not None:
        k_rest = load_at(places.k + TILE_D, keys.k, keys.live, HEAD_DIM - TILE_D, q_rest.shape[1])
        s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision=PRECISION)
    s = cap(s, score.inverse_cap)
    counted = visible
    if weight is not None:
        counted = visible & (weight > 0.0)
    m_log2, p, rescale = weigh(m_log2, tl.where(counted, s, -float("inf")), score.factor)
    if weight is not None:
        p = p * weight
    row_sum = row_sum * rescale + tl.sum(p, 1)
    v = load_at(places.v, keys.v, keys.live, HEAD_DIM_V, TILE_DV)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    if pages is not None:
        wrong = wrong | (tl.max((visible & keys.wrong[None, :]).to(tl.int32), 1) != 0)
    return State(m_log2, row_sum, acc, wrong)


@triton.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "num_tiles", "most", "num_blocks",
        "limit_right", "near_left", "near_right",
    ]
)  # fmt: skip
def _sparse_attn_fwd_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    lists,
    pages,
    cu_seqlens,
    strides,
    lse_head_stride,
    q_len,
    kv_len,
    num_tiles,
    most,
    num_blocks,
    limit_right,
    near_left,
    near_right,
    heads,
    score,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries of GROUP_SIZE heads that share a KV head and a list."""
    # the 576 columns of latent attention are 512 and 64, instead of 1024 of which half are empty
    SPLIT: tl.constexpr = HEAD_DIM > SPLIT_ABOVE and HEAD_DIM & (HEAD_DIM - 1) != 0
    WHOLE: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_D: tl.constexpr = WHOLE // 2 if SPLIT else WHOLE
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    TILE_T: tl.constexpr = 1 if BLOCK_KV < 16 else TILE_M // GROUP_SIZE
    program = tl.program_id(0)
    units = heads.q // GROUP_SIZE
    batch = program // num_tiles // units
    first_head = program // num_tiles % units * GROUP_SIZE
    q_first, q_len = token_span(cu_seqlens.q, batch, q_len)
    kv_first, kv_len = token_span(cu_seqlens.kv, batch, kv_len)
    q_start = program % num_tiles * TILE_T
    if q_start >= q_len:
        return
    kv_len, wrong_length = length_of(pages, batch, kv_len)
    rows = rows_of_tile(tl.arange(0, TILE_M), q_start, q_len, first_head, GROUP_SIZE, TILE_T)
    token = q_first + rows.token
    list_head = first_head // heads.per_list
    own = lists_of_rows(lists, strides.lists, batch, list_head, token, rows.real, most)
    kv_head = first_head // heads.group
    places = places_of_keys(
        k_ptr, v_ptr, strides.k, strides.v, batch, kv_head, kv_first, kv_len, pages
    )
    q_at = offsets_of(batch, rows.head, token, strides.q)
    q = load_at(q_ptr, q_at, rows.real, min(HEAD_DIM, TILE_D), TILE_D)
    q, factor = fold_sign(q, score.factor)
    q_rest = None
    if SPLIT:
        REST: tl.constexpr = HEAD_DIM - TILE_D
        TILE_REST: tl.constexpr = triton.next_power_of_2(max(REST, 16))
        q_rest = load_at(q_ptr + TILE_D, q_at, rows.real, REST, TILE_REST)
        q_rest, _ = fold_sign(q_rest, score.factor)
    score = Score(factor, score.inverse_cap)
    q_pos = position(rows.token, q_len, kv_len)
    limits = row_bounds(q_pos[:, None], kv_len, OPEN, limit_right)
    near = row_bounds(q_pos[:, None], kv_len, near_left, near_right)
    m_log2, row_sum = init_state(q_pos)
    acc = tl.zeros([TILE_M, TILE_DV], tl.float32)
    state = State(m_log2, row_sum, acc, own.wrong | wrong_length)
    offs_n = tl.arange(0, TILE_N)

    lo, hi = kv_range(q_start, q_start + TILE_T, q_len, kv_len, near_left, near_right)
    hi = tl.where(near_left < 0, 0, hi)
    for start in tl.range(lo // TILE_N * TILE_N, hi, TILE_N):
        kv_pos = start + offs_n
        visible = rows.real[:, None] & within_bounds(kv_pos[None, :], near.first, near.last)
        state = _attend_tile(
            state, q, q_rest, places, pages, kv_pos, kv_pos >= lo, visible, None, score,
            HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
        )  # fmt: skip

    if BLOCK_KV < 16:
        count = tl.max(own.count, 0)
        # every row has the same list
        ids = lists.ids + offsets_of(batch, list_head, q_first + q_start, strides.lists.ids)
        for start in tl.range(0, count * BLOCK_KV, TILE_N):
            entry = (start + offs_n) // BLOCK_KV
            listed = entry < count
            block = tl.load(ids + entry, mask=listed, other=0)
            inside = listed & (block >= 0) & (block < num_blocks)
            kv_pos = tl.where(inside, block, 0) * BLOCK_KV + (start + offs_n) % BLOCK_KV
            visible = (rows.real[:, None] & inside[None, :]) & seen_of_block(
                kv_pos[None, :], limits, near
            )
            weight = None
            if lists.gate is not None:
                at = offsets_of(batch, list_head, q_first + q_start, strides.lists.gate)
                weight = tl.load(lists.gate + at + entry, mask=listed, other=0.0)
                weight = weight.to(tl.float32)[None, :]
            state = _attend_tile(
                state, q, q_rest, places, pages, kv_pos, inside, visible, weight, score,
                HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
            )  # fmt: skip
            outside = tl.max((listed & (inside == 0)).to(tl.int32), 0) != 0
            state = State(state.m_log2, state.row_sum, state.acc, state.wrong | outside)
    else:
        gate_rows = offsets_of(batch, list_head, token, strides.lists.gate)
        cursor = rows.token - rows.token
        block, member = next_block(own, cursor)
        while block != NO_BLOCK:
            inside = (block >= 0) & (block < num_blocks)
            weight = None
            if lists.gate is not None:
                weight = tl.load(lists.gate + gate_rows + cursor, mask=member, other=0.0)
                weight = weight.to(tl.float32)[:, None]
            for step in tl.range(0, BLOCK_KV // TILE_N):
                kv_pos = tl.where(inside, block, 0) * BLOCK_KV + step * TILE_N + offs_n
                wanted = inside & (kv_pos >= 0)
                visible = (member & inside)[:, None] & seen_of_block(kv_pos[None, :], limits, near)
                state = _attend_tile(
                    state, q, q_rest, places, pages, kv_pos, wanted, visible, weight, score,
                    HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
                )  # fmt: skip
            wrong = state.wrong | (member & (inside == 0))
            state = State(state.m_log2, state.row_sum, state.acc, wrong)
            cursor += member.to(tl.int32)
            block, member = next_block(own, cursor)

    m_log2, row_sum, acc, wrong = state
    if sinks_ptr is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, tl.load(sinks_ptr + rows.head))
        acc *= rescale[:, None]
    inverse, lse = finalise(m_log2, row_sum)
    out = tl.where(wrong[:, None], float("nan"), acc * inverse[:, None])
    lse = tl.where(wrong, float("nan"), lse)
    offs_dv = tl.arange(0, TILE_DV)
    at = offsets_of(batch, rows.head, token, strides.out)
    mask = rows.real[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + offs_dv[None, :], out, mask=mask)
    lse_row = tl.cast(rows.head, tl.int64)
    if cu_seqlens.q is None:
        lse_row += tl.cast(batch, tl.int64) * heads.q
    tl.store(lse_ptr + lse_row * lse_head_stride + token, lse, mask=rows.real)


def forward(call: SparseAttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, in the tensors of `call.empty_results`."""
    out, lse = call.empty_results()
    config = sparse_attn_config(call.problem, fp32_precision(call.q.dtype))
    launch_sparse_attn_fwd(call, out, lse, config)
    return out, lse


def queries_per_tile(call: SparseAttentionCall, config: SparseAttnConfig) -> int:
    """Queries of a tile of rows."""
    return 1 if call.spec.selection.granularity < 16 else config.tile_m // config.pack


def launch_sparse_attn_fwd(
    call: SparseAttentionCall, out: torch.Tensor, lse: torch.Tensor, config: SparseAttnConfig
) -> None:
    """Fill `out` and `lse`.

    Parameters
    ----------
    call : q, k and v, contiguous in the last dimension
    out : like q, with Dv; contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    config : tiles and launch options
    """
    q, k, v, spec = call.q, call.k, call.v, call.spec
    tiles = cdiv(spec.max_q, queries_per_tile(call, config))
    programs = call.batch * (q.shape[1] // config.pack) * tiles
    if programs == 0:
        return
    lists, list_strides = list_arguments(call)
    keys = (key_strides(x, call) for x in (k, v))
    with on_device_of(q):
        args = (
            out,
            lse,
            q,
            k,
            v,
            None if spec.sinks is None else spec.sinks.contiguous(),
            lists,
            page_arguments(call),
            CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k),
            ForwardStrides(token_strides(out), token_strides(q), *keys, list_strides),
            lse.stride(-2),
            spec.max_q,
            spec.max_k,
            tiles,
            spec.selection.most,
            spec.selection.num_blocks,
            spec.limit_right,
            *local_sides(call),
            head_counts(call),
            score_factors(spec.scale, spec.softcap),
            q.shape[-1],
            v.shape[-1],
            spec.selection.granularity,
            config.pack,
            config.tile_m,
            config.tile_n,
            config.precision,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(_sparse_attn_fwd_kernel, programs, args, **options)
