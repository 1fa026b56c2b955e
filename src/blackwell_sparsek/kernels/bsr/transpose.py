"""Transposing a dense operand: out[j, i] = x[i, j], for 16-bit matrices.

X with K contiguous is read by TMA in pieces of one block width. Where that is 16 elements,
32 bytes, the copies run at a third of the L2 rate; laying X out the other way first costs one pass
over it and is faster. One program moves a square tile. Called by `bsk::bsr_matmul` on Hopper.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ...core.compile_cases import CompileCase, compile_cases
from ...core.launch import cdiv, launch, on_device_of

TILE = 64


@triton.jit(do_not_specialize=["rows", "cols"])
def _transpose_kernel(out_ptr, x_ptr, x_stride, out_stride, rows, cols, TILE: tl.constexpr):
    """Move one tile of x [rows, cols] to out [cols, rows]."""
    tiles = tl.cdiv(cols, TILE)
    offs_m = tl.program_id(0) // tiles * TILE + tl.arange(0, TILE)
    offs_n = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * x_stride + offs_n[None, :]
    tile = tl.load(x_ptrs, mask=inside, other=0.0)
    out_ptrs = out_ptr + offs_n.to(tl.int64)[:, None] * out_stride + offs_m[None, :]
    tl.store(out_ptrs, tl.trans(tile), mask=tl.trans(inside))


def launch_transpose(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write `x.T` to `out` [cols, rows]; both with contiguous rows."""
    rows, cols = x.shape
    with on_device_of(x):
        args = (out, x, x.stride(0), out.stride(0), rows, cols, TILE)
        launch(_transpose_kernel, cdiv(rows, TILE) * cdiv(cols, TILE), args, num_warps=4)


@compile_cases
def _cases() -> Iterator[CompileCase]:
    yield CompileCase(
        name="bsr_transpose/fp16",
        kernel=_transpose_kernel,
        args={
            "out_ptr": torch.float16,
            "x_ptr": torch.float16,
            "x_stride": 4096,
            "out_stride": 4096,
            "rows": 4096,
            "cols": 4096,
            "TILE": TILE,
        },
        archs=(90,),
    )
