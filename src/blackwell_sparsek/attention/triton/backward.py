# mypy: ignore-errors
"""Attention backward, the portable kernel of the keys' and values' gradients: sm_80 and newer.

    p[i, j]  = exp(s[i, j] - lse[i])          where query i sees key j
    ds[i, j] = p[i, j] * (dout[i] . v[j] - delta[i])
    dv[j]    = sum_i p[i, j] dout[i]
    dk[j]    = scale * sum_i ds[i, j] q[i]

Shapes are those of `bwd_dq.py`; the sums go over the queries of all heads that read a KV head. One
program owns TILE_N keys of one KV head and walks over the queries that see them, head by head, so
sums have one order and there are no atomics. Scores are computed as k q^T: p and ds come out with
the keys as rows, as the products that follow want them. (The transpose of a product as an operand
of the next one has been compiled wrongly for Hopper.) Keys that no query sees get 0. Limits are
those of `fwd.py`, and a mask whose KV blocks hold whole tiles. Called by `bsk::attn_bwd`.
"""

import torch
import triton
import triton.language as tl

from ...calls.attention import BackwardCall
from ...device.backprop import probabilities, score_gradients, shift_of_rows
from ...device.masks import column_bounds, exists, position, row_bounds
from ...device.schedule import (
    lse_offset,
    place_in_sections,
    plane_offset,
    section_planes,
    token_span,
)
from ...device.tile_walk import (
    full_tile,
    masked_key_tile,
    masked_query_tile,
    place_query_tile,
    plan_keys,
    plan_queries,
)
from ...device.tiles import load_rows, store_rows
from ...device.visits import num_full_units, num_masked_units, num_tiles
from ...dispatch.machine import fp32_precision
from ...launch.launcher import cdiv, launch, on_device_of, scratch
from ..operands import (
    AttnBwdStrides,
    gradient_factors,
    kernel_operands,
    token_strides,
    transposed_mask,
)
from .delta import launch_attn_delta, launch_sink_gradients
from .tuning import AttnBwdConfig, attn_dkdv_config, attn_dq_config

# Attention backward, the portable kernel of the queries' gradient: sm_80 and newer.
#
#     p[i, j]  = exp(s[i, j] - lse[i])          where query i sees key j
#     ds[i, j] = p[i, j] * (dout[i] . v[j] - delta[i])
#     dq[i]    = scale * sum_j ds[i, j] k[j]
#
# Shapes are those of `fwd.py`; dout is like out, delta like lse. One program owns TILE_M queries of
# one head and walks over the same KV tiles as the forward kernel, so sums have one order and there
# are no atomics. Limits are those of `fwd.py`. Called by `bsk::attn_bwd`.


@triton.jit
def _add_dq_tile(
    dq,
    rows,
    k_ptr,
    v_ptr,
    kv_pos,
    kv_limit,
    visible,
    k_stride,
    v_stride,
    score,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what one KV tile gives to dq / scale; `visible` None means all of it is."""
    q, dout, shift, delta = rows
    k = load_rows(k_ptr, kv_pos, k_stride, tl.arange(0, TILE_D), kv_limit, HEAD_DIM)
    v = load_rows(v_ptr, kv_pos, v_stride, tl.arange(0, TILE_DV), kv_limit, HEAD_DIM_V)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [TILE_M, TILE_N]
    p, capped = probabilities(s, visible, shift[:, None], score, q.dtype == tl.float32)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    ds = score_gradients(p, capped, dp, delta[:, None], score)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "left", "right", "mask_batch_step", "mask_head_step",
    ]
)  # fmt: skip
def _attn_dq_kernel(
    dq_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    row_terms,
    cu_seqlens,
    block_lists,
    strides,
    lse_head_stride,
    q_len,
    kv_len,
    left,
    right,
    mask_batch_step,
    mask_head_step,
    heads,
    score,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ of one tile of queries of one head; `row_terms` are lse and delta."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    UNIT: tl.constexpr = TILE_N if BLOCK_KV is None else BLOCK_KV
    ELEMENT_BYTES: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    KV_BYTES: tl.constexpr = (HEAD_DIM + HEAD_DIM_V) * ELEMENT_BYTES
    tl.static_assert((BLOCK_KV is None) == (block_lists is None))

    place, q_span, kv_span, q_start = place_query_tile(
        cu_seqlens, q_len, kv_len, heads, KV_BYTES, TILE_M
    )
    batch, q_head, kv_head = place
    q_first, q_len = q_span
    kv_first, kv_len = kv_span
    if q_start >= q_len:
        return
    mask_row = batch * mask_batch_step + q_head * mask_head_step
    lengths, band = (q_len, kv_len), (left, right)
    plan = plan_keys(block_lists, mask_row, q_start, lengths, band, TILE_M, TILE_N, BLOCK_KV)

    k_ptr += plane_offset(batch, kv_head, kv_first, strides.k)
    v_ptr += plane_offset(batch, kv_head, kv_first, strides.v)
    offs_m = q_start + tl.arange(0, TILE_M)
    q_ptr += plane_offset(batch, q_head, q_first, strides.q)
    dout_ptr += plane_offset(batch, q_head, q_first, strides.dout)
    q = load_rows(q_ptr, offs_m, strides.q[2], tl.arange(0, TILE_D), q_len, HEAD_DIM)
    dout = load_rows(dout_ptr, offs_m, strides.dout[2], tl.arange(0, TILE_DV), q_len, HEAD_DIM_V)
    offset = lse_offset(batch, q_head, q_first, heads[0], lse_head_stride, cu_seqlens[0])
    live = exists(offs_m, q_len)
    lse = tl.load(row_terms[0] + offset + offs_m, mask=live, other=-float("inf"))
    delta = tl.load(row_terms[1] + offset + offs_m, mask=live, other=0.0)
    rows = (q, dout, shift_of_rows(lse, q.dtype == tl.float32), delta)
    row_limits = row_bounds(position(offs_m, q_len, kv_len), kv_len, left, right)
    dq = tl.zeros([TILE_M, TILE_D], tl.float32)

    num_masked = num_masked_units(plan)
    for kv_tile in tl.range(0, num_tiles(num_masked, TILE_N, UNIT)):
        kv_pos, visible = masked_key_tile(
            block_lists, plan, num_masked, kv_tile, row_limits, offs_m, q_start, kv_len,
            TILE_N, UNIT,
        )  # fmt: skip
        dq = _add_dq_tile(
            dq, rows, k_ptr, v_ptr, kv_pos, kv_len, visible, strides.k[2], strides.v[2],
            score, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
        )  # fmt: skip

    num_full = num_full_units(plan)
    for kv_tile in tl.range(0, num_tiles(num_full, TILE_N, UNIT)):
        kv_pos = full_tile(block_lists, plan, num_full, kv_tile, kv_len, TILE_N, UNIT)
        dq = _add_dq_tile(
            dq, rows, k_ptr, v_ptr, kv_pos, None, None, strides.k[2], strides.v[2],
            score, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
        )  # fmt: skip

    dq_ptr += plane_offset(batch, q_head, q_first, strides.dq)
    offs_d = tl.arange(0, TILE_D)
    store_rows(dq_ptr, offs_m, strides.dq[2], offs_d, dq * score[2], q_len, HEAD_DIM)


def launch_attn_dq(call: BackwardCall, delta: torch.Tensor, config: AttnBwdConfig) -> None:
    """Fill dq.

    Parameters
    ----------
    call : dq, dout, q, k and v [B, H, S, D] or packed [T, H, D], contiguous in the last dimension;
        lse fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    delta : like lse, as `launch_attn_delta` gives it
    config : tiles and launch options; tiles lie within the query blocks of a mask
    """
    dq, dout, lse, spec = call.gradients.dq, call.dout, call.lse, call.forward.spec
    assert dq is not None
    q, k, v = call.forward.q, call.forward.k, call.forward.v
    operands = kernel_operands(call.forward)
    programs = operands.batch * operands.heads[0] * cdiv(operands.lengths[0], config.tile_m)
    if programs == 0:
        return
    with on_device_of(q):
        args = (
            dq,
            q,
            k,
            v,
            dout,
            (lse, delta),
            operands.cu_seqlens,
            operands.block_lists,
            AttnBwdStrides(*(token_strides(x) for x in (q, k, v, dout)), dq=token_strides(dq)),
            lse.stride(-2),
            *operands.lengths,
            *operands.band,
            *operands.mask_steps,
            operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            q.shape[-1],
            v.shape[-1],
            operands.block_kv,
            config.tile_m,
            config.tile_n,
            config.precision,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(_attn_dq_kernel, programs, args, **options)


# Queries past which a plane counts as long: the product with the heads must fit int32.
LONG = tl.constexpr(2**20)


@triton.jit
def _load_terms(term_ptr, q_index, q_limit, missing):
    """One number per query; `missing` for those at or past `q_limit`, if that is given."""
    if q_limit is None:
        terms = tl.load(term_ptr + q_index)
    else:
        terms = tl.load(term_ptr + q_index, mask=exists(q_index, q_limit), other=missing)
    return terms


@triton.jit
def _add_dkdv_tile(
    sums,
    gradients,
    k,
    v,
    queries,
    q_index,
    q_limit,
    visible,
    strides,
    score,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what one tile of queries gives to (dk / scale, dv); `visible` None means all see it."""
    NATURAL: tl.constexpr = k.dtype == tl.float32
    dk, dv = sums
    q_ptr, dout_ptr, lse_ptr, delta_ptr = queries
    q = load_rows(q_ptr, q_index, strides.q[2], tl.arange(0, TILE_D), q_limit, HEAD_DIM)
    dout = load_rows(dout_ptr, q_index, strides.dout[2], tl.arange(0, TILE_DV), q_limit, HEAD_DIM_V)
    lse = _load_terms(lse_ptr, q_index, q_limit, -float("inf"))
    shift = shift_of_rows(lse, NATURAL)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [TILE_N, TILE_M]
    p, capped = probabilities(s, visible, shift[None, :], score, NATURAL)
    if gradients[1] is not None:
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    if gradients[0] is not None:
        delta = _load_terms(delta_ptr, q_index, q_limit, 0.0)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds = score_gradients(p, capped, dp, delta[None, :], score)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "left", "right", "mask_batch_step", "mask_head_step",
    ]
)  # fmt: skip
def _attn_dkdv_kernel(
    gradients,
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    row_terms,
    cu_seqlens,
    block_lists,
    strides,
    lse_head_stride,
    q_len,
    kv_len,
    left,
    right,
    mask_batch_step,
    mask_head_step,
    heads,
    score,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`gradients`, dK and dV or None, of one tile of keys; `row_terms` are lse and delta."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    UNIT: tl.constexpr = TILE_M if BLOCK_Q is None else BLOCK_Q
    ELEMENT_BYTES: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    Q_BYTES: tl.constexpr = (HEAD_DIM + HEAD_DIM_V) * ELEMENT_BYTES
    tl.static_assert((BLOCK_Q is None) == (block_lists is None))

    kv_tiles = (kv_len + TILE_N - 1) // TILE_N
    section = section_planes(tl.minimum(q_len, LONG) * heads[1], 1, Q_BYTES)
    plane, last_tiles = place_in_sections(
        tl.program_id(0), tl.num_programs(0) // kv_tiles, kv_tiles, section
    )
    # the first keys have the most queries where the future is hidden
    kv_start = (kv_tiles - 1 - last_tiles) * TILE_N
    kv_heads = heads[0] // heads[1]
    batch, kv_head = plane // kv_heads, plane % kv_heads
    q_first, q_len = token_span(cu_seqlens[0], batch, q_len)
    kv_first, kv_len = token_span(cu_seqlens[1], batch, kv_len)
    if kv_start >= kv_len:
        return
    lengths, band = (q_len, kv_len), (left, right)
    kv_pos = kv_start + tl.arange(0, TILE_N)
    column_limits = column_bounds(kv_pos, q_len, kv_len, left, right)

    offs_d, offs_dv = tl.arange(0, TILE_D), tl.arange(0, TILE_DV)
    k_ptr += plane_offset(batch, kv_head, kv_first, strides.k)
    v_ptr += plane_offset(batch, kv_head, kv_first, strides.v)
    k = load_rows(k_ptr, kv_pos, strides.k[2], offs_d, kv_len, HEAD_DIM)
    v = load_rows(v_ptr, kv_pos, strides.v[2], offs_dv, kv_len, HEAD_DIM_V)
    dk = tl.zeros([TILE_N, TILE_D], tl.float32)
    dv = tl.zeros([TILE_N, TILE_DV], tl.float32)

    for member in tl.range(0, heads[1]):
        q_head = kv_head * heads[1] + member
        offset = lse_offset(batch, q_head, q_first, heads[0], lse_head_stride, cu_seqlens[0])
        queries = (
            q_ptr + plane_offset(batch, q_head, q_first, strides.q),
            dout_ptr + plane_offset(batch, q_head, q_first, strides.dout),
            row_terms[0] + offset,
            row_terms[1] + offset,
        )
        mask_row = batch * mask_batch_step + q_head * mask_head_step
        plan = plan_queries(
            block_lists, mask_row, kv_start, lengths, band,
            TILE_M, TILE_N, BLOCK_Q,
        )  # fmt: skip
        num_masked = num_masked_units(plan)
        for q_tile in tl.range(0, num_tiles(num_masked, TILE_M, UNIT)):
            q_index, visible = masked_query_tile(
                block_lists, plan, num_masked, q_tile, column_limits, kv_pos, kv_start, q_len,
                TILE_M, UNIT,
            )  # fmt: skip
            dk, dv = _add_dkdv_tile(
                (dk, dv), gradients, k, v, queries, q_index, q_len, visible, strides, score,
                HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
            )  # fmt: skip
        num_full = num_full_units(plan)
        for q_tile in tl.range(0, num_tiles(num_full, TILE_M, UNIT)):
            q_index = full_tile(block_lists, plan, num_full, q_tile, q_len, TILE_M, UNIT)
            dk, dv = _add_dkdv_tile(
                (dk, dv), gradients, k, v, queries, q_index, None, None, strides, score,
                HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
            )  # fmt: skip

    if gradients[0] is not None:
        dk_ptr = gradients[0] + plane_offset(batch, kv_head, kv_first, strides.dk)
        store_rows(dk_ptr, kv_pos, strides.dk[2], offs_d, dk * score[2], kv_len, HEAD_DIM)
    if gradients[1] is not None:
        dv_ptr = gradients[1] + plane_offset(batch, kv_head, kv_first, strides.dv)
        store_rows(dv_ptr, kv_pos, strides.dv[2], offs_dv, dv, kv_len, HEAD_DIM_V)


def launch_attn_dkdv(call: BackwardCall, delta: torch.Tensor | None, config: AttnBwdConfig) -> None:
    """Fill dk and dv, or the one of them that is asked for.

    Parameters
    ----------
    call : dk, dv, dout, q, k and v [B, H, S, D] or packed [T, H, D], contiguous in the last
        dimension; lse fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    delta : like lse, as `launch_attn_delta` gives it; only dk needs it
    config : tiles and launch options; tiles lie within the KV blocks of a mask
    """
    dk, dv = call.gradients.dk, call.gradients.dv
    dout, lse, spec = call.dout, call.lse, call.forward.spec
    q, k, v = call.forward.q, call.forward.k, call.forward.v
    operands = kernel_operands(call.forward)
    programs = operands.batch * k.shape[1] * cdiv(operands.lengths[1], config.tile_n)
    if programs == 0:
        return
    mask = transposed_mask(spec.block_mask)
    with on_device_of(q):
        strides = AttnBwdStrides(
            *(token_strides(x) for x in (q, k, v, dout)),
            dk=None if dk is None else token_strides(dk),
            dv=None if dv is None else token_strides(dv),
        )
        args = (
            (dk, dv),
            q,
            k,
            v,
            dout,
            (lse, lse if delta is None else delta),
            operands.cu_seqlens,
            mask.lists,
            strides,
            lse.stride(-2),
            *operands.lengths,
            *operands.band,
            *mask.steps,
            operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            q.shape[-1],
            v.shape[-1],
            mask.block_q,
            config.tile_m,
            config.tile_n,
            config.precision,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(_attn_dkdv_kernel, programs, args, **options)


def backward(call: BackwardCall) -> None:
    """Fill the gradients that are asked for.

    dQ and dK/dV have kernels of their own and need no atomics: the same bits in every run, whether
    that was asked for or not.
    """
    wanted, lse, spec = call.gradients, call.lse, call.forward.spec
    precision, delta = fp32_precision(call.dout.dtype), None
    if wanted.dq is not None or wanted.dk is not None or wanted.dsinks is not None:
        delta = scratch(lse.shape, lse.dtype, lse.device)
        launch_attn_delta(delta, call.dout, call.out, call.dlse, lse)
    if wanted.dq is not None and delta is not None:
        launch_attn_dq(call, delta, attn_dq_config(call.problem, precision))
    if wanted.dk is not None or wanted.dv is not None:
        launch_attn_dkdv(call, delta, attn_dkdv_config(call.problem, precision))
    if wanted.dsinks is not None and delta is not None and spec.sinks is not None:
        sinks = spec.sinks.contiguous()
        launch_sink_gradients(wanted.dsinks, sinks, lse, delta, spec.cu_seqlens_q)
