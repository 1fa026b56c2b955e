"""Attention calls that were made before: their launches are kept on the mask, if there is one."""

from typing import Any

import torch

from ..core.env import default_impl
from ..formats.block_mask import BlockMask
from .repeat import RepeatableCall, may_repeat, tensor_key

# Launches of calls without a mask.
_UNMASKED: dict[Any, Any] = {}
# Options that a key can hold and compare; others go to the checks of the operator.
_OPTIONS = (type(None), bool, int, float, str, tuple)


def attention_call(
    q: Any, k: Any, v: Any, sinks: Any, block_mask: Any, impl: str, options: tuple[Any, ...]
) -> RepeatableCall | None:
    """The call as one that may be repeated; None where it must go through the operator."""
    if torch.compiler.is_compiling():
        return None
    inputs = (q, k, v, sinks)
    if not all(isinstance(x, torch.Tensor) for x in inputs[: 3 if sinks is None else 4]):
        return None
    if not all(type(option) in _OPTIONS for option in options):
        return None
    # sinks with gaps are copied, which no launch repeats
    if not may_repeat(inputs[:3], inputs[3:]) or not (sinks is None or sinks.is_contiguous()):
        return None
    key: tuple[Any, ...] = (
        *options,
        default_impl() if impl == "auto" else impl,
        q.device,
        *map(tensor_key, inputs),
    )
    if block_mask is None:
        return RepeatableCall(_UNMASKED, key, inputs)
    if not isinstance(block_mask, BlockMask):
        return None
    # what a mask keeps was made on one stream; another must first wait for it
    stream = torch.cuda.current_stream(q.device).cuda_stream
    return RepeatableCall(block_mask._launches, (*key, stream), inputs)
