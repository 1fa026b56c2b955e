# mypy: ignore-errors
"""Merge two partial attention results over disjoint keys.

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * o_a + exp(lse_b - lse) * o_b

o_a, o_b, out [B, H, S, Dv] with a contiguous last dimension; lse_* [B, H, S] fp32, natural log.
Both empty gives 0 and -inf. One program handles TILE_ROWS rows of the flattened B*H*S and walks
over Dv. Called by `bsk::merge_states`.
"""

import torch
import triton
import triton.language as tl

from ...calls.attention import MergeCall
from ...device.records import Strides
from ...device.softmax import merge_partials, merge_weights
from ...launch.launcher import cdiv, launch, on_device_of

# Elements of one tile: 8 per thread. With 16, rows that cannot be loaded in vectors (Dv = 40) need
# so many addresses that sm_80 spills.
TILE_ELEMENTS = 1024
MAX_TILE_D = 256


@triton.jit
def _row_offsets(batch, head, q_pos, strides):
    """Offsets of rows in a tensor with these strides."""
    return batch * strides.batch + head * strides.head + q_pos * strides.token


@triton.jit(do_not_specialize=["num_rows", "heads", "q_len"])
def _merge_states_kernel(
    out_ptr,
    lse_ptr,
    o_a_ptr,
    lse_a_ptr,
    o_b_ptr,
    lse_b_ptr,
    out_strides,
    lse_strides,
    o_a_strides,
    lse_a_strides,
    o_b_strides,
    lse_b_strides,
    num_rows,
    heads,
    q_len,
    v_dim,
    TILE_ROWS: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Merge rows [pid * TILE_ROWS, (pid + 1) * TILE_ROWS)."""
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    mask_m = row < num_rows
    head = row // q_len % heads
    batch = row // q_len // heads
    q_pos = row % q_len

    lse_a_offs = _row_offsets(batch, head, q_pos, lse_a_strides)
    lse_b_offs = _row_offsets(batch, head, q_pos, lse_b_strides)
    lse_a = tl.load(lse_a_ptr + lse_a_offs, mask=mask_m, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + lse_b_offs, mask=mask_m, other=float("-inf"))
    weight_a, weight_b, lse = merge_weights(lse_a, lse_b)

    o_a_offs = _row_offsets(batch, head, q_pos, o_a_strides)
    o_b_offs = _row_offsets(batch, head, q_pos, o_b_strides)
    out_offs = _row_offsets(batch, head, q_pos, out_strides)
    for d_start in range(0, v_dim, TILE_D):
        offs_d = d_start + tl.arange(0, TILE_D)
        mask = mask_m[:, None] & (offs_d < v_dim)[None, :]
        o_a = tl.load(o_a_ptr + o_a_offs[:, None] + offs_d[None, :], mask=mask, other=0.0)
        o_b = tl.load(o_b_ptr + o_b_offs[:, None] + offs_d[None, :], mask=mask, other=0.0)
        out = merge_partials(o_a.to(tl.float32), weight_a, o_b.to(tl.float32), weight_b)
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_offs[:, None] + offs_d[None, :], out, mask=mask)

    tl.store(lse_ptr + _row_offsets(batch, head, q_pos, lse_strides), lse, mask=mask_m)


def _tiles(v_dim: int) -> tuple[int, int]:
    tile_d = min(triton.next_power_of_2(max(v_dim, 1)), MAX_TILE_D)
    return TILE_ELEMENTS // tile_d, tile_d


def launch_merge_states(
    out: torch.Tensor,
    lse: torch.Tensor,
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> None:
    """Fill `out` and `lse`, which must not overlap the inputs.

    Parameters
    ----------
    out, o_a, o_b : [B, H, S, Dv], [H, S, Dv] or [S, Dv]; fp16, bf16 or fp32; any strides with a
        contiguous last dimension
    lse, lse_a, lse_b : the shape of `out` without its last dimension, fp32, any strides
    """
    lead = (1,) * (4 - out.dim())
    out, o_a, o_b = (x.view(*lead, *x.shape) for x in (out, o_a, o_b))
    lse, lse_a, lse_b = (x.view(*lead, *x.shape) for x in (lse, lse_a, lse_b))
    batch, heads, q_len, v_dim = out.shape
    num_rows = batch * heads * q_len
    if num_rows == 0:
        return
    tile_rows, tile_d = _tiles(v_dim)
    with on_device_of(out):
        args = (
            out,
            lse,
            o_a,
            lse_a,
            o_b,
            lse_b,
            *(Strides(*x.stride()[:3]) for x in (out, lse, o_a, lse_a, o_b, lse_b)),
            num_rows,
            heads,
            q_len,
            v_dim,
            tile_rows,
            tile_d,
        )
        launch(_merge_states_kernel, cdiv(num_rows, tile_rows), args, num_warps=4)


def merge_states(call: MergeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of two partial results."""
    out, lse = call.o_a.new_empty(call.o_a.shape), call.lse_a.new_empty(call.lse_a.shape)
    # the kernel walks over up to three dimensions of rows; more are folded into one
    fold = max(out.dim() - 4, 0)
    tensors = (out, lse, *call)
    launch_merge_states(*(x.flatten(0, fold) if fold else x for x in tensors))
    return out, lse
