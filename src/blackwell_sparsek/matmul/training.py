"""Products that need gradients, without the overhead of an operator.

`bsk::bsr_matmul` has a derivative for everything that sees the operator: transforms, modes,
compilers, autocast. torch's overhead for a Python operator with list arguments is longer than a
small training step. If none of them intercepts a call, `trained_product` gives autograd the same
derivative through an `autograd.Function`, whose forward and backward passes replay recorded
launches: the product; the gradients of activation and bias, in one pass over `dy`; the product with
the transpose; the sampled product.
"""

from typing import Any

import torch

from ..calls.matmul import MatmulCall, PatternTensors, SddmmCall, pattern_tensors
from ..core.activations import ACTIVATIONS, activate
from ..core.arch import arch_of
from ..core.checks import check_choice
from ..dispatch.machine import why_not_portable
from ..dispatch.operators import is_in_older_batch
from ..launch.replay import described, is_plain_call, record, repeat
from ..sparse.matrix import BSRMatrix
from .autograd import (
    Needs,
    Product,
    ProductGradients,
    Saved,
    bias_gradient,
    derivative_impl,
    gradient_of_dense,
    gradient_of_values,
    product_gradients,
    readable,
)
from .choice import matmul_dispatch, sddmm_dispatch
from .inputs import Options, check_extra, needs_grad
from .products import replayed_product
from .rows import FeatureViews, feature_views


def trains(
    sparse: BSRMatrix,
    dense: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: Options,
) -> bool:
    """Whether this call needs gradients that `trained_product` can provide."""
    if torch.compiler.is_compiling():
        return False
    tensors = (sparse.storage, dense, bias, residual)
    if not all(x is None or isinstance(x, torch.Tensor) for x in tensors):
        return False  # the checks of the full call report it
    if dense is None or dense.is_meta or dense.dim() < 2 or not needs_grad(*tensors):
        return False
    if torch.is_autocast_enabled(dense.device.type):
        return False
    found = described(options, tensors, gradients=True)
    # a pattern that may have been written to is read by the operator
    return found is not None and found.trains and _pattern(sparse) is not None


def trained_product(
    sparse: BSRMatrix,
    dense: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """A product whose gradients are those of `bsk::bsr_matmul`."""
    made: Any = _TrainedProduct.apply(sparse.storage, dense, bias, residual, (sparse, options))
    if options.activation is None:
        product: torch.Tensor = made
    else:
        product, _ = made
    return product


def _pattern(sparse: BSRMatrix) -> PatternTensors | None:
    tensors = pattern_tensors(sparse.pattern.tensors())
    return tensors if isinstance(tensors, PatternTensors) else None


class _TrainedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        dense: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        # one tuple for all that has no gradient, because torch spends time on every argument
        others: tuple[BSRMatrix, Options],
    ) -> Any:
        sparse, options = others
        activation = options.activation
        if activation is None:
            out, pre = replayed_product(sparse, dense, bias, residual, options), None
        else:
            # the product is asked for without them, so it does not check them
            check_choice("matmul", "activation", activation, ACTIVATIONS)
            linear = options._replace(activation=None)
            pre = replayed_product(sparse, dense, bias, None, linear)
            if residual is not None:
                check_extra("matmul", "residual", residual, pre.shape, dense, pre.dtype)
            out = activate(pre, activation)
            if residual is not None:
                out = out + residual.to(out.dtype)
        needs = Needs(*ctx.needs_input_grad[:4])
        # Activations dominate memory in training: keep them only for the gradient of values.
        ctx.save_for_backward(values if needs.dense else None, dense if needs.values else None, pre)
        ctx.product = Product(
            shape=sparse.pattern.shape,
            block_shape=values.shape[1:],
            transposed=options.transposed,
            dense_left=options.dense_left,
            activation=activation,
            impl=derivative_impl(options.impl),
            values_dtype=values.dtype,
            dense_dtype=dense.dtype,
            bias_dtype=None if bias is None else bias.dtype,
            residual_dtype=None if residual is None else residual.dtype,
        )
        ctx.pattern = sparse.pattern
        ctx.set_materialize_grads(False)
        # what is saved and has a derivative must be an input or a result
        return out if pre is None else (out, pre)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, d_pre: torch.Tensor | None = None) -> Any:
        values, dense, pre = ctx.saved_tensors
        product, needs = ctx.product, Needs(*ctx.needs_input_grad[:4])
        if grad is None:
            if d_pre is None:
                return (None,) * 5
            grad = torch.zeros_like(d_pre)
        pattern = pattern_tensors(ctx.pattern.tensors())
        saved = Saved(values, dense, None, pattern, pre, d_pre)
        tensors = [x for x in (grad, values, dense, pre) if x is not None]
        # derivatives of derivatives, modes and batches of gradients need the operators
        plain = is_plain_call(tensors) and not is_in_older_batch(grad)
        if torch.is_grad_enabled() or d_pre is not None or not plain:
            made = product_gradients(product, saved, grad, needs)
        else:
            made = _replayed_gradients(product, saved, grad, needs, ctx.pattern.launches)
        return (*made, None)


def _replayed_gradients(
    product: Product, saved: Saved, grad: torch.Tensor, needs: Needs, known: dict[Any, Any]
) -> ProductGradients:
    """The gradients of a product, each by recorded launches where there are some."""
    values, dense, _, pattern, pre, _ = saved
    d_values = d_dense = d_bias = None
    d_residual = grad.to(product.residual_dtype) if needs.residual else None
    if pre is not None or needs.bias:
        grad, d_bias = _through_epilogue(product, pre, grad, bool(needs.bias), known)
    grad = readable(grad, product.values_dtype)
    # what the shapes and dtypes of the tensors do not tell
    kind = (product.transposed, product.dense_left, product.dense_dtype, product.impl)
    if needs.dense:
        call: Any = gradient_of_dense(product, values, pattern, grad)
        inputs: tuple[Any, ...] = (grad, values)
        d_dense = _replayed(known, ("gradient of dense", *kind), inputs, _multiplied, call, product)
    if needs.values:
        call, inputs = gradient_of_values(product, dense, pattern, grad), (grad, dense)
        d_values = _replayed(known, ("gradient of values", *kind), inputs, _sampled, call, product)
    return ProductGradients(d_values, d_dense, d_bias, d_residual)


def _replayed(
    known: dict[Any, Any], options: tuple[Any, ...], inputs: tuple[Any, ...], run: Any, *args: Any
) -> torch.Tensor:
    """`run(*args)`, by recorded launches where there are some."""
    results = repeat(known, options, inputs, below_autocast=True)
    if results is None:
        results = record(
            *(known, options, inputs, run, *args), operands=len(inputs), below_autocast=True
        )
    (made,) = results
    return made


def _multiplied(call: MatmulCall, product: Product) -> tuple[torch.Tensor]:
    return (matmul_dispatch.run(product.impl, call),)


def _sampled(call: SddmmCall, product: Product) -> tuple[torch.Tensor]:
    return (sddmm_dispatch.run(product.impl, call),)


def _through_epilogue(
    product: Product,
    pre: torch.Tensor | None,
    grad: torch.Tensor,
    with_bias: bool,
    known: dict[Any, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient before the activation, and that of the bias where it is wanted."""
    views = feature_views(product.dense_left, grad, pre)
    if views is None or not _kernels_compile(grad):
        if pre is not None:
            # by torch's own derivative, as compiled calls have it
            with torch.enable_grad():
                leaf = pre.detach().requires_grad_()
                (grad,) = torch.autograd.grad(activate(leaf, product.activation), leaf, grad)
        return grad, bias_gradient(product, grad) if with_bias else None
    options = (
        *("gradient of epilogue", product.dense_left, product.activation),
        *(product.bias_dtype, product.values_dtype, with_bias),
    )
    inputs = (grad,) if pre is None else (grad, pre)
    results = repeat(known, options, inputs, below_autocast=True)
    if results is None:
        args = (product, grad, views, with_bias)
        results = record(
            *(known, options, inputs, _epilogue_gradients, *args),
            operands=len(inputs),
            below_autocast=True,
        )
    made = iter(results)
    before = grad if pre is None else next(made)
    return before, next(made) if with_bias else None


def _kernels_compile(x: torch.Tensor) -> bool:
    arch = arch_of(x.device)
    return not arch.interpreted and why_not_portable(arch, x.dtype) is None


def _epilogue_gradients(
    product: Product, grad: torch.Tensor, views: FeatureViews, with_bias: bool
) -> tuple[torch.Tensor, ...]:
    """The gradient before the activation, where there is one, and that of the bias."""
    from .triton.epilogue_gradients import launch_epilogue_gradients

    made = []
    before = None
    if views.pre is not None:
        made.append(grad.new_empty(grad.shape, dtype=product.values_dtype))
        before = feature_views(product.dense_left, made[0], None)
        assert before is not None
    d_bias = None
    if with_bias:
        d_bias = grad.new_empty(views.grad.shape[0], dtype=product.bias_dtype)
        made.append(d_bias)
    target = None if before is None else before.grad
    launch_epilogue_gradients(target, d_bias, views.grad, views.pre, product.activation)
    return tuple(made)
