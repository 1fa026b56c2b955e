"""The Hopper kernels as implementation `sm90` of `bsk::bsr_matmul`."""

from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...calls.matmul import BsrProblem
from ...core.compat import warps_may_part
from ...dispatch.machine import why_no_kernels
from ...launch.launcher import scratch
from ...launch.workspace import made_apart
from ..estimate import takes_warp_rows, warp_rows_config
from ..problem import RowsProduct, rows_product
from ..triton.tuning import narrow_is_even, spmm_sizes
from .config import WARP_ROWS
from .tuning import (
    BEARABLE_CHUNKS,
    narrow_sm90_config,
    spmm_sm90_chunk,
    spmm_sm90_config,
    spmm_sm90_paired,
    spmm_sm90_unsupported,
    strips_config,
)

# Packed patterns by the row pointers they were made from, which live as long as their pattern.
_PACKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def why_not(problem: BsrProblem) -> str | None:
    """Why the kernel cannot run this problem, or None when it can."""
    return why_no_kernels(problem.arch) or spmm_sm90_unsupported(problem)


def bsr_matmul(
    values: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    transposed: bool,
    dense: torch.Tensor,
    dense_left: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """op(A) @ dense, or dense @ op(A) where `dense_left`, with its epilogue."""
    from ..plan import SpmmPlan, spmm_plan
    from .row_pairs import PairPlan, row_pairs
    from .spmm_launch import launch_spmm_sm90

    product = rows_product(
        *(values, pattern, shape, transposed, dense, dense_left),
        *(bias, residual, activation, out_dtype),
    )
    if _narrow_product(product, values, bias):
        return product.out
    for part in product.parts:
        operands, x_transposed = _readable(part[1], product.blocks.shape[2])
        if warps_may_part() and takes_warp_rows(product.problem, x_transposed):
            _multiply_by_warps(product, values, part, operands, bias)
            continue
        config = spmm_sm90_config(product.problem, x_transposed)
        blocks, indptr, indices, perm = _tall_blocks(product, values, config.BLOCK_H)
        sizes = spmm_sizes(product.problem)._replace(
            block_h=config.BLOCK_H, nnz_blocks=blocks.shape[0]
        )
        chunk = spmm_sm90_chunk(product.problem.arch, sizes, config)
        plan: SpmmPlan | PairPlan
        plan = spmm_plan(indptr, blocks.shape[0], product.cols_b, chunk, BEARABLE_CHUNKS)
        paired = spmm_sm90_paired(product.problem, config)
        # rows that were cut are too unequal to go in pairs
        if paired is not None and plan.n_split_rows == 0 and values.shape[0] > 0:
            pairs = row_pairs(indptr, indices, perm, product.cols_b)
            if pairs is not None:
                plan, config, indices, perm = pairs, paired, pairs.cols, pairs.entries
        for i in range(part[0].shape[0]):
            part_residual = part[2][i] if residual is not None else None
            launch_spmm_sm90(
                *(part[0][i], blocks, indices, perm, operands[i]),
                *(bias, part_residual, plan, config),
            )
    return product.out


def _multiply_by_warps(
    product: RowsProduct,
    values: torch.Tensor,
    part: list[torch.Tensor],
    operands: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Fill the results of one part with warps that have a block row each."""
    from ..plan import spmm_plan
    from .layouts import fragment_columns, in_fragments
    from .warps import launch_spmm_warps

    config = warp_rows_config(product.problem)
    # no row is longer than this, so none is cut
    plan = spmm_plan(product.indptr, values.shape[0], product.cols_b, product.cols_b)
    block_w = product.blocks.shape[2]
    fragments = in_fragments(values, block_w, product.perm, config.AHEAD)
    columns = fragment_columns(product.indptr, product.indices, block_w // WARP_ROWS)
    for i in range(part[0].shape[0]):
        residual = part[2][i] if len(part) > 2 else None
        operands_i = (part[0][i], fragments, columns, operands[i])
        launch_spmm_warps(*operands_i, bias, residual, plan, block_w // WARP_ROWS, config)


def _narrow_product(product: RowsProduct, values: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Make a product of few columns; False where it is not one, or its rows are too uneven."""
    if product.out.numel() == 0:
        return False
    launch = _strips_launch(product) or _tiles_launch(product)
    if launch is None:
        return False
    for views in product.parts:
        for out, x, *residual in zip(*views, strict=True):
            launch(out, values, x, bias, residual[0] if residual else None)
    return True


def _strips_launch(product: RowsProduct) -> Callable[..., None] | None:
    """How strips of narrow blocks are multiplied, where that is for them."""
    from .row_schedule import row_table
    from .strips import launch_spmm_strips

    config = strips_config(product.problem)
    if config is None:
        return None
    table = row_table(product.indptr, product.indices, product.perm)
    if table is None or not narrow_is_even(product.problem, config, table.width):
        return None
    return lambda out, values, x, bias, residual: launch_spmm_strips(
        out, values, table, x, bias, residual, config
    )


def _tiles_launch(product: RowsProduct) -> Callable[..., None] | None:
    """How tiles that TMA brings are multiplied, where that is for them."""
    from .narrow import launch_spmm_narrow_sm90
    from .row_schedule import row_schedule

    config = narrow_sm90_config(product.problem)
    if config is None:
        return None
    # one program fills the shared memory of an SM
    programs = product.problem.arch.num_sms
    columns = product.problem.n
    schedule = row_schedule(product.indptr, product.indices, config, columns, programs)
    if schedule is None or not narrow_is_even(product.problem, config, schedule.width):
        return None
    return lambda out, values, x, bias, residual: launch_spmm_narrow_sm90(
        out, values, schedule, x, bias, residual, config
    )


def _readable(x: torch.Tensor, block_w: int) -> tuple[torch.Tensor, bool]:
    """The dense operand [B, K, N] as the kernel reads it, and whether its columns are contiguous.

    Narrow blocks would make of contiguous columns many short copies; those are turned around first.
    """
    from .layouts import launch_transpose

    if x.stride(-1) == 1:
        return x, False
    if block_w % 32 == 0 or x.shape[2] % 8:
        return x, True
    turned = scratch(x.shape, x.dtype, x.device)
    for i in range(x.shape[0]):
        launch_transpose(turned[i], x[i].mT)
    return turned, False


def _tall_blocks(
    product: RowsProduct, values: torch.Tensor, block_h: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Blocks of `block_h` rows with their pattern: as stored, or packed from lower ones."""
    from ..triton.pack import launch_pack, pack_pattern

    height, width = product.blocks.shape[1:]
    if values.shape[0] == 0:
        # TMA cannot describe nothing; nothing of this is read
        return (
            values.new_empty((1, *values.shape[1:])),
            product.indptr,
            product.indices,
            product.perm,
        )
    if height >= block_h:
        return values, product.indptr, product.indices, product.perm
    packed = _PACKED.get(product.indptr)
    if packed is None:
        pattern = (product.indptr, product.indices, product.cols_b, block_h // height)
        if torch.cuda.is_current_stream_capturing():
            # part of the graph, so not kept
            packed = pack_pattern(*pattern)
        else:
            packed = made_apart(lambda: pack_pattern(*pattern).trimmed(), values.device)
            _PACKED[product.indptr] = packed
    shape = (packed.indices.shape[0], block_h, width)
    blocks = scratch(shape, values.dtype, values.device)
    launch_pack(blocks, values, packed.source, product.perm)
    return blocks, packed.indptr, packed.indices, None
