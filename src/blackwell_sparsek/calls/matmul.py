"""Block-sparse products: the arguments of a call, and the facts that the choice of a kernel needs.

Each torch operator of a product has a call here with the arguments of its schema, in that order,
without `impl`. A call is made once, its `problem` is computed once, and both are passed on whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..core.arch import Arch, arch_of
from ..sparse.product import PairLists


@dataclass(frozen=True)
class BsrProblem:
    """One block-sparse product, as predicates and `explain` see it.

    `kind` is matmul, sddmm or pairs. `shape` is that of op(A), or of the pattern for sddmm, `n` the
    extent of the dense operand along the result (of the contraction for sddmm), `batch` the product
    of its leading dimensions. `row_major` tells whether the dense operand (both, for sddmm) has a
    contiguous last dimension, `tma` whether addresses and strides of all matrices suit TMA.
    `other_block_shape` is that of the second operand of pairs; both block shapes are those after
    transposition.
    """

    kind: str
    arch: Arch
    dtype: torch.dtype
    out_dtype: torch.dtype
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    nnz_blocks: int
    n: int
    batch: int = 1
    dense_left: bool = False
    transposed: bool = False
    row_major: bool = True
    tma: bool = False
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    other_block_shape: tuple[int, int] = (0, 0)

    @property
    def ragged(self) -> bool:
        """Whether edge blocks reach beyond the shape."""
        return any(size % b != 0 for size, b in zip(self.shape, self.block_shape, strict=True))

    @property
    def merged(self) -> "BsrProblem":
        """This problem with the rows of all batch entries as rows of one matrix."""
        return replace(self, n=self.n * self.batch, batch=1)

    def __str__(self) -> str:
        operand = "X @ A" if self.dense_left else "A @ X"
        what = {"matmul": operand, "sddmm": "sddmm", "pairs": "A @ B"}[self.kind]
        extras = [name for name in ("bias", "residual", "transposed") if getattr(self, name)]
        extras += [self.activation] if self.activation else []
        return (
            f"{what} on {self.arch}, {self.dtype} -> {self.out_dtype}, shape {self.shape}, "
            f"blocks {self.block_shape}, {self.nnz_blocks} stored, n {self.n}, batch {self.batch}"
            + (f", {' '.join(extras)}" if extras else "")
        )


class PatternTensors(NamedTuple):
    """A pattern as the operators take it: its metadata and the metadata of its transpose.

    Entry i of the transpose is stored block `t_perm[i]`.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    t_indptr: torch.Tensor
    t_indices: torch.Tensor
    t_perm: torch.Tensor


class UnreadTensors(NamedTuple):
    """A pattern as tensors that may be written to: operators read them whenever they run."""

    indptr: torch.Tensor
    indices: torch.Tensor


Pattern = PatternTensors | UnreadTensors


def pattern_tensors(tensors: Sequence[torch.Tensor]) -> Pattern:
    """The argument `pattern` of an operator, by its length."""
    kind = UnreadTensors if len(tensors) == len(UnreadTensors._fields) else PatternTensors
    return kind(*tensors)


@dataclass(eq=False)
class MatmulCall:
    """activation(op(A) @ dense + bias) + residual, or dense @ op(A) where `dense_left`.

    `values` and `shape` are those of A as stored; op transposes where `transposed`. `bias` has one
    entry per output feature of op(A); `residual` has the shape of the result. `out_dtype` is that
    of `dense` by default. Results are contiguous.
    """

    values: torch.Tensor
    pattern: Pattern
    shape: Sequence[int]
    transposed: bool
    dense: torch.Tensor
    dense_left: bool
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    activation: str | None = None
    out_dtype: torch.dtype | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `bsk::bsr_matmul` before `impl`."""
        return (
            *(self.values, list(self.pattern), self.shape, self.transposed),
            *(self.dense, self.dense_left),
            *(self.bias, self.residual, self.activation, self.out_dtype),
        )

    @property
    def by_columns(self) -> bool:
        """Whether columns of A as stored are the features of the result.

        X @ A = (A^T @ X^T)^T: all four products are block rows of A, or of its transpose, times
        a matrix.
        """
        return self.transposed != self.dense_left

    @property
    def features(self) -> int:
        """How many output features op(A) has."""
        return self.shape[1] if self.by_columns else self.shape[0]

    @property
    def inner(self) -> int:
        """The extent that the product sums over."""
        return self.shape[0] if self.by_columns else self.shape[1]

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return self.out_dtype or self.dense.dtype

    def empty_out(self) -> torch.Tensor:
        """Memory for the result."""
        *batch, rows, columns = self.dense.shape
        tail = (rows, self.features) if self.dense_left else (self.features, columns)
        return self.dense.new_empty((*batch, *tail), dtype=self.result_dtype)

    @cached_property
    def problem(self) -> BsrProblem:
        """The properties that the choice of an implementation depends on."""
        shape, block_shape = (self.shape[0], self.shape[1]), _block_shape(self.values)
        dense = self.dense
        return BsrProblem(
            kind="matmul",
            arch=arch_of(self.values.device),
            dtype=self.values.dtype,
            out_dtype=self.result_dtype,
            shape=shape[::-1] if self.transposed else shape,
            block_shape=block_shape[::-1] if self.transposed else block_shape,
            nnz_blocks=self.values.shape[0],
            n=dense.shape[-2 if self.dense_left else -1],
            batch=dense.shape[:-2].numel(),
            dense_left=self.dense_left,
            transposed=self.transposed,
            row_major=dense.stride(-1) == 1,
            tma=self._suits_tma(),
            bias=self.bias is not None,
            residual=self.residual is not None,
            activation=self.activation,
        )

    def _suits_tma(self) -> bool:
        """Whether values, dense operand and result can be copied by TMA, in steps of 16 bytes."""
        values, dense, bias = self.values, self.dense, self.bias
        columns = self.features if self.dense_left else dense.shape[-1]
        strides = [s for size, s in zip(dense.shape, dense.stride(), strict=True) if size > 1]
        outer = [s * dense.element_size() for s in strides if s != 1]
        return (
            values.is_contiguous()
            and values.data_ptr() % 16 == 0
            and dense.data_ptr() % 16 == 0
            and all(stride > 0 and stride % 16 == 0 for stride in outer)
            and columns * self.result_dtype.itemsize % 16 == 0
            and (bias is None or bias.is_contiguous())
        )


class ResizedProduct(NamedTuple):
    """A product x @ op(A) of contiguous tensors, as plain numbers: all its launch depends on."""

    at_values: int
    """An address, likewise below."""
    at_dense: int
    at_scales: tuple[int, ...]
    """In fp8: of the scales of blocks, and of those of x."""
    at_bias: int
    """0 without a bias."""
    at_residual: int
    lead: tuple[int, ...]
    """All dimensions of x but the last."""


@dataclass(eq=False)
class SddmmCall:
    """The blocks [nnzb, *block_shape] of a @ b at a pattern of `shape`, summed over the batch."""

    a: torch.Tensor
    b: torch.Tensor
    pattern: Pattern
    shape: Sequence[int]
    block_shape: Sequence[int]
    out_dtype: torch.dtype | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `bsk::bsr_sddmm` before `impl`."""
        return self.a, self.b, list(self.pattern), self.shape, self.block_shape, self.out_dtype

    def empty_out(self) -> torch.Tensor:
        """Memory for the blocks."""
        shape = (self.pattern.indices.shape[0], *self.block_shape)
        return self.a.new_empty(shape, dtype=self.out_dtype or self.a.dtype)

    @cached_property
    def problem(self) -> BsrProblem:
        """The properties that the choice of an implementation depends on."""
        a, b = self.a, self.b
        return BsrProblem(
            kind="sddmm",
            arch=arch_of(a.device),
            dtype=a.dtype,
            out_dtype=self.out_dtype or a.dtype,
            shape=(self.shape[0], self.shape[1]),
            block_shape=(self.block_shape[0], self.block_shape[1]),
            nnz_blocks=self.pattern.indices.shape[0],
            n=a.shape[-1],
            batch=a.shape[:-2].numel(),
            row_major=a.stride(-1) == 1 and b.stride(-1) == 1,
            tma=all(lies_transposed(x) is not None for x in (a, b)),
        )


@dataclass(eq=False)
class PairProductsCall:
    """out[o] = sum of op(first[f]) @ op(second[s]) over the triples (f, s, o) of `pairs`."""

    first: torch.Tensor
    second: torch.Tensor
    pairs: PairLists
    first_transposed: bool
    second_transposed: bool
    out_dtype: torch.dtype | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `bsk::bsr_pair_products` before `impl`."""
        return (
            *(self.first, self.second, list(self.pairs)),
            *(self.first_transposed, self.second_transposed, self.out_dtype),
        )

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of both operands as they are multiplied: transposed views where asked for."""
        first = self.first.mT if self.first_transposed else self.first
        return first, self.second.mT if self.second_transposed else self.second

    def empty_out(self) -> torch.Tensor:
        """Memory for the blocks of the result."""
        first, second = self.seen()
        shape = (self.pairs.ptr_out.shape[0] - 1, first.shape[1], second.shape[2])
        return first.new_empty(shape, dtype=self.out_dtype or first.dtype)

    @cached_property
    def problem(self) -> BsrProblem:
        """The properties that the choice of an implementation depends on."""
        first, second = self.seen()
        return BsrProblem(
            kind="pairs",
            arch=arch_of(first.device),
            dtype=first.dtype,
            out_dtype=self.out_dtype or first.dtype,
            shape=_block_shape(first),
            block_shape=_block_shape(first),
            nnz_blocks=first.shape[0],
            n=second.shape[0],
            batch=self.pairs.first.shape[0],
            other_block_shape=_block_shape(second),
        )


def lies_transposed(x: torch.Tensor) -> bool | None:
    """How TMA reads matrices [..., rows, columns]: with contiguous rows, False, or columns, True.

    None if it cannot: address and strides must be multiples of 16 bytes.
    """
    if x.data_ptr() % 16 or x.numel() == 0:
        return None
    *batch, rows, columns = zip(x.shape, x.stride(), strict=True)
    for transposed, line, inner in ((False, rows, columns), (True, columns, rows)):
        size, stride = inner
        outer = [stride * x.element_size() for size, stride in (*batch, line) if size > 1]
        if (size == 1 or stride == 1) and all(step > 0 and step % 16 == 0 for step in outer):
            return transposed
    return None


def _block_shape(blocks: torch.Tensor) -> tuple[int, int]:
    _, height, width = blocks.shape
    return height, width
