"""Attention backward, the portable kernel of the queries' gradient: sm_80 and newer.

    p[i, j]  = exp(s[i, j] - lse[i])          where query i sees key j
    ds[i, j] = p[i, j] * (dout[i] . v[j] - delta[i])
    dq[i]    = scale * sum_j ds[i, j] k[j]

Shapes are those of `fwd.py`; dout is like out, delta like lse. One program owns TILE_M queries of
one head and walks over the same KV tiles as the forward kernel, so sums have one order and there
are no atomics. Limits are those of `fwd.py`. Called by `bsk::attn_bwd`.
"""

import torch
import triton
import triton.language as tl

from ...core.launch import cdiv, launch, on_device_of
from ...device.backprop import probabilities, score_gradients, shift_of_rows
from ...device.masks import exists, position, row_bounds
from ...device.sequences import lse_offset, plane_offset
from ...device.tile_walk import full_tile, masked_key_tile, place_query_tile, plan_keys
from ...device.tiles import load_rows, store_rows
from ...device.visits import (
    num_full_units,
    num_masked_units,
    num_tiles,
)
from ...formats.attention_spec import AttnSpec
from .config import AttnBwdConfig
from .operands import AttnBwdStrides, gradient_factors, kernel_operands, token_strides


@triton.jit
def _add_tile(
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
        dq = _add_tile(
            dq, rows, k_ptr, v_ptr, kv_pos, kv_len, visible, strides.k[2], strides.v[2],
            score, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
        )  # fmt: skip

    num_full = num_full_units(plan)
    for kv_tile in tl.range(0, num_tiles(num_full, TILE_N, UNIT)):
        kv_pos = full_tile(block_lists, plan, num_full, kv_tile, kv_len, TILE_N, UNIT)
        dq = _add_tile(
            dq, rows, k_ptr, v_ptr, kv_pos, None, None, strides.k[2], strides.v[2],
            score, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION,
        )  # fmt: skip

    dq_ptr += plane_offset(batch, q_head, q_first, strides.dq)
    offs_d = tl.arange(0, TILE_D)
    store_rows(dq_ptr, offs_m, strides.dq[2], offs_d, dq * score[2], q_len, HEAD_DIM)


def launch_attn_dq(
    dq: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    spec: AttnSpec,
    config: AttnBwdConfig,
) -> None:
    """Fill `dq`.

    Parameters
    ----------
    dq, dout, q, k, v : [B, H, S, D] or packed [T, H, D], contiguous in the last dimension
    lse, delta : fp32 [B, Hq, Sq] or [Hq, Tq], contiguous; delta as `launch_attn_delta` gives it
    spec : options of the forward call
    config : tiles and launch options; tiles lie within the query blocks of a mask
    """
    operands = kernel_operands(q, k, v, spec)
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
