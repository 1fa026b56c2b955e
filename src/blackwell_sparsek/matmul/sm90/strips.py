# mypy: ignore-errors
"""BSR times few columns on Hopper for blocks 16 columns wide: out = act(A @ x + bias) + residual.

A is block-sparse [M, K], x [K, N] with contiguous columns, out [M, N], N at most 32. Blocks this
narrow are too small for separate TMA copies (`narrow.py`). Here a program computes a strip: 16
rows of one block row, the M of one `mma.sync`. Its warps split K, each with its share of the
blocks, and their sums are added at the end in a fixed order.

Both operands are loaded from memory straight into the registers of `mma.sync`. A thread holds 8
neighbours along K instead of 2, so that it loads 16 bytes at a time; they are the same 8 of both
operands, and the order of K within a sum is free. Blocks are read once and prefetched to the L2; x
is read again for each block and stays in L1 as far as it fits.

Warps find their blocks through scalars that differ between warps (`device/gluon/warps.py`); all
warps take the same number of steps. Launched with PDL. Part of impl "sm90" of `bsk::bsr_matmul`.
Limits: fp16 and bf16, blocks stored by rows, K a multiple of 16, addresses and strides that are
multiples of 16 bytes.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...core.compat import hopper_options
from ...device.gluon.memory import bring_to_l2
from ...device.gluon.warps import from_lane, lane_number, warp_number
from ...launch.launcher import launch, on_device_of
from .config import K_TILE_BLOCKS, LOADED, STRIP_BLOCK, STRIP_ROWS, StripsConfig
from .epilogue import Epilogue, finish_values
from .row_schedule import TABLE_HEADER, RowTable

_HEADER = gl.constexpr(TABLE_HEADER)
_ROWS = gl.constexpr(STRIP_ROWS)
_BLOCK = gl.constexpr(STRIP_BLOCK)
_LOADED = gl.constexpr(LOADED)
_K_TILE_BLOCKS = gl.constexpr(K_TILE_BLOCKS)
_TILE_K = gl.constexpr(K_TILE_BLOCKS * STRIP_BLOCK)
_LANES = gl.constexpr(32)
_STRIP_BYTES = gl.constexpr(2 * STRIP_ROWS * STRIP_BLOCK)


class StripOperands(NamedTuple):
    """A strip of the blocks, and x, in memory."""

    values_ptr: Any  # first row of the strip in the first block
    x_ptr: Any
    x_stride: Any  # between columns
    n_cols: Any


@gluon.jit
def _prefetch_strips(values_ptr, slots_ptr, width, CFG: gl.constexpr):
    """Prefetch the strips of the first 32 blocks of each warp to the L2, one by each thread."""
    slot = warp_number() * _LANES + lane_number()
    entry = gl.load(slots_ptr + slot, mask=slot < width, other=-1)
    strip_ptr = values_ptr + entry.to(gl.int64) * CFG.block_size
    bring_to_l2(gl.where(entry >= 0, strip_ptr.to(gl.int64), 0), _STRIP_BYTES)


@gluon.jit
def _find(slots_ptr, width, first, blocks, CFG: gl.constexpr):
    """This warp's blocks of a step: entry (-1: none) and block column, one block in each lane."""
    lane = lane_number()
    slot = first + lane
    present = (lane < CFG.warp_blocks) & (slot < blocks)
    entry = gl.load(slots_ptr + slot, mask=present, other=-1)
    col = gl.load(slots_ptr + width + slot, mask=present, other=0)
    return entry, col


@gluon.jit
def _load_k_tile(found, k_tile: gl.constexpr, operands, CFG: gl.constexpr):
    """Four blocks side by side [WARPS * 16, 64] and their rows of x [64, TILE_N] as operands."""
    entry, col = found
    values_ptr = operands.values_ptr
    x_ptr = operands.x_ptr
    sums: gl.constexpr = CFG.sums_layout()
    left: gl.constexpr = gl.DotOperandLayout(0, sums, _LOADED)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, _LOADED)
    blocks: gl.constexpr = _K_TILE_BLOCKS
    # the tile has 16 rows for each warp, and they are the same rows of A
    a_row = gl.arange(0, CFG.all_rows, gl.SliceLayout(1, left))[:, None] % _ROWS
    a_k = gl.arange(0, _TILE_K, gl.SliceLayout(0, left))[None, :]
    x_k = gl.arange(0, _TILE_K, gl.SliceLayout(1, right))[:, None]
    x_col = gl.arange(0, CFG.TILE_N, gl.SliceLayout(0, right))[None, :]
    a_ptrs = gl.where(a_k >= 0, values_ptr, values_ptr)
    x_ptrs = gl.where(x_k >= 0, x_ptr, x_ptr)
    a_entry = 0 * a_k
    x_entry = 0 * x_k
    for i in gl.static_range(blocks):
        of_block = from_lane(entry, k_tile * _K_TILE_BLOCKS + i)
        block_ptr = values_ptr + of_block.to(gl.int64) * CFG.block_size
        rows_ptr = x_ptr + from_lane(col, k_tile * _K_TILE_BLOCKS + i) * _BLOCK
        a_ptrs = gl.where(a_k // _BLOCK == i, block_ptr, a_ptrs)
        x_ptrs = gl.where(x_k // _BLOCK == i, rows_ptr, x_ptrs)
        a_entry = gl.where(a_k // _BLOCK == i, of_block, a_entry)
        x_entry = gl.where(x_k // _BLOCK == i, of_block, x_entry)
    a_ptrs += a_row * _BLOCK + a_k % _BLOCK
    x_ptrs += x_k % _BLOCK + x_col.to(gl.int64) * operands.x_stride
    # Rows of blocks and of x begin at 16 bytes, or TMA could not copy them. Triton since 3.8 does
    # not see it in pointers that were chosen from several, and would load 2 bytes at a time.
    a_ptrs = gl.multiple_of(a_ptrs, [16, 16])
    x_ptrs = gl.multiple_of(x_ptrs, [16, 16])
    # blocks bypass L1, where x is to stay
    a = gl.load(a_ptrs, mask=(a_entry >= 0) & (a_row >= 0), other=0.0, cache_modifier=".cg")
    x = gl.load(x_ptrs, mask=(x_entry >= 0) & (x_col < operands.n_cols), other=0.0)
    return a, x


@gluon.jit
def _load_step(found, operands, CFG: gl.constexpr):
    """All K tiles of a step, as pairs of operands."""
    k_tiles: gl.constexpr = CFG.K_TILES
    loaded = ()
    for k_tile in gl.static_range(k_tiles):
        pair = _load_k_tile(found, k_tile, operands, CFG)
        loaded = loaded + (pair,)  # noqa: RUF005
    return loaded


@gluon.jit
def _add_step(sums, loaded, CFG: gl.constexpr):
    """Add the products of a step."""
    k_tiles: gl.constexpr = CFG.K_TILES
    for k_tile in gl.static_range(k_tiles):
        a, x = loaded[k_tile]
        sums = mma_v2(a, x, sums)
    return sums


@gluon.jit
def _total(sums, CFG: gl.constexpr):
    """The sums of all warps added up [16, TILE_N], in the layout of the store."""
    layout: gl.constexpr = CFG.store_layout()
    if CFG.WARPS > 1:
        sums = gl.sum(sums.reshape([CFG.WARPS, _ROWS, CFG.TILE_N]), 0)
    return gl.convert_layout(sums, layout)


# `n_rows` is specialised: where 16 divides it, rows are stored 16 bytes at a time
@gluon.jit(do_not_specialize=["n_cols", "width"])
def _spmm_strips_kernel(
    out_ptr,
    out_strides,
    values_ptr,
    x_ptr,
    x_stride,
    bias_ptr,
    residual_ptr,
    residual_strides,
    records_ptr,
    n_rows,
    n_cols,
    width,
    CFG: gl.constexpr,
):
    """Multiply one strip with all columns: load and multiply blocks, add up, finish, store."""
    # PDL: the next kernel may start as soon as there is room for it; it waits where it has to
    gdc_launch_dependents()
    item = gl.program_id(0) // CFG.strips
    strip = gl.program_id(0) % CFG.strips
    record_ptr = records_ptr + item.to(gl.int64) * (_HEADER + 2 * width)
    slots_ptr = record_ptr + _HEADER
    block_row = gl.load(record_ptr)
    blocks = gl.load(record_ptr + 1)
    values_ptr += strip * (_ROWS * _BLOCK)
    _prefetch_strips(values_ptr, slots_ptr, width, CFG)
    first = warp_number() * CFG.warp_blocks
    found = _find(slots_ptr, width, first, blocks, CFG)
    next_found = _find(slots_ptr, width, first + CFG.step_blocks, blocks, CFG)
    # only the table may be read before the previous kernels have ended: it never changes
    gdc_wait()

    operands = StripOperands(values_ptr, x_ptr, x_stride, n_cols)
    layout: gl.constexpr = CFG.sums_layout()
    shape: gl.constexpr = [CFG.all_rows, CFG.TILE_N]
    sums = gl.zeros(shape, gl.float32, layout)
    loaded = _load_step(found, operands, CFG)
    # two steps in flight: the loads of the next one are issued before this one is multiplied
    for step in range(CFG.step_blocks, blocks, CFG.step_blocks):
        next_loaded = _load_step(next_found, operands, CFG)
        next_found = _find(slots_ptr, width, first + step + CFG.step_blocks, blocks, CFG)
        sums = _add_step(sums, loaded, CFG)
        loaded = next_loaded
    total = _total(_add_step(sums, loaded, CFG), CFG)

    stored: gl.constexpr = CFG.store_layout()
    activation: gl.constexpr = CFG.ACTIVATION
    first_row = block_row * CFG.BLOCK_H + strip * _ROWS
    rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, stored))[:, None]
    cols = gl.arange(0, CFG.TILE_N, gl.SliceLayout(0, stored))[None, :]
    epilogue = Epilogue(bias_ptr, residual_ptr, residual_strides, n_rows, n_cols)
    total = finish_values(total, rows, cols, epilogue, activation)
    row_stride, col_stride = out_strides
    offsets = rows.to(gl.int64) * row_stride + cols.to(gl.int64) * col_stride
    inside = (rows < n_rows) & (cols < n_cols)
    gl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch_spmm_strips(
    out: torch.Tensor,
    values: torch.Tensor,
    table: RowTable,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    config: StripsConfig,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [M, N], any strides, N at most `config.TILE_N`
    values : [nnzb, bh, 16] contiguous
    table : of the pattern, complete on the device before this call
    x : [K, N] with contiguous columns, K a multiple of 16
    bias : [M] contiguous, residual : [M, N], any strides; or None
    """
    args = (
        out,
        out.stride(),
        values,
        x,
        x.stride(1),
        bias,
        residual,
        None if residual is None else residual.stride(),
        table.records,
        *out.shape,
        table.width,
        config,
    )
    with on_device_of(out):
        launch(
            *(_spmm_strips_kernel, table.records.shape[0] * config.strips, args),
            num_warps=config.WARPS,
            maxnreg=config.max_registers,
            launch_pdl=True,
            **hopper_options(),
        )
