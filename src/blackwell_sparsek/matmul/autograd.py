"""Derivatives of the block-sparse operators, in terms of the same operators.

The derivative of each product is again a product with the pattern's transposed metadata, a sampled
product, or a product of pairs with permuted roles; so derivatives of any order exist.
"""

from typing import Any

import torch

from ..core.activations import activation_grad
from ..dispatch.operators import define_autograd
from ..sparse.pattern import rows_of_entries
from ..sparse.product import PairLists
from ..sparse.validate import zero_padding
from .op import bsr_matmul, bsr_pair_products, bsr_sddmm


def _readable(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in the dtype of the operands, with one of the last two dimensions contiguous."""
    grad = grad.to(dtype)
    return grad if 1 in (grad.stride(-1), grad.stride(-2)) else grad.contiguous()


def _matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    values, pattern, shape, transposed, dense, dense_left, bias, residual, activation, _, impl = (
        inputs
    )
    again = activation is not None
    ctx.save_for_backward(
        values if again or dense.requires_grad else None,
        # Activations are what fills memory in training: kept only for the gradient of values.
        dense if again or values.requires_grad else None,
        bias if again else None,
        *pattern,
    )
    ctx.arguments = (shape, transposed, dense_left, activation, _derivative_impl(impl))
    ctx.dtypes = [None if x is None else x.dtype for x in (values, dense, bias, residual)]
    ctx.block_shape = values.shape[1:]


def _matmul_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    values, dense, bias, *pattern = ctx.saved_tensors
    shape, transposed, dense_left, activation, impl = ctx.arguments
    needs_values, _, _, _, needs_dense, _, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    values_dtype, dense_dtype, bias_dtype, residual_dtype = ctx.dtypes
    d_residual = grad.to(residual_dtype) if needs_residual else None
    if activation is not None:
        # `functional` keeps the pre-activation where a gradient is needed; a caller of the
        # operator itself pays for computing it again.
        pre = bsr_matmul(
            values,
            pattern,
            shape,
            transposed,
            dense,
            dense_left,
            bias,
            None,
            None,
            _wider(grad.dtype),
            impl,
        )
        grad = activation_grad(grad, pre, activation)

    d_values = d_dense = d_bias = None
    if needs_bias:
        per_feature = grad if dense_left else grad.mT
        d_bias = per_feature.flatten(0, -2).sum(0, dtype=_wider(grad.dtype))
        d_bias = d_bias.to(bias_dtype)
    grad = _readable(grad, values_dtype)
    if needs_dense:
        d_dense = bsr_matmul(
            values,
            pattern,
            shape,
            not transposed,
            grad,
            dense_left,
            None,
            None,
            None,
            dense_dtype,
            impl,
        )
    if needs_values:
        a, b = (dense.mT, grad) if dense_left else (grad, dense.mT)
        if transposed:
            a, b = b.mT, a.mT
        d_values = bsr_sddmm(a, b, pattern, shape, ctx.block_shape, values_dtype, impl)
    return (
        *(d_values, [None] * len(pattern), None, None, d_dense, None, d_bias, d_residual),
        *(None, None, None),
    )


def _derivative_impl(impl: str) -> str:
    """What a derivative is computed with: other products than the one `impl` was asked for.

    The portable implementations have all of them; a special one may not, so `auto` chooses.
    """
    return impl if impl in ("reference", "eager", "dense", "triton") else "auto"


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sddmm_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, pattern, shape, _, _, impl = inputs
    ctx.save_for_backward(a, b, *pattern)
    ctx.arguments = (shape, _derivative_impl(impl))


def _sddmm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b, *pattern = ctx.saved_tensors
    shape, impl = ctx.arguments
    # What a consumer asks of the padding is no derivative of anything: it is zero by definition.
    rows = rows_of_entries(pattern[0], pattern[1].shape[0])
    grad = zero_padding(grad.to(a.dtype), (shape[0], shape[1]), rows, pattern[1])
    da = db = None
    if ctx.needs_input_grad[0]:
        da = bsr_matmul(grad, pattern, shape, False, b.mT, False, None, None, None, a.dtype, impl)
    if ctx.needs_input_grad[1]:
        db = bsr_matmul(grad, pattern, shape, False, a.mT, True, None, None, None, b.dtype, impl)
    return da, db, [None] * len(pattern), None, None, None, None


def _pairs_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    first, second, pairs, first_transposed, second_transposed, _, impl = inputs
    ctx.save_for_backward(first, second, *pairs)
    ctx.arguments = (first_transposed, second_transposed, impl)


def _pairs_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    first, second, *tensors = ctx.saved_tensors
    pairs = PairLists(*tensors)
    tf, ts, impl = ctx.arguments
    grad = grad.to(first.dtype)
    d_first = d_second = None
    if ctx.needs_input_grad[0]:
        # O = op(F) op(S): dF = G op(S)^T, or its transpose op(S) G^T.
        if tf:
            roles = pairs.solve_first().swapped()
            d_first = bsr_pair_products(second, grad, roles, ts, True, first.dtype, impl)
        else:
            roles = pairs.solve_first()
            d_first = bsr_pair_products(grad, second, roles, False, not ts, first.dtype, impl)
    if ctx.needs_input_grad[1]:
        # dS = op(F)^T G, or its transpose G^T op(F).
        if ts:
            roles = pairs.solve_second().swapped()
            d_second = bsr_pair_products(grad, first, roles, True, tf, second.dtype, impl)
        else:
            roles = pairs.solve_second()
            d_second = bsr_pair_products(first, grad, roles, not tf, False, second.dtype, impl)
    return d_first, d_second, [None] * len(tensors), None, None, None, None


define_autograd("bsr_matmul", _matmul_setup, _matmul_backward)
define_autograd("bsr_sddmm", _sddmm_setup, _sddmm_backward)
define_autograd("bsr_pair_products", _pairs_setup, _pairs_backward)
