# mypy: ignore-errors
"""Preprocess and postprocess kernels around the Hopper backward: terms of the queries, rounding dq.

Preprocess: lse in base 2, delta (as in `triton.delta`), and zeroed sums or semaphores for dq, in
workspaces whose rows are padded to whole tiles. Padding has lse +inf, like queries that see
nothing: their probabilities are 0. Postprocess: dq = scale * sums, in the dtype and layout of q.
With semaphores (ordered accumulation), the first KV tile stores its sum instead of adding it, so
sums are not zeroed; a query block that no KV tile added to has no sum, and dq is 0 there.
"""

import torch
import triton
import triton.language as tl

from ...device.backprop import shift_of_rows
from ...device.records import Strides
from ...device.schedule import head_offset
from ...device.tiles import store_rows
from ...launch.launcher import launch
from ..operands import token_strides
from ..triton.delta import Outputs, delta_of_rows
from .config import slice_width

# Rows of a program, which share a pair of semaphores.
ROW_TILE = 64


@triton.jit
def _from_the_end():
    """The tile of a program: the last ones first.

    The backward begins with the first (batch, head), which then is in the L2, and ends with the
    last.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit(do_not_specialize=["q_len", "padded", "heads"])
def _attn_bwd_preprocess_kernel(
    lse_log2_ptr,
    delta_ptr,
    sums_ptr,
    semaphores_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    out_strides,
    dout_strides,
    dlse_strides,
    q_len,
    padded,
    heads,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
    SLICE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one (batch, head), which has `padded`."""
    q_tiles = padded // TILE_M
    tile = _from_the_end()
    batch_head = tile // q_tiles
    offs_m = tile % q_tiles * TILE_M + tl.arange(0, TILE_M)
    outputs = Outputs(out_ptr, dout_ptr, lse_ptr, dlse_ptr, out_strides, dout_strides, dlse_strides)
    delta, lse = delta_of_rows(outputs, batch_head, heads, offs_m, q_len, HEAD_DIM_V, TILE_DV)
    row = tl.cast(batch_head, tl.int64) * padded + offs_m
    tl.store(lse_log2_ptr + row, shift_of_rows(lse))
    tl.store(delta_ptr + row, delta)
    if semaphores_ptr is not None:
        tl.store(semaphores_ptr + tile * 2 + tl.arange(0, 2), 0)
    if sums_ptr is not None:
        for first in tl.static_range(0, TILE_D, SLICE_D):
            place = row[:, None] * TILE_D + first + tl.arange(0, SLICE_D)[None, :]
            tl.store(sums_ptr + place, tl.zeros([TILE_M, SLICE_D], tl.float32))


@triton.jit
def _rows_of_registers(sums, TILE_D: tl.constexpr):
    """[64, TILE_D] of dq from tiles of 64 columns in the order that `in_register_order` gives."""
    # 64 columns, eighth of them, warp, row and column of a thread, half of 16 rows, one of two
    sums = sums.reshape([TILE_D // 64, 8, 4, 8, 4, 2, 2]).permute(2, 5, 3, 0, 1, 4, 6)
    return sums.reshape([64, TILE_D])


@triton.jit(do_not_specialize=["q_len", "padded", "heads"])
def _attn_bwd_postprocess_kernel(
    dq_ptr,
    sums_ptr,
    semaphores_ptr,
    dq_strides,
    q_len,
    padded,
    heads,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
    SLICE_D: tl.constexpr,
):
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one (batch, head) of dq."""
    q_tiles = padded // TILE_M
    tile = _from_the_end()
    batch_head = tile // q_tiles
    offs_m = tile % q_tiles * TILE_M + tl.arange(0, TILE_M)
    offs_d = tl.arange(0, SLICE_D)
    live = True
    if semaphores_ptr is not None:
        # the semaphores of a query block are those of its first rows
        first = tile % q_tiles * TILE_M // BLOCK_Q * (BLOCK_Q // TILE_M)
        added = tl.load(semaphores_ptr + (tl.cast(batch_head, tl.int64) * q_tiles + first) * 2)
        live = added > 0
    sums_ptr += tl.cast(tile, tl.int64) * (TILE_M * TILE_D)
    offs = tl.arange(0, TILE_M * SLICE_D)
    for first in tl.static_range(0, TILE_D, SLICE_D):
        sums = tl.load(sums_ptr + TILE_M * first + offs, live & (offs >= 0), other=0.0)
        sums = _rows_of_registers(sums, SLICE_D) * scale
        head_ptr = dq_ptr + head_offset(batch_head // heads, batch_head % heads, 0, dq_strides)
        store_rows(head_ptr, offs_m, dq_strides.token, first + offs_d, sums, q_len, HEAD_DIM)


def launch_attn_bwd_preprocess(
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    sums: torch.Tensor | None,
    semaphores: torch.Tensor | None,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> None:
    """Fill lse_log2, delta fp32 [B * H, rows]; zero sums fp32 [B * H, rows, D] or semaphores.

    Rows are the queries padded to a multiple of 64; semaphores are int32 [B * H, rows / 64, 2].
    With semaphores, sums stay as they are; without sums there are none. The others are as for
    `launch_attn_delta`, not packed.
    """
    batch_heads, padded = lse_log2.shape
    tile_d = 64 if sums is None else sums.shape[2]
    args = (
        lse_log2,
        delta,
        sums if semaphores is None else None,
        semaphores,
        out,
        dout,
        lse,
        dlse,
        token_strides(out),
        token_strides(dout),
        Strides(0, 0, 0) if dlse is None else Strides(*dlse.stride()),
        out.shape[2],
        padded,
        out.shape[1],
        out.shape[3],
        ROW_TILE,
        tile_d,
        slice_width(tile_d),
        triton.next_power_of_2(out.shape[3]),
    )
    launch(_attn_bwd_preprocess_kernel, batch_heads * (padded // ROW_TILE), args, num_warps=4)


def launch_attn_bwd_postprocess(
    dq: torch.Tensor,
    sums: torch.Tensor,
    semaphores: torch.Tensor | None,
    block_q: int,
    scale: float,
) -> None:
    """Fill dq [B, H, S, D], any strides, from sums fp32 [B * H, rows, tile of D], rows as above.

    Each [64, 64] of the sums is in the order of `backward.in_register_order`. Where `semaphores`
    are given, those of a block of `block_q` queries are those of its first 64 rows; sums of blocks
    where they are 0 are not read.
    """
    batch_heads, padded, tile_d = sums.shape
    sizes = (dq.shape[2], padded, dq.shape[1])
    constants = (dq.shape[3], block_q, ROW_TILE, tile_d, slice_width(tile_d))
    args = (dq, sums, semaphores, token_strides(dq), *sizes, scale, *constants)
    launch(_attn_bwd_postprocess_kernel, batch_heads * (padded // ROW_TILE), args, num_warps=4)
