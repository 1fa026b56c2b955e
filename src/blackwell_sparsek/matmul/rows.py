"""All four cases of a product with a block-sparse operand as block rows times a matrix.

X @ A = (A^T @ X^T)^T: with transposed views of dense operands and the metadata of the orientation
whose rows are the rows of the result, every case is the same product.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ..calls.matmul import BsrProblem, MatmulCall, PatternTensors, SddmmCall
from ..launch.launcher import cdiv
from .strides import Strides as Strides
from .strides import strides_of as strides_of


class Views(NamedTuple):
    """Views [B, rows, columns] of the result, the dense operand and the residual."""

    out: torch.Tensor
    x: torch.Tensor
    residual: torch.Tensor | None = None

    def entries(self) -> Iterator["Views"]:
        """The views of each batch entry, [rows, columns]."""
        for i in range(self.out.shape[0]):
            residual = None if self.residual is None else self.residual[i]
            yield Views(self.out[i], self.x[i], residual)


class BlockRows(NamedTuple):
    """A block-sparse matrix with the rows of the result as its rows.

    `blocks` [nnzb, bh, bw] is a view of the values as the product reads them; entry i of `indices`
    (block columns, row by row) refers to block `perm[i]`, or i without `perm`.
    """

    blocks: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    perm: torch.Tensor | None
    cols_b: int


class RowsProduct(NamedTuple):
    """The operands and results of the kernels of `bsk::bsr_matmul`.

    The `parts` together cover `out`, the contiguous result. `problem` describes the call; if the
    rows of all batch entries are merged into one matrix, it describes the merged product.
    `x_scales` has views [B, groups, columns] for each part where the operands are in fp8.
    """

    out: torch.Tensor
    parts: list[Views]
    rows: BlockRows
    problem: BsrProblem
    x_scales: list[torch.Tensor]


def rows_product(call: MatmulCall, x_descale: torch.Tensor | None = None) -> RowsProduct:
    """Allocate the result of a call and turn its operands into block rows and views.

    `x_descale` [..., T, groups] are the scales of a dense operand on the left, if it has any.
    """
    out, problem = call.empty_out(), call.problem
    tensors = [x for x in (out, call.dense, call.residual, x_descale) if x is not None]
    if call.dense_left and (lines := merged_views(tensors, 1)) is not None:
        # rows of all batch entries are rows of one matrix
        parts = [[x.mT.unsqueeze(0) for x in lines]]
        problem = problem.merged
    else:
        parts = matrices([x.mT for x in tensors] if call.dense_left else tensors)
    x_scales = [] if x_descale is None else [views.pop() for views in parts]
    views = [Views(*tensors) for tensors in parts]
    return RowsProduct(out, views, block_rows(call), problem, x_scales)


def block_rows(call: MatmulCall) -> BlockRows:
    """The sparse operand of a call, in the orientation of the result."""
    pattern = call.pattern
    blocks = call.values.mT if call.by_columns else call.values
    cols_b = cdiv(call.inner, blocks.shape[2])
    if call.by_columns:
        assert isinstance(pattern, PatternTensors)  # the operator has read it
        return BlockRows(blocks, pattern.t_indptr, pattern.t_indices, pattern.t_perm, cols_b)
    return BlockRows(blocks, pattern.indptr, pattern.indices, None, cols_b)


class SampledViews(NamedTuple):
    """Views [B, M, K] and [B, K, N] of the operands of a sampled product, or of a part of them."""

    a: torch.Tensor
    b: torch.Tensor


class SampledProduct(NamedTuple):
    """The operands of the kernels of `bsk::bsr_sddmm`: the result is the sum over `parts`.

    `problem` describes one part.
    """

    parts: list[SampledViews]
    problem: BsrProblem


def sampled_product(call: SddmmCall) -> SampledProduct:
    """Turn the operands of a sampled product into views."""
    a, b = call.a, call.b
    if (lines := merged_views([a.mT, b], 1)) is not None:
        # a sum over the batch of sums over k is one longer sum
        lines_a, lines_b = lines
        views = SampledViews(lines_a.mT.unsqueeze(0), lines_b.unsqueeze(0))
        return SampledProduct([views], call.problem.merged)
    parts = [SampledViews(*views) for views in matrices([a, b])]
    return SampledProduct(parts, replace(call.problem, batch=parts[0].a.shape[0]))


class FeatureViews(NamedTuple):
    """Views [features, positions] of the gradient of a result, and of it before its activation."""

    grad: torch.Tensor
    pre: torch.Tensor | None


def feature_views(
    dense_left: bool, grad: torch.Tensor, pre: torch.Tensor | None
) -> FeatureViews | None:
    """Views of results [..., positions, features], or [features, positions]; None if none."""
    tensors = [grad] if pre is None else [grad, pre]
    lines = merged_views(tensors, 1) if dense_left else tensors
    if lines is None or any(x.dim() != 2 or x.numel() == 0 for x in lines):
        return None
    views = [x.mT if dense_left else x for x in lines]
    return FeatureViews(views[0], views[1] if pre is not None else None)


def merged_views(tensors: list[torch.Tensor], tail: int) -> list[torch.Tensor] | None:
    """Views with all but the last `tail` dimensions merged, or None if one would be a copy."""
    lead = tensors[0].dim() - tail
    try:
        return [x.view(x.shape[:lead].numel(), *x.shape[lead:]) for x in tensors]
    except RuntimeError:
        return None


def matrices(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors [..., rows, columns] as views [B, rows, columns].

    One group of views if the leading dimensions of each can be merged; else one group for each
    index of the first dimension.
    """
    if (views := merged_views(tensors, 2)) is not None:
        return [views]
    groups = []
    for i in range(tensors[0].shape[0]):
        groups += matrices([x[i] for x in tensors])
    return groups
