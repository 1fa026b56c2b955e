# mypy: ignore-errors
"""BSR times dense: out[b] = activation(A @ x[b] + bias) + residual[b].

A [M, K] block-sparse in blocks [BLOCK_H, BLOCK_W], x [B, K, N], out and residual [B, M, N],
bias [M]. dense @ BSR is the same product transposed: the caller passes transposed views, and the
metadata of the orientation whose rows are the rows of `out`.

One program of `_bsr_spmm_kernel` computes TILE_M rows of one item of the plan (a block row, or a
part of one) by TILE_N columns of one batch entry. Parts leave fp32 sums in a workspace, and
`_bsr_spmm_reduce_kernel` adds them in order. Blocks must have sides that are multiples of 16, and
zeros where they reach beyond the shape of A.

`matmul` is implementation `triton` of `bsk::bsr_matmul`; it leaves few columns to `narrow`.
`matmul_fp8` is that of `bsk::bsr_matmul_fp8`: the same kernel reads e4m3, and multiplies the sum of
each step, which has one block and one group of channels, with their scales.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from ...core.sizes import SCALE_CHANNELS, cdiv
from ...device.fp8 import e4m3_operand
from ...device.tiles import add_product, offsets_2d
from ...launch.description import KernelLaunch, run
from ..strides import Strides, strides_of
from .finish import OutputRows, addends_of, empty_partial, finish_tile, plan_spmm_reduce
from .tuning import (
    MIN_SM_CONVERTS_FP8,
    SpmmConfig,
    spmm_config,
    spmm_fp8_config,
    triton_stages,
)

if TYPE_CHECKING:
    import torch

    from ...calls.fp8 import Fp8MatmulCall
    from ...calls.matmul import MatmulCall
    from ..plan import SpmmPlan
    from ..rows import BlockRows, Views

_SCALE_CHANNELS = tl.constexpr(SCALE_CHANNELS)


class _Blocks(NamedTuple):
    """Stored blocks, and which of them stand in which block column."""

    ptr: Any
    strides: Strides
    indices_ptr: Any
    perm_ptr: Any


class _Dense(NamedTuple):
    """x [K, N] of one batch entry; no `k_size` where blocks end with K."""

    ptr: Any
    strides: Strides
    k_size: Any
    n_size: Any


class Scales(NamedTuple):
    """Scales of operands in fp8: one for each block, and for the channels of x that share one."""

    block_ptr: Any
    x_ptr: Any
    batch_stride: int
    group_stride: int
    col_stride: int


class _Tile(NamedTuple):
    """Blocks begin ... end - 1 of a block row, some rows of them, and columns of x."""

    begin: Any
    end: Any
    rows: Any
    offs_n: Any


@triton.jit
def _add_scaled(acc, a, x, entry, k_first, scales, tile, live, CONVERTS_FP8: tl.constexpr):
    """acc + a @ x times the scales of the block `entry` and of the channels that hold `k_first`.

    fp16 holds e4m3 exactly, so that a step is summed as a product of fp16 is, in fp32.
    """
    a, x = e4m3_operand(a, CONVERTS_FP8), e4m3_operand(x, CONVERTS_FP8)
    part = tl.dot(a, x, input_precision="ieee")
    group = (k_first // _SCALE_CHANNELS).to(tl.int64)
    x_ptrs = scales.x_ptr + group * scales.group_stride
    x_ptrs += tile.offs_n.to(tl.int64) * scales.col_stride
    factor = tl.load(x_ptrs[None, :], mask=live, other=0.0)
    return acc + part * (factor * tl.load(scales.block_ptr + entry))


@triton.jit
def _sum_within_blocks(
    blocks,
    dense,
    scales,
    tile,
    INPUT_PRECISION: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply the blocks begin ... end - 1, one or more steps to a block."""
    K_STEPS: tl.constexpr = BLOCK_W // TILE_K
    offs_k = tl.arange(0, TILE_K)
    mask_n = (tile.offs_n < dense.n_size)[None, :]
    a_ptrs = blocks.ptr + offsets_2d(tile.rows, offs_k, blocks.strides.row, blocks.strides.col)
    x_ptrs = dense.ptr + offsets_2d(offs_k, tile.offs_n, dense.strides.row, dense.strides.col)
    acc = tl.zeros((tile.rows.shape[0], tile.offs_n.shape[0]), dtype=tl.float32)
    # One flat loop over the steps of all blocks, so that loads run ahead across blocks.
    for step in range(tile.begin * K_STEPS, tile.end * K_STEPS):
        entry = step // K_STEPS
        k_in_block = (step % K_STEPS) * TILE_K
        k_first = tl.load(blocks.indices_ptr + entry) * BLOCK_W + k_in_block
        if blocks.perm_ptr is not None:
            entry = tl.load(blocks.perm_ptr + entry)
        a_offset = tl.cast(entry, tl.int64) * blocks.strides.batch
        a_offset += tl.cast(k_in_block, tl.int64) * blocks.strides.col
        a = tl.load(a_ptrs + a_offset)  # [TILE_M, TILE_K]
        mask_x = mask_n
        if dense.k_size is not None:
            mask_x = mask_x & (k_first + offs_k < dense.k_size)[:, None]
        x = tl.load(x_ptrs + k_first.to(tl.int64) * dense.strides.row, mask=mask_x, other=0.0)
        if scales is None:
            acc = add_product(acc, a, x, tile.end, INPUT_PRECISION)
        else:
            live = mask_n
            if dense.k_size is not None:
                # a block that reaches beyond the channels has steps without a scale
                live = live & (k_first < dense.k_size)
            acc = _add_scaled(acc, a, x, entry, k_first, scales, tile, live, CONVERTS_FP8)
    return acc


@triton.jit
def _sum_across_blocks(
    blocks, dense, tile, INPUT_PRECISION: tl.constexpr, BLOCK_W: tl.constexpr, TILE_K: tl.constexpr
):
    """Multiply the blocks begin ... end - 1 as if they lay side by side.

    A step takes columns of several blocks, which narrow blocks need to fill it.
    """
    offs_k = tl.arange(0, TILE_K)
    mask_n = (tile.offs_n < dense.n_size)[None, :]
    a_ptrs = blocks.ptr + (tile.rows.to(tl.int64) * blocks.strides.row)[:, None]
    x_ptrs = dense.ptr + (tile.offs_n.to(tl.int64) * dense.strides.col)[None, :]
    acc = tl.zeros((tile.rows.shape[0], tile.offs_n.shape[0]), dtype=tl.float32)
    for k_done in range(0, (tile.end - tile.begin) * BLOCK_W, TILE_K):
        entry = tile.begin + (k_done + offs_k) // BLOCK_W  # [TILE_K]
        k_in_block = (k_done + offs_k) % BLOCK_W
        live = entry < tile.end
        k_pos = tl.load(blocks.indices_ptr + entry, mask=live, other=0) * BLOCK_W + k_in_block
        if blocks.perm_ptr is not None:
            entry = tl.load(blocks.perm_ptr + entry, mask=live, other=0)
        a_offset = entry.to(tl.int64) * blocks.strides.batch
        a_offset += k_in_block.to(tl.int64) * blocks.strides.col
        a = tl.load(a_ptrs + a_offset[None, :], mask=live[None, :], other=0.0)
        if dense.k_size is not None:
            live = live & (k_pos < dense.k_size)
        x_offset = k_pos.to(tl.int64) * dense.strides.row
        x = tl.load(x_ptrs + x_offset[:, None], mask=live[:, None] & mask_n, other=0.0)
        acc = add_product(acc, a, x, tile.end, INPUT_PRECISION)
    return acc


@triton.jit(do_not_specialize=["n_items", "n_slots"])
def _bsr_spmm_kernel(
    out_ptr,
    partial_ptr,  # fp32 [B, slots, BLOCK_H, N], None when no row is cut
    values_ptr,  # in fp8, values and x are given as bytes
    x_ptr,
    scales,  # `Scales` of operands in fp8, or None
    items_ptr,
    indices_ptr,
    perm_ptr,  # entry of the values behind each index; None: the same
    out_strides,
    value_strides,
    x_strides,
    m_size,
    k_size,  # None when K is a multiple of BLOCK_W
    n_size,
    n_items,
    n_slots,
    addends,
    ACTIVATION: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply one item of the plan with one panel of columns."""
    tl.static_assert(BLOCK_H % TILE_M == 0)
    tl.static_assert(scales is None or (BLOCK_W % TILE_K == 0 and _SCALE_CHANNELS % TILE_K == 0))
    M_TILES: tl.constexpr = BLOCK_H // TILE_M

    # Tiles of a block row are neighbours (they read the same x), then items, longest first, then
    # panels: programs that run together share a panel of x in the L2 cache.
    pid = tl.program_id(0)
    m_tile = pid % M_TILES
    item = (pid // M_TILES) % n_items
    panel = pid // M_TILES // n_items
    n_tiles = tl.cdiv(n_size, TILE_N)
    n_tile = panel % n_tiles
    batch = panel // n_tiles
    row = tl.load(items_ptr + 4 * item)
    begin = tl.load(items_ptr + 4 * item + 1)
    end = tl.load(items_ptr + 4 * item + 2)

    rows = m_tile * TILE_M + tl.arange(0, TILE_M)  # in the block
    offs_n = n_tile * TILE_N + tl.arange(0, TILE_N)
    x_ptr += batch.to(tl.int64) * x_strides.batch
    blocks = _Blocks(values_ptr, value_strides, indices_ptr, perm_ptr)
    dense = _Dense(x_ptr, x_strides, k_size, n_size)
    tile = _Tile(begin, end, rows, offs_n)
    if scales is not None:
        x_scale_ptr = scales.x_ptr + batch.to(tl.int64) * scales.batch_stride
        scales = Scales(scales.block_ptr, x_scale_ptr, 0, scales.group_stride, scales.col_stride)
    if BLOCK_W % TILE_K == 0:
        acc = _sum_within_blocks(
            blocks, dense, scales, tile, INPUT_PRECISION, CONVERTS_FP8, BLOCK_W, TILE_K
        )
    else:
        acc = _sum_across_blocks(blocks, dense, tile, INPUT_PRECISION, BLOCK_W, TILE_K)

    target = OutputRows(out_ptr, out_strides, addends, batch, row * BLOCK_H + rows, m_size, n_size)
    if partial_ptr is None:
        finish_tile(acc, n_tile * TILE_N, target, ACTIVATION)
    else:
        slot = tl.load(items_ptr + 4 * item + 3)
        if slot < 0:
            finish_tile(acc, n_tile * TILE_N, target, ACTIVATION)
        else:
            first_row = (batch.to(tl.int64) * n_slots + slot) * BLOCK_H
            partial_ptrs = partial_ptr + offsets_2d(first_row + rows, offs_n, n_size, 1)
            tl.store(partial_ptrs, acc, mask=(offs_n < n_size)[None, :])


def matmul(call: "MatmulCall") -> "torch.Tensor":
    """op(A) @ dense, or dense @ op(A) where `dense_left`, with its epilogue."""
    from ...dispatch.machine import fp32_precision
    from ..plan import spmm_plan
    from ..rows import rows_product
    from . import narrow

    product = rows_product(call)
    if narrow.multiplied(product, call.bias, call.activation):
        return product.out
    rows = product.rows
    config = spmm_config(product.problem, fp32_precision(call.values.dtype))
    plan = spmm_plan(rows.indptr, rows.blocks.shape[0], rows.cols_b, config.chunk)
    for views in product.parts:
        launch_spmm(views, rows, call.bias, call.activation, plan, config)
    return product.out


def matmul_fp8(call: "Fp8MatmulCall") -> "torch.Tensor":
    """dense @ op(A) with its epilogue, for operands in e4m3 with scales."""
    import torch

    from ..plan import spmm_plan
    from ..rows import rows_product

    given = call.given
    product = rows_product(given, call.x_descale)
    rows = product.rows._replace(blocks=product.rows.blocks.view(torch.uint8))
    config = spmm_fp8_config(product.problem)
    plan = spmm_plan(rows.indptr, rows.blocks.shape[0], rows.cols_b, config.chunk)
    converts = given.problem.arch.sm >= MIN_SM_CONVERTS_FP8
    for views, x_scales in zip(product.parts, product.x_scales, strict=True):
        views = views._replace(x=views.x.view(torch.uint8))
        scales = Scales(call.descale, x_scales, *x_scales.stride())
        launch_spmm(views, rows, given.bias, given.activation, plan, config, scales, converts)
    return product.out


def launch_spmm(
    views: "Views",
    rows: "BlockRows",
    bias: "torch.Tensor | None",
    activation: str | None,
    plan: "SpmmPlan",
    config: SpmmConfig,
    scales: Scales | None = None,
    converts_fp8: bool = False,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`; see `plan_spmm`."""
    out = views.out
    if out.numel() == 0:
        return
    partial = empty_partial(out, plan, rows.blocks.shape[1])
    epilogue = (bias, activation)
    for planned in plan_spmm(views, rows, epilogue, plan, partial, config, scales, converts_fp8):
        run(planned, out)


def plan_spmm(
    views: Any,
    rows: Any,
    epilogue: tuple[Any, str | None],
    plan: Any,
    partial: Any,
    config: SpmmConfig,
    scales: Scales | None = None,
    converts_fp8: bool = False,
) -> list[KernelLaunch]:
    """The launches that write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    views : out [B, M, N], x [B, K, N], residual [B, M, N] or None; any strides
    rows : A [M, K], its blocks with any strides
    epilogue : bias [M], any stride, or None; activation
    plan : the `SpmmPlan` of the rows and `config.chunk`
    partial : fp32 [B, slots, block height, N] if the plan has slots, else None
    scales : of operands in fp8, given as bytes; strides of x [B, groups, N]
    converts_fp8 : whether the GPU has an instruction that converts e4m3
    """
    out, x, residual = views
    (bias, activation), values = epilogue, rows.blocks
    block_h, block_w = values.shape[1:]
    config.check_blocks((block_h, block_w))
    batches, m, n = out.shape
    if out.numel() == 0:
        return []
    addends = addends_of(bias, residual)
    tiles = cdiv(n, config.tile_n) * batches * (block_h // config.tile_m)
    args = (
        out,
        partial,
        values,
        x,
        scales,
        plan.items,
        rows.indices,
        rows.perm,
        strides_of(out),
        strides_of(values),
        strides_of(x),
        m,
        x.shape[1] if x.shape[1] % block_w else None,
        n,
        plan.n_items,
        plan.n_slots,
        addends,
        activation,
        config.input_precision,
        converts_fp8,
        block_h,
        block_w,
        config.tile_m,
        config.tile_n,
        config.tile_k,
    )
    options = {
        "num_warps": config.num_warps,
        "num_stages": triton_stages(config.num_stages, 1),
    }
    launches = [KernelLaunch(_bsr_spmm_kernel, plan.n_items * tiles, args, options)]
    if plan.n_split_rows:
        launches.append(plan_spmm_reduce(out, partial, addends, activation, plan))
    return launches
