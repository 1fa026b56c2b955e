"""The portable Triton kernels as implementation `triton` of the block-sparse operators.

Triton and the kernels are imported at the first call.
"""

from dataclasses import replace

import torch

from ...calls.matmul import BsrProblem
from ...dispatch.machine import fp32_precision, why_not_portable
from ..problem import (
    RowsProduct,
    matrices,
    merged_views,
    pairs_problem,
    rows_product,
    sddmm_problem,
)
from .tuning import narrow_config, narrow_is_even, pair_config, sddmm_config, spmm_config

# Tensor cores take sides of 16; larger blocks than 256 gain nothing over several smaller ones.
_SIDE_STEP, _LARGEST_SIDE = 16, 256


def why_not(problem: BsrProblem) -> str | None:
    """Why the kernels cannot run this problem, or None when they can."""
    if (reason := why_not_portable(problem.arch, problem.dtype, problem.out_dtype)) is not None:
        return reason
    shapes = [problem.block_shape]
    shapes += [problem.other_block_shape] if problem.kind == "pairs" else []
    for block_shape in shapes:
        if any(side % _SIDE_STEP or side > _LARGEST_SIDE for side in block_shape):
            return (
                f"needs block sides that are multiples of {_SIDE_STEP} up to {_LARGEST_SIDE}, "
                f"got {block_shape}"
            )
    return None


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
    from ..plan import spmm_plan
    from .spmm import launch_spmm

    product = rows_product(
        *(values, pattern, shape, transposed, dense, dense_left),
        *(bias, residual, activation, out_dtype),
    )
    if _narrow_product(product, bias, activation):
        return product.out
    config = spmm_config(product.problem, fp32_precision(values.dtype))
    plan = spmm_plan(product.indptr, values.shape[0], product.cols_b, config.chunk)
    for part in product.parts:
        part_residual = part[2] if residual is not None else None
        launch_spmm(
            *(part[0], product.blocks, product.indices, product.perm, part[1]),
            *(bias, part_residual, activation, plan, config),
        )
    return product.out


def _narrow_product(
    product: RowsProduct, bias: torch.Tensor | None, activation: str | None
) -> bool:
    """Make a product of few columns; False where it is not one, or its rows are too uneven."""
    from ..sm90.row_schedule import row_table
    from .narrow import launch_spmm_narrow

    config = narrow_config(product.problem)
    if config is None or product.out.numel() == 0:
        return False
    table = row_table(product.indptr, product.indices, product.perm)
    if table is None or not narrow_is_even(product.problem, config, table.width):
        return False
    for out, x, *residual in product.parts:
        addends = (bias, residual[0] if residual else None, activation)
        launch_spmm_narrow(out, product.blocks, table, x, *addends, config)
    return True


def bsr_sddmm(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    block_shape: list[int],
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Sum over the batch of a @ b at the blocks of the pattern."""
    from .sddmm import launch_sddmm

    _, indices, _, t_indices, t_perm = pattern
    out = a.new_empty((indices.shape[0], *block_shape), dtype=out_dtype or a.dtype)
    if a.numel() == 0 or b.numel() == 0:
        return out.zero_()
    problem = sddmm_problem(a, b, pattern, shape, block_shape, out_dtype)
    if (rows := merged_views([a.mT, b], 1)) is not None:
        # a sum over the batch of sums over k is one longer sum
        parts = [[rows[0].mT.unsqueeze(0), rows[1].unsqueeze(0)]]
        problem = replace(problem, n=rows[0].shape[0], batch=1)
    else:
        parts = matrices([a, b])
        problem = replace(problem, batch=parts[0][0].shape[0])
    config = sddmm_config(problem, fp32_precision(a.dtype))
    if len(parts) == 1:
        launch_sddmm(out, parts[0][0], parts[0][1], indices, t_indices, t_perm, config)
        return out
    sums = out.new_empty((len(parts), *out.shape), dtype=torch.float32)
    for partial_sum, (part_a, part_b) in zip(sums, parts, strict=True):
        launch_sddmm(partial_sum, part_a, part_b, indices, t_indices, t_perm, config)
    return out.copy_(sums.sum(0))


def bsr_pair_products(
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: list[torch.Tensor],
    first_transposed: bool,
    second_transposed: bool,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """out[o] = sum of op(first[f]) @ op(second[s]) over the triples (f, s, o) of `pairs`."""
    from .pair_products import launch_pair_products

    problem = pairs_problem(first, second, pairs, first_transposed, second_transposed, out_dtype)
    first_of, second_of, _, order, indptr = pairs[:5]
    first = first.mT if first_transposed else first
    second = second.mT if second_transposed else second
    blocks = indptr.shape[0] - 1
    out = first.new_empty((blocks, first.shape[1], second.shape[2]), dtype=out_dtype or first.dtype)
    config = pair_config(problem, fp32_precision(first.dtype))
    launch_pair_products(out, first, second, first_of, second_of, order, indptr, config)
    return out
