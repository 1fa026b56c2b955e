"""The arguments of the block-sparse operators as problems that an implementation is chosen for."""

from dataclasses import replace
from typing import NamedTuple

import torch

from ..calls.matmul import BsrProblem
from ..core.arch import arch_of
from ..launch.launcher import cdiv


def matmul_problem(
    values: torch.Tensor,
    shape: list[int],
    transposed: bool,
    dense: torch.Tensor,
    dense_left: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> BsrProblem:
    """The problem of a call of `bsk::bsr_matmul`."""
    block_shape = (values.shape[1], values.shape[2])
    return BsrProblem(
        kind="matmul",
        arch=arch_of(values.device),
        dtype=values.dtype,
        out_dtype=out_dtype or dense.dtype,
        shape=(shape[1], shape[0]) if transposed else (shape[0], shape[1]),
        block_shape=block_shape[::-1] if transposed else block_shape,
        nnz_blocks=values.shape[0],
        n=dense.shape[-2 if dense_left else -1],
        batch=dense.shape[:-2].numel(),
        dense_left=dense_left,
        transposed=transposed,
        row_major=_row_major(dense),
        tma=_tma(values, shape, transposed, dense, dense_left, bias, out_dtype or dense.dtype),
        bias=bias is not None,
        residual=residual is not None,
        activation=activation,
    )


def sddmm_problem(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    block_shape: list[int],
    out_dtype: torch.dtype | None,
) -> BsrProblem:
    """The problem of a call of `bsk::bsr_sddmm`."""
    return BsrProblem(
        kind="sddmm",
        arch=arch_of(a.device),
        dtype=a.dtype,
        out_dtype=out_dtype or a.dtype,
        shape=(shape[0], shape[1]),
        block_shape=(block_shape[0], block_shape[1]),
        nnz_blocks=pattern[1].shape[0],
        n=a.shape[-1],
        batch=a.shape[:-2].numel(),
        row_major=_row_major(a, b),
    )


def pairs_problem(
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: list[torch.Tensor],
    first_transposed: bool,
    second_transposed: bool,
    out_dtype: torch.dtype | None,
) -> BsrProblem:
    """The problem of a call of `bsk::bsr_pair_products`."""
    block_shape = _seen(first, first_transposed)
    other_block_shape = _seen(second, second_transposed)
    return BsrProblem(
        kind="pairs",
        arch=arch_of(first.device),
        dtype=first.dtype,
        out_dtype=out_dtype or first.dtype,
        shape=block_shape,
        block_shape=block_shape,
        nnz_blocks=first.shape[0],
        n=second.shape[0],
        batch=pairs[0].shape[0],
        other_block_shape=other_block_shape,
    )


def _seen(blocks: torch.Tensor, transposed: bool) -> tuple[int, int]:
    """Block shape of an operand as seen."""
    _, height, width = blocks.shape
    return (width, height) if transposed else (height, width)


def _row_major(*tensors: torch.Tensor) -> bool:
    return all(x.stride(-1) == 1 for x in tensors)


def _tma(
    values: torch.Tensor,
    shape: list[int],
    transposed: bool,
    dense: torch.Tensor,
    dense_left: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> bool:
    """Whether values, dense operand and result can be copied by TMA: all in steps of 16 bytes."""
    columns = shape[1 if transposed == (not dense_left) else 0] if dense_left else dense.shape[-1]
    strides = [s for size, s in zip(dense.shape, dense.stride(), strict=True) if size > 1]
    outer = [s * dense.element_size() for s in strides if s != 1]
    return (
        values.is_contiguous()
        and values.data_ptr() % 16 == 0
        and dense.data_ptr() % 16 == 0
        and all(stride > 0 and stride % 16 == 0 for stride in outer)
        and columns * out_dtype.itemsize % 16 == 0
        and (bias is None or bias.is_contiguous())
    )


# Products with a block-sparse operand, all four cases, as block rows times a matrix.
#
# X @ A = (A^T @ X^T)^T: with transposed views of dense operands and the metadata of the orientation
# whose rows are the rows of the result, every case is the same product.


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
