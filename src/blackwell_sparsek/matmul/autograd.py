"""Derivatives of the block-sparse operators, in terms of the same operators.

The derivative of each product is again a product with the pattern's transposed metadata, a sampled
product, or a product of pairs with permuted roles, so derivatives of any order exist. `multiply`,
`sample` and `multiply_pairs` are the operators with derivatives for `torch.func` as well.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..calls.matmul import (
    MatmulCall,
    PairProductsCall,
    Pattern,
    SddmmCall,
    pattern_tensors,
)
from ..core.activations import activation_grad
from ..dispatch.operators import define_autograd, transformable
from ..sparse.pattern import rows_of_entries
from ..sparse.product import PairLists
from ..sparse.validate import zero_padding
from .op import bsr_matmul, bsr_pair_products, bsr_sddmm


def derivative_impl(impl: str) -> str:
    """The implementation of a derivative, which consists of other products than the forward.

    The portable implementations have all products; others may not, so `auto` chooses for them.
    """
    return impl if impl in ("reference", "eager", "dense", "triton") else "auto"


def readable(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in the dtype of the operands, with one of the last two dimensions contiguous."""
    grad = grad.to(dtype)
    return grad if 1 in (grad.stride(-1), grad.stride(-2)) else grad.contiguous()


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Product(NamedTuple):
    """Everything that the derivative of a matmul needs besides tensors."""

    shape: Any
    block_shape: Any
    transposed: bool
    dense_left: bool
    activation: str | None
    impl: str
    values_dtype: torch.dtype
    dense_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    residual_dtype: torch.dtype | None


def _matmul_setup(
    ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor, *, keep_all: bool = False
) -> None:
    *arguments, impl = inputs
    call = MatmulCall(*arguments)
    values, dense = call.values, call.dense
    again = call.activation is not None or keep_all
    ctx.save_for_backward(
        values if again or dense.requires_grad else None,
        # Activations dominate memory in training: keep them only for the gradient of values.
        dense if again or values.requires_grad else None,
        call.bias if again else None,
        *call.pattern,
    )
    ctx.product = Product(
        shape=call.shape,
        block_shape=values.shape[1:],
        transposed=call.transposed,
        dense_left=call.dense_left,
        activation=call.activation,
        impl=derivative_impl(impl),
        values_dtype=values.dtype,
        dense_dtype=dense.dtype,
        bias_dtype=None if call.bias is None else call.bias.dtype,
        residual_dtype=None if call.residual is None else call.residual.dtype,
    )


class Saved(NamedTuple):
    """The tensors of a matmul that its derivative needs; None for the others."""

    values: torch.Tensor | None
    dense: torch.Tensor | None
    bias: torch.Tensor | None
    pattern: Pattern
    pre: torch.Tensor | None = None
    """The result before the activation; it is computed again where it was not kept."""
    d_pre: torch.Tensor | None = None
    """The gradient of `pre` besides that through the activation: second derivatives have one."""


class ProductGradients(NamedTuple):
    """Gradients of the tensors of a matmul; None if not needed."""

    values: torch.Tensor | None = None
    dense: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None


def _matmul_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    values, dense, bias, *tensors = ctx.saved_tensors
    pattern = pattern_tensors(tensors)
    # which gradients are needed, by the names of the arguments
    call = MatmulCall(*ctx.needs_input_grad[:-1])
    needs = Needs(call.values, call.dense, call.bias, call.residual)
    saved = Saved(values, dense, bias, pattern)
    made = product_gradients(ctx.product, saved, grad, needs)
    # in the order of the schema
    return (
        *(made.values, [None] * len(pattern), None, None, made.dense, None),
        *(made.bias, made.residual, None, None, None),
    )


class Needs(NamedTuple):
    """Which gradients of a matmul are needed."""

    values: Any
    dense: Any
    bias: Any
    residual: Any


def product_gradients(
    product: Product, saved: Saved, grad: torch.Tensor, needs: Needs
) -> ProductGradients:
    """The gradients of a matmul by the operators, so that they have derivatives themselves."""
    values, dense, bias, pattern, pre, d_pre = saved
    dense_left, impl = product.dense_left, product.impl
    d_values = d_dense = d_bias = d_residual = None
    if needs.residual:
        d_residual = grad.to(product.residual_dtype)
    if product.activation is not None:
        if pre is None:
            # The public function keeps the pre-activation if a gradient is needed; direct callers
            # of the operator pay for computing it again.
            assert values is not None and dense is not None
            shape, transposed = product.shape, product.transposed
            layer = MatmulCall(values, pattern, shape, transposed, dense, dense_left, bias)
            layer = replace(layer, out_dtype=_wider(grad.dtype))
            pre = multiply(*layer.arguments, impl)
        grad = activation_grad(grad, pre, product.activation)
    grad = grad if d_pre is None else grad + d_pre
    if needs.bias:
        d_bias = bias_gradient(product, grad)
    grad = readable(grad, product.values_dtype)
    if needs.dense:
        d_dense = multiply(*gradient_of_dense(product, values, pattern, grad).arguments, impl)
    if needs.values:
        d_values = sample(*gradient_of_values(product, dense, pattern, grad).arguments, impl)
    return ProductGradients(d_values, d_dense, d_bias, d_residual)


def bias_gradient(product: Product, grad: torch.Tensor) -> torch.Tensor:
    """The sum of `grad` over everything but the features."""
    features = grad.dim() - (1 if product.dense_left else 2)
    others = [dim for dim in range(grad.dim()) if dim != features]
    return grad.sum(others, dtype=_wider(grad.dtype)).to(product.bias_dtype)


def gradient_of_dense(
    product: Product, values: Any, pattern: Pattern, grad: torch.Tensor
) -> MatmulCall:
    """The product that is the gradient of the dense operand."""
    shape, dense_left = product.shape, product.dense_left
    back = MatmulCall(values, pattern, shape, not product.transposed, grad, dense_left)
    return replace(back, out_dtype=product.dense_dtype)


def gradient_of_values(
    product: Product, dense: Any, pattern: Pattern, grad: torch.Tensor
) -> SddmmCall:
    """The sampled product that is the gradient of the stored blocks."""
    a, b = (dense.mT, grad) if product.dense_left else (grad, dense.mT)
    if product.transposed:
        a, b = b.mT, a.mT
    return SddmmCall(a, b, pattern, product.shape, product.block_shape, product.values_dtype)


def _sddmm_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *arguments, impl = inputs
    call = SddmmCall(*arguments)
    ctx.save_for_backward(call.a, call.b, *call.pattern)
    ctx.shape, ctx.impl = call.shape, derivative_impl(impl)


def _sddmm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b, *tensors = ctx.saved_tensors
    pattern, shape, impl = pattern_tensors(tensors), ctx.shape, ctx.impl
    # Padding is zero by definition, so a gradient that arrives there is dropped.
    rows = rows_of_entries(pattern.indptr, pattern.indices.shape[0])
    grad = zero_padding(grad.to(a.dtype), (shape[0], shape[1]), rows, pattern.indices)
    da = db = None
    needs_a, needs_b, *_ = ctx.needs_input_grad
    if needs_a:
        left = MatmulCall(grad, pattern, shape, False, b.mT, False, out_dtype=a.dtype)
        da = multiply(*left.arguments, impl)
    if needs_b:
        right = MatmulCall(grad, pattern, shape, False, a.mT, True, out_dtype=b.dtype)
        db = multiply(*right.arguments, impl)
    return da, db, [None] * len(pattern), None, None, None, None


def _pairs_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *arguments, impl = inputs
    call = PairProductsCall(*arguments)
    ctx.save_for_backward(call.first, call.second, *call.pairs)
    ctx.transposed, ctx.impl = (call.first_transposed, call.second_transposed), impl


def _pairs_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    first, second, *tensors = ctx.saved_tensors
    pairs, impl = PairLists(*tensors), ctx.impl
    tf, ts = ctx.transposed
    grad = grad.to(first.dtype)
    d_first = d_second = None
    needs_first, needs_second, *_ = ctx.needs_input_grad
    if needs_first:
        # O = op(F) op(S): dF = G op(S)^T, or its transpose op(S) G^T.
        roles, dtype = pairs.solve_first(), first.dtype
        if tf:
            call = PairProductsCall(second, grad, roles.swapped(), ts, True, dtype)
        else:
            call = PairProductsCall(grad, second, roles, False, not ts, dtype)
        d_first = multiply_pairs(*call.arguments, impl)
    if needs_second:
        # dS = op(F)^T G, or its transpose G^T op(F).
        roles, dtype = pairs.solve_second(), second.dtype
        if ts:
            call = PairProductsCall(grad, first, roles.swapped(), True, tf, dtype)
        else:
            call = PairProductsCall(first, grad, roles, not tf, False, dtype)
        d_second = multiply_pairs(*call.arguments, impl)
    return d_first, d_second, [None] * len(pairs), None, None, None, None


# inside of a transform, tensors may not tell whether they have a gradient
multiply = transformable(bsr_matmul, partial(_matmul_setup, keep_all=True), _matmul_backward)
sample = transformable(bsr_sddmm, _sddmm_setup, _sddmm_backward)
multiply_pairs = transformable(bsr_pair_products, _pairs_setup, _pairs_backward)
define_autograd("bsr_matmul", _matmul_setup, _matmul_backward)
define_autograd("bsr_sddmm", _sddmm_setup, _sddmm_backward)
define_autograd("bsr_pair_products", _pairs_setup, _pairs_backward)
