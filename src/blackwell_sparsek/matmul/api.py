"""The public products of block-sparse matrices: replay a recorded launch, or check and dispatch."""

from typing import Any, overload

import torch

from ..calls.fp8 import Quantized
from ..calls.matmul import PairProductsCall, SddmmCall, pattern_tensors
from ..core.checks import (
    check_choice,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tangent,
    message,
    wants_gradient,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput, InvalidType
from ..core.torch_state import cast_operand
from ..sparse.matrix import BSRMatrix, BSRPattern, install_matmul
from ..sparse.product import product_pattern
from ..sparse.validate import zero_padding
from .autograd import multiply_pairs, sample
from .fp8_inputs import fp8_product, is_fp8_product
from .inputs import (
    Options,
    check_blocks,
    check_operand,
    check_options,
    check_out_dtype,
    check_readable,
)
from .products import replayed_product
from .training import trained_product, trains


@overload
def matmul(
    a: BSRMatrix,
    b: BSRMatrix,
    *,
    bias: None = None,
    activation: None = None,
    residual: None = None,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> BSRMatrix: ...


@overload
def matmul(
    a: BSRMatrix,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> torch.Tensor: ...


@overload
def matmul(
    a: torch.Tensor | Quantized,
    b: BSRMatrix,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> torch.Tensor: ...


def matmul(
    a: torch.Tensor | BSRMatrix | Quantized,
    b: torch.Tensor | BSRMatrix,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> torch.Tensor | BSRMatrix:
    """Multiply with a block-sparse matrix: `activation(a @ b + bias) + residual`.

    At least one of `a` and `b` is a `BSRMatrix`. Work and memory are proportional to its stored
    blocks, unless `auto` estimates that it is faster to densify the matrix (`explain` shows both
    estimates). A block that is not stored contributes nothing, as long as the dense operand is
    finite. NaN and inf in the dense operand can also reach rows that do not store the block: in the
    dense product, and on a GPU for blocks of fewer than 64 rows.

    Parameters
    ----------
    a, b : BSRMatrix [M, K] and Tensor [..., K, N] -> Tensor [..., M, N]
        or Tensor [..., T, M] and BSRMatrix [M, K] -> Tensor [..., T, K]
        or two BSRMatrix [M, K], [K, N] -> BSRMatrix [M, N]
        or `bsk.fp8.quantize(x, "1x128")` [..., T, M] and BSRMatrix [M, K], both in e4m3

        A dense vector works as in `torch.matmul`. float16, bfloat16, float32 or float64, the same
        for both; under `torch.autocast` both are cast to its dtype. The dense operand needs stride
        1 in one of its last two dimensions and is never copied for its layout; leading dimensions
        may be expanded. Block widths of a BSR `a` and block heights of a BSR `b` must agree.
    bias : Tensor, one entry per output feature of the sparse operand, optional
        [M] for `BSRMatrix @ Tensor` (added to rows), [K] for `Tensor @ BSRMatrix` (to columns).
    activation : None, "relu", "gelu" (exact, with erf) or "silu"
    residual : Tensor of the shape of the result, optional
        Added after the activation.
    out_dtype : dtype of the result; that of the operands by default, bfloat16 for those in fp8
    impl : "auto", or one implementation by name, which never falls back (see `explain`)

    Returns
    -------
    Tensor (contiguous) or, for two block-sparse operands, BSRMatrix.
        Accumulated in float32 (float64 for float64) and rounded once. If a gradient is needed and
        an activation is given, the pre-activation is kept in `out_dtype`, as by a linear layer
        followed by an activation. bias, activation and residual are not available for two
        block-sparse operands.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Notes
    -----
    Both operands, bias and residual have gradients of any order, also by `torch.func` (`grad`,
    `vjp`, `jacrev`, `vmap`) outside of `torch.compile`; forward mode (`jvp`, `hessian`) is refused.
    The gradient of a BSRMatrix is computed at its stored blocks only and accumulates in its
    `storage`. The product of two BSRMatrix synchronizes with the device to find out which blocks
    the result has, and the eager implementation on a GPU does so once per pattern; nothing else
    does. Products in fp8 have no gradients; `BSRMatrix.to_fp8` makes the matrix, and
    `bsk.fp8.matmul` also quantizes the activations.

    `w @ x` and `x @ w` call this function. Inside `torch.compile` call the function:
    dynamo (torch 2.13) does not trace the operator `@` between a tensor and another object.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> keep = torch.rand(4, 8) < 0.3
    >>> w = bsk.BSRMatrix.from_mask(torch.randn(128, 256), keep)
    >>> x = torch.randn(10, 256)
    >>> y = bsk.matmul(x, w.T, bias=torch.zeros(128), activation="gelu")
    >>> y.shape
    torch.Size([10, 128])
    >>> torch.allclose(w @ x.T, w.to_dense() @ x.T, atol=1e-4)
    True
    """
    if isinstance(a, BSRMatrix) and isinstance(b, BSRMatrix):
        extras = {"bias": bias, "activation": activation, "residual": residual}
        return _sparse_sparse(a, b, extras, out_dtype, impl)
    dense_left = isinstance(b, BSRMatrix)
    sparse, dense = (b, a) if dense_left else (a, b)
    if not isinstance(sparse, BSRMatrix):
        check_options(activation, out_dtype, impl)
        got = f"{type(a).__name__} and {type(b).__name__}"
        raise InvalidType(message("matmul", "a/b", "are both dense", "at least one BSRMatrix", got))
    options = Options(sparse.is_transposed, dense_left, activation, out_dtype, impl)
    if is_fp8_product(sparse, dense):
        return fp8_product(sparse, dense, bias, residual, options)
    if not trains(sparse, dense, bias, residual, options):
        return replayed_product(sparse, dense, bias, residual, options)
    return trained_product(sparse, dense, bias, residual, options)


def _without_padding_grad(matrix: BSRMatrix, values: torch.Tensor) -> torch.Tensor:
    """`values`, but no gradient reaches the padding of edge blocks."""
    if not (torch.is_grad_enabled() and wants_gradient(values)):
        return values
    pattern = matrix.pattern
    return zero_padding(values, pattern.shape, pattern.row_indices(), pattern.indices)


def _sparse_sparse(
    a: BSRMatrix,
    b: BSRMatrix,
    extras: dict[str, Any],
    out_dtype: torch.dtype | None,
    impl: str,
) -> BSRMatrix:
    """Check and compute a product of two sparse operands, which takes no `extras`."""
    op = "matmul"
    check_options(extras["activation"], out_dtype, impl)
    for arg, value in extras.items():
        if value is not None:
            got = type(value).__name__
            problem = "is not available for two block-sparse operands"
            raise InvalidInput(message(op, arg, problem, None, got))
    if a.shape[1] != b.shape[0]:
        got = f"{list(a.shape)} and {list(b.shape)}"
        raise InvalidInput(message(op, "a/b", "do not fit", "a [M, K] and b [K, N]", got))
    if a.block_shape[1] != b.block_shape[0]:
        got = f"blocks {list(a.block_shape)} and {list(b.block_shape)}"
        expected = "block widths of a equal to block heights of b"
        raise InvalidInput(message(op, "a/b", "have blocks that do not fit", expected, got))
    for arg, matrix in (("a", a), ("b", b)):
        if matrix.stored_descale is not None:
            expected = "wider blocks (dequantize() gives them)"
            problem = "is in fp8, which products of two block-sparse operands do not take"
            raise InvalidInput(message(op, arg, problem, expected, matrix.dtype))
        check_blocks(op, arg, matrix)
        check_tangent(op, arg, matrix.storage)
    first, second = cast_operand(a.storage), cast_operand(b.storage)
    check_same_dtype(op, {"a": first, "b": second})
    check_same_device(op, {"a": first, "b": second})
    pattern, pairs = product_pattern(a.pattern, b.pattern, a.is_transposed, b.is_transposed)
    call = PairProductsCall(
        first=_without_padding_grad(a, first),
        second=_without_padding_grad(b, second),
        pairs=pairs,
        first_transposed=a.is_transposed,
        second_transposed=b.is_transposed,
        out_dtype=out_dtype,
    )
    values = multiply_pairs(*call.arguments, impl)
    values = zero_padding(values, pattern.shape, pattern.row_indices(), pattern.indices)
    return BSRMatrix._from_parts(pattern, values)


def sddmm(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: BSRPattern | BSRMatrix,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> BSRMatrix:
    """Compute `a @ b` at the blocks of a pattern only (sampled dense-dense product).

    Parameters
    ----------
    a : Tensor [..., M, K], float16, bfloat16, float32 or float64
    b : Tensor [..., K, N], same dtype and leading dimensions
        Leading dimensions are summed over, as for the gradient of a weight. Strides as in `matmul`.
    pattern : BSRPattern or BSRMatrix of shape (M, N)
        Only the pattern of a BSRMatrix is used.
    out_dtype : dtype of the result, such as float32 for sums of gradients; that of the operands by
        default
    impl : "auto", or one implementation by name, which never falls back (see `explain`)

    Returns
    -------
    BSRMatrix (M, N) with the blocks of the pattern.
        Accumulated in float32 (float64 for float64) and rounded once. Differentiable in `a`, `b`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> p = bsk.BSRMatrix.from_mask(torch.zeros(4, 4), torch.eye(2, dtype=torch.bool))
    >>> bsk.sddmm(torch.ones(4, 3), torch.ones(3, 4), p).to_dense()
    tensor([[3., 3., 0., 0.],
            [3., 3., 0., 0.],
            [0., 0., 3., 3.],
            [0., 0., 3., 3.]])
    """
    op = "sddmm"
    check_choice(op, "impl", impl, IMPLS)
    check_out_dtype(op, out_dtype)
    if isinstance(pattern, BSRMatrix):
        pattern = pattern.logical_pattern
    if not isinstance(pattern, BSRPattern):
        got = type(pattern).__name__
        raise InvalidType(
            message(op, "pattern", "has a wrong type", "BSRPattern or BSRMatrix", got)
        )
    for arg, x in (("a", a), ("b", b)):
        check_operand(op, arg, x)
        if x.dim() < 2:
            expected = "[..., rows, columns]"
            raise InvalidInput(message(op, arg, "has a wrong rank", expected, list(x.shape)))
    a, b = cast_operand(a), cast_operand(b)
    check_same_dtype(op, {"a": a, "b": b})
    check_same_device(op, {"a": a, "b": b, "pattern": pattern.indptr})
    m, n = pattern.shape
    check_shape(op, "a", a, (*a.shape[:-2], m, a.shape[-1]))
    check_shape(op, "b", b, (*a.shape[:-2], a.shape[-1], n))
    check_readable(op, "a", a)
    check_readable(op, "b", b)
    tensors = pattern_tensors(pattern.tensors())
    call = SddmmCall(a, b, tensors, pattern.shape, pattern.block_shape, out_dtype)
    values = sample(*call.arguments, impl)
    return BSRMatrix._from_parts(pattern, values)


install_matmul(matmul)
