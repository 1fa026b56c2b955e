"""Implementation `dense` of block-sparse products: densify the matrix and multiply it with torch.

The better choice if few blocks are missing, or if blocks are too small for their rows to feed a GPU
(`choice`). Absent blocks are zeros here, so NaN and inf of the dense operand are multiplied with
them and spread.
"""

from collections.abc import Sequence
from functools import partial

import torch

from ..calls.matmul import MatmulCall, Pattern, SddmmCall
from ..core.arch import arch_of
from ..dispatch.machine import why_no_kernels
from ..launch.launcher import cdiv
from ..launch.recording import unrecorded
from ..launch.replay import launch_recorded
from ..sparse.pattern import rows_of_entries
from ..sparse.validate import zero_padding
from .eager import finish
from .rows import merged_views

# Requirements of the densify kernel: Triton's oldest GPU, whole chunks of a row.
LEAST_SM, COLUMNS_STEP = 80, 8


def matmul(call: MatmulCall) -> torch.Tensor:
    """op(A) @ dense, or dense @ op(A) if `dense_left`, with its epilogue."""
    matrix = densified(call.values, call.pattern, call.shape)
    matrix = matrix.mT if call.transposed else matrix
    extras = (call.bias, call.residual, call.activation)
    plain = call.result_dtype == call.dense.dtype and all(x is None for x in extras)
    factors = (call.dense, matrix) if call.dense_left else (matrix, call.dense)
    return finish(_product(*factors, rounded=plain), call)


def sddmm(call: SddmmCall) -> torch.Tensor:
    """The blocks [nnzb, bh, bw] of a @ b, summed over the batch; zero beyond `shape`."""
    (m, n), (bh, bw) = call.shape, call.block_shape
    a, b, indices = call.a, call.b, call.pattern.indices
    if (lines := merged_views([a.mT, b], 1)) is not None:
        # a sum over the batch of sums over k is one longer sum
        lines_a, b = lines
        a = lines_a.mT
    rows = rows_of_entries(call.pattern.indptr, indices.shape[0])
    # one product is rounded once, to any dtype; of a batch, the sum is what is rounded
    rounded = a.dim() == 2 and call.out_dtype in (None, a.dtype)
    product = _product(a, b, rounded=rounded)
    if product.dim() > 2:
        product = product.flatten(0, -3).sum(0)
    if _kernels_run_on(a) and product.stride(-1) == 1:
        from .triton.sample import launch_sample

        out = call.empty_out()
        # torch has computed the product, so replaying launches would not repeat the call
        with unrecorded():
            launch_sample(out, product, rows, indices)
        return out
    padded = torch.nn.functional.pad(product, (0, -n % bw, 0, -m % bh))
    blocks = padded.view(cdiv(m, bh), bh, cdiv(n, bw), bw).transpose(1, 2)
    found = blocks[rows.long(), indices.long()].to(call.out_dtype or a.dtype)
    return zero_padding(found, (m, n), rows, indices)


def _kernels_run_on(x: torch.Tensor) -> bool:
    """Whether portable kernels can be compiled for the device of `x`."""
    arch = arch_of(x.device)
    return arch.sm >= LEAST_SM and why_no_kernels(arch) is None


def densified(values: torch.Tensor, pattern: Pattern, shape: Sequence[int]) -> torch.Tensor:
    """The stored matrix as a view [M, K] of whole blocks; in one pass if the kernel supports it."""
    (m, k), (nnzb, block_h, block_w) = shape, values.shape
    rows_b, cols_b = cdiv(m, block_h), cdiv(k, block_w)
    if _kernels_run_on(values) and block_w % COLUMNS_STEP == 0 and values.is_contiguous():
        from .triton.densify import block_table, launch_densify

        full = values.new_empty(rows_b * block_h, cols_b * block_w)
        if not (full.numel() and nnzb):
            return full.zero_()[:m, :k]
        table = block_table(pattern.indptr, pattern.indices, cols_b)
        kind = ("densify", full.shape, values.shape, values.dtype)
        # torch computes the product that follows, so these launches alone would not repeat the call
        roles = (full, values, table)
        launch_recorded(kind, roles, partial(launch_densify, full, values, table))
        return full[:m, :k]
    blocks = values.new_zeros(rows_b, block_h, cols_b, block_w)
    rows = rows_of_entries(pattern.indptr, nnzb)
    blocks.transpose(1, 2)[rows.long(), pattern.indices.long()] = values
    return blocks.view(rows_b * block_h, cols_b * block_w)[:m, :k]


def _product(a: torch.Tensor, b: torch.Tensor, *, rounded: bool) -> torch.Tensor:
    """a @ b in the dtype of the operands if `rounded`, else in that of its accumulator."""
    if a.dtype.itemsize > 2:
        return torch.matmul(a, b)
    if not a.is_cuda:
        # the precision in which a CPU sums 16-bit products varies
        product = torch.matmul(a.float(), b.float())
        return product.to(a.dtype) if rounded else product
    if rounded:
        return torch.matmul(a, b)
    batch = max(a.shape[:-2], b.shape[:-2], key=len)
    a3, b3 = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    product = torch.bmm(a3, b3, out_dtype=torch.float32)
    return product.view(*batch, *product.shape[-2:])
