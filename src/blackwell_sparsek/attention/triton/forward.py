# mypy: ignore-errors
"""Attention forward, the portable kernel: sm_80 and newer, and the interpreter.

    s[i, j] = scale * q[i] . k[j], softcapped, + bias[i, j] - slope * |position of i - j|
                                                       where query i sees key j
    out[i]  = sum_j exp(s[i, j] - lse[i]) v[j]
    lse[i]  = log(sum_j exp(s[i, j]) + exp(sink))

q, out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], lse [B, Hq, Sq], or packed: q [Tq, Hq, D] and
lse [Hq, Tq]. One program computes TILE_M queries of one head: it walks the KV tiles that need mask
code, then those that do not. Rows that see nothing give 0 and -inf. With gates, exp(s[i, j]) has
the factor of `device.gates`. Called by `bsk::attn_fwd` and `bsk::gated_attn_fwd`.

Limits: D and Dv up to 256, lengths below 2**30, a mask whose query blocks hold whole tiles. Keys
past the lengths and absent blocks are not read; NaN in a value that only some queries of a tile
see reaches all of them.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from ...core.sizes import cdiv
from ...device.gates import GateRow, KeyGates, add_gates, gate_row, gate_weights, load_gate_terms
from ...device.masks import exists, position, row_bounds
from ...device.records import Added, Band, Lengths, Score
from ...device.schedule import head_offset, lse_offset
from ...device.scores import added_scores, bias_of_head, cap, fold_sign, slope_of_head
from ...device.softmax import LOG2_E, add_sink, finalise, init_state, softmax_step
from ...device.tile_walk import full_tile, masked_key_tile, place_query_tile, plan_keys
from ...device.tiles import load_rows, store_rows
from ...device.visits import num_full_blocks, num_masked_blocks, num_tiles
from ...launch.description import KernelLaunch, run
from ..operands import AttnStrides, kernel_operands, token_strides
from .tuning import AttnFwdConfig, attn_fwd_config

if TYPE_CHECKING:
    import torch

    from ...calls.attention import AttentionCall


class State(NamedTuple):
    """Softmax state of each query, and its weighted sum of values."""

    m_log2: Any
    row_sum: Any
    acc: Any


class Keys(NamedTuple):
    """Keys and values of one (batch, head): pointers, and elements from token to token."""

    k: Any
    v: Any
    k_stride: Any
    v_stride: Any


@triton.jit
def _attend_tile(
    state,
    q,
    keys,
    kv_pos,
    kv_limit,
    visible,
    score,
    offs_m,
    added,
    gate,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_BIASED: tl.constexpr,
):
    """Add one KV tile to the state; `visible` is None for a tile without mask code.

    `gate` is None, or a `GateRow` with a pointer to the scores and the thresholds of the rows.
    """
    m_log2, row_sum, acc = state
    offs_d = tl.arange(0, TILE_D)
    offs_dv = tl.arange(0, TILE_DV)
    k = load_rows(keys.k, kv_pos, keys.k_stride, offs_d, kv_limit, HEAD_DIM)  # [TILE_N, TILE_D]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [TILE_M, TILE_N]
    s = cap(s, score.inverse_cap)
    factor = score.factor
    if IS_BIASED:
        s = s * factor + added_scores(added, offs_m[:, None], kv_pos[None, :]) * LOG2_E
        factor = 1.0
    if gate is not None:
        u = load_gate_terms(gate.u, kv_pos, kv_limit, -float("inf"))
        s = add_gates(s * factor, gate_weights(u[None, :], gate.tau[:, None]))
        factor = 1.0
    if visible is not None:
        s = tl.where(visible, s, -float("inf"))
    m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, factor)
    v = load_rows(keys.v, kv_pos, keys.v_stride, offs_dv, kv_limit, HEAD_DIM_V)  # [TILE_N, TILE_DV]
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return State(m_log2, row_sum, acc)


@triton.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "left", "right", "mask_batch_step", "mask_head_step",
    ]
)  # fmt: skip
def _attn_fwd_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    gates,
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
    slopes,
    bias,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MASK_PER_KV_HEAD: tl.constexpr,
):
    """Compute one tile of queries of one head."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    # Tiles of narrower values are as wide as those of keys: if tiles of different widths share an
    # address in shared memory, ptxas of CUDA 12.8 may lose one of them.
    NARROWEST: tl.constexpr = HEAD_DIM if HEAD_DIM <= 128 else 16
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, NARROWEST, 16))
    KV_BLOCK: tl.constexpr = TILE_N if BLOCK_KV is None else BLOCK_KV
    ELEMENT_BYTES: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    KV_BYTES: tl.constexpr = (HEAD_DIM + HEAD_DIM_V) * ELEMENT_BYTES
    IS_BIASED: tl.constexpr = slopes is not None or bias is not None
    tl.static_assert((BLOCK_KV is None) == (block_lists is None))

    place, q_span, kv_span, q_start = place_query_tile(
        cu_seqlens, q_len, kv_len, heads, KV_BYTES, TILE_M
    )
    batch, q_head, kv_head = place
    q_first, q_len = q_span
    kv_first, kv_len = kv_span
    if q_start >= q_len:
        return
    mask_head = kv_head if MASK_PER_KV_HEAD else q_head
    mask_row = batch * mask_batch_step + mask_head * mask_head_step
    lengths, band = Lengths(q_len, kv_len), Band(left, right)
    plan = plan_keys(block_lists, mask_row, q_start, lengths, band, TILE_M, TILE_N, BLOCK_KV)

    offs_m = q_start + tl.arange(0, TILE_M)
    q_ptr += head_offset(batch, q_head, q_first, strides.q)
    k_ptr += head_offset(batch, kv_head, kv_first, strides.k)
    v_ptr += head_offset(batch, kv_head, kv_first, strides.v)
    keys = Keys(k_ptr, v_ptr, strides.k.token, strides.v.token)
    q = load_rows(q_ptr, offs_m, strides.q.token, tl.arange(0, TILE_D), q_len, HEAD_DIM)
    q, scale_log2 = fold_sign(q, score.factor)
    score = Score(scale_log2, score.inverse_cap)
    q_pos = position(offs_m, q_len, kv_len)
    row_limits = row_bounds(q_pos, kv_len, left, right)
    gate = None
    if gates is not None:
        at = gate_row(gates, batch, q_head)
        gate = GateRow(at.u, load_gate_terms(at.tau, offs_m, q_len, float("inf")))
    m_log2, row_sum = init_state(q_pos)
    state = State(m_log2, row_sum, tl.zeros([TILE_M, TILE_DV], tl.float32))

    slope, bias_ptr, bias_q_step, bias_kv_step = None, None, 0, 0
    if slopes is not None:
        slope = slope_of_head(slopes, batch, q_head)
    if bias is not None:
        bias_ptr = bias_of_head(bias, batch, q_head)
        bias_q_step, bias_kv_step = bias.q_step, bias.kv_step
    added = Added(slope, bias_ptr, bias_q_step, bias_kv_step, lengths)

    num_masked = num_masked_blocks(plan)
    for kv_tile in tl.range(0, num_tiles(num_masked, TILE_N, KV_BLOCK)):
        kv_pos, visible = masked_key_tile(
            block_lists, plan, num_masked, kv_tile, row_limits, offs_m, q_start, kv_len,
            TILE_N, KV_BLOCK,
        )  # fmt: skip
        state = _attend_tile(
            state, q, keys, kv_pos, kv_len, visible, score, offs_m, added, gate,
            HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION, IS_BIASED,
        )  # fmt: skip

    num_full = num_full_blocks(plan)
    for kv_tile in tl.range(0, num_tiles(num_full, TILE_N, KV_BLOCK)):
        kv_pos = full_tile(block_lists, plan, num_full, kv_tile, kv_len, TILE_N, KV_BLOCK)
        state = _attend_tile(
            state, q, keys, kv_pos, None, None, score, offs_m, added, gate,
            HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION, IS_BIASED,
        )  # fmt: skip

    m_log2, row_sum, acc = state
    if sinks_ptr is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, tl.load(sinks_ptr + q_head))
        acc *= rescale[:, None]
    inverse, lse = finalise(m_log2, row_sum)

    out_ptr += head_offset(batch, q_head, q_first, strides.out)
    offs_dv = tl.arange(0, TILE_DV)
    out = acc * inverse[:, None]
    store_rows(out_ptr, offs_m, strides.out.token, offs_dv, out, q_len, HEAD_DIM_V)
    lse_ptr += lse_offset(batch, q_head, q_first, heads.q, lse_head_stride, cu_seqlens.q)
    tl.store(lse_ptr + offs_m, lse, exists(offs_m, q_len))


def forward(call: "AttentionCall") -> "tuple[torch.Tensor, torch.Tensor]":
    """Output, in the tensor that the call gives or as `empty_out` lays it out, and lse."""
    from ...calls.attention import empty_lse
    from ...dispatch.machine import fp32_precision

    out, lse = call.empty_out(), empty_lse(call.q)
    config = attn_fwd_config(call.problem, fp32_precision(call.q.dtype))
    launch_attn_fwd(call, out, lse, config)
    return out, lse


def launch_attn_fwd(
    call: "AttentionCall",
    out: "torch.Tensor",
    lse: "torch.Tensor",
    config: AttnFwdConfig,
    gates: KeyGates | None = None,
) -> None:
    """Fill `out` and `lse`; see `plan_attn_fwd`."""
    run(plan_attn_fwd(call, out, lse, config, gates), call.q)


def plan_attn_fwd(
    call: Any, out: Any, lse: Any, config: AttnFwdConfig, gates: KeyGates | None = None
) -> KernelLaunch | None:
    """The launch that fills `out` and `lse`.

    Parameters
    ----------
    call : q, k and v [B, H, S, D] or packed [T, H, D], contiguous in the last dimension
    out : [B, Hq, Sq, Dv] or [Tq, Hq, Dv], contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    config : tiles and launch options
    gates : scores of keys and thresholds of queries; only for dense batches
    """
    q, k, v = call.q, call.k, call.v
    operands = kernel_operands(call)
    programs = operands.batch * operands.heads[0] * cdiv(operands.lengths[0], config.tile_m)
    if programs == 0:
        return None
    args = (
        out,
        lse,
        q,
        k,
        v,
        operands.sinks,
        gates,
        operands.cu_seqlens,
        operands.block_lists,
        AttnStrides(*(token_strides(x) for x in (out, q, k, v))),
        lse.stride(-2),
        *operands.lengths,
        *operands.band,
        *operands.mask_steps,
        operands.heads,
        operands.score,
        operands.slopes,
        operands.bias,
        q.shape[-1],
        v.shape[-1],
        operands.block_kv,
        config.tile_m,
        config.tile_n,
        config.precision,
        operands.mask_per_kv_head,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return KernelLaunch(_attn_fwd_kernel, programs, args, options)
