"""Block-sparse products and sampled products by the portable kernels, on a GPU.

A product is y = op(A) @ x with x [B, K, N], or y = x @ op(A) with x [B, T, K] where `dense_left`;
op transposes where `transposed`. The sampled product of the same flags is what comes back for the
values of A: they are each other's derivatives, so both can be differentiated to any order.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

import jax

from ..core.sizes import cdiv
from ..core.target import Arch
from ..dispatch.tuned import planned_for
from .arrays import gradient_of
from .batching import batch_of, fold_axis, vmapped
from .kernel_calls import Arrays, made, run_launches


class ProductOptions(NamedTuple):
    """What is known while tracing; `shape` is that of A as stored."""

    shape: tuple[int, int]
    transposed: bool
    dense_left: bool
    arch: Arch
    device_name: str
    precision: str
    """Of fp32 products."""

    @property
    def by_columns(self) -> bool:
        """Whether columns of A as stored are the features of the result."""
        return self.transposed != self.dense_left

    @property
    def flipped(self) -> "ProductOptions":
        """The product with the transpose of op(A)."""
        return self._replace(transposed=not self.transposed)


class Pattern(NamedTuple):
    """Where the stored blocks of A lie."""

    indices: Any
    indptr: Any
    rows: Any
    """Block row of each block."""


class Orientation(NamedTuple):
    """A pattern by rows of the result; block `perm[i]` is entry i, or block i without `perm`."""

    indptr: Any
    indices: Any
    perm: Any


class Problem(NamedTuple):
    """The facts of a product that tiles depend on, named as in `calls.matmul.BsrProblem`."""

    kind: str
    arch: Arch
    dtype: Any
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    nnz_blocks: int
    n: int
    batch: int
    dense_left: bool = False
    transposed: bool = False
    activation: str | None = None


def why_not_triton(block_shape: tuple[int, int]) -> str | None:
    """Why the kernels cannot multiply blocks of this shape, or None."""
    from ..matmul.triton.tuning import why_not_blocks

    problem: Any = SimpleNamespace(kind="matmul", block_shape=block_shape)
    return why_not_blocks(problem)


def _by_columns(pattern: Pattern, options: ProductOptions, block_w: int) -> Orientation:
    """The pattern of the transpose."""
    columns = cdiv(options.shape[1], block_w)
    order = jnp.argsort(pattern.indices, stable=True).astype(jnp.int32)
    counts = jnp.zeros(columns + 1, jnp.int32).at[pattern.indices + 1].add(1)
    return Orientation(jnp.cumsum(counts, dtype=jnp.int32), pattern.rows[order], order)


class WorkList(NamedTuple):
    """Which program multiplies which blocks: `matmul.plan.SpmmPlan` in jnp."""

    items: Any
    split_rows: Any
    n_slots: int


def work_list(indptr: jax.Array, nnz_blocks: int, cols_b: int, chunk: int) -> WorkList:
    """Rows longer than `chunk` blocks are cut; sized for the worst pattern of this many blocks."""
    rows_b = indptr.shape[0] - 1
    if min(nnz_blocks, cols_b) <= chunk or rows_b == 0:
        lengths = jnp.diff(indptr)
        row = jnp.arange(rows_b, dtype=jnp.int32)
        whole = jnp.stack([row, indptr[:-1], indptr[1:], jnp.full_like(row, -1)], 1)
        order = jnp.argsort(-lengths, stable=True)
        return WorkList(whole[order], jnp.zeros((0, 3), jnp.int32), 0)
    # a row of n blocks has at most 1 + n // chunk parts, and is cut only if n > chunk
    most_split = min(rows_b, nnz_blocks // (chunk + 1))
    extra = nnz_blocks // chunk
    lengths = jnp.diff(indptr)
    parts = jnp.maximum((lengths + chunk - 1) // chunk, 1)
    items_end = jnp.cumsum(parts)
    slots = jnp.where(parts > 1, parts, 0)
    first_slot = jnp.cumsum(slots) - slots
    item = jnp.arange(rows_b + extra, dtype=jnp.int32)
    row = jnp.searchsorted(items_end, item, side="right").astype(jnp.int32)
    real = row < rows_b
    row = jnp.minimum(row, rows_b - 1)
    part = item - (items_end - parts)[row]
    # begins and ends of even parts, without products that int32 cannot hold
    share, rest = lengths[row] // parts[row], lengths[row] % parts[row]
    begin = indptr[row] + part * share + jnp.minimum(part, rest)
    end = begin + share + (part < rest)
    slot = jnp.where(parts[row] > 1, first_slot[row] + part, -1)
    fields = zip((row, begin, end, slot), (-1, 0, 0, -1), strict=True)
    items = jnp.stack([jnp.where(real, x, fill) for x, fill in fields], 1).astype(jnp.int32)
    order = jnp.argsort(-jnp.where(real, end - begin, -1), stable=True)
    split = jnp.argsort(parts == 1, stable=True)[:most_split]
    split_row = jnp.where(parts[split] > 1, split, -1)
    ends = (first_slot + slots)[split]
    split_rows = jnp.stack([split_row, first_slot[split], ends], 1).astype(jnp.int32)
    return WorkList(items[order], split_rows, most_split + extra)


def plan_product(
    options: ProductOptions, data: jax.Array, x: jax.Array, pattern: Pattern, arrays: Arrays
) -> list[Any]:
    """The launches that write "out", the product."""
    from ..matmul.triton.finish import partial_shape
    from ..matmul.triton.spmm import plan_spmm
    from ..matmul.triton.tuning import spmm_config

    (nnz_blocks, *stored), shape = data.shape, options.shape
    block = (stored[0], stored[1])
    rows, inner = shape[::-1] if options.by_columns else shape
    height, width = block[::-1] if options.by_columns else block
    positions = x.shape[1 if options.dense_left else 2]
    facts: Any = Problem(
        *("matmul", options.arch, data.dtype),
        shape[::-1] if options.transposed else shape,
        block[::-1] if options.transposed else block,
        *(nnz_blocks, positions, x.shape[0], options.dense_left, options.transposed),
    )
    with planned_for(options.device_name):
        config = spmm_config(facts, options.precision)
    listed = Orientation(pattern.indptr, pattern.indices, None)
    if options.by_columns:
        listed = _by_columns(pattern, options, block[1])
    work = work_list(listed.indptr, nnz_blocks, cdiv(inner, width), config.chunk)
    tail = (positions, rows) if options.dense_left else (rows, positions)
    out = made("out", "output", (x.shape[0], *tail), data.dtype)
    blocks = arrays.add("values", data)
    turned: Any = (lambda y: y.transpose(1, 2)) if options.dense_left else (lambda y: y)
    out_rows = turned(out)
    views = (out_rows, turned(arrays.add("x", x)), None)
    block_rows = SimpleNamespace(
        blocks=blocks.transpose(1, 2) if options.by_columns else blocks,
        indices=arrays.add("indices", listed.indices),
        perm=arrays.add_if("perm", listed.perm),
    )
    plan = SimpleNamespace(
        items=arrays.add("items", work.items),
        split_rows=arrays.add("split_rows", work.split_rows),
        n_items=work.items.shape[0],
        n_split_rows=work.split_rows.shape[0],
        n_slots=work.n_slots,
    )
    partial_sums = None
    if work.n_slots:
        sums = partial_shape(out_rows, plan, height)
        partial_sums = made("partial", "scratch", sums, jnp.float32)
    return list(plan_spmm(views, block_rows, (None, None), plan, partial_sums, config))


def plan_sample(
    options: ProductOptions,
    dy: jax.Array,
    x: jax.Array,
    pattern: Pattern,
    block: tuple[int, int],
    arrays: Arrays,
) -> list[Any]:
    """The launches that write "out", the blocks of what comes back for A."""
    from ..matmul.triton.sddmm import plan_sddmm, sddmm_shares
    from ..matmul.triton.tuning import sddmm_config

    dy_rows, x_rows = arrays.add("dy", dy), arrays.add("x", x)
    if options.dense_left:
        # [B, features, positions], as the other side has them
        dy_rows, x_rows = dy_rows.transpose(1, 2), x_rows.transpose(1, 2)
    a, b = (x_rows, dy_rows) if options.by_columns else (dy_rows, x_rows)
    b = b.transpose(1, 2)
    nnz_blocks = pattern.indices.shape[0]
    facts: Any = Problem(
        *("sddmm", options.arch, dy.dtype, options.shape, block),
        *(nnz_blocks, a.shape[2], a.shape[0]),
    )
    config = sddmm_config(facts, options.precision)
    turned = _by_columns(pattern, options, block[1])
    lists = SimpleNamespace(
        indices=arrays.add("indices", pattern.indices),
        t_indices=arrays.add("t_indices", turned.indices),
        t_perm=arrays.add("t_perm", turned.perm),
    )
    out = made("out", "output", (nnz_blocks, *block), dy.dtype)
    shares, parts = sddmm_shares(a, config), None
    if shares > 1:
        parts = made("parts", "scratch", (shares, *out.shape), jnp.float32)
    return list(plan_sddmm(out, parts, a, b, lists, config))


def _fold_product(size: int, is_mapped: Any, inputs: Any) -> tuple[Any, int] | None:
    """data, x and pattern with an axis folded into the batch of x; one matrix has no batch."""
    _, x_is_mapped, _ = is_mapped
    data, x, pattern = inputs
    if sum(jax.tree.leaves(is_mapped)) > x_is_mapped:
        return None
    batch = batch_of(x, x_is_mapped)
    return (data, fold_axis(x, x_is_mapped, size, batch), pattern), batch


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(options: ProductOptions, data: jax.Array, x: jax.Array, pattern: Pattern) -> jax.Array:
    """op(A) @ x, or x @ op(A) where `dense_left`."""

    def kernels(data: jax.Array, x: jax.Array, pattern: Pattern) -> jax.Array:
        rows = options.shape[1 if options.by_columns else 0]
        tail = (x.shape[1], rows) if options.dense_left else (rows, x.shape[2])
        if 0 in (*x.shape, *data.shape):
            return jnp.zeros((x.shape[0], *tail), data.dtype)
        arrays = Arrays()
        launches = plan_product(options, data, x, pattern, arrays)
        found = run_launches(launches, arrays.given, options.arch)
        return found["out"] if launches else jnp.zeros((x.shape[0], *tail), data.dtype)

    return vmapped(kernels, _fold_product)(data, x, pattern)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sample(
    options: ProductOptions, block: tuple[int, int], dy: jax.Array, x: jax.Array, pattern: Pattern
) -> jax.Array:
    """What comes back for the values of A: blocks `[nnzb, *block]`, zero beyond the shape."""

    @sequential_vmap
    def kernels(dy: jax.Array, x: jax.Array, pattern: Pattern) -> jax.Array:
        count = pattern.indices.shape[0]
        if 0 in (*dy.shape, *x.shape, count):
            return jnp.zeros((count, *block), dy.dtype)
        arrays = Arrays()
        launches = plan_sample(options, dy, x, pattern, block, arrays)
        return run_launches(launches, arrays.given, options.arch)["out"]

    return kernels(dy, x, pattern)


def _multiply_fwd(options: ProductOptions, *inputs: Any) -> Any:
    return multiply(options, *inputs), inputs


def _multiply_bwd(options: ProductOptions, saved: Any, dy: jax.Array) -> Any:
    data, x, pattern = saved
    ddata = sample(options, data.shape[1:], dy, x, pattern)
    dx = multiply(options.flipped, data, dy, pattern)
    return gradient_of(data, ddata), gradient_of(x, dx), None


def _sample_fwd(options: ProductOptions, block: Any, *inputs: Any) -> Any:
    return sample(options, block, *inputs), inputs


def _sample_bwd(options: ProductOptions, block: Any, saved: Any, ddata: jax.Array) -> Any:
    dy, x, pattern = saved
    ddy = multiply(options, ddata, x, pattern)
    dx = multiply(options.flipped, ddata, dy, pattern)
    return gradient_of(dy, ddy), gradient_of(x, dx), None


multiply.defvjp(_multiply_fwd, _multiply_bwd)
sample.defvjp(_sample_fwd, _sample_bwd)
