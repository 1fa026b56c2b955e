"""Products that were made before: their launches are kept on the pattern."""

from typing import Any

import torch

from ..core.env import default_impl
from ..formats.bsr import BSRMatrix
from .repeat import RepeatableCall, may_repeat, tensor_key


def product_call(
    a: Any,
    b: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    impl: str,
) -> RepeatableCall | None:
    """The call as one that may be repeated; None where it must go through the operator."""
    if torch.compiler.is_compiling():
        return None
    dense_left = isinstance(b, BSRMatrix)
    sparse, dense = (b, a) if dense_left else (a, b)
    if not isinstance(sparse, BSRMatrix) or not isinstance(dense, torch.Tensor):
        return None
    inputs = (sparse.storage, dense, bias, residual)
    if not may_repeat(inputs[:2], inputs[2:]):
        return None
    key = (
        *(sparse.is_transposed, dense_left, activation, out_dtype),
        default_impl() if impl == "auto" else impl,
        *map(tensor_key, inputs),
    )
    return RepeatableCall(sparse.pattern.launches, key, inputs)
