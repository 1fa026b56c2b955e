"""`BSRMatrix`: a matrix that stores only some of its rectangular blocks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import check_same_device, check_shape, message
from ..core.errors import InvalidInput
from . import convert as bsr_convert
from .pattern import SAVED_PATTERN, BSRPattern, checked_state
from .validate import check_metadata, check_padding, check_pair, check_values

if TYPE_CHECKING:
    from scipy.sparse import bsr_matrix

__all__ = ["BSRMatrix", "BSRPattern"]

# Set by `matmul.api`: the format lies below the products and cannot import them.
_matmul: Callable[[Any, Any], Any] | None = None


def install_matmul(matmul: Callable[[Any, Any], Any]) -> None:
    """Make `@` on a `BSRMatrix` mean `matmul`."""
    global _matmul
    _matmul = matmul


class BSRMatrix:
    """A block-sparse matrix in block-sparse-row format, with SciPy's names for the parts.

    Parameters
    ----------
    data : Tensor [nnzb, bh, bw], float16, bfloat16, float32 or float64
        The stored blocks. Kept as it is (not copied), so gradients reach it.
    indices : Tensor [nnzb], int32 or int64
        Block column of each block, strictly increasing within a block row.
    indptr : Tensor [ceil(M / bh) + 1], same dtype as `indices`
        Block row r holds the blocks indptr[r] ... indptr[r + 1] - 1.
    shape : (M, K)
        In elements. Need not be a multiple of the block; the part of edge blocks beyond `shape`
        must be zero.

    Everything is checked at construction, contents included, with one or two synchronisations.
    The metadata is copied and narrowed to int32; treat all tensors of a matrix as read only
    except for optimiser steps on `storage`.

    Attributes
    ----------
    storage : the values as stored, [nnzb, bh, bw]; the leaf to give to an optimiser
    pattern : the `BSRPattern` of `storage`
    is_transposed : whether this matrix is the transpose of the stored one

    Notes
    -----
    `.T` flips `is_transposed`: it copies nothing and shares storage and pattern. `shape`,
    `block_shape`, `indptr`, `indices` and `data` describe the matrix as seen; on a transposed
    matrix `data` is gathered and transposed at each access, while products use `storage`.

    Examples
    --------
    >>> import torch
    >>> x = torch.zeros(4, 6)
    >>> x[0, 0] = 1.0
    >>> m = BSRMatrix.from_dense(x, (2, 3))
    >>> m
    BSRMatrix(shape=(4, 6), block_shape=(2, 3), nnz_blocks=1, density=0.25, dtype=torch.float32, \
device=cpu)
    >>> torch.equal(m.to_dense(), x), m.T.shape
    (True, (6, 4))
    """

    def __init__(
        self,
        data: torch.Tensor,
        indices: torch.Tensor,
        indptr: torch.Tensor,
        shape: tuple[int, int],
    ):
        op = "BSRMatrix"
        check_values(op, data)
        shape = check_pair(op, "shape", shape, 0)
        block_shape = (data.shape[1], data.shape[2])
        check_metadata(op, indptr, indices, shape, block_shape)
        check_same_device(op, {"data": data, "indices": indices, "indptr": indptr})
        if data.shape[0] != indices.shape[0]:
            expected = f"{indices.shape[0]}, the length of indices"
            problem = "has a wrong number of blocks"
            raise InvalidInput(message(op, "data", problem, expected, data.shape[0]))
        pattern = BSRPattern._from_parts(
            indptr.to(torch.int32, copy=True),
            indices.to(torch.int32, copy=True),
            shape,
            block_shape,
        )
        check_padding(op, data, shape, pattern.row_indices(), pattern.indices)
        self._pattern = pattern
        self._storage = data
        self._is_transposed = False

    @classmethod
    def _from_parts(
        cls, pattern: BSRPattern, storage: torch.Tensor, is_transposed: bool = False
    ) -> "BSRMatrix":
        """Assemble parts that are known to fit, without a check or a copy."""
        matrix = cls.__new__(cls)
        matrix._pattern = pattern
        matrix._storage = storage
        matrix._is_transposed = is_transposed
        return matrix

    @classmethod
    def from_dense(cls, x: torch.Tensor, block_shape: int | tuple[int, int]) -> "BSRMatrix":
        """Keep the blocks of `x` [M, K] that have any nonzero element (one synchronisation).

        Gradients flow back to `x` through the kept blocks.
        """
        return cls._from_parts(*bsr_convert.from_dense("BSRMatrix.from_dense", x, block_shape))

    @classmethod
    def from_mask(
        cls,
        x: torch.Tensor,
        block_keep: torch.Tensor,
        block_shape: int | tuple[int, int] | None = None,
    ) -> "BSRMatrix":
        """Keep the blocks of `x` [M, K] marked in `block_keep` bool [rows_b, cols_b].

        Marked blocks are kept even if they are zero. `block_shape` is inferred if the sizes of `x`
        are multiples of the numbers of blocks. Gradients flow back to `x`. See `from_element_mask`
        for a mask of elements.
        """
        op = "BSRMatrix.from_mask"
        return cls._from_parts(*bsr_convert.from_mask(op, x, block_keep, block_shape))

    @classmethod
    def from_element_mask(
        cls, x: torch.Tensor, mask: torch.Tensor, block_shape: int | tuple[int, int]
    ) -> "BSRMatrix":
        """Keep `x` [M, K] where `mask` bool [M, K] is true, in the blocks that hold such elements.

        The other elements of those blocks are stored as zeros. Gradients flow back to `x`.
        """
        op = "BSRMatrix.from_element_mask"
        return cls._from_parts(*bsr_convert.from_element_mask(op, x, mask, block_shape))

    @classmethod
    def from_torch(cls, t: torch.Tensor) -> "BSRMatrix":
        """Convert a `torch.sparse_bsr` tensor [M, K], after checks that torch does not make.

        The values are shared with `t`; gradients do not flow back to it.
        """
        bsr_convert.check_torch("BSRMatrix.from_torch", t)
        t = t.detach()
        return cls(t.values(), t.col_indices(), t.crow_indices(), (t.shape[0], t.shape[1]))

    @classmethod
    def from_scipy(cls, m: "bsr_matrix") -> "BSRMatrix":
        """Copy a SciPy matrix or array in BSR format, float32 or float64, to the CPU.

        Unsorted or duplicate indices are refused: call `m.sum_duplicates()` first.
        """
        bsr_convert.check_scipy("BSRMatrix.from_scipy", m)
        data, indices, indptr = (torch.tensor(part) for part in (m.data, m.indices, m.indptr))
        return cls(data, indices, indptr, (int(m.shape[0]), int(m.shape[1])))

    @property
    def storage(self) -> torch.Tensor:
        """[nnzb, bh, bw] as stored; the blocks of the transpose if `is_transposed`."""
        return self._storage

    @property
    def pattern(self) -> BSRPattern:
        """The pattern of `storage`."""
        return self._pattern

    @property
    def is_transposed(self) -> bool:
        """Whether this matrix is the transpose of the stored one."""
        return self._is_transposed

    @property
    def logical_pattern(self) -> BSRPattern:
        """The pattern of the matrix as seen: the transposed one if `is_transposed`."""
        return self._pattern.transposed() if self._is_transposed else self._pattern

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) in elements."""
        return self._pattern.shape[::-1] if self._is_transposed else self._pattern.shape

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bh, bw)."""
        pattern = self._pattern
        return pattern.block_shape[::-1] if self._is_transposed else pattern.block_shape

    @property
    def indptr(self) -> torch.Tensor:
        """int32 [rows_b + 1]."""
        return self.logical_pattern.indptr

    @property
    def indices(self) -> torch.Tensor:
        """int32 [nnzb], block columns."""
        return self.logical_pattern.indices

    @property
    def data(self) -> torch.Tensor:
        """[nnzb, bh, bw] in the order of `indices`; computed from `storage` if transposed."""
        if not self._is_transposed:
            return self._storage
        return self._storage[self._pattern.transpose_perm.long()].mT

    @property
    def T(self) -> "BSRMatrix":
        """The transpose, sharing storage and pattern."""
        return self._from_parts(self._pattern, self._storage, not self._is_transposed)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._storage.dtype

    @property
    def device(self) -> torch.device:
        """Device of values and metadata."""
        return self._storage.device

    @property
    def nnz_blocks(self) -> int:
        """Stored blocks."""
        return self._pattern.nnz_blocks

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; 0 for a matrix without blocks."""
        return self._pattern.density

    def to_dense(self) -> torch.Tensor:
        """The matrix as a contiguous tensor [M, K]; differentiable."""
        dense = bsr_convert.to_dense(self._pattern, self._storage)
        return dense.T.contiguous() if self._is_transposed else dense

    def to_torch(self) -> torch.Tensor:
        """As `torch.sparse_bsr`; the shape must be a multiple of the block."""
        return bsr_convert.to_torch(self.indptr, self.indices, self.data, self.shape)

    def to_scipy(self) -> "bsr_matrix":
        """As `scipy.sparse.bsr_matrix`, copied to the CPU; needs a shape as `to_torch` does."""
        return bsr_convert.to_scipy(self.indptr, self.indices, self.data, self.shape)

    def to(self, *args: Any, **kwargs: Any) -> "BSRMatrix":
        """Move or cast as `torch.Tensor.to` does: a device, a floating dtype, or both."""
        storage = self._storage.to(*args, **kwargs)
        check_values("BSRMatrix.to", storage)
        non_blocking = kwargs.get("non_blocking", False)
        pattern = self._pattern.to(storage.device, non_blocking=non_blocking)
        return self._from_parts(pattern, storage, self._is_transposed)

    def with_data(self, data: torch.Tensor) -> "BSRMatrix":
        """The same pattern with other values [nnzb, bh, bw], in the order of `indices`.

        Any floating dtype. The padding of edge blocks is checked, which synchronises if the shape
        is ragged.
        """
        op = "BSRMatrix.with_data"
        check_values(op, data)
        pattern = self.logical_pattern
        check_shape(op, "data", data, (pattern.nnz_blocks, *pattern.block_shape))
        check_same_device(op, {"data": data, "matrix": self._storage})
        check_padding(op, data, pattern.shape, pattern.row_indices(), pattern.indices)
        return self._from_parts(pattern, data)

    def validate(self) -> None:
        """Check everything again, contents included (synchronises); raise `InvalidInput`."""
        pattern = self._pattern
        pattern.validate()
        check_values("BSRMatrix", self._storage)
        expected = (pattern.nnz_blocks, *pattern.block_shape)
        check_shape("BSRMatrix", "data", self._storage, expected)
        rows, columns = pattern.row_indices(), pattern.indices
        check_padding("BSRMatrix", self._storage, pattern.shape, rows, columns)

    def __getstate__(self) -> dict[str, Any]:
        pattern = self._pattern.__getstate__()
        return {**pattern, "storage": self._storage, "is_transposed": self._is_transposed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        op = "BSRMatrix"
        checked_state(op, state, (*SAVED_PATTERN, "storage", "is_transposed"))
        self._pattern, self._storage = BSRPattern.__new__(BSRPattern), state["storage"]
        self._pattern._load(op, state)
        self._is_transposed = bool(state["is_transposed"])
        check_values(op, self._storage)
        check_same_device(op, {"data": self._storage, "indices": self._pattern.indices})
        if not self._storage.is_meta:
            self.validate()

    def __copy__(self) -> "BSRMatrix":
        return self._from_parts(self._pattern, self._storage, self._is_transposed)

    def __matmul__(self, other: Any) -> Any:
        if _matmul is None or not isinstance(other, torch.Tensor | BSRMatrix):
            return NotImplemented
        return _matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        if _matmul is None or not isinstance(other, torch.Tensor):
            return NotImplemented
        return _matmul(other, self)

    def __repr__(self) -> str:
        return (
            f"BSRMatrix(shape={self.shape}, block_shape={self.block_shape}, "
            f"nnz_blocks={self.nnz_blocks}, density={self.density:.4g}, dtype={self.dtype}, "
            f"device={self.device})"
        )


# What `__setstate__` takes is plain data, and all of it is checked.
torch.serialization.add_safe_globals([BSRMatrix])
