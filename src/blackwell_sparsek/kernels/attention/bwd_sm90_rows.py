"""What the Hopper backward does row by row: terms of the queries before it, rounding dq after it.

Before: lse in base 2, delta (as in `bwd_delta`), zeroed sums and turns for dq, in scratch memory
whose rows are padded to whole tiles. Padding has lse +inf, like queries that see nothing: their
probabilities are 0. After: dq = scale * sums, in the dtype and layout of q. Called around
`bwd_sm90`.
"""

import triton
import triton.language as tl

from ...device.backprop import shift_of_rows
from ...device.masks import exists
from ...device.sequences import plane_offset
from ...device.tiles import load_rows


@triton.jit(do_not_specialize=["q_len", "padded", "heads"])
def _attn_bwd_rows_kernel(
    lse_log2_ptr,
    delta_ptr,
    sums_ptr,
    turns_ptr,
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
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one plane of `padded` rows."""
    q_tiles = padded // TILE_M
    plane = tl.program_id(0) // q_tiles
    batch, head = plane // heads, plane % heads
    offs_m = tl.program_id(0) % q_tiles * TILE_M + tl.arange(0, TILE_M)
    offs_dv = tl.arange(0, TILE_DV)
    live = exists(offs_m, q_len)

    out_ptr += plane_offset(batch, head, 0, out_strides)
    dout_ptr += plane_offset(batch, head, 0, dout_strides)
    out = load_rows(out_ptr, offs_m, out_strides[2], offs_dv, q_len, HEAD_DIM_V)
    dout = load_rows(dout_ptr, offs_m, dout_strides[2], offs_dv, q_len, HEAD_DIM_V)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        rows = tl.cast(offs_m, tl.int64) * dlse_strides[2]
        dlse_ptr += plane_offset(batch, head, 0, dlse_strides)
        delta -= tl.load(dlse_ptr + rows, mask=live, other=0.0).to(tl.float32)
    row = tl.cast(plane, tl.int64) * q_len + offs_m
    lse = tl.load(lse_ptr + row, mask=live, other=-float("inf"))
    delta = tl.where(lse == -float("inf"), 0.0, delta)

    row = tl.cast(plane, tl.int64) * padded + offs_m
    tl.store(lse_log2_ptr + row, shift_of_rows(lse))
    tl.store(delta_ptr + row, delta)
    if turns_ptr is not None:
        tl.store(turns_ptr + tl.program_id(0) * 2 + tl.arange(0, 2), 0)
    if sums_ptr is not None:
        offs_d = tl.arange(0, TILE_D)[None, :]
        place = row[:, None] * HEAD_DIM + offs_d
        tl.store(sums_ptr + place, tl.zeros([TILE_M, TILE_D], tl.float32), offs_d < HEAD_DIM)


@triton.jit(do_not_specialize=["q_len", "padded", "heads"])
def _attn_bwd_round_kernel(
    dq_ptr,
    sums_ptr,
    dq_strides,
    q_len,
    padded,
    heads,
    scale,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one plane of dq."""
    q_tiles = padded // TILE_M
    plane = tl.program_id(0) // q_tiles
    offs_m = tl.program_id(0) % q_tiles * TILE_M + tl.arange(0, TILE_M)
    offs_d = tl.arange(0, TILE_D)[None, :]
    row = tl.cast(plane, tl.int64) * padded + offs_m
    live = exists(offs_m, q_len)[:, None] & (offs_d < HEAD_DIM)
    dq = tl.load(sums_ptr + row[:, None] * HEAD_DIM + offs_d, live, other=0.0) * scale
    dq_ptr += plane_offset(plane // heads, plane % heads, 0, dq_strides)
    place = tl.cast(offs_m, tl.int64)[:, None] * dq_strides[2] + offs_d
    tl.store(dq_ptr + place, dq.to(dq_ptr.dtype.element_ty), live)
