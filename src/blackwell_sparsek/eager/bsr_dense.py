"""Block-sparse products by writing the matrix out and multiplying it with torch.

The better choice where few blocks are missing, or where blocks are too small for their rows to
feed a GPU. Absent blocks are zeros here, so NaN and inf of the dense operand meet all of them.
The arguments are those of the operators (see `ops.bsr`); `ops.bsr_dense` puts product and matrix
together.
"""

import torch

from ..core.launch import cdiv
from ..formats.bsr_pattern import rows_of_entries
from ..formats.bsr_validate import zero_padding
from .bsr_epilogue import finish


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
