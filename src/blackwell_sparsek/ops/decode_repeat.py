"""Decode calls that were made before: see `repeat`."""

from typing import Any

import torch

from ..core.env import default_impl
from .attention_repeat import _OPTIONS
from .repeat import RepeatableCall, may_repeat, tensor_key

_KNOWN: dict[Any, Any] = {}


def decode_call(
    tensors: tuple[Any, ...], impl: str, options: tuple[Any, ...]
) -> RepeatableCall | None:
    """The call as one that may be repeated; None where it must go through the operator.

    `tensors` are q, the caches and the lengths, then those that may be None.
    """
    if torch.compiler.is_compiling():
        return None
    if not all(x is None or isinstance(x, torch.Tensor) for x in tensors):
        return None
    if any(x is None for x in tensors[:4]) or not all(type(x) in _OPTIONS for x in options):
        return None
    if not may_repeat(tensors[:1], tensors[1:]):
        return None
    sinks = tensors[6]
    # sinks with gaps are copied, which no launch repeats
    if not (sinks is None or sinks.is_contiguous()):
        return None
    key = (
        *options,
        default_impl() if impl == "auto" else impl,
        tensors[0].device,
        *map(tensor_key, tensors),
    )
    return RepeatableCall(_KNOWN, key, tensors)
