"""Implementation `sm90` of `bsk::bsr_matmul_fp8`: tiles of many tokens, or of few."""

from typing import Any, NamedTuple

import torch

from ...calls.fp8 import Fp8MatmulCall
from ...calls.matmul import BsrProblem
from ...core.arch import arch_of
from ...core.compat import hopper_options
from ...launch.descriptors import tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import self_resetting_counters
from ..plan import SpmmPlan, spmm_plan
from ..rows import BlockRows, RowsProduct, Views, rows_product
from ..triton.finish import addends_of, empty_partial, launch_spmm_reduce
from ..triton.tuning import narrow_is_even, spmm_chunk, spmm_sizes
from .fp8_config import SpmmFp8Config
from .narrow import launch_spmm_narrow_sm90
from .narrow_records import NarrowScales
from .row_schedule import row_schedule
from .spmm_fp8 import _spmm_fp8_sm90_kernel
from .spmm_launch import MAX_REGISTERS, RASTER_BYTES, spmm_grid
from .tuning import BEARABLE_CHUNKS, narrow_fp8_config, spmm_fp8_sm90_config


def matmul(call: Fp8MatmulCall) -> torch.Tensor:
    """dense @ op(A) with its epilogue, for operands in e4m3 with scales."""
    given = call.given
    product = rows_product(given, call.x_descale)
    if product.out.numel() == 0 or _by_few_tokens(product, call):
        return product.out
    rows = product.rows
    plan, config = fp8_work(product.problem, rows.cols_b, rows.indptr)
    for views, x_scales in zip(product.parts, product.x_scales, strict=True):
        for entry, of_entry in zip(views.entries(), x_scales, strict=True):
            launch_spmm_fp8_sm90(entry, rows, call.descale, of_entry, given.bias, plan, config)
    return product.out


class Fp8Work(NamedTuple):
    """How a product is divided into tiles."""

    plan: SpmmPlan
    config: SpmmFp8Config


def fp8_work(problem: BsrProblem, cols_b: int, indptr: torch.Tensor) -> Fp8Work:
    """The work list of rows with these pointers, and tiles."""
    config, sizes = spmm_fp8_sm90_config(problem), spmm_sizes(problem)
    chunk = spmm_chunk(problem.arch, sizes, config.tile_m, config.tile_n)
    plan = spmm_plan(indptr, sizes.nnz_blocks, cols_b, chunk, BEARABLE_CHUNKS)
    return Fp8Work(plan, config)


def _by_few_tokens(product: RowsProduct, call: Fp8MatmulCall) -> bool:
    """Compute the product by the kernel for few tokens; False if that does not apply."""
    rows, problem, given = product.rows, product.problem, call.given
    config = narrow_fp8_config(problem)
    if config is None:
        return False
    # one program fills the shared memory of an SM
    schedule = row_schedule(rows.indptr, rows.indices, config, problem.n, problem.arch.num_sms)
    if schedule is None or not narrow_is_even(problem, config, schedule.width):
        return False
    for part, x_scales in zip(product.parts, product.x_scales, strict=True):
        for views, of_entry in zip(part.entries(), x_scales, strict=True):
            group_stride, col_stride = of_entry.stride()
            strides = (col_stride, group_stride)
            scales = NarrowScales(call.descale, of_entry, *strides, of_entry.shape[0])
            operands = (views.out, given.values, schedule, views.x)
            extras = (given.bias, views.residual)
            launch_spmm_narrow_sm90(*operands, *extras, config, scales)
    return True


def launch_spmm_fp8_sm90(
    views: Views,
    rows: BlockRows,
    descale: torch.Tensor,
    x_scales: torch.Tensor,
    bias: torch.Tensor | None,
    plan: SpmmPlan,
    config: SpmmFp8Config,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    views : out [M, N] and x [K, N], columns contiguous; residual [M, N], any strides, or None
    rows : A [M, K], its blocks contiguous and in the order of the rows, at least one
    descale : fp32 [nnzb]
    x_scales : fp32 [groups, N], any strides
    bias : [M] contiguous, or None
    plan : of the rows
    """
    out, x, residual = views
    m, n = out.shape
    # the kernel has no batch dimension; the second pass does
    out_b = out.unsqueeze(0)
    partial = empty_partial(out_b, plan, config.BLOCK_H)
    grid = spmm_grid(plan, config, n, arch_of(out.device).num_sms)
    raster = max(1, RASTER_BYTES // (x.shape[0] * config.tile_n))
    group_stride, token_stride = x_scales.stride()
    # a dimension of size 1 may carry any stride, which TMA would refuse
    x_strides = (x.stride(1) if n > 1 else cdiv(x.shape[0], 16) * 16, 1)
    out_strides = (out.stride(1) if n > 1 else cdiv(m, 16) * 16, 1)
    with on_device_of(out):
        args = (
            tensor_descriptor(rows.blocks.view(-1, config.BLOCK_W), config.a_block()),
            tensor_descriptor(x.mT, config.x_block(), x_strides),
            tensor_descriptor(out.mT, config.out_block(), out_strides),
            partial,
            bias,
            residual,
            None if residual is None else residual.stride(),
            descale,
            x_scales,
            token_stride,
            group_stride,
            x_scales.shape[0],
            plan.items,
            rows.indices,
            self_resetting_counters(1, out.device),
            m,
            n,
            grid.row_tiles,
            grid.panels,
            raster,
            config,
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": MAX_REGISTERS, **hopper_options()}
        launch(_spmm_fp8_sm90_kernel, grid.programs, args, **options)
        if partial is not None:
            residual_b = None if residual is None else residual.unsqueeze(0)
            addends = addends_of(bias, residual_b)
            launch_spmm_reduce(out_b, partial, addends, config.ACTIVATION, plan)
