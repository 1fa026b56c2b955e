"""Options of the products of block-sparse matrices, and the checks of their arguments."""

from typing import Any, NamedTuple

import torch

from ..core.activations import ACTIVATIONS
from ..core.checks import (
    check_choice,
    check_dtype,
    check_same_device,
    check_shape,
    check_tangent,
    check_tensor,
    message,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput, InvalidType
from ..sparse.matrix import BSRMatrix
from ..sparse.validate import VALUE_DTYPES


class Options(NamedTuple):
    """All that the launches of a product with a dense operand depend on besides tensors."""

    transposed: bool
    dense_left: bool
    activation: str | None
    out_dtype: torch.dtype | None
    impl: str


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of any of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def check_options(activation: str | None, out_dtype: torch.dtype | None, impl: str) -> None:
    """Check the options of a product that are not tensors."""
    op = "matmul"
    check_choice(op, "impl", impl, IMPLS)
    check_choice(op, "activation", activation, ACTIVATIONS)
    check_out_dtype(op, out_dtype)


def check_out_dtype(op: str, out_dtype: torch.dtype | None) -> None:
    """Check the dtype that was asked for."""
    if out_dtype is not None and out_dtype not in VALUE_DTYPES:
        names = ", ".join(str(d) for d in VALUE_DTYPES)
        raise InvalidType(message(op, "out_dtype", "is unsupported", f"one of {names}", out_dtype))


def check_operand(op: str, arg: str, x: Any) -> None:
    """Check that an operand is a tensor that products take."""
    check_tensor(op, arg, x)
    check_tangent(op, arg, x)
    check_dtype(op, arg, x, VALUE_DTYPES)


def check_blocks(op: str, arg: str, matrix: BSRMatrix) -> None:
    """Check that there is a block for each entry of the pattern, since kernels read that many.

    The values of a layer can be replaced at any time, without its pattern.
    """
    pattern, stored = matrix.pattern, matrix.storage
    expected = (pattern.nnz_blocks, *pattern.block_shape)
    if tuple(stored.shape) != expected:
        problem = "has values that do not fit its pattern"
        raise InvalidInput(message(op, arg, problem, list(expected), list(stored.shape)))


def check_readable(op: str, arg: str, x: torch.Tensor) -> None:
    """Check that one of the last two dimensions has stride 1 or size 1."""
    strided = [x.shape[d] > 1 and x.stride(d) != 1 for d in (-1, -2)]
    if all(strided) and x.numel() > 0:
        raise InvalidInput(
            message(
                op,
                arg,
                "is contiguous in neither of its last two dimensions",
                "stride 1 in one of them (call .contiguous())",
                f"strides {tuple(x.stride())}",
            )
        )


def check_extra(
    op: str,
    arg: str,
    x: Any,
    shape: tuple[int, ...],
    dense: torch.Tensor,
    out_dtype: torch.dtype,
) -> None:
    """Check a bias or a residual."""
    check_tensor(op, arg, x)
    check_tangent(op, arg, x)
    check_shape(op, arg, x, shape)
    check_dtype(op, arg, x, tuple(dict.fromkeys((dense.dtype, out_dtype, torch.float32))))
    check_same_device(op, {arg: x, "the operands": dense})
