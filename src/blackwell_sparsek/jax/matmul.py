"""`matmul` and `sddmm` for JAX: products with block-sparse matrices and at their blocks."""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp

import jax

from ..core.errors import InvalidInput, InvalidType
from ..core.messages import message
from .arrays import (
    check_array,
    check_same_dtype,
    compute_dtype,
    from_blocks,
    gradient_of,
    into_blocks,
    over_chunks,
    vary_like,
)
from .bsr import BSRMatrix, install_matmul
from .choice import Kernels, choose, platform_of
from .kernel_calls import arch_of, device_of, fp32_precision, why_no_kernels
from .matmul_triton import Pattern, ProductOptions, multiply, sample, why_not_triton

# Elements of the products of one chunk of blocks: 16 MiB in fp32.
CHUNK_ELEMENTS = 2**22


def matmul(a: Any, b: Any, *, impl: str = "auto") -> jax.Array:
    """Product of a block-sparse matrix with an array, or of an array with a block-sparse matrix.

    Sums run in fp32 (fp64 for fp64) and are rounded once. Gradients reach the values of the matrix
    and the array, to any order. Works under `jit`, `grad`, `vmap` and `shard_map`.

    Parameters
    ----------
    a : BSRMatrix `[M, K]` or array `[..., M, K]`
    b : array `[..., K, N]` or BSRMatrix `[K, N]`
        One of the two is a `BSRMatrix`; both have the same dtype.
    impl : "auto", "jnp" or "triton"
        "triton" launches the portable kernels of `bsk.matmul` on a GPU, through jax-triton, or says
        why it cannot. `explain` says what "auto" takes.

    Returns
    -------
    product : `[..., M, N]`, dtype of a and b

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from blackwell_sparsek.jax import BSRMatrix
    >>> m = BSRMatrix.from_dense(jnp.eye(32), (16, 16))
    >>> matmul(m, jnp.ones((32, 5))).shape, (jnp.ones((7, 32)) @ m).shape
    ((32, 5), (7, 32))
    """
    op = "matmul"
    if isinstance(a, BSRMatrix) == isinstance(b, BSRMatrix):
        got = f"{type(a).__name__} and {type(b).__name__}"
        raise InvalidType(message(op, "a/b", "do not fit", "one BSRMatrix and one array", got))
    if isinstance(a, BSRMatrix):
        x = _operand(op, "b", b)
        _check_product(op, "b", x, -2, a, a.shape[1])
        if _chosen(op, impl, a, x) == "triton":
            return _multiplied(a, x, dense_left=False)
        # columns of all batches side by side
        outer = (*x.shape[:-2], x.shape[-1])
        columns = jnp.moveaxis(x, -2, 0).reshape(a.shape[1], math.prod(outer))
        product = _bsr_by_columns(a, columns)
        return jnp.moveaxis(product.reshape(a.shape[0], *outer), 0, -2)
    x = _operand(op, "a", a)
    _check_product(op, "a", x, -1, b, b.shape[0])
    if _chosen(op, impl, b, x) == "triton":
        return _multiplied(b, x, dense_left=True)
    rows = x.reshape(math.prod(x.shape[:-1]), b.shape[0]).T
    product = _bsr_by_columns(b, rows, transposed=True)
    return product.T.reshape(*x.shape[:-1], b.shape[1])


def sddmm(a: jax.Array, b: jax.Array, pattern: BSRMatrix, *, impl: str = "auto") -> BSRMatrix:
    """`a @ b` at the blocks of a pattern: a sampled dense-dense product.

    Sums run in fp32 (fp64 for fp64) and are rounded once. Differentiable to any order.

    Parameters
    ----------
    a : `[M, K]`
    b : `[K, N]`, dtype of a
    pattern : BSRMatrix `[M, N]`
        Says which blocks are computed; its values are not read.
    impl : as in `matmul`

    Returns
    -------
    product : BSRMatrix with the pattern of `pattern` and the dtype of a

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from blackwell_sparsek.jax import BSRMatrix
    >>> pattern = BSRMatrix.from_dense(jnp.eye(32), (16, 16))
    >>> sddmm(jnp.ones((32, 8)), jnp.ones((8, 32)), pattern).data.shape
    (2, 16, 16)
    """
    op = "sddmm"
    if not isinstance(pattern, BSRMatrix):
        got = type(pattern).__name__
        raise InvalidType(message(op, "pattern", "is not a matrix", "BSRMatrix", got))
    left = check_array(op, "a", a, 2, "[M, K]")
    right = check_array(op, "b", b, 2, "[K, N]")
    check_same_dtype(op, {"a": left, "b": right})
    if (left.shape[0], right.shape[1]) != pattern.shape or left.shape[1] != right.shape[0]:
        expected = f"[{pattern.shape[0]}, K] and [K, {pattern.shape[1]}]"
        got = f"{list(left.shape)} and {list(right.shape)}"
        raise InvalidInput(message(op, "a/b", "do not fit the pattern", expected, got))
    bh, bw = pattern.block_shape
    rows, cols = pattern.row_indices(), pattern.indices
    if _chosen(op, impl, pattern, left) == "triton":
        options = _product_options(pattern, left, dense_left=False)
        lists = Pattern(cols, pattern.indptr, rows)
        data = sample(options, (bh, bw), left[None], right.T[None], lists)
    else:
        data = _sample(into_blocks(left, bh), into_blocks(right.T, bw), rows, cols)
    return BSRMatrix(data, pattern.indices, pattern.indptr, pattern.shape)


def _operand(op: str, arg: str, x: Any) -> jax.Array:
    layout = "[..., K, N]" if arg == "b" else "[..., M, K]"
    dims = getattr(x, "ndim", 0)
    return check_array(op, arg, x, max(dims, 2), layout)


def _check_product(op: str, arg: str, x: jax.Array, dim: int, m: BSRMatrix, size: int) -> None:
    check_same_dtype(op, {"the matrix": m.data, arg: x})
    if x.shape[dim] != size:
        problem = f"does not fit a matrix of shape {m.shape}"
        raise InvalidInput(message(op, arg, problem, f"{size} in dimension {dim}", list(x.shape)))


def _chosen(op: str, impl: str, matrix: BSRMatrix, x: jax.Array) -> str:
    (bh, bw), (m, k) = matrix.block_shape, matrix.shape
    problem = (
        f"on {platform_of(x)}, {x.dtype.name}, {m} x {k} with {matrix.nnz_blocks} blocks of "
        f"{bh} x {bw}, array {list(x.shape)}"
    )

    def why_not() -> str | None:
        return why_no_kernels(device_of(x), x.dtype) or why_not_triton((bh, bw))

    return choose(op, impl, problem, Kernels("triton", why_not))


def _product_options(matrix: BSRMatrix, x: jax.Array, dense_left: bool) -> ProductOptions:
    device, precision = device_of(x), fp32_precision(x.dtype)
    arch, name = arch_of(device), device.device_kind
    return ProductOptions(matrix.shape, False, dense_left, arch, name, precision)


def _multiplied(matrix: BSRMatrix, x: jax.Array, dense_left: bool) -> jax.Array:
    """The product by the kernels: matrix @ x, or x @ matrix where `dense_left`."""
    options = _product_options(matrix, x, dense_left)
    inside = matrix.inside()
    data = matrix.data if inside is None else jnp.where(inside, matrix.data, 0)
    pattern = Pattern(matrix.indices, matrix.indptr, matrix.row_indices())
    lead = x.shape[: -1 if dense_left else -2]
    if dense_left:
        # rows of all batches are rows of one matrix
        lines = x.reshape(1, math.prod(lead), x.shape[-1])
        return multiply(options, data, lines, pattern).reshape(*lead, matrix.shape[1])
    product = multiply(options, data, x.reshape(math.prod(lead), *x.shape[-2:]), pattern)
    return product.reshape(*lead, matrix.shape[0], x.shape[-1])


def _bsr_by_columns(matrix: BSRMatrix, x: jax.Array, *, transposed: bool = False) -> jax.Array:
    """The matrix, or its transpose, times `x` [K, N]."""
    (m, k), (bh, bw), (block_rows, block_cols) = matrix.shape, matrix.block_shape, matrix.grid
    data, rows, cols = matrix.data, matrix.row_indices(), matrix.indices
    inside = matrix.inside()
    if inside is not None:
        # x is zero beyond the edge; the gradient of the values must be zero there too
        data = jnp.where(inside, data, 0)
    if transposed:
        data, rows, cols = data.swapaxes(1, 2), cols, rows
        m, bh, bw, block_rows = k, bw, bh, block_cols
    product = _multiply(block_rows, data, into_blocks(x, bw), rows, cols)
    return from_blocks(product, m)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    block_rows: int, data: jax.Array, x: jax.Array, rows: jax.Array, cols: jax.Array
) -> jax.Array:
    """y[rows[i]] += data[i] @ x[cols[i]]: x [Kb, bw, N], y [block_rows, bh, N]."""
    compute = compute_dtype(data.dtype)

    def step(y: jax.Array, part: Any) -> jax.Array:
        row, col, index = part
        products = jnp.einsum("nij,njk->nik", data[index], x[col], preferred_element_type=compute)
        return y.at[jnp.where(index < 0, block_rows, row)].add(products, mode="drop")

    columns = x.shape[-1]
    start = jnp.zeros((block_rows, data.shape[1], columns), compute)
    start = vary_like(start, data, x, rows, cols)
    size = max(1, CHUNK_ELEMENTS // max(data.shape[1] * columns, 1))
    parts = (rows, cols, jnp.arange(data.shape[0], dtype=jnp.int32))
    return over_chunks(step, start, parts, size).astype(data.dtype)


def _multiply_fwd(block_rows: int, *inputs: Any) -> Any:
    return _multiply(block_rows, *inputs), inputs


def _multiply_bwd(block_rows: int, saved: Any, dy: jax.Array) -> Any:
    data, x, rows, cols = saved
    ddata = _sample(dy, x, rows, cols)
    dx = _multiply(x.shape[0], data.swapaxes(1, 2), dy, cols, rows)
    return gradient_of(data, ddata), gradient_of(x, dx), None, None


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


@jax.custom_vjp
def _sample(a: jax.Array, b: jax.Array, rows: jax.Array, cols: jax.Array) -> jax.Array:
    """a[rows[i]] @ b[cols[i]]^T: a [Mb, bh, K], b [Nb, bw, K], result [n, bh, bw]."""
    compute = compute_dtype(a.dtype)
    # a chunk gathers the operands of its blocks
    size = max(1, CHUNK_ELEMENTS // max((a.shape[1] + b.shape[1]) * a.shape[2], 1))

    def products(row: jax.Array, col: jax.Array) -> jax.Array:
        made = jnp.einsum("nik,njk->nij", a[row], b[col], preferred_element_type=compute)
        return made.astype(a.dtype)

    def step(data: jax.Array, part: Any) -> jax.Array:
        row, col, index = part
        at = jnp.where(index < 0, data.shape[0], index)
        return data.at[at].set(products(row, col), mode="drop")

    count = rows.shape[0]
    if count <= size:
        return products(rows, cols)
    start = jnp.zeros((count, a.shape[1], b.shape[1]), a.dtype)
    start = vary_like(start, a, b, rows, cols)
    return over_chunks(step, start, (rows, cols, jnp.arange(count, dtype=jnp.int32)), size)


def _sample_fwd(*inputs: Any) -> Any:
    return _sample(*inputs), inputs


def _sample_bwd(saved: Any, ddata: jax.Array) -> Any:
    a, b, rows, cols = saved
    da = _multiply(a.shape[0], ddata, b, rows, cols)
    db = _multiply(b.shape[0], ddata.swapaxes(1, 2), a, cols, rows)
    return gradient_of(a, da), gradient_of(b, db), None, None


_sample.defvjp(_sample_fwd, _sample_bwd)

install_matmul(matmul)
