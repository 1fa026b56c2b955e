"""The term of each query that all kernels of the backward pass share.

    delta[i] = sum_d dout[i, d] * out[i, d] - dlse[i]

out, dout [B, H, S, Dv], delta, lse, dlse [B, H, S] fp32, or packed: [T, H, Dv] and [H, T]. One
program computes TILE_M rows of one head. Rows that see nothing (lse -inf) give 0, whatever dlse
holds there. Called by the implementations of `bsk::attn_bwd`.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ...core.compile_cases import CompileCase, compile_cases
from ...core.launch import cdiv, launch, on_device_of
from ...device.masks import exists
from ...device.sequences import plane_offset
from ...device.tiles import load_rows
from .operands import token_strides

# Elements of one tile of out: 32 per thread.
TILE_ELEMENTS = 4096


@triton.jit
def delta_of_rows(
    tensors, strides, plane, heads, offs_m, q_len, HEAD_DIM_V: tl.constexpr, TILE_DV: tl.constexpr
):
    """delta and lse of rows `offs_m` of a plane; 0 and -inf for rows past the end.

    `tensors` are out, dout, lse and dlse or None, `strides` those of out, dout and dlse.
    """
    out_ptr, dout_ptr, lse_ptr, dlse_ptr = tensors
    out_strides, dout_strides, dlse_strides = strides
    batch, head = plane // heads, plane % heads
    offs_d = tl.arange(0, TILE_DV)
    live = exists(offs_m, q_len)
    out_ptr += plane_offset(batch, head, 0, out_strides)
    dout_ptr += plane_offset(batch, head, 0, dout_strides)
    out = load_rows(out_ptr, offs_m, out_strides[2], offs_d, q_len, HEAD_DIM_V)
    dout = load_rows(dout_ptr, offs_m, dout_strides[2], offs_d, q_len, HEAD_DIM_V)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        offset = plane_offset(batch, head, 0, dlse_strides)
        rows = tl.cast(offs_m, tl.int64) * dlse_strides[2]
        delta -= tl.load(dlse_ptr + offset + rows, mask=live, other=0.0).to(tl.float32)
    row = tl.cast(plane, tl.int64) * q_len + offs_m
    lse = tl.load(lse_ptr + row, mask=live, other=-float("inf"))
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
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one plane."""
    q_tiles = (q_len + TILE_M - 1) // TILE_M
    plane = tl.program_id(0) // q_tiles
    offs_m = tl.program_id(0) % q_tiles * TILE_M + tl.arange(0, TILE_M)
    tensors = (out_ptr, dout_ptr, lse_ptr, dlse_ptr)
    strides = (out_strides, dout_strides, dlse_strides)
    delta, _ = delta_of_rows(tensors, strides, plane, heads, offs_m, q_len, HEAD_DIM_V, TILE_DV)
    row = tl.cast(plane, tl.int64) * q_len + offs_m
    tl.store(delta_ptr + row, delta, mask=exists(offs_m, q_len))


def _tiles(v_dim: int) -> tuple[int, int]:
    tile_d = max(triton.next_power_of_2(v_dim), 16)
    return TILE_ELEMENTS // tile_d, tile_d


def launch_attn_delta(
    delta: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    dlse: torch.Tensor | None,
    lse: torch.Tensor,
) -> None:
    """Fill `delta`.

    Parameters
    ----------
    delta, lse : fp32 [B, H, S] or packed [H, T], contiguous
    out, dout : [B, H, S, Dv] or packed [T, H, Dv]; any strides with a contiguous last dimension
    dlse : like lse with any strides, or None where nothing comes back for lse
    """
    planes, q_len = delta.shape[:-1].numel(), delta.shape[-1]
    tile_m, tile_d = _tiles(out.shape[-1])
    programs = planes * cdiv(q_len, tile_m)
    if programs == 0:
        return
    dlse_strides = (0, 0, 0) if dlse is None else (0, 0, *dlse.stride())[-3:]
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
    with on_device_of(delta):
        launch(_attn_delta_kernel, programs, args, num_warps=4)


@compile_cases
def _cases() -> Iterator[CompileCase]:
    kinds = ((torch.float16, 80), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 256))
    for dtype, v_dim in kinds:
        tile_m, tile_d = _tiles(v_dim)
        strides = (32 * 4096 * v_dim, v_dim, 32 * v_dim)
        yield CompileCase(
            f"attn_delta/{str(dtype).split('.')[-1]}-d{v_dim}",
            _attn_delta_kernel,
            {
                **{f"{name}_ptr": dtype for name in ("out", "dout")},
                **{f"{name}_ptr": torch.float32 for name in ("delta", "lse", "dlse")},
                "out_strides": strides,
                "dout_strides": strides,
                "dlse_strides": (32 * 4096, 4096, 1),
                "q_len": 4096,
                "heads": 32,
                "HEAD_DIM_V": v_dim,
                "TILE_M": tile_m,
                "TILE_DV": tile_d,
            },
        )
