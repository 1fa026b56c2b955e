"""`BSRMatrix`: a matrix that stores only some of its rectangular blocks."""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import (
    check_dtype,
    check_flag,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput
from ..core.fp8 import E4M3
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
    data : Tensor [nnzb, bh, bw], float16, bfloat16, float32, float64 or float8_e4m3fn
        The stored blocks. Kept as it is (not copied), so gradients reach it.
    indices : Tensor [nnzb], int32 or int64
        Block column of each block, strictly increasing within a block row.
    indptr : Tensor [ceil(M / bh) + 1], same dtype as `indices`
        Block row r holds the blocks indptr[r] ... indptr[r + 1] - 1.
    shape : (M, K)
        In elements. Need not be a multiple of the block; the part of edge blocks beyond `shape`
        must be zero.
    descale : Tensor [nnzb], float32, with float8_e4m3fn only
        The factor of each block's values. `to_fp8` converts a matrix with wider values to such a
        matrix, which has no gradients.

    Everything is checked at construction, contents included, with one or two synchronizations.
    The metadata is copied and narrowed to int32; treat all tensors of a matrix as read only
    except for optimizer steps on `storage`.

    Attributes
    ----------
    storage : the values as stored, [nnzb, bh, bw]; the leaf to give to an optimizer
    pattern : the `BSRPattern` of `storage`
    is_transposed : whether this matrix is the transpose of the stored one

    Raises
    ------
    InvalidInput
        If the metadata is malformed, or edge blocks are not zero beyond `shape`.

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
        descale: torch.Tensor | None = None,
    ):
        op = "BSRMatrix"
        check_values(op, data, descale)
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
        self._stored_descale = descale

    @classmethod
    def _from_parts(
        cls,
        pattern: BSRPattern,
        storage: torch.Tensor,
        is_transposed: bool = False,
        stored_descale: torch.Tensor | None = None,
    ) -> "BSRMatrix":
        """Assemble parts that are known to fit, without a check or a copy."""
        matrix = cls.__new__(cls)
        matrix._pattern = pattern
        matrix._storage = storage
        matrix._is_transposed = is_transposed
        matrix._stored_descale = stored_descale
        return matrix

    @classmethod
    def from_dense(cls, x: torch.Tensor, block_shape: int | tuple[int, int]) -> "BSRMatrix":
        """Keep the blocks of `x` [M, K] that have any nonzero element (one synchronization).

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
    def stored_descale(self) -> torch.Tensor | None:
        """fp32 [nnzb]: the scale of each block of `storage`; None unless that is in fp8."""
        return self._stored_descale

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
    def descale(self) -> torch.Tensor | None:
        """fp32 [nnzb] in the order of `indices`: the factor of each block, or None."""
        if self._stored_descale is None or not self._is_transposed:
            return self._stored_descale
        return self._stored_descale[self._pattern.transpose_perm.long()]

    @property
    def T(self) -> "BSRMatrix":
        """The transpose, sharing storage and pattern."""
        parts = (self._pattern, self._storage, not self._is_transposed)
        return self._from_parts(*parts, self._stored_descale)

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
        """The matrix as a contiguous tensor [M, K]; differentiable. In float32 if it is in fp8."""
        if self._stored_descale is not None:
            return self.dequantize().to_dense()
        dense = bsr_convert.to_dense(self._pattern, self._storage)
        return dense.T.contiguous() if self._is_transposed else dense

    def to_torch(self) -> torch.Tensor:
        """As `torch.sparse_bsr`; the shape must be a multiple of the block."""
        self._refuse_scales("BSRMatrix.to_torch")
        return bsr_convert.to_torch(self.indptr, self.indices, self.data, self.shape)

    def to_scipy(self) -> "bsr_matrix":
        """As `scipy.sparse.bsr_matrix`, copied to the CPU; needs a shape as `to_torch` does."""
        self._refuse_scales("BSRMatrix.to_scipy")
        return bsr_convert.to_scipy(self.indptr, self.indices, self.data, self.shape)

    def to(self, *args: Any, **kwargs: Any) -> "BSRMatrix":
        """Move or cast as `torch.Tensor.to` does: a device, a floating dtype, or both.

        A matrix in fp8 is moved only: `to_fp8` and `dequantize` change what is stored.
        """
        op, descale = "BSRMatrix.to", self._stored_descale
        storage = self._storage.to(*args, **kwargs)
        non_blocking = kwargs.get("non_blocking", False)
        if descale is not None:
            if storage.dtype != self.dtype:
                self._refuse_scales(op)
            descale = descale.to(storage.device, non_blocking=non_blocking)
        check_values(op, storage, descale)
        pattern = self._pattern.to(storage.device, non_blocking=non_blocking)
        return self._from_parts(pattern, storage, self._is_transposed, descale)

    def to_fp8(self) -> "BSRMatrix":
        """The same matrix with blocks rounded to float8_e4m3fn, each with its own scale.

        A scale is the largest finite magnitude of its block over 448, at least 2**-120, and 1 for
        a block of zeros: the rule of `bsk.fp8.quantize`. For products with activations in fp8; no
        gradient flows through the rounding.

        Examples
        --------
        >>> import torch
        >>> m = BSRMatrix.from_dense(torch.tensor([[1.0, 448.0]]), (1, 1)).to_fp8()
        >>> m.dtype, m.descale
        (torch.float8_e4m3fn, tensor([0.0022, 1.0000]))
        """
        op = "BSRMatrix.to_fp8"
        if self._stored_descale is not None:
            return copy(self)
        if torch.is_grad_enabled() and self._storage.requires_grad:
            problem = "requires gradients, which rounding does not have"
            expected = "torch.no_grad(), or with_data(data.detach())"
            raise InvalidInput(message(op, "data", problem, expected, "requires_grad=True"))
        storage, descale = bsr_convert.rounded_blocks(self._storage)
        return self._from_parts(self._pattern, storage, self._is_transposed, descale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> "BSRMatrix":
        """The values of an fp8 matrix: each block times its scale, rounded to `dtype`."""
        descale = self._stored_descale
        if descale is None:
            problem = "has no scales to be applied"
            got = self.dtype
            raise InvalidInput(message("BSRMatrix.dequantize", "data", problem, E4M3, got))
        values = (self._storage.float() * descale[:, None, None]).to(dtype)
        check_values("BSRMatrix.dequantize", values)
        return self._from_parts(self._pattern, values, self._is_transposed)

    def _refuse_scales(self, op: str) -> None:
        """Refuse what has no room for the scales of blocks."""
        if self._stored_descale is not None:
            expected = "a wider dtype (dequantize() gives one)"
            problem = "is in fp8 with a scale for each block, which would be lost"
            raise InvalidInput(message(op, "data", problem, expected, self.dtype))

    def with_data(self, data: torch.Tensor, descale: torch.Tensor | None = None) -> "BSRMatrix":
        """The same pattern with other values [nnzb, bh, bw], in the order of `indices`.

        Any floating dtype; float8_e4m3fn with `descale` [nnzb]. The padding of edge blocks is
        checked, which synchronizes if the shape is ragged.
        """
        op = "BSRMatrix.with_data"
        check_values(op, data, descale)
        pattern = self.logical_pattern
        check_shape(op, "data", data, (pattern.nnz_blocks, *pattern.block_shape))
        check_same_device(op, {"data": data, "matrix": self._storage})
        check_padding(op, data, pattern.shape, pattern.row_indices(), pattern.indices)
        return self._from_parts(pattern, data, stored_descale=descale)

    def validate(self) -> None:
        """Check everything again, contents included (synchronizes); raise `InvalidInput`."""
        pattern = self._pattern
        pattern.validate()
        check_values("BSRMatrix", self._storage, self._stored_descale)
        expected = (pattern.nnz_blocks, *pattern.block_shape)
        check_shape("BSRMatrix", "data", self._storage, expected)
        rows, columns = pattern.row_indices(), pattern.indices
        check_padding("BSRMatrix", self._storage, pattern.shape, rows, columns)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self._pattern.__getstate__(), "storage": self._storage}
        state["is_transposed"] = self._is_transposed
        if self._stored_descale is not None:
            # as bytes: torch fails to read tensors in fp8 that Python has serialised
            state["storage"] = self._storage.view(torch.uint8)
            state["descale"] = self._stored_descale
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        op = "BSRMatrix"
        names = (*SAVED_PATTERN, "storage", "is_transposed")
        scaled = isinstance(state, dict) and "descale" in state
        checked_state(op, state, (*names, "descale") if scaled else names)
        self._pattern, self._storage = BSRPattern.__new__(BSRPattern), state["storage"]
        self._pattern._load(op, state)
        check_flag(op, "is_transposed", state["is_transposed"])
        self._is_transposed = state["is_transposed"]
        self._stored_descale = state.get("descale")
        if scaled:
            check_tensor(op, "storage", self._storage)
            check_dtype(op, "storage", self._storage, (torch.uint8,))
            self._storage = self._storage.view(E4M3)
        check_values(op, self._storage, self._stored_descale)
        check_same_device(op, {"data": self._storage, "indices": self._pattern.indices})
        if not self._storage.is_meta:
            self.validate()

    def __copy__(self) -> "BSRMatrix":
        parts = (self._pattern, self._storage, self._is_transposed)
        return self._from_parts(*parts, self._stored_descale)

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
