"""Gradient of the sinks: one number per head, a sum over all queries in one order.

    dsinks[h] = - sum_i exp(sinks[h] - lse[i]) * delta[i]

lse and delta [B, H, S] fp32, or packed [H, T]. A first launch adds up ROWS queries of one head per
program, a second one the partial sums of a head. Called by `bsk::attn_bwd`.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ...core.compile_cases import CompileCase, compile_cases
from ...core.launch import cdiv, launch, on_device_of
from ...device.backprop import sink_gradients
from ...device.masks import exists

# Queries of one program, and how many of them it reads at a time.
ROWS = 16384
TILE_ROWS = 1024


@triton.jit(do_not_specialize=["q_len", "num_rows", "heads", "num_parts", "num_sequences"])
def _sink_parts_kernel(
    parts_ptr,
    sinks_ptr,
    lse_ptr,
    delta_ptr,
    cu_seqlens_ptr,
    num_rows,
    q_len,
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
        # tokens past the last sequence belong to nobody
        num_rows = tl.load(cu_seqlens_ptr + num_sequences)
    sink = tl.load(sinks_ptr + head)
    total = tl.zeros([TILE_ROWS], tl.float32)
    for first in range(0, ROWS, TILE_ROWS):
        row = tl.cast(part, tl.int64) * ROWS + first + tl.arange(0, TILE_ROWS)
        live = exists(row, num_rows)
        at = (row // q_len * heads + head) * q_len + row % q_len
        lse = tl.load(lse_ptr + at, mask=live, other=-float("inf"))
        delta = tl.load(delta_ptr + at, mask=live, other=0.0)
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
    dsinks: torch.Tensor,
    sinks: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """Fill `dsinks`.

    Parameters
    ----------
    dsinks, sinks : [Hq], sinks contiguous
    lse, delta : fp32 [B, Hq, Sq] or packed [Hq, Tq], contiguous
    cu_seqlens : int32 [B + 1] offsets of packed queries, or None
    """
    heads = sinks.shape[0]
    num_rows = lse.numel() // max(heads, 1)
    num_parts = max(cdiv(num_rows, ROWS), 1)
    if heads == 0:
        return
    with on_device_of(lse):
        parts = torch.empty(heads * num_parts, dtype=torch.float32, device=lse.device)
        num_sequences = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
        # lengths of 0 divide nothing
        sizes = (num_rows, max(lse.shape[-1], 1), heads, num_parts, num_sequences)
        args = (parts, sinks, lse, delta, cu_seqlens, *sizes, ROWS, TILE_ROWS)
        launch(_sink_parts_kernel, heads * num_parts, args, num_warps=4)
        launch(_sink_sum_kernel, heads, (dsinks, parts, num_parts, dsinks.stride(0), TILE_ROWS))


@compile_cases
def _cases() -> Iterator[CompileCase]:
    numbers = torch.float32
    for packed in (False, True):
        yield CompileCase(
            f"attn_sink_parts/{'packed' if packed else 'dense'}",
            _sink_parts_kernel,
            {
                **{f"{name}_ptr": numbers for name in ("parts", "sinks", "lse", "delta")},
                "cu_seqlens_ptr": torch.int32 if packed else None,
                "num_rows": 8192,
                "q_len": 4096,
                "heads": 32,
                "num_parts": 3,
                "num_sequences": 4,
                "ROWS": ROWS,
                "TILE_ROWS": TILE_ROWS,
            },
        )
    yield CompileCase(
        "attn_sink_sum/float32",
        _sink_sum_kernel,
        {
            "dsinks_ptr": numbers,
            "parts_ptr": numbers,
            "num_parts": 3,
            "dsinks_stride": 1,
            "TILE_ROWS": TILE_ROWS,
        },
    )
