"""Products that were made before: their launches are kept on the pattern."""

from collections.abc import Callable
from typing import Any

import torch

from ..launch.replay import Tensors, record, repeat
from ..sparse.matrix import BSRMatrix


def product_results(
    a: Any,
    b: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: tuple[Any, ...],
    call: Callable[[], Tensors],
) -> Tensors:
    """The product in a tuple: by recorded launches, or by `call`, which checks everything."""
    if torch.compiler.is_compiling():
        return call()
    dense_left = isinstance(b, BSRMatrix)
    sparse, dense = (b, a) if dense_left else (a, b)
    if not isinstance(sparse, BSRMatrix) or not isinstance(dense, torch.Tensor):
        return call()
    known, inputs = sparse.pattern.launches, (sparse.storage, dense, bias, residual)
    options = (sparse.is_transposed, dense_left, *options)
    results = repeat(known, options, inputs)
    return record(known, options, inputs, call, operands=2) if results is None else results
