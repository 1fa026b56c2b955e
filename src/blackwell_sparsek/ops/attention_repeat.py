"""Attention calls that were made before: their launches are kept on the mask, if there is one.

`attention_results` is for calls of the public functions, which gradients keep from being repeated;
`OperatorCall` for what remains of them below autograd, and for the gradients themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.compat import raw_stream
from ..core.launch import is_recording
from ..formats.block_mask import BlockMask
from .repeat import Tensors, record, repeat

# Launches of calls without a mask. Those of packed sequences, whose sizes change from batch to
# batch, must not push the others out.
_UNMASKED: dict[Any, Any] = {}
_UNMASKED_PACKED: dict[Any, Any] = {}
# Launches of operators: by their mask's row pointers, which live as long as the mask does.
_OPERATORS: dict[Any, Any] = {}
_MASKED_OPERATORS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def attention_results(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    block_mask: Any,
    options: tuple[Any, ...],
    call: Callable[[], Tensors],
    return_lse: bool,
    cu_seqlens: tuple[Any, ...] = (),
) -> Tensors:
    """The output, and lse where it is asked for: by recorded launches, or by `call`.

    Nothing was checked; `call` checks everything. `cu_seqlens` are the two offsets of packed
    sequences, whose longest lengths are options.
    """
    if torch.compiler.is_compiling():
        return call()
    known, stream = _UNMASKED, None
    if cu_seqlens:
        known = _UNMASKED_PACKED
        # a recording tells tensors apart by their addresses; most calls give the same offsets twice
        if cu_seqlens[0] is cu_seqlens[1]:
            cu_seqlens = (cu_seqlens[0], None)
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            return call()
        # what a mask keeps was made on one stream; another must first wait for it
        known, stream = block_mask._launches, _stream_of(q)
    inputs = (q, k, v, sinks, *cu_seqlens)
    options = (return_lse, *options)
    results = repeat(known, options, inputs, stream)
    if results is not None:
        return results
    # sinks with gaps are copied, which no launch repeats
    if isinstance(sinks, torch.Tensor) and not sinks.is_contiguous():
        return call()
    wanted = 2 if return_lse else 1
    return record(known, options, inputs, call, operands=3, wanted=wanted, stream=stream)


def _stream_of(x: Any) -> int | None:
    """The current stream of the device of a plain tensor on a GPU."""
    plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    return raw_stream(x.get_device()) if plain and x.is_cuda else None


class OperatorCall(NamedTuple):
    """A call of an operator that may be repeated.

    `options` are all that launches depend on besides tensors, the operator's name and
    implementation included. Whoever makes one sees to it that launches alone make the results:
    nothing copied, no packed sequences.
    """

    operands: tuple[torch.Tensor, ...]
    others: tuple[torch.Tensor | None, ...]
    mask: Sequence[torch.Tensor]
    options: tuple[Any, ...]

    def repeat(self) -> Tensors | None:
        """The results by recorded launches, or None where there are none."""
        if is_recording():
            return None
        known = _MASKED_OPERATORS.get(self.mask[0]) if self.mask else _OPERATORS
        inputs = (*self.operands, *self.others, *self.mask)
        return repeat(known, self.options, inputs, self._stream(), True) if known else None

    def record(self, call: Callable[[], Tensors]) -> Tensors:
        """Make the results by `call` and keep its launches."""
        if is_recording():
            return call()
        known = _MASKED_OPERATORS.setdefault(self.mask[0], {}) if self.mask else _OPERATORS
        inputs = (*self.operands, *self.others, *self.mask)
        return record(
            known,
            self.options,
            inputs,
            call,
            operands=len(self.operands),
            stream=self._stream(),
            below_autocast=True,
        )

    def _stream(self) -> int | None:
        # orders of a mask were made on one stream; another must first wait for them
        return _stream_of(self.operands[0]) if self.mask else None
