# mypy: ignore-errors
"""Attention forward over e4m3 tensors, the portable kernel: sm_80 and newer, and the interpreter.

    s[i, j] = scale * (q_descale[i] q[i]) . (k_descale[j] k[j]), softcapped    where i sees j
    out[i]  = v_descale * sum_j exp(s[i, j] - lse[i]) v[j]

Shapes, walk and softmax are those of `forward`. Stored values become fp16, which holds them
exactly, and so do the weights: sums are those of fp16 products in fp32, and reading takes half the
bytes. v may be contiguous along its channels or along its tokens. Called as impl "triton" of
`bsk::attn_fwd_fp8`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...calls.fp8 import SCALE_TOKENS, Fp8AttentionCall
from ...device.fp8 import e4m3_operand
from ...device.masks import exists, position, row_bounds
from ...device.records import Band, Lengths, Score
from ...device.schedule import head_offset, lse_offset
from ...device.scores import cap, fold_sign
from ...device.softmax import add_sink, finalise, init_state, softmax_step
from ...device.tile_walk import full_tile, masked_key_tile, place_query_tile, plan_keys
from ...device.tiles import load_rows, store_rows
from ...device.visits import num_full_blocks, num_masked_blocks, num_tiles
from ...launch.launcher import cdiv, launch, on_device_of
from ..operands import AttnStrides, kernel_operands, token_strides
from .forward import State
from .tuning import MIN_SM_CONVERTS_FP8, AttnFwdConfig, attn_fwd_fp8_config

_SCALE_TOKENS = tl.constexpr(SCALE_TOKENS)


class Keys(NamedTuple):
    """Keys and values of one (batch, head): pointers, elements from token to token, scales."""

    k: Any
    v: Any
    k_stride: Any
    v_stride: Any
    """From token to token, or from channel to channel where tokens are contiguous."""
    scale: Any
    """A pointer to those of the keys, or None."""
    scale_stride: Any
    """0 if all keys share one scale."""


@triton.jit
def token_scales(scale_ptr, tokens, stride, length):
    """The scale of each token; those at or past `length` are not read, None means all exist."""
    at = scale_ptr + (tokens // _SCALE_TOKENS).to(tl.int64) * stride
    return tl.load(at) if length is None else tl.load(at, exists(tokens, length), 0.0)


@triton.jit
def _load_values(keys, kv_pos, offs_d, kv_limit, HEAD_DIM: tl.constexpr, TURNED: tl.constexpr):
    """Values [keys, channels], 0 for keys at or past `kv_limit`."""
    if TURNED:
        live = (offs_d < HEAD_DIM)[:, None]
        if kv_limit is not None:
            live = live & exists(kv_pos, kv_limit)[None, :]
        rows = offs_d.to(tl.int64)[:, None] * keys.v_stride
        tile = tl.trans(tl.load(keys.v + rows + kv_pos[None, :], live, 0))
    else:
        tile = load_rows(keys.v, kv_pos, keys.v_stride, offs_d, kv_limit, HEAD_DIM)
    return tile


@triton.jit
def _attend_tile(
    state,
    q,
    q_scale,
    keys,
    kv_pos,
    kv_limit,
    visible,
    score,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
    TURNED: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
):
    """Take one KV tile into the state; `visible` None means all of it is."""
    m_log2, row_sum, acc = state
    k = load_rows(keys.k, kv_pos, keys.k_stride, tl.arange(0, TILE_D), kv_limit, HEAD_DIM)
    k = e4m3_operand(k, CONVERTS_FP8)  # [TILE_N, TILE_D]
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [TILE_M, TILE_N]
    if q_scale is not None:
        s *= q_scale[:, None]
    if keys.scale is not None:
        s *= token_scales(keys.scale, kv_pos, keys.scale_stride, kv_limit)[None, :]
    s = cap(s, score.inverse_cap)
    if visible is not None:
        s = tl.where(visible, s, -float("inf"))
    m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, score.factor)
    v = _load_values(keys, kv_pos, tl.arange(0, TILE_DV), kv_limit, HEAD_DIM_V, TURNED)
    v = e4m3_operand(v, CONVERTS_FP8)  # [TILE_N, TILE_DV]
    acc = tl.dot(p.to(tl.float16), v, acc * rescale[:, None], input_precision="ieee")
    return State(m_log2, row_sum, acc)


@triton.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "left", "right", "mask_batch_step", "mask_head_step",
        "q_scale_batch", "q_scale_head", "q_scale_block", "k_scale_batch", "k_scale_head",
        "k_scale_block", "v_scale_batch", "v_scale_head", "v_scale_channel",
    ]
)  # fmt: skip
def _attn_fwd_fp8_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    cu_seqlens,
    block_lists,
    strides,
    q_scale_batch,
    q_scale_head,
    q_scale_block,
    k_scale_batch,
    k_scale_head,
    k_scale_block,
    v_scale_batch,
    v_scale_head,
    v_scale_channel,
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
    TURNED: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """One tile of queries of one head."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    # As wide as keys where values are narrower, for the reason that `forward` gives.
    NARROWEST: tl.constexpr = HEAD_DIM if HEAD_DIM <= 128 else 16
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, NARROWEST, 16))
    KV_BLOCK: tl.constexpr = TILE_N if BLOCK_KV is None else BLOCK_KV
    tl.static_assert((BLOCK_KV is None) == (block_lists is None))

    place, q_span, kv_span, q_start = place_query_tile(
        cu_seqlens, q_len, kv_len, heads, HEAD_DIM + HEAD_DIM_V, TILE_M
    )
    batch, q_head, kv_head = place
    q_first, q_len = q_span
    kv_first, kv_len = kv_span
    if q_start >= q_len:
        return
    mask_row = batch * mask_batch_step + q_head * mask_head_step
    lengths, band = Lengths(q_len, kv_len), Band(left, right)
    plan = plan_keys(block_lists, mask_row, q_start, lengths, band, TILE_M, TILE_N, BLOCK_KV)

    offs_m = q_start + tl.arange(0, TILE_M)
    q_ptr += head_offset(batch, q_head, q_first, strides.q)
    k_ptr += head_offset(batch, kv_head, kv_first, strides.k)
    v_ptr += head_offset(batch, kv_head, kv_first, strides.v)
    q_scale = None
    if q_scale_ptr is not None:
        q_scale_ptr += batch.to(tl.int64) * q_scale_batch + q_head * q_scale_head
        q_scale = token_scales(q_scale_ptr, offs_m, q_scale_block, q_len)
    if k_scale_ptr is not None:
        k_scale_ptr += batch.to(tl.int64) * k_scale_batch + kv_head * k_scale_head
    v_stride = strides.v.token
    keys = Keys(k_ptr, v_ptr, strides.k.token, v_stride, k_scale_ptr, k_scale_block)
    q = load_rows(q_ptr, offs_m, strides.q.token, tl.arange(0, TILE_D), q_len, HEAD_DIM)
    q, scale_log2 = fold_sign(e4m3_operand(q, CONVERTS_FP8), score.factor)
    score = Score(scale_log2, score.inverse_cap)
    q_pos = position(offs_m, q_len, kv_len)
    row_limits = row_bounds(q_pos, kv_len, left, right)
    m_log2, row_sum = init_state(q_pos)
    state = State(m_log2, row_sum, tl.zeros([TILE_M, TILE_DV], tl.float32))

    num_masked = num_masked_blocks(plan)
    for kv_tile in tl.range(0, num_tiles(num_masked, TILE_N, KV_BLOCK)):
        kv_pos, visible = masked_key_tile(
            block_lists, plan, num_masked, kv_tile, row_limits, offs_m, q_start, kv_len,
            TILE_N, KV_BLOCK,
        )  # fmt: skip
        state = _attend_tile(
            state, q, q_scale, keys, kv_pos, kv_len, visible, score,
            HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, TURNED, CONVERTS_FP8,
        )  # fmt: skip

    num_full = num_full_blocks(plan)
    for kv_tile in tl.range(0, num_tiles(num_full, TILE_N, KV_BLOCK)):
        kv_pos = full_tile(block_lists, plan, num_full, kv_tile, kv_len, TILE_N, KV_BLOCK)
        state = _attend_tile(
            state, q, q_scale, keys, kv_pos, None, None, score,
            HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, TURNED, CONVERTS_FP8,
        )  # fmt: skip

    m_log2, row_sum, acc = state
    if sinks_ptr is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, tl.load(sinks_ptr + q_head))
        acc *= rescale[:, None]
    inverse, lse = finalise(m_log2, row_sum)

    out_ptr += head_offset(batch, q_head, q_first, strides.out)
    offs_dv = tl.arange(0, TILE_DV)
    out = acc * inverse[:, None]
    if v_scale_ptr is not None:
        v_scale_ptr += batch.to(tl.int64) * v_scale_batch + kv_head * v_scale_head
        at = v_scale_ptr + offs_dv.to(tl.int64) * v_scale_channel
        out *= tl.load(at, offs_dv < HEAD_DIM_V, 0.0)[None, :]
    store_rows(out_ptr, offs_m, strides.out.token, offs_dv, out, q_len, HEAD_DIM_V)
    lse_ptr += lse_offset(batch, q_head, q_first, heads.q, lse_head_stride, cu_seqlens.q)
    tl.store(lse_ptr + offs_m, lse, exists(offs_m, q_len))


def forward(call: Fp8AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of a call."""
    out, lse = call.empty_results()
    config = attn_fwd_fp8_config(call.problem)
    converts = call.problem.arch.sm >= MIN_SM_CONVERTS_FP8
    launch_attn_fwd_fp8(call, out, lse, config, converts_fp8=converts)
    return out, lse


def scale_strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of scales [B or 1, H or 1, n or 1]; 0 where one serves all."""
    if scale is None:
        return (0, 0, 0)
    return tuple(scale.stride(d) if scale.shape[d] > 1 else 0 for d in range(3))


def launch_attn_fwd_fp8(
    call: Fp8AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: AttnFwdConfig,
    *,
    converts_fp8: bool = False,
) -> None:
    """Fill `out` and `lse`.

    Parameters
    ----------
    call : e4m3 q, k and v [B, H, S, D] or packed [T, H, D], contiguous in the last dimension; v
        [B, H, S, D] may be contiguous along its tokens instead
    out : [B, Hq, Sq, Dv] or [Tq, Hq, Dv], contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    config : tiles and launch options
    converts_fp8 : whether the GPU has an instruction for it (sm_89 on); the results are the same
    """
    given = call.given
    operands = kernel_operands(given)
    programs = operands.batch * operands.heads[0] * cdiv(operands.lengths[0], config.tile_m)
    if programs == 0:
        return
    turned = call.problem.turned_values
    q, k = given.q.view(torch.uint8), given.k.view(torch.uint8)
    v = given.v.mT.view(torch.uint8) if turned else given.v.view(torch.uint8)
    with on_device_of(q):
        args = (
            out,
            lse,
            q,
            k,
            v,
            call.q_descale,
            call.k_descale,
            call.v_descale,
            operands.sinks,
            operands.cu_seqlens,
            operands.block_lists,
            AttnStrides(*(token_strides(x) for x in (out, q, k, v))),
            *scale_strides(call.q_descale),
            *scale_strides(call.k_descale),
            *scale_strides(call.v_descale),
            lse.stride(-2),
            *operands.lengths,
            *operands.band,
            *operands.mask_steps,
            operands.heads,
            operands.score,
            q.shape[-1],
            given.v.shape[-1],
            operands.block_kv,
            turned,
            converts_fp8,
            config.tile_m,
            config.tile_n,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(_attn_fwd_fp8_kernel, programs, args, **options)
