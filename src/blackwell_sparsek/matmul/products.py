"""Products of a sparse and a dense operand: replayed, or checked and passed to the operator."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..calls.matmul import MatmulCall, PatternTensors, pattern_tensors
from ..core.activations import activate
from ..core.checks import check_same_device, check_same_dtype, check_tangent, message
from ..core.errors import InvalidInput
from ..core.torch_state import cast_operand
from ..launch.replay import described, kept, record
from ..sparse.matrix import BSRMatrix
from .autograd import multiply
from .choice import matmul_dispatch
from .dense import matmul as multiply_densely
from .inputs import (
    Options,
    check_blocks,
    check_extra,
    check_operand,
    check_options,
    check_readable,
    needs_grad,
)
from .resize import product_of_family


def replayed_product(
    sparse: BSRMatrix,
    dense: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """Replay what an earlier call recorded, or call the operator."""
    known, inputs = sparse.pattern.launches, (sparse.storage, dense, bias, residual)
    found = described(options, inputs)
    recorded = None if found is None else kept(known, found.key)
    if isinstance(recorded, DenseProduct):
        return recorded(*inputs)
    if recorded is not None and found is not None:
        (product,) = recorded(found.addresses)
        return product
    families, given = sparse.pattern.families, (sparse, dense, bias, residual, options)
    calling = (_computed, _checked_call, *given)
    made = product_of_family(families, found, options, inputs, *calling)
    if made is not None:
        return made
    (product,) = record(known, options, inputs, _computed, *given, operands=2)
    # recorded just now, but not to be repeated by launches alone
    if found is not None and known.get(found.key, found) is None:
        known[found.key] = dense_product(_checked(*given), options.impl)
    return product


class DenseProduct:
    """A product that `auto` leaves to torch: the same with other tensors, without checks.

    The launch that densifies the matrix is replayed; torch multiplies and allocates.
    """

    __slots__ = ("_call",)

    def __init__(self, call: MatmulCall):
        # without its tensors, which the next call replaces
        none: Any = None
        self._call = replace(call, values=none, dense=none, bias=None, residual=None)

    def __call__(
        self,
        values: torch.Tensor,
        dense: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product of new tensors with the same shapes, dtypes and pattern."""
        call = replace(self._call, values=values, dense=dense, bias=bias, residual=residual)
        return multiply_densely(call)


def dense_product(checked: "_Checked", impl: str) -> DenseProduct | None:
    """The `DenseProduct` of a call that the dispatcher leaves to torch; None for other calls."""
    call = checked.call
    if checked.is_vector or not isinstance(call.pattern, PatternTensors):
        return None
    chosen = matmul_dispatch.choose(impl, call.problem)
    return DenseProduct(call) if chosen is not None and chosen.name == "dense" else None


class _Checked(NamedTuple):
    """A checked call, and the parts of the product that come after the operator."""

    call: MatmulCall
    is_vector: bool
    activation: str | None
    """Applied after the operator, as training needs the result before it; so is `residual`."""
    residual: torch.Tensor | None


def _checked_call(*given: Any) -> MatmulCall:
    return _checked(*given).call


def _computed(*given: Any) -> tuple[torch.Tensor]:
    """Check and compute a product of a sparse and a dense operand."""
    call, is_vector, activation, residual = _checked(*given)
    options: Options = given[-1]
    out: torch.Tensor = multiply(*call.arguments, options.impl)
    if activation is not None:
        out = activate(out, activation)
        if residual is not None:
            out = out + residual.to(out.dtype)
    return (out.squeeze(0 if call.dense_left else 1) if is_vector else out,)


def _cast_extra(x: Any, out_dtype: torch.dtype) -> Any:
    """A bias or residual under autocast: cast, unless kernels add it in its own dtype."""
    is_half = isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return cast_operand(x) if is_half and x.dtype != out_dtype else x


def _checked(
    sparse: BSRMatrix,
    dense: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: Options,
) -> _Checked:
    """Check the arguments of a product and make its call."""
    op = "matmul"
    _, dense_left, activation, out_dtype, impl = options
    check_options(activation, out_dtype, impl)
    sparse_arg, dense_arg = ("b", "a") if dense_left else ("a", "b")
    check_operand(op, dense_arg, dense)
    if dense.dim() == 0:
        raise InvalidInput(message(op, dense_arg, "has a wrong rank", "1 or more dimensions", []))
    check_blocks(op, sparse_arg, sparse)
    check_tangent(op, sparse_arg, sparse.storage)
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
        if dense.shape[-1 if dense_left else -2] == features:
            expected += f" ({sparse_arg}.T has {features})"
        raise InvalidInput(message(op, dense_arg, "does not fit", expected, shapes))
    check_same_dtype(op, {dense_arg: dense, sparse_arg: storage})
    check_same_device(op, {dense_arg: dense, sparse_arg: storage})
    check_readable(op, dense_arg, dense)
    out_dtype = out_dtype or dense.dtype
    tail = (dense.shape[-2], features) if dense_left else (features, dense.shape[-1])
    out_shape = (features,) if is_vector else (*dense.shape[:-2], *tail)
    if bias is not None:
        bias = _cast_extra(bias, out_dtype)
        check_extra(op, "bias", bias, (features,), dense, out_dtype)
    if residual is not None:
        residual = _cast_extra(residual, out_dtype)
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
    later = (activation, residual) if keeps_pre else (None, None)
    return _Checked(call, is_vector, *later)
