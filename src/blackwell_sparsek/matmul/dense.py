"""The matrix written out as implementation `dense` of `bsk::bsr_matmul`, and when to take it."""

from collections.abc import Callable
from functools import lru_cache

import torch

from ..calls.matmul import BsrProblem
from ..core.arch import arch_of
from ..dispatch.dispatcher import interpreted_only
from ..dispatch.machine import why_no_kernels
from ..launch.launcher import cdiv, unrecorded
from ..sparse.pattern import rows_of_entries
from ..sparse.validate import zero_padding
from .eager import finish
from .estimate import dense_seconds, packs_for_few_columns, sparse_seconds
from .sm90 import route as bsr_sm90
from .sm90.tuning import spmm_sm90_passed_over
from .triton import route as bsr_triton

# Block-sparse products by writing the matrix out and multiplying it with torch.
#
# The better choice where few blocks are missing, or where blocks are too small for their rows to
# feed a GPU. Absent blocks are zeros here, so NaN and inf of the dense operand meet all of them.
# The arguments are those of the operators (see `ops.bsr`); `ops.bsr_dense` puts product and matrix
# together.


def multiplied_out(
    matrix: torch.Tensor,
    dense: torch.Tensor,
    dense_left: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The product of a matrix that was written out, with its epilogue."""
    out_dtype = out_dtype or dense.dtype
    plain = bias is None and residual is None and activation is None and out_dtype == dense.dtype
    factors = (dense, matrix) if dense_left else (matrix, dense)
    product = _product(*factors, rounded=plain)
    return finish(product, bias, residual, activation, out_dtype, dense_left)


def bsr_sddmm(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    block_shape: list[int],
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The blocks [nnzb, bh, bw] of a @ b, summed over the batch; zero beyond `shape`."""
    (m, n), (bh, bw) = shape, block_shape
    indptr, indices = pattern[:2]
    rows = rows_of_entries(indptr, indices.shape[0])
    product = _product(a, b, rounded=False)
    if product.dim() > 2:
        product = product.flatten(0, -3).sum(0)
    padded = torch.nn.functional.pad(product, (0, -n % bw, 0, -m % bh))
    blocks = padded.view(cdiv(m, bh), bh, cdiv(n, bw), bw).transpose(1, 2)
    found = blocks[rows.long(), indices.long()].to(out_dtype or a.dtype)
    return zero_padding(found, (m, n), rows, indices)


def written_out(
    values: torch.Tensor, pattern: list[torch.Tensor], shape: list[int]
) -> torch.Tensor:
    """The stored matrix as a view [M, K] of whole blocks."""
    (m, k), (nnzb, bh, bw) = shape, values.shape
    rows_b, cols_b = cdiv(m, bh), cdiv(k, bw)
    full = values.new_zeros(rows_b, bh, cols_b, bw)
    rows = rows_of_entries(pattern[0], nnzb)
    full.transpose(1, 2)[rows.long(), pattern[1].long()] = values
    return full.view(rows_b * bh, cols_b * bw)[:m, :k]


def _product(a: torch.Tensor, b: torch.Tensor, *, rounded: bool) -> torch.Tensor:
    """a @ b in the dtype of the operands where `rounded`, else in that of its sums."""
    if a.dtype.itemsize > 2:
        return torch.matmul(a, b)
    if not a.is_cuda:
        # CPUs sum 16-bit products in whatever precision they have
        product = torch.matmul(a.float(), b.float())
        return product.to(a.dtype) if rounded else product
    if rounded:
        return torch.matmul(a, b)
    batch = max(a.shape[:-2], b.shape[:-2], key=len)
    a3, b3 = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    product = torch.bmm(a3, b3, out_dtype=torch.float32)
    return product.view(*batch, *product.shape[-2:])


# What the kernel that writes a matrix out needs: Triton's oldest GPU, whole pieces of a row.
LEAST_SM, COLUMNS_STEP = 80, 8


def bsr_matmul(
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
) -> torch.Tensor:
    """op(A) @ dense, or dense @ op(A) where `dense_left`, with its epilogue."""
    matrix = _written_out(values, pattern, shape)
    matrix = matrix.mT if transposed else matrix
    extras = (bias, residual, activation, out_dtype)
    return multiplied_out(matrix, dense, dense_left, *extras)


def _written_out(
    values: torch.Tensor, pattern: list[torch.Tensor], shape: list[int]
) -> torch.Tensor:
    """The stored matrix as a view [M, K] of whole blocks: in one pass where a kernel can."""
    arch = arch_of(values.device)
    compiled = arch.sm >= LEAST_SM and why_no_kernels(arch) is None
    block_h, block_w = values.shape[1:]
    if not (compiled and block_w % COLUMNS_STEP == 0 and values.is_contiguous()):
        return written_out(values, pattern, shape)
    from .triton.densify import block_table, launch_write_out

    rows_b, cols_b = cdiv(shape[0], block_h), cdiv(shape[1], block_w)
    full = values.new_empty(rows_b * block_h, cols_b * block_w)
    # the product behind it is torch's, so that launches are not all of this call
    with unrecorded():
        launch_write_out(full, values, block_table(pattern, cols_b))
    return full[: shape[0], : shape[1]]


def passed_for_dense(impl: str) -> Callable[[BsrProblem], str | None]:
    """Why `auto` passes over `impl`: because the dense product should be faster."""

    # the answer is kept, since estimating takes longer than the rest of a dispatch
    @lru_cache(maxsize=4096)
    def why(problem: BsrProblem) -> str | None:
        sparse_s, dense_s = sparse_seconds(problem, impl), dense_seconds(problem)
        return None if sparse_s <= dense_s else _compared(sparse_s, "dense", dense_s)

    return why


_sm90_for_dense, _triton_for_dense = passed_for_dense("sm90"), passed_for_dense("triton")


@lru_cache(maxsize=4096)
def _sm90_for_triton(problem: BsrProblem) -> str | None:
    """Why blocks that WGMMA has to pack are left to the portable kernel: it should be faster."""
    if not packs_for_few_columns(problem) or bsr_triton.why_not(problem) is not None:
        return None
    own_s, portable_s = (sparse_seconds(problem, impl) for impl in ("sm90", "triton"))
    # both are known to a tenth
    return None if own_s <= 1.1 * portable_s else _compared(own_s, "triton", portable_s)


def sm90_passed_over(problem: BsrProblem) -> str | None:
    """What others do better is for them; the rest competes with the dense product."""
    return spmm_sm90_passed_over(problem) or _sm90_for_triton(problem) or _sm90_for_dense(problem)


def triton_passed_over(problem: BsrProblem) -> str | None:
    """Interpreted kernels are for tests; compiled ones compete with the dense product."""
    return interpreted_only(problem) or _triton_for_dense(problem)


def dense_passed_over(problem: BsrProblem) -> str | None:
    """Why `auto` passes over the dense product: the stored blocks should be faster."""
    dense_s = dense_seconds(problem)
    for impl in _sparse_impls(problem):
        sparse_s = sparse_seconds(problem, impl)
        if sparse_s <= dense_s:
            return _compared(dense_s, impl, sparse_s)
    return None


def _sparse_impls(problem: BsrProblem) -> list[str]:
    """Sparse implementations that can run, in the order in which `auto` asks."""
    passed = spmm_sm90_passed_over(problem) or _sm90_for_triton(problem)
    sm90 = (bsr_sm90.why_not(problem) or passed) is None
    impls = ["sm90"] if sm90 else []
    if (bsr_triton.why_not(problem) or interpreted_only(problem)) is None:
        impls.append("triton")
    return [*impls, "eager"]


def _compared(own_s: float, other: str, other_s: float) -> str:
    return f"estimated {own_s * 1e3:.3g} ms, {other} {other_s * 1e3:.3g} ms"
