"""Block-sparse products in plain PyTorch, on any device, with work proportional to stored blocks.

One block row of A with c blocks is a dense product [bh, c*bw] @ [c*bw, N] once its blocks lie side
by side and the block rows of X that they meet lie below one another. Both are gathered, chunk by
chunk; rows with equal c share a batched product. Accumulation is in float32 (float64 for float64),
with one rounding at the end. The arguments are those of the operators (see `ops.bsr`).

`sddmm` is the same walk with the roles of the result and of A exchanged.
"""

import torch
import torch.nn.functional as F

from ..core.launch import cdiv
from ..formats.bsr_pattern import rows_of_entries
from ..formats.bsr_validate import zero_padding
from .bsr_epilogue import finish
from .bsr_rows import RowGroup, columns_at_once, row_groups, rows_at_once


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    out_dtype = out_dtype or dense.dtype
    # X @ A = (A^T @ X^T)^T: all four cases are block rows of something times a matrix.
    by_columns = transposed != dense_left
    rows, cols = (shape[1], shape[0]) if by_columns else (shape[0], shape[1])
    bh, bw = values.shape[1:][::-1] if by_columns else values.shape[1:]
    if dense_left:
        batch, n = dense.shape[:-2], dense.shape[-2]
        x = _collapsed(dense).mT
    else:
        batch, n = dense.shape[:-2], dense.shape[-1]
        x = dense
    x = _padded_rows(x.to(accumulation_dtype(values.dtype)), cols, bw)

    acc = _accumulator(x, cdiv(rows, bh) * bh, dense_left)
    if acc.numel() > 0:
        for group in row_groups(pattern[2] if by_columns else pattern[0]):
            _multiply_rows(group, values, pattern, by_columns, x, acc, (bh, bw))

    product = acc[..., :rows, :]
    if dense_left:
        product = product.mT.reshape(*batch, n, rows)
    return finish(product, bias, residual, activation, out_dtype, dense_left)


def _collapsed(x: torch.Tensor) -> torch.Tensor:
    """[..., T, K] as [batch * T, K] where that is a view: one large product beats many small."""
    lines = range(x.dim() - 2)
    if all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in lines):
        return x.flatten(0, -2)
    return x


def _padded_rows(x: torch.Tensor, rows: int, block: int) -> torch.Tensor:
    """Logical [..., rows, N] with zero rows up to a multiple of the block, in the same layout."""
    if rows % block == 0:
        return x
    if _rows_contiguous(x):
        return F.pad(x.mT, (0, -rows % block)).mT
    return F.pad(x, (0, 0, 0, -rows % block))


def _rows_contiguous(x: torch.Tensor) -> bool:
    """Whether the second to last dimension is the one with stride 1."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _accumulator(x: torch.Tensor, rows: int, dense_left: bool) -> torch.Tensor:
    """Zeros, logical [..., rows, N], laid out as the result will be."""
    if dense_left:
        return x.new_zeros(*x.shape[:-2], x.shape[-1], rows).mT
    return x.new_zeros(*x.shape[:-2], rows, x.shape[-1])


def _multiply_rows(
    group: RowGroup,
    values: torch.Tensor,
    pattern: list[torch.Tensor],
    by_columns: bool,
    x: torch.Tensor,
    acc: torch.Tensor,
    block_shape: tuple[int, int],
) -> None:
    """acc[rows of the group] = their blocks times `x`."""
    bh, bw = block_shape
    if by_columns:
        block_cols = pattern[3][group.entries]
        weights = _stacked(values, pattern[4][group.entries]).mT
    else:
        block_cols = pattern[1][group.entries]
        if _rows_contiguous(x) and x.shape[-1] > 1:
            # BLAS is a third slower where both factors run along the contraction. A single column
            # would be summed up term by term then, with several times the error.
            weights = _stacked(values.mT, group.entries).mT
        else:
            weights = _side_by_side(values, group.entries)
    weights = weights.to(x.dtype)

    n, per_column = x.shape[-1], group.entries.shape[1] * bw * x.shape[:-2].numel()
    width = min(n, columns_at_once(x.device, per_column))
    step = rows_at_once(x.device, per_column * width)
    for left in range(0, n, width):
        x_part = x[..., left : left + width]
        acc_part = acc[..., left : left + width]
        for i in range(0, len(group.rows), step):
            gathered = gather_block_rows(x_part, block_cols[i : i + step], bw)
            if step > 1:
                product = torch.matmul(weights[i : i + step], gathered)
                acc_blocks = torch.unflatten(acc_part, -2, (-1, bh))
                acc_blocks.index_copy_(-3, group.row_ids[i : i + step], product)
            else:
                top = group.rows[i] * bh
                target = acc_part[..., top : top + bh, :]
                product_into(weights[i], gathered.squeeze(-3), target)


def product_into(a: torch.Tensor, b: torch.Tensor, target: torch.Tensor) -> None:
    """target = a @ b, without a temporary where BLAS can write the target's strides."""
    if b.dim() == 2:
        torch.mm(a, b, out=target)
    else:
        target.copy_(torch.matmul(a, b))


def gather_block_rows(x: torch.Tensor, block_rows: torch.Tensor, block: int) -> torch.Tensor:
    """Logical [..., g, c*block, N]: for each of g lists, c block rows of `x` [..., rows, N].

    The copy keeps the layout of `x`, so that its inner runs are long either way.
    """
    g, c = block_rows.shape
    flat = block_rows.flatten()
    if _rows_contiguous(x):
        picked = torch.unflatten(x.mT, -1, (-1, block)).index_select(-2, flat)
        return picked.view(*picked.shape[:-2], g, c * block).movedim(-2, -3).mT
    picked = torch.unflatten(x, -2, (-1, block)).index_select(-3, flat)
    return picked.view(*picked.shape[:-3], g, c * block, x.shape[-1])


def _side_by_side(values: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """[g, bh, c*bw]: for each of g lists of c entries, their blocks from left to right."""
    (g, c), (_, bh, bw) = entries.shape, values.shape
    lines = entries[:, None, :] * bh + torch.arange(bh, device=entries.device)[:, None]
    picked = values.reshape(-1, bw).index_select(0, lines.flatten())
    return picked.view(g, bh, c * bw)


def _stacked(values: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """[g, c*bh, bw]: for each of g lists of c entries, their blocks from top to bottom."""
    (g, c), (_, bh, bw) = entries.shape, values.shape
    return values.index_select(0, entries.flatten()).view(g, c * bh, bw)


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
    indptr, indices = pattern[0], pattern[1]
    out = a.new_zeros(indices.shape[0], bh, bw, dtype=out_dtype or a.dtype)
    compute = accumulation_dtype(a.dtype)
    lines_a, lines_b = _collapsed(a.mT), _collapsed(b)
    if lines_a.dim() == lines_b.dim() == 2:
        # The sum over the batch joins the contraction.
        a, b = lines_a.mT, lines_b
    a = _padded_rows(a.to(compute), m, bh)
    columns = _padded_rows(b.to(compute).mT, n, bw)

    for group in row_groups(indptr) if a.numel() and columns.numel() else []:
        count = group.entries.shape[1]
        per_row = count * bw * columns.shape[:-2].numel() * columns.shape[-1]
        step = rows_at_once(a.device, per_row)
        block_cols = indices[group.entries]
        for i in range(0, len(group.rows), step):
            gathered = gather_block_rows(columns, block_cols[i : i + step], bw)
            a_rows = torch.unflatten(a, -2, (-1, bh)).index_select(-3, group.row_ids[i : i + step])
            if not _rows_contiguous(columns):
                a_rows = a_rows.mT.contiguous().mT
            product = torch.matmul(a_rows, gathered.mT)
            if product.dim() > 3:
                product = product.flatten(0, -4).sum(0)
            blocks = torch.unflatten(product, -1, (count, bw)).transpose(1, 2)
            out[group.entries[i : i + step]] = blocks.to(out.dtype)
    rows = rows_of_entries(indptr, indices.shape[0])
    return zero_padding(out, (m, n), rows, indices)
