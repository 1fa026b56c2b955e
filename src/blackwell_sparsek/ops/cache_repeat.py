"""Calls on caches that were made before: see `repeat`."""

from typing import Any

import torch

from ..core.env import default_impl
from .repeat import RepeatableCall, may_repeat, tensor_key

_RECORDED: dict[Any, Any] = {}


def cache_call(
    op: str,
    operands: tuple[Any, ...],
    others: tuple[Any, ...],
    impl: str,
    options: tuple[Any, ...] = (),
) -> RepeatableCall | None:
    """The call as one that may be repeated; None where it must be checked and dispatched.

    `operands` decide about precision; `others` may be None.
    """
    if torch.compiler.is_compiling():
        return None
    if not all(isinstance(x, torch.Tensor) for x in operands):
        return None
    if not all(x is None or isinstance(x, torch.Tensor) for x in others):
        return None
    if not may_repeat(operands, others):
        return None
    tensors = (*operands, *others)
    asked = default_impl() if impl == "auto" else impl
    key = (op, asked, options, operands[0].device, *map(tensor_key, tensors))
    return RepeatableCall(_RECORDED, key, tensors)
