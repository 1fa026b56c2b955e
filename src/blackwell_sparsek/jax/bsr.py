"""`BSRMatrix` for JAX: block-sparse rows as a pytree."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax

from ..core.errors import InvalidInput, InvalidType
from ..core.messages import message
from .arrays import FLOATS, as_host, as_jax, cdiv, check_pair

_matmul: Callable[[Any, Any], Any] | None = None


def install_matmul(matmul: Callable[[Any, Any], Any]) -> None:
    """Make `@` on a `BSRMatrix` mean `matmul`."""
    global _matmul
    _matmul = matmul


def _product(a: Any, b: Any) -> Any:
    assert _matmul is not None
    return _matmul(a, b)


@jax.tree_util.register_pytree_with_keys_class
class BSRMatrix:
    """A block-sparse matrix; the pytree twin of `bsk.BSRMatrix`, with SciPy's names for the parts.

    Make one with `from_dense`, `from_mask`, `from_parts`, `from_torch` or `from_scipy`, outside of
    traced functions. `m @ x` and `x @ m` are `matmul`. To train the values, take `data` as the
    parameter and compute with `m.with_data(data)`.

    Attributes
    ----------
    data : `[nnzb, bh, bw]`
        The stored blocks.
    indices : int32 `[nnzb]`
        Block column of each block, ascending within a block row.
    indptr : int32 `[block rows + 1]`
        Block row r holds the blocks `indptr[r] .. indptr[r + 1]`.
    shape : (M, K)
        In elements; need not be a multiple of the block. What edge blocks hold beyond it is zero.

    Examples
    --------
    >>> import numpy as np
    >>> m = BSRMatrix.from_dense(np.eye(4, 6, dtype=np.float32), (2, 3))
    >>> m, m.T.shape
    (BSRMatrix(shape=(4, 6), block_shape=(2, 3), nnz_blocks=3, dtype=float32), (6, 4))
    """

    # NumPy leaves `array @ matrix` to this class
    __array_ufunc__ = None

    def __init__(self, data: Any, indices: Any, indptr: Any, shape: tuple[int, int]):
        # also called by JAX with whatever a transformation puts in place of arrays
        self.data = data
        self.indices = indices
        self.indptr = indptr
        self.shape = shape

    @classmethod
    def from_parts(
        cls, data: Any, indices: Any, indptr: Any, shape: tuple[int, int]
    ) -> "BSRMatrix":
        """A matrix of arrays of NumPy, JAX or torch; the pattern is checked on the host.

        Parameters
        ----------
        data : fp16, bf16, fp32 or fp64 `[nnzb, bh, bw]`
            Tensors of torch are shared by DLPack, not copied, unless their strides leave gaps.
        indices : int32 or int64 `[nnzb]`
        indptr : int32 or int64 `[ceil(M / bh) + 1]`
        shape : (M, K)
        """
        op = "BSRMatrix"
        blocks = as_jax(op, "data", data)
        _check_float(op, "data", blocks)
        if blocks.ndim != 3 or 0 in blocks.shape[1:]:
            raise InvalidInput(
                message(op, "data", "has a wrong shape", "[nnzb, bh, bw]", list(blocks.shape))
            )
        shape = check_pair(op, "shape", shape, 0)
        cols, ends = as_host(op, "indices", indices), as_host(op, "indptr", indptr)
        _check_pattern(op, cols, ends, blocks.shape[0], shape, blocks.shape[1:])
        # copies: what was checked must not change with the arrays of the caller
        made = cls(blocks, jnp.array(cols, jnp.int32), jnp.array(ends, jnp.int32), shape)
        if not isinstance(blocks, jax.core.Tracer) and bool((made._beyond_edges() != 0).any()):
            problem = "has a nonzero beyond the edge of the matrix"
            raise InvalidInput(message(op, "data", problem, f"zeros beyond {shape}", "others"))
        return made

    @classmethod
    def from_dense(cls, x: Any, block_shape: tuple[int, int]) -> "BSRMatrix":
        """Keep the blocks of `x` [M, K] that have any nonzero element."""
        op = "BSRMatrix.from_dense"
        # inside of jit, JAX would trace these operations, although x is known
        with jax.ensure_compile_time_eval():
            _, tiles, shape = _tiled(op, as_host(op, "x", x), block_shape)
            keep = np.asarray((tiles != 0).any((2, 3)))
        return cls._kept(tiles, keep, shape)

    @classmethod
    def from_mask(cls, x: Any, keep: Any, block_shape: tuple[int, int]) -> "BSRMatrix":
        """Keep the blocks of `x` [M, K] marked in `keep` bool [rows_b, cols_b], zero or not.

        `x` may be traced, `keep` may not: gradients flow back to `x`.
        """
        op = "BSRMatrix.from_mask"
        block, tiles, shape = _tiled(op, x, block_shape)
        marked = as_host(op, "keep", keep)
        if marked.dtype != np.bool_:
            raise InvalidType(message(op, "keep", "has a wrong dtype", "bool", marked.dtype))
        if marked.shape != tiles.shape[:2]:
            expected = f"{list(tiles.shape[:2])} blocks of {block[0]} x {block[1]}"
            raise InvalidInput(
                message(op, "keep", "has a wrong shape", expected, list(marked.shape))
            )
        return cls._kept(tiles, marked, shape)

    @classmethod
    def _kept(cls, tiles: jax.Array, keep: np.ndarray, shape: tuple[int, int]) -> "BSRMatrix":
        rows, cols = np.nonzero(keep)
        indptr = np.concatenate([[0], np.cumsum(keep.sum(1))])
        return cls(
            tiles[rows, cols], jnp.asarray(cols, jnp.int32), jnp.asarray(indptr, jnp.int32), shape
        )

    @classmethod
    def from_torch(cls, matrix: Any) -> "BSRMatrix":
        """The same matrix as a `bsk.BSRMatrix`, whose values are shared by DLPack if possible.

        The values of a transposed matrix are gathered first.
        """
        op = "BSRMatrix.from_torch"
        if not all(hasattr(matrix, name) for name in ("data", "indices", "indptr", "storage")):
            got = type(matrix).__name__
            raise InvalidType(message(op, "matrix", "is not a matrix", "bsk.BSRMatrix", got))
        data = matrix.data.detach().contiguous()
        return cls.from_parts(data, matrix.indices, matrix.indptr, tuple(matrix.shape))

    @classmethod
    def from_scipy(cls, matrix: Any) -> "BSRMatrix":
        """From a `scipy.sparse.bsr_matrix` or `bsr_array`."""
        op = "BSRMatrix.from_scipy"
        if getattr(matrix, "format", None) != "bsr":
            got = getattr(matrix, "format", type(matrix).__name__)
            raise InvalidType(message(op, "matrix", "is not in BSR format", "bsr", got))
        matrix = matrix.copy()
        matrix.sum_duplicates()
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        return cls.from_parts(matrix.data, matrix.indices, matrix.indptr, shape)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bh, bw)."""
        return self.data.shape[1], self.data.shape[2]

    @property
    def dtype(self) -> Any:
        """Of the values."""
        return self.data.dtype

    @property
    def nnz_blocks(self) -> int:
        """Number of stored blocks."""
        return self.data.shape[0]

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns."""
        (m, k), (bh, bw) = self.shape, self.block_shape
        return cdiv(m, bh), cdiv(k, bw)

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; 0.0 for a matrix without blocks."""
        total = self.grid[0] * self.grid[1]
        return self.nnz_blocks / total if total else 0.0

    def row_indices(self) -> jax.Array:
        """Block row of each stored block, int32 `[nnzb]`."""
        rows = jnp.arange(self.grid[0], dtype=jnp.int32)
        return jnp.repeat(rows, jnp.diff(self.indptr), total_repeat_length=self.nnz_blocks)

    @property
    def T(self) -> "BSRMatrix":
        """The transpose, with blocks in its own order; may be traced and differentiated."""
        rows, counts = self.row_indices(), jnp.zeros(self.grid[1] + 1, jnp.int32)
        order = jnp.argsort(self.indices, stable=True)
        counts = counts.at[self.indices + 1].add(1)
        data = self.data[order].swapaxes(1, 2)
        indptr = jnp.cumsum(counts, dtype=jnp.int32)
        return BSRMatrix(data, rows[order], indptr, (self.shape[1], self.shape[0]))

    def with_data(self, data: Any) -> "BSRMatrix":
        """The same pattern with other values `[nnzb, bh, bw]`, which may be traced."""
        op = "BSRMatrix.with_data"
        values = as_jax(op, "data", data)
        _check_float(op, "data", values)
        if values.shape != self.data.shape:
            expected, got = list(self.data.shape), list(values.shape)
            raise InvalidInput(message(op, "data", "has a wrong shape", expected, got))
        return BSRMatrix(values, self.indices, self.indptr, self.shape)

    def to_dense(self) -> jax.Array:
        """All elements, `[M, K]`."""
        (rows, cols), (bh, bw) = self.grid, self.block_shape
        tiles = jnp.zeros((rows, cols, bh, bw), self.dtype)
        tiles = tiles.at[self.row_indices(), self.indices].set(self.data)
        dense = tiles.swapaxes(1, 2).reshape(rows * bh, cols * bw)
        return dense[: self.shape[0], : self.shape[1]]

    def inside(self) -> jax.Array | None:
        """Which elements of `data` lie within the shape, or None if all do."""
        (m, k), (bh, bw) = self.shape, self.block_shape
        if m % bh == 0 and k % bw == 0:
            return None
        rows = self.row_indices()[:, None] * bh + jnp.arange(bh) < m
        cols = self.indices[:, None] * bw + jnp.arange(bw) < k
        return rows[:, :, None] & cols[:, None, :]

    def _beyond_edges(self) -> jax.Array:
        inside = self.inside()
        return jnp.zeros(0) if inside is None else jnp.where(inside, 0, self.data)

    def __matmul__(self, other: Any) -> Any:
        return _product(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _product(other, self)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Arrays as children; the shape is static."""
        names = ("data", "indices", "indptr")
        key = jax.tree_util.GetAttrKey
        return tuple((key(name), getattr(self, name)) for name in names), self.shape

    @classmethod
    def tree_unflatten(cls, shape: Any, children: Any) -> "BSRMatrix":
        """The inverse of `tree_flatten_with_keys`."""
        data, indices, indptr = children
        return cls(data, indices, indptr, shape)

    def __repr__(self) -> str:
        if len(getattr(self.data, "shape", ())) != 3:
            return f"BSRMatrix({self.data}, {self.indices}, {self.indptr}, {self.shape})"
        return (
            f"BSRMatrix(shape={self.shape}, block_shape={self.block_shape}, "
            f"nnz_blocks={self.nnz_blocks}, dtype={self.dtype.name})"
        )


def _check_float(op: str, arg: str, x: jax.Array) -> None:
    if x.dtype.name not in FLOATS:
        expected = f"one of {', '.join(FLOATS)}"
        raise InvalidType(message(op, arg, "has a wrong dtype", expected, x.dtype.name))


def _tiled(op: str, x: Any, block_shape: Any) -> tuple[tuple[int, int], jax.Array, tuple[int, int]]:
    """The block shape, `x` as tiles [rows_b, cols_b, bh, bw], and its shape."""
    block = check_pair(op, "block_shape", block_shape, 1)
    dense = as_jax(op, "x", x)
    _check_float(op, "x", dense)
    if dense.ndim != 2:
        raise InvalidInput(message(op, "x", "has a wrong rank", "[M, K]", list(dense.shape)))
    m, k = dense.shape
    rows, cols = cdiv(m, block[0]), cdiv(k, block[1])
    padded = jnp.pad(dense, ((0, rows * block[0] - m), (0, cols * block[1] - k)))
    return block, padded.reshape(rows, block[0], cols, block[1]).swapaxes(1, 2), (m, k)


def _check_pattern(
    op: str,
    indices: np.ndarray,
    indptr: np.ndarray,
    blocks: int,
    shape: tuple[int, int],
    block_shape: Any,
) -> None:
    rows, cols = cdiv(shape[0], block_shape[0]), cdiv(shape[1], block_shape[1])
    for arg, x, size in (("indices", indices, blocks), ("indptr", indptr, rows + 1)):
        if x.dtype not in (np.int32, np.int64):
            raise InvalidType(message(op, arg, "has a wrong dtype", "int32 or int64", x.dtype))
        if x.shape != (size,):
            raise InvalidInput(message(op, arg, "has a wrong shape", [size], list(x.shape)))
    if indptr[0] != 0 or indptr[-1] != blocks or (np.diff(indptr) < 0).any():
        expected = f"offsets that ascend from 0 to {blocks}"
        raise InvalidInput(message(op, "indptr", "is malformed", expected, indptr.tolist()[:8]))
    if blocks and not 0 <= indices.min() <= indices.max() < cols:
        got = f"{indices.min()} to {indices.max()}"
        raise InvalidInput(message(op, "indices", "is out of range", f"0 to {cols - 1}", got))
    row_of = np.repeat(np.arange(rows), np.diff(indptr))
    descending = (np.diff(row_of) == 0) & (np.diff(indices) <= 0)
    if descending.any():
        problem = "does not ascend within a block row"
        at = int(descending.argmax())
        got = f"{indices[at]}, {indices[at + 1]} in block row {row_of[at]}"
        raise InvalidInput(message(op, "indices", problem, "ascending block columns", got))
