"""Block-sparse products as formulas: dense arithmetic in float64, blocks chosen by a mask.

    op(A) @ X  or  X @ op(A):   out = activation(product + bias) + residual
    sddmm:                      (sum over the batch of a @ b) at the blocks of a pattern
    pair products:              out[o] = sum of op(first[f]) @ op(second[s]) over the triples

A block that is not stored contributes nothing, whatever the dense operand holds there: it is
masked out, because a product of NaN with zero would be NaN.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..calls.matmul import MatmulCall, PairProductsCall, SddmmCall
from ..core.activations import activate


def block_keep(
    indptr: torch.Tensor, indices: torch.Tensor, shape: Sequence[int], block_shape: Sequence[int]
) -> torch.Tensor:
    """bool [rows_b, cols_b], true where a block is stored."""
    rows_b, cols_b = -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])
    rows = torch.arange(rows_b, device=indptr.device)
    rows = rows.repeat_interleave(indptr.diff().long(), output_size=indices.shape[0])
    keep = torch.zeros(rows_b, cols_b, dtype=torch.bool, device=indptr.device)
    keep[rows, indices.long()] = True
    return keep


def to_dense(values: torch.Tensor, keep: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """float64 [M, K] with zeros where nothing is stored."""
    _, bh, bw = values.shape
    blocks = values.new_zeros(*keep.shape, bh, bw, dtype=torch.float64)
    blocks[keep] = values.double()
    full = blocks.transpose(1, 2).reshape(keep.shape[0] * bh, keep.shape[1] * bw)
    return full[: shape[0], : shape[1]]


def matmul(call: MatmulCall) -> torch.Tensor:
    """op(A) @ dense, or dense @ op(A) where `dense_left`, with its epilogue."""
    dense, dense_left, bias, residual = call.dense, call.dense_left, call.bias, call.residual
    block_shape = list(call.values.shape[1:])
    keep = block_keep(call.pattern.indptr, call.pattern.indices, call.shape, block_shape)
    a = to_dense(call.values, keep, call.shape)
    if call.transposed:
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
    out = activate(product, call.activation)
    if residual is not None:
        out = out + residual.double()
    return out.to(call.out_dtype or dense.dtype).contiguous()


def sddmm(call: SddmmCall) -> torch.Tensor:
    """The blocks [nnzb, bh, bw] of a @ b, summed over the batch; zero beyond `shape`."""
    (m, n), (bh, bw) = call.shape, call.block_shape
    product = call.a.double() @ call.b.double()
    if product.dim() > 2:
        product = product.flatten(0, -3).sum(0)
    padded = F.pad(product, (0, -n % bw, 0, -m % bh))
    pattern = call.pattern
    keep = block_keep(pattern.indptr, pattern.indices, call.shape, call.block_shape)
    blocks = padded.view(keep.shape[0], bh, keep.shape[1], bw).transpose(1, 2)
    return blocks[keep].to(call.out_dtype or call.a.dtype)


def pair_products(call: PairProductsCall) -> torch.Tensor:
    """The blocks of the result, one for each entry of the role `out` of the pairs."""
    x, y = call.first.double(), call.second.double()
    x, y = (x.mT if call.first_transposed else x), (y.mT if call.second_transposed else y)
    pairs = call.pairs
    out = x.new_zeros(pairs.ptr_out.shape[0] - 1, x.shape[1], y.shape[2])
    out.index_add_(0, pairs.out.long(), x[pairs.first.long()] @ y[pairs.second.long()])
    return out.to(call.out_dtype or call.first.dtype)
