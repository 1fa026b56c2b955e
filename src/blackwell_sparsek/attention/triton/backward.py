# mypy: ignore-errors
"""Attention backward, the portable kernels: one for dq, one for dk and dv; sm_80 and newer.

    p[i, j]  = exp(s[i, j] - lse[i])          where query i sees key j; s as in `forward.py`
    ds[i, j] = p[i, j] * (dout[i] . v[j] - delta[i])
    dq[i]    = scale * sum_j ds[i, j] k[j]
    dk[j]    = scale * sum_i ds[i, j] q[i]
    dv[j]    = sum_i p[i, j] dout[i]

Shapes are those of `forward.py`; dout is like out, delta like lse. A program of the dq kernel owns
TILE_M queries of one head and walks over the same KV tiles as the forward kernel. One of the dk/dv
kernel owns TILE_N keys of one KV head and walks over the queries that see them, head by head of
those that read it. So sums have one order and there are no atomics. The dk/dv kernel computes
scores as k q^T: p and ds come out with the keys as rows, as the products that follow want them.
(The transpose of a product as an operand of the next one has been compiled wrongly for Hopper.)
Keys that no query sees get 0.

Limits are those of `forward.py`; tiles lie within the blocks of a mask on the side that a program
owns. With gates w, the p of these formulas has the factor w, and

    du[j]    = sum_i p[i, j] / w[i, j] * (dout[i] . v[j] - delta[i])          where 0 < w[i, j] < 1
    dtau[i]  = -sum_j of the same

for each query head. Called by `bsk::attn_bwd` and `bsk::gated_attn_bwd`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from ...core.sizes import cdiv
from ...device.backprop import probabilities, score_gradients, shift_of_rows
from ...device.gates import (
    GateRow,
    KeyGates,
    gate_gradients,
    gate_row,
    gate_weights,
    load_gate_terms,
)
from ...device.masks import column_bounds, exists, position, row_bounds
from ...device.records import Added, Band, Lengths
from ...device.schedule import (
    head_offset,
    lse_offset,
    raster_group_size,
    raster_place,
    token_span,
)
from ...device.scores import added_scores, bias_of_head, slope_of_head
from ...device.tile_walk import (
    full_tile,
    masked_key_tile,
    masked_query_tile,
    place_query_tile,
    plan_keys,
    plan_queries,
)
from ...device.tiles import load_rows, store_rows
from ...device.visits import num_full_blocks, num_masked_blocks, num_tiles
from ...launch.description import KernelLaunch, run
from ..operands import (
    DkdvStrides,
    DqStrides,
    gradient_factors,
    kernel_operands,
    token_strides,
    transposed_mask,
)
from .delta import launch_attn_delta, launch_sink_gradients
from .tuning import AttnBwdConfig, attn_dkdv_config, attn_dq_config

if TYPE_CHECKING:
    import torch

    from ...calls.attention import BackwardCall

# Queries past which a (batch, head) counts as long: the product with the heads must fit int32.
LONG = tl.constexpr(2**20)


class RowTerms(NamedTuple):
    """Pointers to lse and delta, fp32, contiguous."""

    lse: Any
    delta: Any


class KeyGradients(NamedTuple):
    """Pointers to the gradients of keys and values, or None for one that is not wanted.

    `du`, fp32 [B, Hq, Sk], is wanted with `dk` or not at all.
    """

    dk: Any
    dv: Any
    du: Any


class QueryGradients(NamedTuple):
    """Pointers to the gradients of queries and, fp32 [B, Hq, Sq] or None, of their thresholds."""

    dq: Any
    dtau: Any


class Rows(NamedTuple):
    """Queries and output gradients, or keys and values, of one (batch, head)."""

    x: Any
    y: Any
    x_stride: Any
    """From token to token."""
    y_stride: Any


@triton.jit
def _rows_of_head(x_ptr, y_ptr, x_strides, y_strides, batch, head, first):
    """`Rows` from token `first` on."""
    x = x_ptr + head_offset(batch, head, first, x_strides)
    y = y_ptr + head_offset(batch, head, first, y_strides)
    return Rows(x, y, x_strides.token, y_strides.token)


@triton.jit
def _load_tiles(
    rows, index, limit, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
):  # fmt: skip
    """Tokens `index` of `Rows`, 0 for those at or past `limit`, if that is given."""
    x = load_rows(rows.x, index, rows.x_stride, tl.arange(0, TILE_D), limit, HEAD_DIM)
    y = load_rows(rows.y, index, rows.y_stride, tl.arange(0, TILE_DV), limit, HEAD_DIM_V)
    return x, y


@triton.jit
def _load_terms(term_ptr, q_index, q_limit, missing):
    """One number per query; `missing` for those at or past `q_limit`, if that is given."""
    if q_limit is None:
        terms = tl.load(term_ptr + q_index)
    else:
        terms = tl.load(term_ptr + q_index, mask=exists(q_index, q_limit), other=missing)
    return terms


class OwnQueries(NamedTuple):
    """The queries of a program of the dq kernel, and their row terms."""

    q: Any
    dout: Any
    shift: Any
    """lse as `probabilities` subtracts it."""
    delta: Any


@triton.jit
def _add_dq_tile(
    dq,
    dtau,
    own,
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
    """Add what one KV tile gives to dq / scale and dtau; `visible` None means all of it is."""
    q = own.q
    k, v = _load_tiles(keys, kv_pos, kv_limit, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [TILE_M, TILE_N]
    extra = None
    if IS_BIASED:
        extra = added_scores(added, offs_m[:, None], kv_pos[None, :])
    NATURAL: tl.constexpr = q.dtype == tl.float32
    p, capped = probabilities(s, visible, own.shift[:, None], score, NATURAL, extra)
    dp = tl.dot(own.dout, tl.trans(v), input_precision=PRECISION)
    if gate is not None:
        u = load_gate_terms(gate.u, kv_pos, kv_limit, -float("inf"))
        weights = gate_weights(u[None, :], gate.tau[:, None])
        dtau -= tl.sum(gate_gradients(p, weights, dp, own.delta[:, None]), 1)
        # p without the gate may be inf where that is 0
        p = tl.where(weights == 0.0, 0.0, p * weights)
    ds = score_gradients(p, capped, dp, own.delta[:, None], score)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION), dtau


@triton.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "left", "right", "mask_batch_step", "mask_head_step",
    ]
)  # fmt: skip
def _attn_dq_kernel(
    gradients,
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    row_terms,
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
    """`gradients`, dQ and dtau or None, of one tile of queries; `row_terms` are lse and delta."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
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

    keys = _rows_of_head(k_ptr, v_ptr, strides.k, strides.v, batch, kv_head, kv_first)
    offs_m = q_start + tl.arange(0, TILE_M)
    queries = _rows_of_head(q_ptr, dout_ptr, strides.q, strides.dout, batch, q_head, q_first)
    q, dout = _load_tiles(queries, offs_m, q_len, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV)
    offset = lse_offset(batch, q_head, q_first, heads.q, lse_head_stride, cu_seqlens.q)
    lse = _load_terms(row_terms.lse + offset, offs_m, q_len, -float("inf"))
    delta = _load_terms(row_terms.delta + offset, offs_m, q_len, 0.0)
    own = OwnQueries(q, dout, shift_of_rows(lse, q.dtype == tl.float32), delta)
    row_limits = row_bounds(position(offs_m, q_len, kv_len), kv_len, left, right)
    dq = tl.zeros([TILE_M, TILE_D], tl.float32)
    slope, bias_ptr, bias_q_step, bias_kv_step = None, None, 0, 0
    if slopes is not None:
        slope = slope_of_head(slopes, batch, q_head)
    if bias is not None:
        bias_ptr = bias_of_head(bias, batch, q_head)
        bias_q_step, bias_kv_step = bias.q_step, bias.kv_step
    added = Added(slope, bias_ptr, bias_q_step, bias_kv_step, lengths)
    dtau = tl.zeros([TILE_M], tl.float32)
    gate = None
    if gates is not None:
        at = gate_row(gates, batch, q_head)
        gate = GateRow(at.u, load_gate_terms(at.tau, offs_m, q_len, float("inf")))

    num_masked = num_masked_blocks(plan)
    for kv_tile in tl.range(0, num_tiles(num_masked, TILE_N, KV_BLOCK)):
        kv_pos, visible = masked_key_tile(
            block_lists, plan, num_masked, kv_tile, row_limits, offs_m, q_start, kv_len,
            TILE_N, KV_BLOCK,
        )  # fmt: skip
        dq, dtau = _add_dq_tile(
            dq, dtau, own, keys, kv_pos, kv_len, visible, score, offs_m, added, gate,
            HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION, IS_BIASED,
        )  # fmt: skip

    num_full = num_full_blocks(plan)
    for kv_tile in tl.range(0, num_tiles(num_full, TILE_N, KV_BLOCK)):
        kv_pos = full_tile(block_lists, plan, num_full, kv_tile, kv_len, TILE_N, KV_BLOCK)
        dq, dtau = _add_dq_tile(
            dq, dtau, own, keys, kv_pos, None, None, score, offs_m, added, gate,
            HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION, IS_BIASED,
        )  # fmt: skip

    dq_ptr = gradients.dq + head_offset(batch, q_head, q_first, strides.dq)
    offs_d = tl.arange(0, TILE_D)
    store_rows(dq_ptr, offs_m, strides.dq.token, offs_d, dq * score.scale, q_len, HEAD_DIM)
    if gradients.dtau is not None:
        tl.store(gradients.dtau + offset + offs_m, dtau, exists(offs_m, q_len))


def launch_attn_dq(
    call: "BackwardCall",
    delta: "torch.Tensor",
    config: AttnBwdConfig,
    gates: KeyGates | None = None,
    dtau: "torch.Tensor | None" = None,
) -> None:
    """Fill dq, and dtau of gated attention; see `plan_attn_dq`."""
    run(plan_attn_dq(call, delta, config, gates, dtau), call.forward.q)


def plan_attn_dq(
    call: Any,
    delta: Any,
    config: AttnBwdConfig,
    gates: KeyGates | None = None,
    dtau: Any = None,
) -> KernelLaunch | None:
    """The launch that fills dq, and dtau of gated attention.

    Parameters
    ----------
    call : dq, dout, q, k and v [B, H, S, D] or packed [T, H, D], contiguous in the last dimension;
        lse fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    delta : like lse, as `launch_attn_delta` gives it
    config : tiles and launch options; tiles lie within the query blocks of a mask
    gates : scores of keys and thresholds of queries, of dense batches only
    dtau : like lse, or None; the share of each query head
    """
    dq, dout, lse, spec = call.gradients.dq, call.dout, call.lse, call.forward.spec
    assert dq is not None
    q, k, v = call.forward.q, call.forward.k, call.forward.v
    operands = kernel_operands(call.forward)
    programs = operands.batch * operands.heads[0] * cdiv(operands.lengths[0], config.tile_m)
    if programs == 0:
        return None
    args = (
        QueryGradients(dq, dtau),
        q,
        k,
        v,
        dout,
        RowTerms(lse, delta),
        gates,
        operands.cu_seqlens,
        operands.block_lists,
        DqStrides(*(token_strides(x) for x in (q, k, v, dout, dq))),
        lse.stride(-2),
        *operands.lengths,
        *operands.band,
        *operands.mask_steps,
        operands.heads,
        gradient_factors(spec.scale, spec.softcap, q.dtype),
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
    return KernelLaunch(_attn_dq_kernel, programs, args, options)


@triton.jit
def _add_dkdv_tile(
    sums,
    gradients,
    k,
    v,
    queries,
    terms,
    q_index,
    q_limit,
    visible,
    score,
    kv_pos,
    added,
    gate,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_BIASED: tl.constexpr,
):
    """Add what a tile of queries gives to (dk / scale, dv, du); `visible` None: all see it."""
    NATURAL: tl.constexpr = k.dtype == tl.float32
    dk, dv, du = sums
    q, dout = _load_tiles(queries, q_index, q_limit, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV)
    lse = _load_terms(terms.lse, q_index, q_limit, -float("inf"))
    shift = shift_of_rows(lse, NATURAL)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [TILE_N, TILE_M]
    extra = None
    if IS_BIASED:
        extra = added_scores(added, q_index[None, :], kv_pos[:, None])
    p, capped = probabilities(s, visible, shift[None, :], score, NATURAL, extra)
    ungated = p
    if gate is not None:
        tau = load_gate_terms(gate.tau, q_index, q_limit, float("inf"))
        weights = gate_weights(gate.u[:, None], tau[None, :])
        # p without the gate may be inf where that is 0
        p = tl.where(weights == 0.0, 0.0, p * weights)
    if gradients.dv is not None:
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    if gradients.dk is not None:
        delta = _load_terms(terms.delta, q_index, q_limit, 0.0)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds = score_gradients(p, capped, dp, delta[None, :], score)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if gradients.du is not None:
            du += tl.sum(gate_gradients(ungated, weights, dp, delta[None, :]), 1)
    return dk, dv, du


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
    BLOCK_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MASK_PER_KV_HEAD: tl.constexpr,
):
    """`gradients`, each of them or None, of one tile of keys; `row_terms` are lse and delta."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    Q_BLOCK: tl.constexpr = TILE_M if BLOCK_Q is None else BLOCK_Q
    ELEMENT_BYTES: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    Q_BYTES: tl.constexpr = (HEAD_DIM + HEAD_DIM_V) * ELEMENT_BYTES
    IS_BIASED: tl.constexpr = slopes is not None or bias is not None
    tl.static_assert((BLOCK_Q is None) == (block_lists is None))

    kv_tiles = (kv_len + TILE_N - 1) // TILE_N
    group = raster_group_size(tl.minimum(q_len, LONG) * heads.group_size, 1, Q_BYTES)
    batch_head, last_tiles = raster_place(
        tl.program_id(0), tl.num_programs(0) // kv_tiles, kv_tiles, group
    )
    # the first keys have the most queries where the future is hidden
    kv_start = (kv_tiles - 1 - last_tiles) * TILE_N
    kv_heads = heads.q // heads.group_size
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    q_first, q_len = token_span(cu_seqlens.q, batch, q_len)
    kv_first, kv_len = token_span(cu_seqlens.kv, batch, kv_len)
    if kv_start >= kv_len:
        return
    lengths, band = Lengths(q_len, kv_len), Band(left, right)
    kv_pos = kv_start + tl.arange(0, TILE_N)
    column_limits = column_bounds(kv_pos, q_len, kv_len, left, right)

    keys = _rows_of_head(k_ptr, v_ptr, strides.k, strides.v, batch, kv_head, kv_first)
    k, v = _load_tiles(keys, kv_pos, kv_len, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV)
    dk = tl.zeros([TILE_N, TILE_D], tl.float32)
    dv = tl.zeros([TILE_N, TILE_DV], tl.float32)

    for member in tl.range(0, heads.group_size):
        q_head = kv_head * heads.group_size + member
        offset = lse_offset(batch, q_head, q_first, heads.q, lse_head_stride, cu_seqlens.q)
        queries = _rows_of_head(q_ptr, dout_ptr, strides.q, strides.dout, batch, q_head, q_first)
        terms = RowTerms(row_terms.lse + offset, row_terms.delta + offset)
        du = tl.zeros([TILE_N], tl.float32)
        gate = None
        if gates is not None:
            at = gate_row(gates, batch, q_head)
            gate = GateRow(load_gate_terms(at.u, kv_pos, kv_len, -float("inf")), at.tau)
        mask_head = kv_head if MASK_PER_KV_HEAD else q_head
        mask_row = batch * mask_batch_step + mask_head * mask_head_step
        plan = plan_queries(
            block_lists, mask_row, kv_start, lengths, band,
            TILE_M, TILE_N, BLOCK_Q,
        )  # fmt: skip
        slope, bias_ptr, bias_q_step, bias_kv_step = None, None, 0, 0
        if slopes is not None:
            slope = slope_of_head(slopes, batch, q_head)
        if bias is not None:
            bias_ptr = bias_of_head(bias, batch, q_head)
            bias_q_step, bias_kv_step = bias.q_step, bias.kv_step
        added = Added(slope, bias_ptr, bias_q_step, bias_kv_step, lengths)
        num_masked = num_masked_blocks(plan)
        for q_tile in tl.range(0, num_tiles(num_masked, TILE_M, Q_BLOCK)):
            q_index, visible = masked_query_tile(
                block_lists, plan, num_masked, q_tile, column_limits, kv_pos, kv_start, q_len,
                TILE_M, Q_BLOCK,
            )  # fmt: skip
            dk, dv, du = _add_dkdv_tile(
                (dk, dv, du), gradients, k, v, queries, terms, q_index, q_len, visible, score,
                kv_pos, added, gate, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION, IS_BIASED,
            )  # fmt: skip
        num_full = num_full_blocks(plan)
        for q_tile in tl.range(0, num_tiles(num_full, TILE_M, Q_BLOCK)):
            q_index = full_tile(block_lists, plan, num_full, q_tile, q_len, TILE_M, Q_BLOCK)
            dk, dv, du = _add_dkdv_tile(
                (dk, dv, du), gradients, k, v, queries, terms, q_index, None, None, score,
                kv_pos, added, gate, HEAD_DIM, HEAD_DIM_V, TILE_D, TILE_DV, PRECISION, IS_BIASED,
            )  # fmt: skip
        if gradients.du is not None:
            du_row = tl.cast(batch * heads.q + q_head, tl.int64) * kv_len
            tl.store(gradients.du + du_row + kv_pos, du, exists(kv_pos, kv_len))

    if gradients.dk is not None:
        dk_ptr = gradients.dk + head_offset(batch, kv_head, kv_first, strides.dk)
        offs_d = tl.arange(0, TILE_D)
        store_rows(dk_ptr, kv_pos, strides.dk.token, offs_d, dk * score.scale, kv_len, HEAD_DIM)
    if gradients.dv is not None:
        dv_ptr = gradients.dv + head_offset(batch, kv_head, kv_first, strides.dv)
        offs_dv = tl.arange(0, TILE_DV)
        store_rows(dv_ptr, kv_pos, strides.dv.token, offs_dv, dv, kv_len, HEAD_DIM_V)


def launch_attn_dkdv(
    call: "BackwardCall",
    delta: "torch.Tensor | None",
    config: AttnBwdConfig,
    gates: KeyGates | None = None,
    du: "torch.Tensor | None" = None,
) -> None:
    """Fill dk and dv, or the one of them that is asked for, and du; see `plan_attn_dkdv`."""
    if call.forward.q.shape[1] == 0:
        # the kernel derives the number of KV heads from that of the query heads
        for gradient in (call.gradients.dk, call.gradients.dv):
            if gradient is not None:
                gradient.zero_()
        return
    run(plan_attn_dkdv(call, delta, config, gates, du), call.forward.q)


def plan_attn_dkdv(
    call: Any,
    delta: Any,
    config: AttnBwdConfig,
    gates: KeyGates | None = None,
    du: Any = None,
) -> KernelLaunch | None:
    """The launch that fills dk and dv, or the one of them that is asked for, and du of gates.

    There is at least one query head.

    Parameters
    ----------
    call : dk, dv, dout, q, k and v [B, H, S, D] or packed [T, H, D], contiguous in the last
        dimension; lse fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    delta : like lse, as `launch_attn_delta` gives it; only dk needs it
    config : tiles and launch options; tiles lie within the KV blocks of a mask
    gates : scores of keys and thresholds of queries, of dense batches only
    du : fp32 [B, Hq, Sk], contiguous, or None; the share of each query head; needs dk
    """
    dk, dv = call.gradients.dk, call.gradients.dv
    dout, lse, spec = call.dout, call.lse, call.forward.spec
    q, k, v = call.forward.q, call.forward.k, call.forward.v
    operands = kernel_operands(call.forward)
    programs = operands.batch * k.shape[1] * cdiv(operands.lengths[1], config.tile_n)
    if programs == 0:
        return None
    mask = transposed_mask(spec.block_mask)
    written = (k if dk is None else dk, v if dv is None else dv)
    strides = DkdvStrides(*(token_strides(x) for x in (q, k, v, dout, *written)))
    args = (
        KeyGradients(dk, dv, du),
        q,
        k,
        v,
        dout,
        RowTerms(lse, lse if delta is None else delta),
        gates,
        operands.cu_seqlens,
        mask.lists,
        strides,
        lse.stride(-2),
        *operands.lengths,
        *operands.band,
        *mask.steps,
        operands.heads,
        gradient_factors(spec.scale, spec.softcap, q.dtype),
        operands.slopes,
        operands.bias,
        q.shape[-1],
        v.shape[-1],
        mask.block_q,
        config.tile_m,
        config.tile_n,
        config.precision,
        operands.mask_per_kv_head,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return KernelLaunch(_attn_dkdv_kernel, programs, args, options)


def backward(call: "BackwardCall") -> None:
    """Fill the gradients that are asked for.

    dQ and dK/dV have kernels of their own and need no atomics: the same bits in every run, whether
    that was asked for or not.
    """
    from ...dispatch.machine import fp32_precision
    from ...launch.workspace import scratch

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
