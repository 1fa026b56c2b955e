# mypy: ignore-errors
"""Sparse attention backward, the portable kernels: one for dq and gates, one for dk and dv.

    r[i, j]  = exp(s[i, j] - lse[i])                 of what query i sees; p = w r
    ds[i, j] = p[i, j] * (dout[i] . v[j] - delta[i])
    dq[i]    = scale * sum_j ds[i, j] k[j]           dk[j] = scale * sum_i ds[i, j] q[i]
    dv[j]    = sum_i p[i, j] dout[i]
    dgate[e] = sum_{j in e} r[i, j] * (dout[i] . v[j] - delta[i])

Shapes are those of `forward.py`. A program of the dq kernel walks the same keys as one of the
forward kernel. A program of the dk/dv kernel owns TILE_N keys of one entry, or one entry of fewer
keys, and walks the queries near them, then those that chose the entry, which
`masks.key_selection.queries_of_blocks` has listed. Sums have one order and there are no atomics, so
every run gives the same bits. The gradient of a gate sums over query heads: each head writes its
share, and torch adds them up. Called by `bsk::sparse_attn_bwd`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...attention.operands import gradient_factors, token_strides
from ...attention.triton.delta import launch_attn_delta, launch_sink_gradients
from ...calls.sparse_attention import SparseAttentionCall, SparseBackwardCall
from ...device.backprop import probabilities, score_gradients, shift_of_rows
from ...device.masks import exists, kv_range, position, q_range, row_bounds, within_bounds
from ...device.records import CuSeqlens, Strides
from ...device.schedule import token_span
from ...dispatch.machine import fp32_precision
from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import scratch
from ...masks.key_selection import BlocksOfSequences, QueriesOfBlocks, queries_of_blocks
from .forward import OPEN, queries_per_tile
from .tuning import SparseAttnConfig, sparse_attn_config
from .walk import (
    NO_BLOCK,
    ListStrides,
    head_counts,
    key_rows,
    key_strides,
    list_arguments,
    lists_of_rows,
    load_at,
    local_sides,
    next_block,
    offsets_of,
    places_of_keys,
    row_offsets,
    rows_of_tile,
    seen_of_block,
)


class DqStrides(NamedTuple):
    """Strides of batch, head and token of each tensor, and strides of the lists."""

    dq: Strides
    q: Strides
    dout: Strides
    k: Strides
    v: Strides
    lists: ListStrides


class DkdvStrides(NamedTuple):
    """The same for the kernel of dk and dv; those of k and v stand in for what is not written."""

    q: Strides
    dout: Strides
    k: Strides
    v: Strides
    dk: Strides
    dv: Strides
    gate: Strides


class QueryGradients(NamedTuple):
    """Pointers to the gradients of queries and, by query head, of gates; None if not wanted."""

    dq: Any
    dgate: Any


class KeyGradients(NamedTuple):
    """Pointers to the gradients of keys and values; None if not wanted."""

    dk: Any
    dv: Any


class RowTerms(NamedTuple):
    """Pointers to lse and delta, fp32, contiguous."""

    lse: Any
    delta: Any


class OwnRows(NamedTuple):
    """Queries and output gradients of the rows of a tile, and what is subtracted in each."""

    q: Any
    dout: Any
    shift: Any
    delta: Any


@triton.jit
def _own_rows(
    q_ptr, dout_ptr, terms, q_at, dout_at, term_at, real,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
):  # fmt: skip
    """Load the `OwnRows` at these offsets."""
    q = load_at(q_ptr, q_at, real, HEAD_DIM, TILE_D)
    dout = load_at(dout_ptr, dout_at, real, HEAD_DIM_V, TILE_DV)
    lse = tl.load(terms.lse + term_at, mask=real, other=-float("inf"))
    delta = tl.load(terms.delta + term_at, mask=real, other=0.0)
    return OwnRows(q, dout, shift_of_rows(lse, q.dtype == tl.float32), delta)


@triton.jit
def _query_step(
    dq, own, places, kv_pos, wanted, visible, weight, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what keys give to dq / scale; also return r * (dp - delta) of each row and key."""
    keys = key_rows(places, None, kv_pos, wanted)
    k = load_at(places.k, keys.k, keys.live, HEAD_DIM, TILE_D)
    v = load_at(places.v, keys.v, keys.live, HEAD_DIM_V, TILE_DV)
    s = tl.dot(own.q, tl.trans(k), input_precision=PRECISION)
    r, capped = probabilities(s, visible, own.shift[:, None], score, own.q.dtype == tl.float32)
    dp = tl.dot(own.dout, tl.trans(v), input_precision=PRECISION)
    change = r * (dp - own.delta[:, None])
    ds = score_gradients(r, capped, dp, own.delta[:, None], score)
    if weight is not None:
        # r of an entry with gate 0 may be inf
        ds = tl.where(weight > 0.0, ds * weight, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION), change


@triton.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "num_tiles", "most", "num_blocks", "num_tokens",
        "limit_right", "near_left", "near_right",
    ]
)  # fmt: skip
def _sparse_attn_dq_kernel(
    gradients,
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    terms,
    lists,
    cu_seqlens,
    strides,
    lse_head_stride,
    q_len,
    kv_len,
    num_tiles,
    most,
    num_blocks,
    num_tokens,
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
    """dQ, and each head's share of dgate, of one tile of queries."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
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
    rows = rows_of_tile(tl.arange(0, TILE_M), q_start, q_len, first_head, GROUP_SIZE, TILE_T)
    token = q_first + rows.token
    list_head = first_head // heads.per_list
    listing = lists_of_rows(lists, strides.lists, batch, list_head, token, rows.real, most)
    kv_head = first_head // heads.group
    places = places_of_keys(
        k_ptr, v_ptr, strides.k, strides.v, batch, kv_head, kv_first, kv_len, None
    )
    own = _own_rows(
        q_ptr, dout_ptr, terms,
        offsets_of(batch, rows.head, token, strides.q),
        offsets_of(batch, rows.head, token, strides.dout),
        row_offsets(rows.head, token, batch, heads.q, lse_head_stride, cu_seqlens.q),
        rows.real, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV,
    )  # fmt: skip
    q_pos = position(rows.token, q_len, kv_len)
    limits = row_bounds(q_pos[:, None], kv_len, OPEN, limit_right)
    near = row_bounds(q_pos[:, None], kv_len, near_left, near_right)
    dq = tl.zeros([TILE_M, TILE_D], tl.float32)
    offs_n = tl.arange(0, TILE_N)
    # [B, Hq, T, K], or packed [Hq, T, K]
    gate_row = row_offsets(rows.head, token, batch, heads.q, num_tokens, cu_seqlens.q) * most

    lo, hi = kv_range(q_start, q_start + TILE_T, q_len, kv_len, near_left, near_right)
    hi = tl.where(near_left < 0, 0, hi)
    for start in tl.range(lo // TILE_N * TILE_N, hi, TILE_N):
        kv_pos = start + offs_n
        visible = rows.real[:, None] & within_bounds(kv_pos[None, :], near.first, near.last)
        dq, _ = _query_step(
            dq, own, places, kv_pos, kv_pos >= lo, visible, None, score,
            HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
        )  # fmt: skip

    if BLOCK_KV < 16:
        count = tl.max(listing.count, 0)
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
            dq, change = _query_step(
                dq, own, places, kv_pos, inside, visible, weight, score,
                HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
            )  # fmt: skip
            if gradients.dgate is not None:
                change = tl.reshape(change, [TILE_M, TILE_N // BLOCK_KV, BLOCK_KV])
                entry = start // BLOCK_KV + tl.arange(0, TILE_N // BLOCK_KV)
                mask = rows.real[:, None] & exists(entry, count)[None, :]
                at = gate_row[:, None] + entry[None, :]
                tl.store(gradients.dgate + at, tl.sum(change, 2), mask=mask)
    else:
        gate_rows = offsets_of(batch, list_head, token, strides.lists.gate)
        cursor = rows.token - rows.token
        block, member = next_block(listing, cursor)
        while block != NO_BLOCK:
            inside = (block >= 0) & (block < num_blocks)
            weight = None
            if lists.gate is not None:
                weight = tl.load(lists.gate + gate_rows + cursor, mask=member, other=0.0)
                weight = weight.to(tl.float32)[:, None]
            dgate = own.delta - own.delta
            for step in tl.range(0, BLOCK_KV // TILE_N):
                kv_pos = tl.where(inside, block, 0) * BLOCK_KV + step * TILE_N + offs_n
                wanted = inside & (kv_pos >= 0)
                visible = (member & inside)[:, None] & seen_of_block(kv_pos[None, :], limits, near)
                dq, change = _query_step(
                    dq, own, places, kv_pos, wanted, visible, weight, score,
                    HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
                )  # fmt: skip
                dgate += tl.sum(change, 1)
            if gradients.dgate is not None:
                tl.store(gradients.dgate + gate_row + cursor, dgate, mask=member)
            cursor += member.to(tl.int32)
            block, member = next_block(listing, cursor)

    if gradients.dq is not None:
        offs_d = tl.arange(0, TILE_D)
        at = offsets_of(batch, rows.head, token, strides.dq)
        mask = rows.real[:, None] & (offs_d < HEAD_DIM)[None, :]
        dq = (dq * score.scale).to(gradients.dq.dtype.element_ty)
        tl.store(gradients.dq + at[:, None] + offs_d[None, :], dq, mask=mask)


class KeySums(NamedTuple):
    """Gradients of the keys (without the scale) and values that a program owns."""

    dk: Any
    dv: Any


@triton.jit
def _key_step(sums, own, k, v, visible, weight, score, PRECISION: tl.constexpr):
    """Add what rows give to their keys; products have the keys as rows, as sums want them."""
    s = tl.dot(k, tl.trans(own.q), input_precision=PRECISION)
    natural: tl.constexpr = k.dtype == tl.float32
    r, capped = probabilities(s, visible, own.shift[None, :], score, natural)
    dp = tl.dot(v, tl.trans(own.dout), input_precision=PRECISION)
    ds = score_gradients(r, capped, dp, own.delta[None, :], score)
    p = r
    if weight is not None:
        p = tl.where(weight > 0.0, r * weight, 0.0)
        ds = tl.where(weight > 0.0, ds * weight, 0.0)
    dv = tl.dot(p.to(v.dtype), own.dout, sums.dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(k.dtype), own.q, sums.dk, input_precision=PRECISION)
    return KeySums(dk, dv)


@triton.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "num_tiles", "most", "num_blocks", "num_tokens",
        "num_lists", "limit_right", "near_left", "near_right",
    ]
)  # fmt: skip
def _sparse_attn_dkdv_kernel(
    gradients,
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    gate_ptr,
    terms,
    queries,
    first_blocks_ptr,
    cu_seqlens,
    strides,
    lse_head_stride,
    q_len,
    kv_len,
    num_tiles,
    most,
    num_blocks,
    num_tokens,
    num_lists,
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
    """dK and dV of one tile of keys of one KV head; `num_lists` of a batch, 0 if all share one."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    TILE_T: tl.constexpr = TILE_M // GROUP_SIZE
    OWN_KEYS: tl.constexpr = min(BLOCK_KV, TILE_N)
    program = tl.program_id(0)
    kv_heads = heads.q // heads.group
    batch = program // num_tiles // kv_heads
    kv_head = program // num_tiles % kv_heads
    q_first, q_len = token_span(cu_seqlens.q, batch, q_len)
    kv_first, kv_len = token_span(cu_seqlens.kv, batch, kv_len)
    kv_start = program % num_tiles * OWN_KEYS
    if kv_start >= kv_len:
        return
    offs_n = tl.arange(0, TILE_N)
    kv_pos = kv_start + offs_n
    mine = (offs_n < OWN_KEYS) & exists(kv_pos, kv_len)
    places = places_of_keys(
        k_ptr, v_ptr, strides.k, strides.v, batch, kv_head, kv_first, kv_len, None
    )
    keys = key_rows(places, None, kv_pos, mine)
    k = load_at(places.k, keys.k, mine, HEAD_DIM, TILE_D)
    v = load_at(places.v, keys.v, mine, HEAD_DIM_V, TILE_DV)
    sums = KeySums(tl.zeros([TILE_N, TILE_D], tl.float32), tl.zeros([TILE_N, TILE_DV], tl.float32))
    block = kv_start // BLOCK_KV
    if first_blocks_ptr is not None:
        block += tl.load(first_blocks_ptr + batch)
    offs_m = tl.arange(0, TILE_M)
    in_tile = offs_m < TILE_T * GROUP_SIZE
    lo, hi = q_range(kv_start, kv_start + OWN_KEYS, q_len, kv_len, near_left, near_right)
    hi = tl.where(near_left < 0, 0, hi)

    for unit in tl.range(0, heads.group // GROUP_SIZE):
        first_head = kv_head * heads.group + unit * GROUP_SIZE
        head = first_head + offs_m % GROUP_SIZE
        list_head = first_head // heads.per_list
        for start in tl.range(lo, hi, TILE_T):
            token = start + offs_m // GROUP_SIZE
            real = in_tile & exists(token, hi)
            token = tl.where(real, token, 0)
            own = _own_rows(
                q_ptr, dout_ptr, terms,
                offsets_of(batch, head, q_first + token, strides.q),
                offsets_of(batch, head, q_first + token, strides.dout),
                row_offsets(head, q_first + token, batch, heads.q, lse_head_stride, cu_seqlens.q),
                real, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV,
            )  # fmt: skip
            q_pos = position(token, q_len, kv_len)[None, :]
            near = row_bounds(q_pos, kv_len, near_left, near_right)
            visible = within_bounds(kv_pos[:, None], near.first, near.last)
            visible = visible & mine[:, None] & real[None, :]
            sums = _key_step(sums, own, k, v, visible, None, score, PRECISION)

        row = tl.cast(batch * num_lists + list_head, tl.int64)
        starts = queries.starts + row * (num_blocks + 1) + block
        places_row = queries.places + row * num_tokens * most
        end = tl.load(starts + 1)
        for start in tl.range(tl.load(starts), end, TILE_T):
            index = start + offs_m // GROUP_SIZE
            real = in_tile & exists(index, end)
            place = tl.load(places_row + index, mask=real, other=0)
            # counted through all packed sequences
            token = tl.where(real, place // most, q_first)
            own = _own_rows(
                q_ptr, dout_ptr, terms,
                offsets_of(batch, head, token, strides.q),
                offsets_of(batch, head, token, strides.dout),
                row_offsets(head, token, batch, heads.q, lse_head_stride, cu_seqlens.q),
                real, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV,
            )  # fmt: skip
            q_pos = position(token - q_first, q_len, kv_len)[None, :]
            limits = row_bounds(q_pos, kv_len, OPEN, limit_right)
            near = row_bounds(q_pos, kv_len, near_left, near_right)
            visible = seen_of_block(kv_pos[:, None], limits, near)
            visible = visible & mine[:, None] & real[None, :]
            weight = None
            if gate_ptr is not None:
                at = offsets_of(batch, list_head, token, strides.gate) + place % most
                weight = tl.load(gate_ptr + at, mask=real, other=0.0).to(tl.float32)[None, :]
            sums = _key_step(sums, own, k, v, visible, weight, score, PRECISION)

    if gradients.dk is not None:
        offs_d = tl.arange(0, TILE_D)
        at = offsets_of(batch, kv_head, kv_first + kv_pos, strides.dk)
        mask = mine[:, None] & (offs_d < HEAD_DIM)[None, :]
        dk = (sums.dk * score.scale).to(gradients.dk.dtype.element_ty)
        tl.store(gradients.dk + at[:, None] + offs_d[None, :], dk, mask=mask)
    if gradients.dv is not None:
        offs_dv = tl.arange(0, TILE_DV)
        at = offsets_of(batch, kv_head, kv_first + kv_pos, strides.dv)
        mask = mine[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        dv = sums.dv.to(gradients.dv.dtype.element_ty)
        tl.store(gradients.dv + at[:, None] + offs_dv[None, :], dv, mask=mask)


def backward(call: SparseBackwardCall) -> None:
    """Fill the gradients that are asked for; the same bits in every run."""
    config = sparse_attn_config(call.problem, fp32_precision(call.forward.q.dtype))
    fill_gradients(
        call,
        lambda delta, shares: launch_sparse_attn_dq(call, delta, shares, config),
        lambda delta: launch_sparse_attn_dkdv(call, delta, config),
    )


def fill_gradients(
    call: SparseBackwardCall,
    launch_dq: Callable[[torch.Tensor, torch.Tensor | None], None],
    launch_dkdv: Callable[[torch.Tensor], None],
) -> None:
    """Fill the gradients that are asked for by these kernels.

    `launch_dq(delta, shares)` fills dq, and each query head's shares of dgate unless they are None;
    `launch_dkdv(delta)` fills dk and dv.
    """
    wanted, lse, given = call.gradients, call.lse, call.forward
    delta = scratch(lse.shape, lse.dtype, lse.device)
    launch_attn_delta(delta, call.dout, call.out, call.dlse, lse)
    if wanted.dq is not None or wanted.dgate is not None:
        shares = None
        if wanted.dgate is not None:
            shares = _gate_shares(given)
        launch_dq(delta, shares)
        if shares is not None and wanted.dgate is not None:
            _add_shares(wanted.dgate, shares)
    if wanted.dk is not None or wanted.dv is not None:
        launch_dkdv(delta)
    if wanted.dsinks is not None and given.spec.sinks is not None:
        sinks = given.spec.sinks.contiguous()
        launch_sink_gradients(wanted.dsinks, sinks, lse, delta, given.spec.cu_seqlens_q)


def _gate_shares(call: SparseAttentionCall) -> torch.Tensor:
    """Zeros for each query head's share of dgate, fp32 [B, Hq, Tq, K]."""
    batch = 1 if call.spec.is_varlen else call.q.shape[0]
    _, _, tokens, most = call.spec.selection.ids.shape
    shape = (batch, call.q.shape[1], tokens, most)
    return torch.zeros(shape, dtype=torch.float32, device=call.q.device)


def _add_shares(dgate: torch.Tensor, shares: torch.Tensor) -> None:
    """Add up the shares of the query heads of a list, and of sequences with the same lists."""
    batch, lists, tokens, most = dgate.shape
    # torch does not infer a size, as of -1, where there are no elements
    sharing = shares.shape[1] // max(lists, 1)
    sums = shares.view(shares.shape[0], lists, sharing, tokens, most).sum(2)
    dgate.copy_(sums.sum(0, keepdim=True) if batch == 1 else sums)


def launch_sparse_attn_dq(
    call: SparseBackwardCall,
    delta: torch.Tensor,
    shares: torch.Tensor | None,
    config: SparseAttnConfig,
) -> None:
    """Fill dq, and `shares` with each query head's share of dgate, where these are wanted.

    Parameters
    ----------
    call : the backward call
    delta : fp32, like lse, contiguous
    shares : fp32 [B, Hq, Tq, K] or packed [1, Hq, Tq, K], zeros, contiguous
    config : tiles and launch options
    """
    given, spec, dq = call.forward, call.forward.spec, call.gradients.dq
    q, k, v = given.q, given.k, given.v
    tiles = cdiv(spec.max_q, queries_per_tile(given, config))
    programs = given.batch * (q.shape[1] // config.pack) * tiles
    if programs == 0:
        return
    lists, list_strides = list_arguments(given)
    tensors = (q if dq is None else dq, q, call.dout)
    keys = (key_strides(x, given) for x in (k, v))
    with on_device_of(q):
        args = (
            QueryGradients(dq, shares),
            q,
            k,
            v,
            call.dout,
            RowTerms(call.lse, delta),
            lists,
            CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k),
            DqStrides(*(token_strides(x) for x in tensors), *keys, list_strides),
            call.lse.stride(-2),
            spec.max_q,
            spec.max_k,
            tiles,
            spec.selection.most,
            spec.selection.num_blocks,
            spec.selection.q_len,
            spec.limit_right,
            *local_sides(given),
            head_counts(given),
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            q.shape[-1],
            v.shape[-1],
            spec.selection.granularity,
            config.pack,
            config.tile_m,
            config.tile_n,
            config.precision,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(_sparse_attn_dq_kernel, programs, args, **options)


class Transposed(NamedTuple):
    """Queries of each block, how many blocks are numbered, and the first of each sequence."""

    queries: QueriesOfBlocks
    blocks: int
    first_blocks: torch.Tensor | None


def transposed(call: SparseAttentionCall) -> Transposed:
    """List the queries of each block on the device; blocks of packed sequences numbered through."""
    chosen, spec = call.spec.selection, call.spec
    if spec.cu_seqlens_q is None or spec.cu_seqlens_k is None:
        return Transposed(chosen.transpose(), chosen.num_blocks, None)
    size = chosen.granularity
    lengths = spec.cu_seqlens_k.long().diff()
    own = (lengths + size - 1) // size
    first = own.cumsum(0) - own
    token = torch.arange(chosen.q_len, device=call.q.device)
    sequence = torch.searchsorted(spec.cu_seqlens_q[1:].contiguous(), token, right=True)
    # offsets that end before the last token are the user's error, and must not be read past
    sequence = sequence.clamp(max=max(call.batch - 1, 0))
    of_token = BlocksOfSequences(first[sequence], own[sequence])
    # at most one block of each sequence is not full
    blocks = call.k.shape[0] // size + call.batch
    made = queries_of_blocks(chosen.ids, chosen.counts, blocks, of_token)
    return Transposed(made, blocks, first.to(torch.int32))


def launch_sparse_attn_dkdv(
    call: SparseBackwardCall, delta: torch.Tensor, config: SparseAttnConfig
) -> None:
    """Fill dk and dv, whichever are needed.

    Parameters
    ----------
    call : the backward call
    delta : fp32, like lse, contiguous
    config : tiles and launch options
    """
    given, spec = call.forward, call.forward.spec
    q, k, v, chosen = given.q, given.k, given.v, given.spec.selection
    dk, dv = call.gradients.dk, call.gradients.dv
    tiles = cdiv(spec.max_k, min(chosen.granularity, config.tile_n))
    programs = given.batch * given.kv_heads * tiles
    if programs == 0:
        return
    lists = transposed(given)
    gate = spec.gate
    written = (k if dk is None else dk, v if dv is None else dv)
    _, list_strides = list_arguments(given)
    with on_device_of(q):
        args = (
            KeyGradients(dk, dv),
            q,
            k,
            v,
            call.dout,
            gate,
            RowTerms(call.lse, delta),
            lists.queries,
            lists.first_blocks,
            CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k),
            DkdvStrides(
                token_strides(q),
                token_strides(call.dout),
                *(key_strides(x, given) for x in (k, v, *written)),
                list_strides.gate,
            ),
            call.lse.stride(-2),
            spec.max_q,
            spec.max_k,
            tiles,
            max(chosen.most, 1),
            lists.blocks,
            chosen.q_len,
            chosen.heads if chosen.batch > 1 else 0,
            spec.limit_right,
            *local_sides(given),
            head_counts(given),
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            q.shape[-1],
            v.shape[-1],
            chosen.granularity,
            config.pack,
            config.tile_m,
            config.tile_n,
            config.precision,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(_sparse_attn_dkdv_kernel, programs, args, **options)
