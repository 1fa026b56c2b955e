"""Block-sparse products, written to be read: dense arithmetic in float64, blocks chosen by a mask.

    op(A) @ X  or  X @ op(A):   out = activation(product + bias) + residual
    sddmm:                      (sum over the batch of a @ b) at the blocks of a pattern
    pair products:              out[o] = sum of op(first[f]) @ op(second[s]) over the triples

A block that is not stored contributes nothing, whatever the dense operand holds there: it is left
out by selection, so that a NaN does not come through a product with zero. The arguments are those
of the operators (see `ops.bsr`).
"""

import torch
import torch.nn.functional as F

from ..core.activations import activate


def block_keep(
    indptr: torch.Tensor, indices: torch.Tensor, shape: list[int], block_shape: list[int]
) -> torch.Tensor:
    """bool [rows_b, cols_b], true where a block is stored."""
    rows_b, cols_b = -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])
    rows = torch.arange(rows_b, device=indptr.device)
    rows = rows.repeat_interleave(indptr.diff().long(), output_size=indices.shape[0])
    keep = torch.zeros(rows_b, cols_b, dtype=torch.bool, device=indptr.device)
    keep[rows, indices.long()] = True
    return keep


def to_dense(values: torch.Tensor, keep: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """float64 [M, K] with zeros where nothing is stored."""
    _, bh, bw = values.shape
    blocks = values.new_zeros(*keep.shape, bh, bw, dtype=torch.float64)
    blocks[keep] = values.double()
    full = blocks.transpose(1, 2).reshape(keep.shape[0] * bh, keep.shape[1] * bw)
    return full[: shape[0], : shape[1]]


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
    block_shape = list(values.shape[1:])
    keep = block_keep(pattern[0], pattern[1], shape, block_shape)
    a = to_dense(values, keep, shape)
    if transposed:
        a, keep, block_shape = a.T, keep.T, block_shape[::-1]
    x = dense.double()
    if dense_left:  # X @ A = (A^T @ X^T)^T
        a, keep, block_shape, x = a.T, keep.T, block_shape[::-1], x.mT

    bh, bw = block_shape
    row_keep = keep.repeat_interleave(bh, 0)[: a.shape[0]]
    product = x.new_zeros(*x.shape[:-2], a.shape[0], x.shape[-1])
    for j in range(keep.shape[1]):
        columns = slice(j * bw, (j + 1) * bw)
        part = a[:, columns] @ x[..., columns, :]
        product += part.masked_fill(~row_keep[:, j, None], 0)

    if dense_left:
        product = product.mT
    if bias is not None:
        product = product + (bias.double() if dense_left else bias.double()[:, None])
    out = activate(product, activation)
    if residual is not None:
        out = out + residual.double()
    return out.to(out_dtype or dense.dtype).contiguous()


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
    product = a.double() @ b.double()
    if product.dim() > 2:
        product = product.flatten(0, -3).sum(0)
    padded = F.pad(product, (0, -n % bw, 0, -m % bh))
    keep = block_keep(pattern[0], pattern[1], shape, block_shape)
    blocks = padded.view(keep.shape[0], bh, keep.shape[1], bw).transpose(1, 2)
    return blocks[keep].to(out_dtype or a.dtype)


def bsr_pair_products(
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: list[torch.Tensor],
    first_transposed: bool,
    second_transposed: bool,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The blocks of the result, one for each entry of the role `out` of `pairs`."""
    x, y = first.double(), second.double()
    x, y = (x.mT if first_transposed else x), (y.mT if second_transposed else y)
    x_of_pair, y_of_pair, out_of_pair, _, out_ptr = (p.long() for p in pairs[:5])
    out = x.new_zeros(out_ptr.shape[0] - 1, x.shape[1], y.shape[2])
    out.index_add_(0, out_of_pair, x[x_of_pair] @ y[y_of_pair])
    return out.to(out_dtype or first.dtype)
