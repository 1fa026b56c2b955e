"""Products of e4m3 blocks and activations: replayed, or checked and given to the operator."""

from typing import Any

import torch

from ..calls.fp8 import Fp8MatmulCall, Quantized, descale_shape
from ..calls.matmul import MatmulCall, pattern_tensors
from ..core.checks import (
    check_choice,
    check_derivatives,
    check_dtype,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
    message,
    wants_gradient,
)
from ..core.errors import InvalidInput, InvalidType
from ..core.fp8 import E4M3
from ..launch.replay import described, kept, record
from ..sparse.matrix import BSRMatrix
from .fp8_op import bsr_matmul_fp8
from .inputs import Options, check_blocks, check_options
from .resize import product_of_family

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTH = "1x128"


def is_fp8_product(sparse: BSRMatrix, dense: Any) -> bool:
    """Whether a product is one for fp8: by either operand."""
    return sparse.stored_descale is not None or isinstance(dense, Quantized)


def fp8_product(
    sparse: BSRMatrix,
    x: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """The product by what an earlier call has recorded, or else by the operator."""
    given = (sparse, x, bias, residual, options)
    if not isinstance(x, Quantized) or sparse.stored_descale is None:
        (out,) = _computed(*given)
        return out
    known, families = sparse.pattern.launches, sparse.pattern.families
    facts = (*options, x.scale, x.mean is None, x.hadamard)
    inputs = (sparse.storage, x.data, sparse.stored_descale, x.descale, bias, residual)
    found = described(facts, inputs)
    recorded = None if found is None else kept(known, found.key)
    if recorded is not None and found is not None:
        (out,) = recorded(found.addresses)
        return out
    made = product_of_family(families, found, options, inputs, _computed, _checked, *given)
    if made is not None:
        return made
    (out,) = record(known, facts, inputs, _computed, *given, operands=0)
    return out


def _computed(*given: Any) -> tuple[torch.Tensor]:
    """Check and compute a product of operands in e4m3."""
    options: Options = given[-1]
    return (bsr_matmul_fp8(*_checked(*given).arguments, options.impl),)


def _checked(
    sparse: BSRMatrix,
    x: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: Options,
) -> Fp8MatmulCall:
    op = "matmul"
    check_options(options.activation, options.out_dtype, options.impl)
    sparse_arg, dense_arg = ("b", "a") if options.dense_left else ("a", "b")
    if sparse.stored_descale is None:
        expected = "a BSRMatrix in fp8 (to_fp8() makes one) for activations in fp8"
        raise InvalidType(message(op, sparse_arg, "is not in fp8", expected, sparse.dtype))
    if not isinstance(x, Quantized):
        expected = (
            f'bsk.fp8.quantize(x, "{_WIDTH}") for blocks in fp8, or bsk.fp8.matmul(x, ...), which '
            "rounds x"
        )
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidType(message(op, dense_arg, "is not in fp8", expected, got))
    if not options.dense_left:
        expected = "x @ w.T, with the quantized operand on the left"
        problem = "has scales along rows, which the product does not sum over"
        raise InvalidInput(message(op, dense_arg, problem, expected, "w @ x"))
    check_blocks(op, sparse_arg, sparse)
    _check_activations(op, x, sparse)
    out_dtype = torch.bfloat16 if options.out_dtype is None else options.out_dtype
    check_choice(op, "out_dtype", out_dtype, OUT_DTYPES)
    features, (*batch, tokens, _) = sparse.shape[1], x.data.shape
    extras = {"bias": (bias, (features,)), "residual": (residual, (*batch, tokens, features))}
    for arg, (extra, shape) in extras.items():
        if extra is not None:
            check_tensor(op, arg, extra)
            check_derivatives(op, arg, extra)
            check_shape(op, arg, extra, shape)
            check_dtype(op, arg, extra, OUT_DTYPES)
            check_same_device(op, {arg: extra, "the operands": x.data})
    operands = {"a": x.data, "a.descale": x.descale, "b": sparse.storage}
    others = {"b.descale": sparse.stored_descale, "bias": bias, "residual": residual}
    tensors: dict[str, torch.Tensor | None] = {**operands, **others}
    for arg, tensor in tensors.items():
        if tensor is not None and torch.is_grad_enabled() and wants_gradient(tensor):
            expected = "torch.no_grad(), or the layer before to_fp8() for training"
            problem = "requires gradients, which products in fp8 do not have"
            raise InvalidInput(message(op, arg, problem, expected, "requires_grad=True"))
    given = MatmulCall(
        values=sparse.storage,
        pattern=pattern_tensors(sparse.pattern.tensors()),
        shape=sparse.pattern.shape,
        transposed=sparse.is_transposed,
        dense=x.data,
        dense_left=True,
        bias=bias,
        residual=residual,
        activation=options.activation,
        out_dtype=out_dtype,
    )
    return Fp8MatmulCall(given, sparse.stored_descale, x.descale)


def _check_activations(op: str, x: Quantized, sparse: BSRMatrix) -> None:
    """Check the quantized operand on the left."""
    for name, tensor in (("a.data", x.data), ("a.descale", x.descale)):
        check_tensor(op, name, tensor)
        check_derivatives(op, name, tensor)
    check_dtype(op, "a.data", x.data, (E4M3,))
    check_dtype(op, "a.descale", x.descale, (torch.float32,))
    if x.scale != _WIDTH:
        expected = f'scale="{_WIDTH}", which the product sums with'
        raise InvalidInput(message(op, "a", "has other scales", expected, repr(x.scale)))
    if x.mean is not None:
        expected = "smooth=False, which is for the keys of attention"
        raise InvalidInput(message(op, "a", "was smoothed", expected, "a mean"))
    inner = sparse.shape[0]
    if x.data.dim() < 2 or x.data.shape[-1] != inner:
        shapes = f"{list(x.data.shape)} for a block-sparse {list(sparse.shape)}"
        raise InvalidInput(message(op, "a", "does not fit", f"[..., tokens, {inner}]", shapes))
    check_shape(op, "a.descale", x.descale, descale_shape(x.data.shape, _WIDTH, 0))
    operands = {"a": x.data, "a.descale": x.descale, "b": sparse.storage}
    check_same_device(op, {**operands})
    check_last_dim_contiguous(op, "a.data", x.data)
