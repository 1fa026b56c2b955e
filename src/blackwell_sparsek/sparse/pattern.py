"""`BSRPattern`: which blocks of a matrix are stored."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..core.checks import check_tensor, message
from ..core.errors import InvalidInput
from ..core.torch_state import usable_in_training
from ..launch.launcher import cdiv
from .validate import check_index_tensors, check_metadata, check_pair


def rows_of_entries(indptr: torch.Tensor, nnzb: int) -> torch.Tensor:
    """int32 [nnzb]: the row that each entry belongs to, without a synchronization."""
    entries = torch.arange(nnzb, dtype=torch.int32, device=indptr.device)
    return torch.searchsorted(indptr, entries, right=True, out_int32=True) - 1


# What copies consist of; the rest follows from it.
SAVED_PATTERN = ("indptr", "indices", "shape", "block_shape")


def checked_state(op: str, state: Any, names: Sequence[str]) -> dict[str, Any]:
    """Check that a copied state has these names, and return it."""
    if not isinstance(state, dict) or sorted(map(str, state)) != sorted(names):
        got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise InvalidInput(message(op, f"the state of a saved {op}", "does not fit", names, got))
    return state


def _check_not_expanded(op: str, arg: str, x: Any) -> None:
    """Refuse a tensor of a file that repeats its elements: a copy could have any size."""
    check_tensor(op, arg, x)
    stored = x.untyped_storage().nbytes() // x.element_size()
    if x.numel() > stored:
        expected = f"at most the {stored} elements that are stored"
        raise InvalidInput(message(op, arg, "is expanded", expected, x.numel()))


class _Transpose(NamedTuple):
    """Metadata of the transpose; its entry t is entry `perm[t]` of the pattern."""

    indptr: torch.Tensor
    indices: torch.Tensor
    perm: torch.Tensor


class BSRPattern:
    """The positions of the stored blocks of a block-sparse matrix. Immutable.

    The metadata of the transpose is built once at construction, without a synchronization, so that
    gradients and products with the transpose cost no preparation later.

    Parameters
    ----------
    indptr : Tensor [rows_b + 1], int32 or int64
        Block row r holds the entries indptr[r] ... indptr[r + 1] - 1.
    indices : Tensor [nnzb], same dtype
        Block column of each entry, strictly increasing within a row.
    shape : (M, K) in elements; need not be a multiple of the block.
    block_shape : (bh, bw), each at least 1.

    The tensors are copied, so that changing them later cannot break what was checked.

    Examples
    --------
    >>> import torch
    >>> p = BSRPattern(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2]), (32, 48), (16, 16))
    >>> p.nnz_blocks, p.rows_b, p.cols_b
    (3, 2, 3)
    >>> p.transposed().indices.tolist()
    [1, 0, 1]
    """

    def __init__(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ):
        op = "BSRPattern"
        shape = check_pair(op, "shape", shape, 0)
        block_shape = check_pair(op, "block_shape", block_shape, 1)
        check_metadata(op, indptr, indices, shape, block_shape)
        self._build(
            indptr.to(torch.int32, copy=True),
            indices.to(torch.int32, copy=True),
            shape,
            block_shape,
        )

    @usable_in_training
    def _build(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ) -> None:
        if not torch.compiler.is_compiling() and indices.is_inference():
            indptr, indices = indptr.clone(), indices.clone()
        rows = rows_of_entries(indptr, indices.shape[0])
        # Stable: within a column, entries stay in the order of their rows.
        columns, perm = torch.sort(indices, stable=True)
        column_ids = torch.arange(
            cdiv(shape[1], block_shape[1]) + 1, dtype=torch.int32, device=indices.device
        )
        t_indptr = torch.searchsorted(columns, column_ids, out_int32=True)
        tensors = [indptr, indices, t_indptr, rows[perm], perm.int()]
        self._set(tensors, rows, shape, block_shape)

    def _set(
        self,
        tensors: list[torch.Tensor],
        rows: torch.Tensor,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ) -> None:
        self._indptr, self._indices, *transpose = tensors
        self._transpose, self._rows = _Transpose(*transpose), rows
        self._shape = shape
        self._block_shape = block_shape
        self._transposed: BSRPattern | None = None
        # launches that the operators record to replay products with this pattern
        self._launches: dict[Any, Any] = {}
        self._families: dict[Any, Any] = {}
        # for `check_unwritten`; traced tensors are not followed
        self._version: int | None = None if torch.compiler.is_compiling() else self._writes()

    def _writes(self) -> int:
        """How often the metadata was written in place."""
        t_indptr, t_indices, _ = self._transpose
        own = self._indptr._version + self._indices._version
        return own + t_indptr._version + t_indices._version

    def check_unwritten(self) -> None:
        """Raise if the metadata was written in place: nothing derived from it would be right."""
        if self._version is None or torch.compiler.is_compiling():
            return
        if self._writes() != self._version:
            raise InvalidInput(
                message(
                    "BSRPattern",
                    "indptr/indices",
                    "were written in place",
                    "read-only tensors: make a new BSRMatrix or BSRPattern, or write to the "
                    "buffers of a layer",
                    "lists that no longer agree with those of the transpose",
                )
            )

    @classmethod
    def _from_parts(
        cls,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ) -> "BSRPattern":
        """Take int32 metadata that is known to be well formed, without a check or a copy."""
        pattern = cls.__new__(cls)
        pattern._build(indptr, indices, shape, block_shape)
        return pattern

    @property
    def indptr(self) -> torch.Tensor:
        """int32 [rows_b + 1]. Read only."""
        return self._indptr

    @property
    def indices(self) -> torch.Tensor:
        """int32 [nnzb], block columns. Read only."""
        return self._indices

    def row_indices(self) -> torch.Tensor:
        """int32 [nnzb], block row of each entry. Read only."""
        return self._rows

    @property
    def transpose_perm(self) -> torch.Tensor:
        """int32 [nnzb]: entry t of the transpose is entry transpose_perm[t] of this pattern."""
        return self._transpose.perm

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) in elements."""
        return self._shape

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bh, bw)."""
        return self._block_shape

    @property
    def rows_b(self) -> int:
        """Block rows, the last possibly ragged."""
        return cdiv(self._shape[0], self._block_shape[0])

    @property
    def cols_b(self) -> int:
        """Block columns, the last possibly ragged."""
        return cdiv(self._shape[1], self._block_shape[1])

    @property
    def nnz_blocks(self) -> int:
        """Stored blocks."""
        return self._indices.shape[0]

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; 0 for a matrix without blocks."""
        return self.nnz_blocks / max(1, self.rows_b * self.cols_b)

    @property
    def device(self) -> torch.device:
        """Where the metadata lives."""
        return self._indptr.device

    @usable_in_training
    def transposed(self) -> "BSRPattern":
        """The pattern of the transpose (cached). See `transpose_perm` for the order of entries."""
        self.check_unwritten()
        if self._transposed is None:
            other = BSRPattern.__new__(BSRPattern)
            perm = self._transpose.perm
            inverse = torch.empty_like(perm)
            inverse[perm.long()] = torch.arange(
                self.nnz_blocks, dtype=torch.int32, device=self.device
            )
            rows = self._indices[perm.long()]
            tensors = [self._transpose.indptr, self._transpose.indices]
            tensors += [self._indptr, self._indices, inverse]
            other._set(tensors, rows, self._shape[::-1], self._block_shape[::-1])
            self._transposed = other
        return self._transposed

    def tensors(self) -> list[torch.Tensor]:
        """[indptr, indices, t_indptr, t_indices, t_perm], the form that the operators take."""
        self.check_unwritten()
        return [self._indptr, self._indices, *self._transpose]

    @property
    def launches(self) -> dict[Any, Any]:
        """Recorded launches of products with this pattern; filled by the operators."""
        self.check_unwritten()
        return self._launches

    @property
    def families(self) -> dict[Any, Any]:
        """Launches for products with this pattern of any number of rows; see `matmul.resize`."""
        self.check_unwritten()
        return self._families

    @usable_in_training
    def to(self, device: torch.device | str, non_blocking: bool = False) -> "BSRPattern":
        """This pattern on `device`; returns itself if it is already there."""
        rows = self._rows.to(device, non_blocking=non_blocking)
        if rows is self._rows:
            return self
        other = BSRPattern.__new__(BSRPattern)
        tensors = [x.to(device, non_blocking=non_blocking) for x in self.tensors()]
        other._set(tensors, rows, self._shape, self._block_shape)
        return other

    def validate(self) -> None:
        """Check the contents of the metadata again (one synchronization); raise `InvalidInput`."""
        check_metadata("BSRPattern", self._indptr, self._indices, self._shape, self._block_shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED_PATTERN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._load("BSRPattern", checked_state("BSRPattern", state, SAVED_PATTERN))

    def _load(self, op: str, state: dict[str, Any]) -> None:
        """Take a copied state, of which kernels follow the indices: all of it is checked."""
        shape = check_pair(op, "shape", state["shape"], 0)
        block_shape = check_pair(op, "block_shape", state["block_shape"], 1)
        indptr, indices = state["indptr"], state["indices"]
        if isinstance(indptr, torch.Tensor) and indptr.is_meta:
            # real indices beside an indptr without data would be followed unchecked
            check_index_tensors(op, indptr, indices)
        else:
            for arg, x in (("indptr", indptr), ("indices", indices)):
                _check_not_expanded(op, arg, x)
            check_metadata(op, indptr, indices, shape, block_shape)
        self._build(indptr.to(torch.int32), indices.to(torch.int32), shape, block_shape)

    def __copy__(self) -> "BSRPattern":
        return self

    def __repr__(self) -> str:
        return (
            f"BSRPattern(shape={self.shape}, block_shape={self.block_shape}, "
            f"nnz_blocks={self.nnz_blocks}, density={self.density:.4g}, device={self.device})"
        )


# What `__setstate__` takes is plain data, and all of it is checked.
torch.serialization.add_safe_globals([BSRPattern])
