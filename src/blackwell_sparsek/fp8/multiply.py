"""`bsk.fp8.matmul`: 16-bit activations times a block-sparse matrix in fp8."""

import math
from typing import Any

import torch

from ..core.checks import check_choice, check_dtype, check_tensor, message
from ..core.env import IMPLS
from ..core.errors import InvalidInput, InvalidType
from ..core.torch_state import cast_operand
from ..matmul.api import matmul as matmul_in
from ..sparse.matrix import BSRMatrix
from .api import DTYPES, quantized_operand

_OP = "fp8.matmul"
# Leading dimensions that `quantize` takes besides tokens and channels.
_MOST_BATCHES = 2


def matmul(
    x: torch.Tensor,
    w: BSRMatrix,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Round x to e4m3 and multiply: `activation(x @ w + bias) + residual`.

    The same as `bsk.matmul(bsk.fp8.quantize(x, "1x128"), w, ...)`: every 128 channels of a token
    have a scale of their own, and so does every block of w. What it costs in accuracy is in
    docs/numerics.md.

    Parameters
    ----------
    x : fp16, bf16 or fp32 `[..., K]`, with a contiguous last dimension
        No gradient flows through the rounding. Under `torch.autocast` it is cast to its dtype.
    w : BSRMatrix (K, N) in fp8
        `BSRMatrix.to_fp8()` makes one. Kernels want it as the transpose of one that is stored as
        (N, K), as the weight of a linear layer is.
    bias, activation, residual, impl : as in `bsk.matmul`
    out_dtype : torch.bfloat16, torch.float16 or torch.float32; that of x by default

    Returns
    -------
    Tensor `[..., N]`

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> import blackwell_sparsek as bsk
    >>> w = bsk.BSRMatrix.from_mask(torch.randn(128, 256), torch.rand(4, 8) < 0.5)
    >>> x = torch.randn(10, 256)
    >>> exact = bsk.matmul(x, w.T)
    >>> float((bsk.fp8.matmul(x, w.to_fp8().T) - exact).norm() / exact.norm()) < 0.05
    True
    """
    check_tensor(_OP, "x", x)
    check_dtype(_OP, "x", x, DTYPES)
    check_choice(_OP, "impl", impl, IMPLS)
    if not isinstance(w, BSRMatrix):
        expected, got = "a BSRMatrix in fp8", type(w).__name__
        raise InvalidType(message(_OP, "w", "has a wrong type", expected, got))
    if w.stored_descale is None:
        expected = "w.to_fp8(), or bsk.matmul for wider blocks"
        raise InvalidType(message(_OP, "w", "is not in fp8", expected, w.dtype))
    if x.dim() == 0 or x.shape[-1] != w.shape[0]:
        shapes = f"{list(x.shape)} for a block-sparse {list(w.shape)}"
        raise InvalidInput(message(_OP, "x", "does not fit", f"[..., {w.shape[0]}]", shapes))
    x = cast_operand(x)
    rows = _in_rows(x)
    rounding = {"auto": "auto", "triton": "triton", "sm90": "triton"}.get(impl, "eager")
    shape = (*x.shape[:-1], w.shape[1])
    if residual is not None and rows is not x:
        check_tensor(_OP, "residual", residual)
        if tuple(residual.shape) != shape:
            got = list(residual.shape)
            raise InvalidInput(message(_OP, "residual", "has a wrong shape", list(shape), got))
        residual = _in_rows(residual)
    out = matmul_in(
        quantized_operand(rows, "1x128", impl=rounding),
        w,
        bias=bias,
        activation=activation,
        residual=residual,
        out_dtype=x.dtype if out_dtype is None else out_dtype,
        impl=impl,
    )
    return out if rows is x else out.view(shape)


def _in_rows(x: torch.Tensor) -> Any:
    """A view of x as rows [T, K], unless it has as few leading dimensions as `quantize` takes."""
    if 2 <= x.dim() <= 2 + _MOST_BATCHES:
        return x
    try:
        # not -1: without elements it could be any number
        return x.view(math.prod(x.shape[:-1]), x.shape[-1])
    except RuntimeError:
        expected = f"strides of rows that merge, or at most {2 + _MOST_BATCHES} dimensions"
        got = f"{list(x.shape)} with strides {tuple(x.stride())}"
        raise InvalidInput(message(_OP, "x", "cannot be seen as rows", expected, got)) from None
