"""The arguments of the block-sparse operators as problems that an implementation is chosen for."""

import torch

from ..core.arch import arch_of
from ..tuning.problem_bsr import BsrProblem


def matmul_problem(
    values: torch.Tensor,
    shape: list[int],
    transposed: bool,
    dense: torch.Tensor,
    dense_left: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> BsrProblem:
    """The problem of a call of `bsk::bsr_matmul`."""
    block_shape = (values.shape[1], values.shape[2])
    return BsrProblem(
        kind="matmul",
        arch=arch_of(values.device),
        dtype=values.dtype,
        out_dtype=out_dtype or dense.dtype,
        shape=(shape[1], shape[0]) if transposed else (shape[0], shape[1]),
        block_shape=block_shape[::-1] if transposed else block_shape,
        nnz_blocks=values.shape[0],
        n=dense.shape[-2 if dense_left else -1],
        batch=dense.shape[:-2].numel(),
        dense_left=dense_left,
        transposed=transposed,
        row_major=_row_major(dense),
        tma=_tma(values, shape, transposed, dense, dense_left, bias, out_dtype or dense.dtype),
        bias=bias is not None,
        residual=residual is not None,
        activation=activation,
    )


def sddmm_problem(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    block_shape: list[int],
    out_dtype: torch.dtype | None,
) -> BsrProblem:
    """The problem of a call of `bsk::bsr_sddmm`."""
    return BsrProblem(
        kind="sddmm",
        arch=arch_of(a.device),
        dtype=a.dtype,
        out_dtype=out_dtype or a.dtype,
        shape=(shape[0], shape[1]),
        block_shape=(block_shape[0], block_shape[1]),
        nnz_blocks=pattern[1].shape[0],
        n=a.shape[-1],
        batch=a.shape[:-2].numel(),
        row_major=_row_major(a, b),
    )


def pairs_problem(
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: list[torch.Tensor],
    first_transposed: bool,
    second_transposed: bool,
    out_dtype: torch.dtype | None,
) -> BsrProblem:
    """The problem of a call of `bsk::bsr_pair_products`."""
    block_shape = _seen(first, first_transposed)
    other_block_shape = _seen(second, second_transposed)
    return BsrProblem(
        kind="pairs",
        arch=arch_of(first.device),
        dtype=first.dtype,
        out_dtype=out_dtype or first.dtype,
        shape=block_shape,
        block_shape=block_shape,
        nnz_blocks=first.shape[0],
        n=second.shape[0],
        batch=pairs[0].shape[0],
        other_block_shape=other_block_shape,
    )


def _seen(blocks: torch.Tensor, transposed: bool) -> tuple[int, int]:
    """Block shape of an operand as seen."""
    _, height, width = blocks.shape
    return (width, height) if transposed else (height, width)


def _row_major(*tensors: torch.Tensor) -> bool:
    return all(x.stride(-1) == 1 for x in tensors)


def _tma(
    values: torch.Tensor,
    shape: list[int],
    transposed: bool,
    dense: torch.Tensor,
    dense_left: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> bool:
    """Whether values, dense operand and result can be copied by TMA: all in steps of 16 bytes."""
    columns = shape[1 if transposed == (not dense_left) else 0] if dense_left else dense.shape[-1]
    strides = [s for size, s in zip(dense.shape, dense.stride(), strict=True) if size > 1]
    outer = [s * dense.element_size() for s in strides if s != 1]
    return (
        values.is_contiguous()
        and values.data_ptr() % 16 == 0
        and dense.data_ptr() % 16 == 0
        and all(stride > 0 and stride % 16 == 0 for stride in outer)
        and columns * out_dtype.itemsize % 16 == 0
        and (bias is None or bias.is_contiguous())
    )
