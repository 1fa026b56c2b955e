"""Products with a block-sparse operand, all four cases, as block rows times a matrix.

X @ A = (A^T @ X^T)^T: with transposed views of dense operands and the metadata of the orientation
whose rows are the rows of the result, every case is the same product.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from ..core.launch import cdiv
from ..tuning.problem_bsr import BsrProblem
from .bsr_problem import matmul_problem


class RowsProduct(NamedTuple):
    """What the kernels of `bsk::bsr_matmul` read and write.

    `parts` are groups of views [B, rows, columns] of (out, x) or (out, x, residual); together they
    cover all of `out`, the contiguous result. `blocks` [nnzb, bh, bw] is a view of the values as
    the product reads them; entry i of `indices` stands for block `perm[i]`, or i without `perm`.
    """

    out: torch.Tensor
    parts: list[list[torch.Tensor]]
    blocks: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    perm: torch.Tensor | None
    cols_b: int
    problem: BsrProblem


def rows_product(
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
) -> RowsProduct:
    """Allocate the result of `bsk::bsr_matmul` and turn its arguments into a `RowsProduct`."""
    by_columns = transposed != dense_left
    features, inner = (shape[1], shape[0]) if by_columns else (shape[0], shape[1])
    tail = (dense.shape[-2], features) if dense_left else (features, dense.shape[-1])
    out = dense.new_empty((*dense.shape[:-2], *tail), dtype=out_dtype or dense.dtype)
    problem = matmul_problem(
        values, shape, transposed, dense, dense_left, bias, residual, activation, out_dtype
    )
    tensors = [x for x in (out, dense, residual) if x is not None]
    if dense_left and (rows := merged_views(tensors, 1)) is not None:
        # rows of all batch entries are rows of one matrix
        parts = [[x.mT.unsqueeze(0) for x in rows]]
        problem = replace(problem, n=rows[0].shape[0], batch=1)
    else:
        parts = matrices([x.mT for x in tensors] if dense_left else tensors)
    blocks = values.mT if by_columns else values
    indptr, indices, perm = (*pattern[:2], None)
    if by_columns:
        indptr, indices, perm = pattern[2:5]
    cols_b = cdiv(inner, blocks.shape[2])
    return RowsProduct(out, parts, blocks, indptr, indices, perm, cols_b, problem)


def merged_views(tensors: list[torch.Tensor], tail: int) -> list[torch.Tensor] | None:
    """Views with all but the last `tail` dimensions merged, or None where one would be a copy."""
    lead = tensors[0].dim() - tail
    try:
        return [x.view(x.shape[:lead].numel(), *x.shape[lead:]) for x in tensors]
    except RuntimeError:
        return None


def matrices(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors [..., rows, columns] as views [B, rows, columns].

    One group of views where the leading dimensions of each can be merged; else one group for each
    index of the first dimension.
    """
    if (views := merged_views(tensors, 2)) is not None:
        return [views]
    groups = []
    for i in range(tensors[0].shape[0]):
        groups += matrices([x[i] for x in tensors])
    return groups
