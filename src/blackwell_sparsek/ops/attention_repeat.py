"""Attention calls that were made before: their launches are kept on the mask, if there is one.

`attention_call` is for calls of the public function, which gradients keep from being repeated;
`operator_call` for what remains of them below autograd, and for the gradients themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.env import default_impl
from ..core.launch import is_recording
from ..formats.block_mask import BlockMask
from .repeat import RepeatableCall, may_repeat, tensor_key

# Launches of calls without a mask. Those of packed sequences, whose sizes change from batch to
# batch, must not push the others out.
_UNMASKED: dict[Any, Any] = {}
_UNMASKED_PACKED: dict[Any, Any] = {}
# Launches of operators: by their mask's row pointers, which live as long as the mask does.
_OPERATORS: dict[Any, Any] = {}
_MASKED_OPERATORS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
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


def operator_call(
    operands: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor | None],
    mask: Sequence[torch.Tensor],
    impl: str,
    options: tuple[Any, ...],
) -> RepeatableCall | None:
    """A call of an operator as one that may be repeated; None where it must run as it is.

    `options` are all that launches depend on besides tensors, the operator's name included. Whoever
    calls makes sure that launches alone make the results: nothing copied, no packed sequences.
    """
    if is_recording() or not may_repeat(operands, (*others, *mask)):
        return None
    inputs = (*operands, *others, *mask)
    key = (
        *options,
        default_impl() if impl == "auto" else impl,
        operands[0].device,
        *map(tensor_key, inputs),
    )
    if not mask:
        return RepeatableCall(_OPERATORS, key, inputs)
    # orders of a mask were made on one stream; another must first wait for them
    stream = torch.cuda.current_stream(operands[0].device).cuda_stream
    return RepeatableCall(_MASKED_OPERATORS.setdefault(mask[0], {}), (*key, stream), inputs)
