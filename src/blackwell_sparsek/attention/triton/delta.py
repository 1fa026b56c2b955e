# mypy: ignore-errors
"""Sums over rows that the backward pass needs: delta of each query, and the gradient of sinks.

    delta[i]  = sum_d dout[i, d] * out[i, d] - dlse[i]
    dsinks[h] = - sum_i exp(sinks[h] - lse[i]) * delta[i]

out, dout [B, H, S, Dv], delta, lse, dlse [B, H, S] fp32, or packed: [T, H, Dv] and [H, T]. Rows
that see nothing (lse -inf) have delta 0, whatever dlse holds there. Sums have one order. Called by
the implementations of `bsk::attn_bwd`.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from ...core.sizes import cdiv
from ...device.backprop import sink_gradients
from ...device.masks import exists
from ...device.records import Strides
from ...device.schedule import head_offset
from ...device.tiles import load_rows
from ...launch.description import KernelLaunch, run
from ..operands import token_strides

if TYPE_CHECKING:
    import torch

# Elements of one tile of out: 32 per thread.
TILE_ELEMENTS = 4096


class Outputs(NamedTuple):
    """The output of the forward pass and its gradient: pointers and strides."""

    out: Any
    dout: Any
    lse: Any
    """Contiguous."""
    dlse: Any
    """None where nothing came back for lse."""
    out_strides: Strides
    dout_strides: Strides
    dlse_strides: Strides


@triton.jit
def delta_of_rows(
    outputs, batch_head, heads, offs_m, q_len, HEAD_DIM_V: tl.constexpr, TILE_DV: tl.constexpr
):
    """delta and lse of rows `offs_m` of a (batch, head); 0 and -inf for rows past the end."""
    batch, head = batch_head // heads, batch_head % heads
    offs_d = tl.arange(0, TILE_DV)
    live = exists(offs_m, q_len)
    out_ptr = outputs.out + head_offset(batch, head, 0, outputs.out_strides)
    dout_ptr = outputs.dout + head_offset(batch, head, 0, outputs.dout_strides)
    out = load_rows(out_ptr, offs_m, outputs.out_strides.token, offs_d, q_len, HEAD_DIM_V)
    dout = load_rows(dout_ptr, offs_m, outputs.dout_strides.token, offs_d, q_len, HEAD_DIM_V)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if outputs.dlse is not None:
        offset = head_offset(batch, head, 0, outputs.dlse_strides)
        rows = tl.cast(offs_m, tl.int64) * outputs.dlse_strides.token
        delta -= tl.load(outputs.dlse + offset + rows, mask=live, other=0.0).to(tl.float32)
    row = tl.cast(batch_head, tl.int64) * q_len + offs_m
    lse = tl.load(outputs.lse + row, mask=live, other=-float("inf"))
    return tl.where(lse == -float("inf"), 0.0, delta), lse


@triton.jit(do_not_specialize=["q_len", "heads"])
def _attn_delta_kernel(
    delta_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    out_strides,
    dout_strides,
    dlse_strides,
    q_len,
    heads,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one (batch, head)."""
    q_tiles = (q_len + TILE_M - 1) // TILE_M
    batch_head = tl.program_id(0) // q_tiles
    offs_m = tl.program_id(0) % q_tiles * TILE_M + tl.arange(0, TILE_M)
    outputs = Outputs(out_ptr, dout_ptr, lse_ptr, dlse_ptr, out_strides, dout_strides, dlse_strides)
    delta, _ = delta_of_rows(outputs, batch_head, heads, offs_m, q_len, HEAD_DIM_V, TILE_DV)
    row = tl.cast(batch_head, tl.int64) * q_len + offs_m
    tl.store(delta_ptr + row, delta, mask=exists(offs_m, q_len))


def _tiles(v_dim: int) -> tuple[int, int]:
    tile_d = max(triton.next_power_of_2(v_dim), 16)
    return TILE_ELEMENTS // tile_d, tile_d


def launch_attn_delta(
    delta: "torch.Tensor",
    dout: "torch.Tensor",
    out: "torch.Tensor",
    dlse: "torch.Tensor | None",
    lse: "torch.Tensor",
) -> None:
    """Fill `delta`; see `plan_attn_delta`."""
    run(plan_attn_delta(delta, dout, out, dlse, lse), delta)


def plan_attn_delta(delta: Any, dout: Any, out: Any, dlse: Any, lse: Any) -> KernelLaunch | None:
    """The launch that fills `delta`.

    Parameters
    ----------
    delta, lse : fp32 [B, H, S] or packed [H, T], contiguous
    out, dout : [B, H, S, Dv] or packed [T, H, Dv]; any strides with a contiguous last dimension
    dlse : like lse with any strides, or None where nothing comes back for lse
    """
    batch_heads, q_len = math.prod(delta.shape[:-1]), delta.shape[-1]
    tile_m, tile_d = _tiles(out.shape[-1])
    programs = batch_heads * cdiv(q_len, tile_m)
    if programs == 0:
        return None
    dlse_strides = Strides(*((0, 0, 0) if dlse is None else (0, 0, *dlse.stride())[-3:]))
    args = (
        delta,
        out,
        dout,
        lse,
        dlse,
        token_strides(out),
        token_strides(dout),
        dlse_strides,
        q_len,
        delta.shape[-2],
        out.shape[-1],
        tile_m,
        tile_d,
    )
    return KernelLaunch(_attn_delta_kernel, programs, args, {"num_warps": 4})


# Gradient of the sinks: a first launch adds up ROWS queries of one head per program, a second one
# the partial sums of a head.

# Queries of one program, and how many of them it reads at a time.
ROWS = 16384
TILE_ROWS = 1024


@triton.jit(
    do_not_specialize=["q_len", "delta_rows", "num_rows", "heads", "num_parts", "num_sequences"]
)
def _sink_parts_kernel(
    parts_ptr,
    sinks_ptr,
    lse_ptr,
    delta_ptr,
    cu_seqlens_ptr,
    num_rows,
    q_len,
    delta_rows,
    heads,
    num_parts,
    num_sequences,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Sum over the rows [part * ROWS, (part + 1) * ROWS) of one head, batches one after another."""
    head = tl.program_id(0) // num_parts
    part = tl.program_id(0) % num_parts
    if cu_seqlens_ptr is not None:
        # tokens past the last sequence belong to none
        num_rows = tl.load(cu_seqlens_ptr + num_sequences)
    sink = tl.load(sinks_ptr + head)
    total = tl.zeros([TILE_ROWS], tl.float32)
    for first in range(0, ROWS, TILE_ROWS):
        row = tl.cast(part, tl.int64) * ROWS + first + tl.arange(0, TILE_ROWS)
        live = exists(row, num_rows)
        batch_head, query = row // q_len * heads + head, row % q_len
        lse = tl.load(lse_ptr + batch_head * q_len + query, mask=live, other=-float("inf"))
        delta = tl.load(delta_ptr + batch_head * delta_rows + query, mask=live, other=0.0)
        total += sink_gradients(sink, lse, delta)
    tl.store(parts_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_parts"])
def _sink_sum_kernel(dsinks_ptr, parts_ptr, num_parts, dsinks_stride, TILE_ROWS: tl.constexpr):
    """Add up the partial sums of one head."""
    head = tl.program_id(0)
    total = tl.zeros([TILE_ROWS], tl.float32)
    for first in range(0, num_parts, TILE_ROWS):
        part = first + tl.arange(0, TILE_ROWS)
        total += tl.load(parts_ptr + head * num_parts + part, exists(part, num_parts), other=0.0)
    dsink = tl.sum(total, 0).to(dsinks_ptr.dtype.element_ty)
    tl.store(dsinks_ptr + head * dsinks_stride, dsink)


def launch_sink_gradients(
    dsinks: "torch.Tensor",
    sinks: "torch.Tensor",
    lse: "torch.Tensor",
    delta: "torch.Tensor",
    cu_seqlens: "torch.Tensor | None",
) -> None:
    """Fill `dsinks`; see `plan_sink_gradients`."""
    import torch

    from ...launch.workspace import scratch

    parts = scratch((sink_parts(lse.shape),), torch.float32, lse.device)
    for planned in plan_sink_gradients(dsinks, parts, sinks, lse, delta, cu_seqlens):
        run(planned, lse)


def sink_parts(lse_shape: Any) -> int:
    """Partial sums, fp32, that the gradient of sinks takes for an lse of this shape."""
    return lse_shape[-2] * _parts_of_head(lse_shape)


def _parts_of_head(lse_shape: Any) -> int:
    return max(cdiv(math.prod(lse_shape) // max(lse_shape[-2], 1), ROWS), 1)


def plan_sink_gradients(
    dsinks: Any, parts: Any, sinks: Any, lse: Any, delta: Any, cu_seqlens: Any
) -> list[KernelLaunch]:
    """The launches that fill `dsinks`, one after the other.

    Parameters
    ----------
    dsinks, sinks : [Hq], sinks contiguous
    parts : fp32 [sink_parts(lse.shape)]
    lse : fp32 [B, Hq, Sq] or packed [Hq, Tq], contiguous
    delta : likewise; of dense batches, heads may have further rows, which are not read
    cu_seqlens : int32 [B + 1] offsets of packed queries, or None
    """
    heads = sinks.shape[0]
    if heads == 0:
        return []
    num_rows, num_parts = lse.numel() // heads, _parts_of_head(lse.shape)
    num_sequences = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    # lengths of 0 divide nothing
    rows = (num_rows, max(lse.shape[-1], 1), delta.shape[-1])
    sizes = (*rows, heads, num_parts, num_sequences)
    args = (parts, sinks, lse, delta, cu_seqlens, *sizes, ROWS, TILE_ROWS)
    summed = (dsinks, parts, num_parts, dsinks.stride(0), TILE_ROWS)
    return [
        KernelLaunch(_sink_parts_kernel, heads * num_parts, args, {"num_warps": 4}),
        KernelLaunch(_sink_sum_kernel, heads, summed, {}),
    ]
