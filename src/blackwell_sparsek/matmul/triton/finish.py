# mypy: ignore-errors
"""The end of a BSR product: the epilogue of a tile, and the second pass over rows that were cut.

Parts of a cut row leave fp32 sums in a workspace; one program adds the parts of TILE_M rows by
TILE_N columns in order and finishes them. Shared by the portable products and the Hopper product.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from ...core.sizes import cdiv
from ...device.epilogue import finish
from ...device.tiles import offsets_2d
from ...launch.description import KernelLaunch
from ..strides import Strides, strides_of

if TYPE_CHECKING:
    import torch

    from ..plan import SpmmPlan

# Tile of the second pass, which only moves memory: 16 sums a thread.
REDUCE_TILE_M, REDUCE_TILE_N, REDUCE_WARPS = 16, 64, 2
# Columns that go through the epilogue at a time: all 256 of the widest tile at once would need more
# registers than there are.
SLICE_N = tl.constexpr(64)


class Addends(NamedTuple):
    """Added to the product: bias [M] before the activation, residual [B, M, N] after it.

    Either pointer may be None. The strides of the residual lie flat: Triton loses what it knows of
    constants in a tuple of tuples.
    """

    bias_ptr: Any
    bias_stride: int
    residual_ptr: Any
    batch_stride: int
    row_stride: int
    col_stride: int


class OutputRows(NamedTuple):
    """Where the rows of a finished tile go: rows `offs_m` of one batch entry, and what is added."""

    out_ptr: Any
    out_strides: Strides
    addends: Addends
    batch: Any
    offs_m: Any
    m_size: Any
    n_size: Any


@triton.jit
def _halves(tile):
    """Split a tile [M, N] into its left and its right columns."""
    M: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _finish_slice(acc, first_n, target, ACTIVATION: tl.constexpr):
    """Take columns of an fp32 tile through the epilogue to the output."""
    addends = target.addends
    offs_m = target.offs_m
    offs_n = first_n + tl.arange(0, acc.shape[1])
    # a padding item has negative rows
    mask_m = (offs_m >= 0) & (offs_m < target.m_size)
    mask = mask_m[:, None] & (offs_n < target.n_size)[None, :]
    bias = None
    if addends.bias_ptr is not None:
        bias_ptrs = addends.bias_ptr + offs_m.to(tl.int64) * addends.bias_stride
        bias = tl.load(bias_ptrs, mask=mask_m, other=0.0)[:, None]
    residual = None
    if addends.residual_ptr is not None:
        residual_ptrs = addends.residual_ptr + target.batch.to(tl.int64) * addends.batch_stride
        residual_ptrs += offsets_2d(offs_m, offs_n, addends.row_stride, addends.col_stride)
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    out = finish(acc, bias, residual, ACTIVATION, target.out_ptr.dtype.element_ty)
    out_ptrs = target.out_ptr + target.batch.to(tl.int64) * target.out_strides.batch
    out_ptrs += offsets_2d(offs_m, offs_n, target.out_strides.row, target.out_strides.col)
    tl.store(out_ptrs, out, mask=mask)


@triton.jit
def _finish_half(acc, first_n, target, ACTIVATION: tl.constexpr):
    """Finish a tile of at most 2 * SLICE_N columns."""
    N: tl.constexpr = acc.shape[1]
    if N > SLICE_N:
        left, right = _halves(acc)
        _finish_slice(left, first_n, target, ACTIVATION)
        _finish_slice(right, first_n + N // 2, target, ACTIVATION)
    else:
        _finish_slice(acc, first_n, target, ACTIVATION)


@triton.jit
def finish_tile(acc, first_n, target, ACTIVATION: tl.constexpr):
    """Finish a tile of at most 4 * SLICE_N columns, slice by slice to keep few values alive."""
    N: tl.constexpr = acc.shape[1]
    if N > 2 * SLICE_N:
        left, right = _halves(acc)
        _finish_half(left, first_n, target, ACTIVATION)
        _finish_half(right, first_n + N // 2, target, ACTIVATION)
    else:
        _finish_half(acc, first_n, target, ACTIVATION)


@triton.jit(do_not_specialize=["n_split_rows", "n_slots"])
def _bsr_spmm_reduce_kernel(
    out_ptr,
    partial_ptr,
    split_rows_ptr,
    out_strides,
    m_size,
    n_size,
    n_split_rows,
    n_slots,
    addends,
    ACTIVATION: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Add the parts of one cut row in order and finish it."""
    M_TILES: tl.constexpr = BLOCK_H // TILE_M
    pid = tl.program_id(0)
    m_tile = pid % M_TILES
    split_row = (pid // M_TILES) % n_split_rows
    panel = pid // M_TILES // n_split_rows
    n_tiles = tl.cdiv(n_size, TILE_N)
    n_tile = panel % n_tiles
    batch = panel // n_tiles
    row = tl.load(split_rows_ptr + 3 * split_row)
    first_slot = tl.load(split_rows_ptr + 3 * split_row + 1)
    last_slot = tl.load(split_rows_ptr + 3 * split_row + 2)

    rows = m_tile * TILE_M + tl.arange(0, TILE_M)
    offs_n = n_tile * TILE_N + tl.arange(0, TILE_N)
    slot_size = tl.cast(n_size, tl.int64) * BLOCK_H
    partial_ptr += batch.to(tl.int64) * n_slots * slot_size
    partial_ptrs = partial_ptr + offsets_2d(rows, offs_n, n_size, 1)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for slot in range(first_slot, last_slot):
        mask = (offs_n < n_size)[None, :]
        acc += tl.load(partial_ptrs + tl.cast(slot, tl.int64) * slot_size, mask=mask, other=0.0)

    target = OutputRows(out_ptr, out_strides, addends, batch, row * BLOCK_H + rows, m_size, n_size)
    finish_tile(acc, n_tile * TILE_N, target, ACTIVATION)


def addends_of(bias: Any, residual: Any) -> Addends:
    """Bias [M] and residual [B, M, N], either of them None, as kernels take them."""
    return Addends(
        bias,
        0 if bias is None else bias.stride(0),
        residual,
        *((0, 0, 0) if residual is None else residual.stride()),
    )


def partial_shape(out: Any, plan: Any, block_h: int) -> tuple[int, int, int, int]:
    """Workspace of a plan for `out` [B, M, N]: fp32 [B, slots, block_h, N]."""
    return out.shape[0], plan.n_slots, block_h, out.shape[2]


def empty_partial(out: "torch.Tensor", plan: Any, block_h: int) -> "torch.Tensor | None":
    """Memory for the workspace of a plan; None without slots."""
    import torch

    from ...launch.workspace import scratch

    if not plan.n_slots:
        return None
    return scratch(partial_shape(out, plan, block_h), torch.float32, out.device)


def launch_spmm_reduce(
    out: "torch.Tensor",
    partial: "torch.Tensor",
    addends: Addends,
    activation: str | None,
    plan: "SpmmPlan",
) -> None:
    """Write the rows of `out` [B, M, N] that the plan cut; its device is the current one."""
    from ...launch.launcher import launch

    kernel, programs, args, options = plan_spmm_reduce(out, partial, addends, activation, plan)
    launch(kernel, programs, args, **options)


def plan_spmm_reduce(
    out: Any, partial: Any, addends: Addends, activation: str | None, plan: Any
) -> KernelLaunch:
    """The launch that writes the rows of `out` [B, M, N] that the plan cut, from `partial`."""
    batches, m, n = out.shape
    block_h = partial.shape[2]
    tiles = cdiv(n, REDUCE_TILE_N) * batches * (block_h // REDUCE_TILE_M)
    args = (
        out,
        partial,
        plan.split_rows,
        strides_of(out),
        m,
        n,
        plan.n_split_rows,
        plan.n_slots,
        addends,
        activation,
        block_h,
        REDUCE_TILE_M,
        REDUCE_TILE_N,
    )
    options = {"num_warps": REDUCE_WARPS}
    return KernelLaunch(_bsr_spmm_reduce_kernel, plan.n_split_rows * tiles, args, options)
