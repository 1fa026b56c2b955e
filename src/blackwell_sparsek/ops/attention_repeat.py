"""Attention calls that were made before: their launches are kept on the mask, if there is one."""

from typing import Any

import torch

from ..core.env import default_impl
from ..formats.block_mask import BlockMask
from .repeat import RepeatableCall, may_repeat, tensor_key

# Launches of calls without a mask. Those of packed sequences, whose sizes change from batch to
# batch, must not push the others out.
_UNMASKED: dict[Any, Any] = {}
_UNMASKED_PACKED: dict[Any, Any] = {}
# Options that a key can hold and compare; others go to the checks of the operator.
_OPTIONS = (type(None), bool, int, float, str, tuple)


def attention_call(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    block_mask: Any,
    impl: str,
    options: tuple[Any, ...],
    cu_seqlens: tuple[Any, ...] = (),
) -> RepeatableCall | None:
    """The call as one that may be repeated; None where it must go through the operator.

    `cu_seqlens` are the two offsets of packed sequences, whose longest lengths are options.
    """
    if torch.compiler.is_compiling():
        return None
    tensors = (q, k, v, *(() if sinks is None else (sinks,)), *cu_seqlens)
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return None
    # a recording tells tensors apart by their addresses; most calls give the same offsets twice
    if cu_seqlens and cu_seqlens[0] is cu_seqlens[1]:
        cu_seqlens = (cu_seqlens[0], None)
    inputs = (q, k, v, sinks, *cu_seqlens)
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
        return RepeatableCall(_UNMASKED_PACKED if cu_seqlens else _UNMASKED, key, inputs)
    if not isinstance(block_mask, BlockMask):
        return None
    # what a mask keeps was made on one stream; another must first wait for it
    stream = torch.cuda.current_stream(q.device).cuda_stream
    return RepeatableCall(block_mask._launches, (*key, stream), inputs)
