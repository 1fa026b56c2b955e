# mypy: ignore-errors
"""BSR times dense: out[b] = activation(A @ x[b] + bias) + residual[b].

A [M, K] block-sparse in blocks [BLOCK_H, BLOCK_W], x [B, K, N], out and residual [B, M, N],
bias [M]. dense @ BSR is the same product transposed: the caller passes transposed views, and the
metadata of the orientation whose rows are the rows of `out`.

One program of `_bsr_spmm_kernel` computes TILE_M rows of one item of the plan (a block row, or a
part of one) by TILE_N columns of one batch entry. Parts leave fp32 sums in a workspace, and
`_bsr_spmm_reduce_kernel` adds them in order. Called by `bsk::bsr_matmul`. Blocks must have sides
that are multiples of 16, and zeros where they reach beyond the shape of A.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...device.epilogue import finish
from ...device.tiles import add_product, offsets_2d
from ...launch.launcher import cdiv, launch, on_device_of, scratch
from ..plan import SpmmPlan, strides_of
from .tuning import SpmmConfig, triton_stages

# The end of a BSR product: the epilogue of a tile, and the second pass over rows that were cut.
#
# Parts of a cut row leave fp32 sums in a workspace; one program adds the parts of
# TILE_M rows by TILE_N columns in order and finishes them. Shared by the portable and the Hopper
# product.

# Tile of the second pass, which only moves memory: 16 sums a thread.
REDUCE_TILE_M, REDUCE_TILE_N, REDUCE_WARPS = 16, 64, 2
# Columns that go through the epilogue at a time: all 256 of the widest tile at once would need more
# registers than there are.
SLICE_N = tl.constexpr(64)


class Addends(NamedTuple):
    """What is added to the product: bias [M] before the activation, residual [B, M, N] after it.

    Either pointer may be None. The strides of the residual lie flat: Triton loses what it knows of
    constants in a tuple of tuples.
    """

    bias_ptr: torch.Tensor | None
    bias_stride: int
    residual_ptr: torch.Tensor | None
    batch_stride: int
    row_stride: int
    col_stride: int


@triton.jit
def _halves(tile):
    """Split a tile [M, N] into its left and its right columns."""
    M: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _finish_slice(
    acc, first_n, out_ptr, out_strides, addends, batch, offs_m, m_size, n_size, ACTIVATION
):
    """Take columns of an fp32 tile through the epilogue to the output."""
    offs_n = first_n + tl.arange(0, acc.shape[1])
    # a padding item has negative rows
    mask_m = (offs_m >= 0) & (offs_m < m_size)
    mask = mask_m[:, None] & (offs_n < n_size)[None, :]
    bias = None
    if addends.bias_ptr is not None:
        bias_ptrs = addends.bias_ptr + offs_m.to(tl.int64) * addends.bias_stride
        bias = tl.load(bias_ptrs, mask=mask_m, other=0.0)[:, None]
    residual = None
    if addends.residual_ptr is not None:
        residual_ptrs = addends.residual_ptr + batch.to(tl.int64) * addends.batch_stride
        residual_ptrs += offsets_2d(offs_m, offs_n, addends.row_stride, addends.col_stride)
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    out = finish(acc, bias, residual, ACTIVATION, out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + batch.to(tl.int64) * out_strides.batch
    out_ptrs += offsets_2d(offs_m, offs_n, out_strides.row, out_strides.col)
    tl.store(out_ptrs, out, mask=mask)


@triton.jit
def _finish_half(acc, first_n, args, ACTIVATION: tl.constexpr):
    """Finish a tile of at most 2 * SLICE_N columns."""
    N: tl.constexpr = acc.shape[1]
    if N > SLICE_N:
        left, right = _halves(acc)
        _finish_slice(left, first_n, *args, ACTIVATION)
        _finish_slice(right, first_n + N // 2, *args, ACTIVATION)
    else:
        _finish_slice(acc, first_n, *args, ACTIVATION)


@triton.jit
def finish_tile(acc, first_n, args, ACTIVATION: tl.constexpr):
    """Finish a tile of at most 4 * SLICE_N columns, slice by slice to keep few values alive."""
    N: tl.constexpr = acc.shape[1]
    if N > 2 * SLICE_N:
        left, right = _halves(acc)
        _finish_half(left, first_n, args, ACTIVATION)
        _finish_half(right, first_n + N // 2, args, ACTIVATION)
    else:
        _finish_half(acc, first_n, args, ACTIVATION)


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

    epilogue = (out_ptr, out_strides, addends, batch, row * BLOCK_H + rows, m_size, n_size)
    finish_tile(acc, n_tile * TILE_N, epilogue, ACTIVATION)


def addends_of(bias: torch.Tensor | None, residual: torch.Tensor | None) -> Addends:
    """Bias [M] and residual [B, M, N], either of them None, as kernels take them."""
    return Addends(
        bias,
        0 if bias is None else bias.stride(0),
        residual,
        *((0, 0, 0) if residual is None else residual.stride()),
    )


def empty_partial(out: torch.Tensor, plan: SpmmPlan, block_h: int) -> torch.Tensor | None:
    """Workspace of a plan for `out` [B, M, N]: fp32 [B, slots, block_h, N], None without slots."""
    if not plan.n_slots:
        return None
    shape = (out.shape[0], plan.n_slots, block_h, out.shape[2])
    return scratch(shape, torch.float32, out.device)


def launch_spmm_reduce(
    out: torch.Tensor,
    partial: torch.Tensor,
    addends: Addends,
    activation: str | None,
    plan: SpmmPlan,
) -> None:
    """Write the rows of `out` [B, M, N] that the plan cut, from the parts in `partial`."""
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
    launch(_bsr_spmm_reduce_kernel, plan.n_split_rows * tiles, args, num_warps=REDUCE_WARPS)


@triton.jit
def _sum_within_blocks(
    values_ptr,
    x_ptr,
    indices_ptr,
    perm_ptr,
    value_strides,
    x_strides,
    begin,
    end,
    rows,
    offs_n,
    k_size,
    n_size,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply the blocks begin ... end - 1, one or more steps to a block."""
    K_STEPS: tl.constexpr = BLOCK_W // TILE_K
    offs_k = tl.arange(0, TILE_K)
    mask_n = (offs_n < n_size)[None, :]
    a_ptrs = values_ptr + offsets_2d(rows, offs_k, value_strides.row, value_strides.col)
    x_ptrs = x_ptr + offsets_2d(offs_k, offs_n, x_strides.row, x_strides.col)
    acc = tl.zeros((rows.shape[0], offs_n.shape[0]), dtype=tl.float32)
    # One flat loop over the steps of all blocks, so that loads run ahead across blocks.
    for step in range(begin * K_STEPS, end * K_STEPS):
        entry = step // K_STEPS
        k_in_block = (step % K_STEPS) * TILE_K
        k_first = tl.load(indices_ptr + entry) * BLOCK_W + k_in_block
        if perm_ptr is not None:
            entry = tl.load(perm_ptr + entry)
        a_offset = tl.cast(entry, tl.int64) * value_strides.batch
        a_offset += tl.cast(k_in_block, tl.int64) * value_strides.col
        a = tl.load(a_ptrs + a_offset)  # [TILE_M, TILE_K]
        mask_x = mask_n
        if k_size is not None:
            mask_x = mask_x & (k_first + offs_k < k_size)[:, None]
        x = tl.load(x_ptrs + k_first.to(tl.int64) * x_strides.row, mask=mask_x, other=0.0)
        acc = add_product(acc, a, x, end, INPUT_PRECISION)
    return acc


@triton.jit
def _sum_across_blocks(
    values_ptr,
    x_ptr,
    indices_ptr,
    perm_ptr,
    value_strides,
    x_strides,
    begin,
    end,
    rows,
    offs_n,
    k_size,
    n_size,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply the blocks begin ... end - 1 as if they lay side by side.

    A step takes pieces of several blocks, which narrow blocks need to fill it.
    """
    offs_k = tl.arange(0, TILE_K)
    mask_n = (offs_n < n_size)[None, :]
    a_ptrs = values_ptr + (rows.to(tl.int64) * value_strides.row)[:, None]
    x_ptrs = x_ptr + (offs_n.to(tl.int64) * x_strides.col)[None, :]
    acc = tl.zeros((rows.shape[0], offs_n.shape[0]), dtype=tl.float32)
    for k_done in range(0, (end - begin) * BLOCK_W, TILE_K):
        entry = begin + (k_done + offs_k) // BLOCK_W  # [TILE_K]
        k_in_block = (k_done + offs_k) % BLOCK_W
        live = entry < end
        k_pos = tl.load(indices_ptr + entry, mask=live, other=0) * BLOCK_W + k_in_block
        if perm_ptr is not None:
            entry = tl.load(perm_ptr + entry, mask=live, other=0)
        a_offset = entry.to(tl.int64) * value_strides.batch
        a_offset += k_in_block.to(tl.int64) * value_strides.col
        a = tl.load(a_ptrs + a_offset[None, :], mask=live[None, :], other=0.0)
        if k_size is not None:
            live = live & (k_pos < k_size)
        x_offset = k_pos.to(tl.int64) * x_strides.row
        x = tl.load(x_ptrs + x_offset[:, None], mask=live[:, None] & mask_n, other=0.0)
        acc = add_product(acc, a, x, end, INPUT_PRECISION)
    return acc


@triton.jit(do_not_specialize=["n_items", "n_slots"])
def _bsr_spmm_kernel(
    out_ptr,
    partial_ptr,  # fp32 [B, slots, BLOCK_H, N], None when no row is cut
    values_ptr,
    x_ptr,
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
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Multiply one item of the plan with one panel of columns."""
    tl.static_assert(BLOCK_H % TILE_M == 0)
    M_TILES: tl.constexpr = BLOCK_H // TILE_M

    # Pieces of a block row are neighbours (they read the same x), then items, longest first, then
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
    operands = (values_ptr, x_ptr, indices_ptr, perm_ptr, value_strides, x_strides)
    extent = (begin, end, rows, offs_n, k_size, n_size)
    if BLOCK_W % TILE_K == 0:
        acc = _sum_within_blocks(*operands, *extent, INPUT_PRECISION, BLOCK_W, TILE_K)
    else:
        acc = _sum_across_blocks(*operands, *extent, INPUT_PRECISION, BLOCK_W, TILE_K)

    epilogue = (out_ptr, out_strides, addends, batch, row * BLOCK_H + rows, m_size, n_size)
    if partial_ptr is None:
        finish_tile(acc, n_tile * TILE_N, epilogue, ACTIVATION)
    else:
        slot = tl.load(items_ptr + 4 * item + 3)
        if slot < 0:
            finish_tile(acc, n_tile * TILE_N, epilogue, ACTIVATION)
        else:
            first_row = (batch.to(tl.int64) * n_slots + slot) * BLOCK_H
            partial_ptrs = partial_ptr + offsets_2d(first_row + rows, offs_n, n_size, 1)
            tl.store(partial_ptrs, acc, mask=(offs_n < n_size)[None, :])


def launch_spmm(
    out: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    perm: torch.Tensor | None,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    plan: SpmmPlan,
    config: SpmmConfig,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [B, M, N], any strides
    values : [nnzb, bh, bw], any strides: a transposed view where the stored blocks are transposed
    indices : int32 [nnzb], block columns in the order of the plan's rows
    perm : int32 [nnzb] or None, which entry of `values` stands behind each index
    x : [B, K, N], any strides
    bias : [M], residual : [B, M, N], any strides; or None
    """
    block_h, block_w = values.shape[1:]
    config.check_blocks((block_h, block_w))
    batches, m, n = out.shape
    if out.numel() == 0:
        return
    partial = empty_partial(out, plan, block_h)
    addends = addends_of(bias, residual)
    with on_device_of(out):
        tiles = cdiv(n, config.tile_n) * batches * (block_h // config.tile_m)
        args = (
            out,
            partial,
            values,
            x,
            plan.items,
            indices,
            perm,
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
            block_h,
            block_w,
            config.tile_m,
            config.tile_n,
            config.tile_k,
        )
        stages = triton_stages(config.num_stages, 1)
        launch(
            *(_bsr_spmm_kernel, plan.n_items * tiles, args),
            num_warps=config.num_warps,
            num_stages=stages,
        )
        if plan.n_split_rows:
            launch_spmm_reduce(out, partial, addends, activation, plan)
