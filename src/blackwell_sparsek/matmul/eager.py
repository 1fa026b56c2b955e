"""Block-sparse products in plain PyTorch, on any device, with work proportional to stored blocks.

One block row of A with c blocks is a dense product [bh, c*bw] @ [c*bw, N] once its blocks are laid
side by side and the block rows of X that they multiply are stacked. Both are gathered chunk by
chunk; rows with equal c share a batched product. Accumulation is in float32 (float64 for float64),
with one rounding at the end.

`sddmm` is the same walk with the roles of the result and of A exchanged.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from ..calls.fp8 import SCALE_CHANNELS, Fp8MatmulCall
from ..calls.matmul import MatmulCall, PairProductsCall, SddmmCall
from ..core.activations import activate
from ..launch.launcher import cdiv
from ..sparse.pattern import rows_of_entries
from ..sparse.validate import zero_padding
from .rows import BlockRows, block_rows


def finish(product: torch.Tensor, call: MatmulCall) -> torch.Tensor:
    """activation(product + bias) + residual, contiguous and rounded once."""
    if call.bias is not None:
        product = product + (call.bias if call.dense_left else call.bias[:, None])
    product = activate(product, call.activation)
    if call.residual is not None:
        product = product + call.residual
    return product.to(call.result_dtype).contiguous()


# Block rows with equally many blocks, which share one batched product.
#
# Finding them needs the row counts on the host: one synchronisation on a GPU, once per pattern,
# since the result is kept as long as the pattern's tensor lives.


class RowGroup(NamedTuple):
    """Rows with the same count of entries; `entries` [rows, count] are positions in the pattern."""

    rows: list[int]
    row_ids: torch.Tensor
    entries: torch.Tensor


_groups_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def row_groups(indptr: torch.Tensor) -> list[RowGroup]:
    """The rows of `indptr` [rows + 1] that are not empty, grouped by their count."""
    if indptr not in _groups_of:
        found = _find_groups(indptr.long())
        if indptr.is_cuda:
            # the next product with this pattern may run on another stream
            torch.cuda.current_stream(indptr.device).synchronize()
        _groups_of[indptr] = found
    groups: list[RowGroup] = _groups_of[indptr]
    return groups


def _find_groups(indptr: torch.Tensor) -> list[RowGroup]:
    counts, order = torch.sort(indptr.diff(), stable=True)
    distinct, sizes = torch.unique_consecutive(counts, return_counts=True)
    groups = []
    for count, row_ids in zip(distinct.tolist(), torch.split(order, sizes.tolist()), strict=True):
        if count > 0:
            within = torch.arange(count, device=indptr.device)
            entries = indptr[row_ids][:, None] + within
            groups.append(RowGroup(row_ids.tolist(), row_ids, entries))
    return groups


def rows_at_once(device: torch.device, elements_per_row: int) -> int:
    """How many rows to gather into one batched product.

    On a CPU, a product of 128 Ki gathered elements takes much longer than the overhead of its call,
    and gathering one row at a time keeps the copy in the cache; smaller rows are batched up to
    4 MiB. On a GPU launches dominate, so batches are bounded only by 256 MiB of scratch memory.
    """
    if device.type == "cpu":
        return 1 if elements_per_row >= 2**17 else 2**20 // max(1, elements_per_row)
    return max(1, 2**26 // max(1, elements_per_row))


def columns_at_once(device: torch.device, elements_per_column: int) -> int:
    """How many columns of the dense operand to gather for one row, with similar bounds."""
    limit = 2**21 if device.type == "cpu" else 2**26
    return max(64, limit // max(1, elements_per_column))


# Products of pairs of blocks, summed per block of the result, in plain PyTorch.
#
# Blocks of the result that are sums of equally many pairs share one batched product: the sum over
# pairs becomes part of the contraction, so nothing is rounded or scattered in between.


def pair_products(call: PairProductsCall) -> torch.Tensor:
    """out[o] = sum of op(first[f]) @ op(second[s]) over the triples (f, s, o) of the pairs."""
    first, second, pairs = call.first, call.second, call.pairs
    out = call.empty_out().zero_()
    compute = accumulation_dtype(first.dtype)
    for group in row_groups(pairs.ptr_out):
        pair = pairs.order_out[group.entries].long()
        per_row = pair.shape[1] * (first.shape[1:].numel() + second.shape[1:].numel())
        step = max(1, rows_at_once(first.device, per_row))
        for i in range(0, pair.shape[0], step):
            part = pair[i : i + step]
            x = _gather(first, pairs.first[part], compute)
            y = _gather(second, pairs.second[part], compute)
            left = _stack(x).mT if call.first_transposed else _beside(x)
            right = _beside(y).mT if call.second_transposed else _stack(y)
            out[group.row_ids[i : i + step]] = torch.bmm(left, right).to(out.dtype)
    return out


def _gather(blocks: torch.Tensor, entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[g, c, p, q]: the blocks [p, q] of each of g lists."""
    picked = blocks.index_select(0, entries.flatten()).to(dtype)
    return picked.view(*entries.shape, *blocks.shape[1:])


def _stack(x: torch.Tensor) -> torch.Tensor:
    """[g, c*p, q]: blocks stacked; a view."""
    return x.flatten(1, 2)


def _beside(x: torch.Tensor) -> torch.Tensor:
    """[g, p, c*q]: blocks side by side."""
    return x.transpose(1, 2).flatten(2)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(call: MatmulCall) -> torch.Tensor:
    """op(A) @ dense, or dense @ op(A) if `dense_left`, with its epilogue."""
    rows = block_rows(call)
    _, bh, bw = rows.blocks.shape
    dense, dense_left = call.dense, call.dense_left
    x = _collapsed(dense).mT if dense_left else dense
    x = _padded_rows(x.to(accumulation_dtype(call.values.dtype)), call.inner, bw)

    acc = _accumulator(x, cdiv(call.features, bh) * bh, dense_left)
    if acc.numel() > 0:
        for group in row_groups(rows.indptr):
            _multiply_rows(group, rows, x, acc)

    product = acc[..., : call.features, :]
    if dense_left:
        product = product.mT.reshape(*dense.shape[:-1], call.features)
    return finish(product, call)


def matmul_fp8(call: Fp8MatmulCall) -> torch.Tensor:
    """The product in fp32 of what is stored times its scales."""
    given, channels = call.given, call.given.dense.shape[-1]
    scales = call.x_descale.repeat_interleave(SCALE_CHANNELS, -1)[..., :channels]
    values = given.values.float() * call.descale[:, None, None]
    return matmul(replace(given, values=values, dense=given.dense.float() * scales))


def _collapsed(x: torch.Tensor) -> torch.Tensor:
    """[..., T, K] as [batch * T, K] if that is a view: one large product beats many small ones."""
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
    """Whether the second to last dimension, and not the last, has stride 1."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _accumulator(x: torch.Tensor, rows: int, dense_left: bool) -> torch.Tensor:
    """Zeros, logical [..., rows, N], laid out as the result will be."""
    if dense_left:
        return x.new_zeros(*x.shape[:-2], x.shape[-1], rows).mT
    return x.new_zeros(*x.shape[:-2], rows, x.shape[-1])


def _multiply_rows(group: RowGroup, rows: BlockRows, x: torch.Tensor, acc: torch.Tensor) -> None:
    """acc[rows of the group] = their blocks times `x`."""
    _, bh, bw = rows.blocks.shape
    block_cols = rows.indices[group.entries]
    if rows.perm is not None:
        # blocks are stored by columns, so those of a row are stacked
        weights = _stacked(rows.blocks.mT, rows.perm[group.entries]).mT
    elif _rows_contiguous(x) and x.shape[-1] > 1:
        # BLAS is a third slower if both factors are contiguous along the contraction. A single
        # column is excepted: it would be summed term by term, with several times the error.
        weights = _stacked(rows.blocks.mT, group.entries).mT
    else:
        weights = _side_by_side(rows.blocks, group.entries)
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
    """target = a @ b, without a temporary if BLAS can write the target's strides."""
    if b.dim() == 2:
        torch.mm(a, b, out=target)
    else:
        target.copy_(torch.matmul(a, b))


def gather_block_rows(x: torch.Tensor, block_rows: torch.Tensor, block: int) -> torch.Tensor:
    """Logical [..., g, c*block, N]: for each of g lists, c block rows of `x` [..., rows, N].

    The copy keeps the layout of `x`, so that its contiguous runs are long in both layouts.
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


def sddmm(call: SddmmCall) -> torch.Tensor:
    """The blocks [nnzb, bh, bw] of a @ b, summed over the batch; zero beyond `shape`."""
    (m, n), (bh, bw) = call.shape, call.block_shape
    a, b, indptr, indices = call.a, call.b, call.pattern.indptr, call.pattern.indices
    out = call.empty_out().zero_()
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
