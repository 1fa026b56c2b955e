"""Products of a sparse and a dense operand: replayed, or checked and given to the operator."""

from typing import Any

import torch

from ..calls.matmul import MatmulCall, pattern_tensors
from ..core.activations import activate
from ..core.checks import check_derivatives, check_same_device, check_same_dtype, message
from ..core.errors import InvalidInput
from ..core.torch_state import cast_operand
from ..launch.replay import record, repeat
from ..sparse.matrix import BSRMatrix
from .inputs import (
    Options,
    check_extra,
    check_operand,
    check_options,
    check_readable,
    needs_grad,
)
from .op import bsr_matmul


def replayed_product(
    sparse: BSRMatrix,
    dense: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """The product by launches that were recorded before, or else by the operator."""
    known, inputs = sparse.pattern.launches, (sparse.storage, dense, bias, residual)
    results = repeat(known, options, inputs)
    if results is None:
        checked = (sparse, dense, bias, residual, options)
        results = record(known, options, inputs, _computed, *checked, operands=2)
    (product,) = results
    return product


def _computed(
    sparse: BSRMatrix,
    dense: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor]:
    """Check and compute a product of a sparse and a dense operand."""
    op = "matmul"
    _, dense_left, activation, out_dtype, impl = options
    check_options(activation, out_dtype, impl)
    sparse_arg, dense_arg = ("b", "a") if dense_left else ("a", "b")
    check_operand(op, dense_arg, dense)
    if dense.dim() == 0:
        raise InvalidInput(message(op, dense_arg, "has a wrong rank", "1 or more dimensions", []))
    check_derivatives(op, sparse_arg, sparse.storage)
    storage, dense = cast_operand(sparse.storage), cast_operand(dense)
    is_vector = dense.dim() == 1
    vector_dim = 0 if dense_left else 1
    if is_vector:
        dense = dense.unsqueeze(vector_dim)
    features = sparse.shape[1] if dense_left else sparse.shape[0]
    inner = sparse.shape[0] if dense_left else sparse.shape[1]
    if dense.shape[-1 if dense_left else -2] != inner:
        shapes = f"{list(dense.shape)} for a block-sparse {list(sparse.shape)}"
        expected = f"{inner} {'columns' if dense_left else 'rows'}"
        raise InvalidInput(message(op, dense_arg, "does not fit", expected, shapes))
    check_same_dtype(op, {dense_arg: dense, sparse_arg: storage})
    check_same_device(op, {dense_arg: dense, sparse_arg: storage})
    check_readable(op, dense_arg, dense)
    out_dtype = out_dtype or dense.dtype
    tail = (dense.shape[-2], features) if dense_left else (features, dense.shape[-1])
    out_shape = (features,) if is_vector else (*dense.shape[:-2], *tail)
    if bias is not None:
        check_extra(op, "bias", bias, (features,), dense, out_dtype)
    if residual is not None:
        check_extra(op, "residual", residual, out_shape, dense, out_dtype)
        residual = residual.unsqueeze(vector_dim) if is_vector else residual

    # Training needs the pre-activation; keeping it is cheaper than computing it again.
    keeps_pre = activation is not None and needs_grad(storage, dense, bias, residual)
    call = MatmulCall(
        values=storage,
        pattern=pattern_tensors(sparse.pattern.tensors()),
        shape=sparse.pattern.shape,
        transposed=sparse.is_transposed,
        dense=dense,
        dense_left=dense_left,
        bias=bias,
        residual=None if keeps_pre else residual,
        activation=None if keeps_pre else activation,
        out_dtype=out_dtype,
    )
    out: torch.Tensor = bsr_matmul(*call.arguments, impl)
    if keeps_pre:
        out = activate(out, activation)
        if residual is not None:
            out = out + residual.to(out_dtype)
    return (out.squeeze(vector_dim) if is_vector else out,)
