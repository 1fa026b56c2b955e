"""Attention calls that were made before.

A call with a mask is recorded for all masks of its kind: same sizes and blocks, other lists. The
first call with such a mask binds the recorded launches to its lists, and the mask keeps that.

`attention_results` is for calls of the public functions, with gradients or without; `OperatorCall`
for what compilers and transforms leave of them below autograd, and for the gradients themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..core.compat import raw_stream
from ..launch.launcher import is_recording
from ..launch.replay import (
    Bound,
    Cache,
    Recorded,
    Tensors,
    described,
    keep,
    kept,
    may_record,
    record,
    recorder,
)
from ..masks.block_mask import BlockMask
from ..masks.derived_lists import derived_list

# Launches of calls without a mask. Those of packed sequences, whose sizes change from batch to
# batch, must not push the others out.
_UNMASKED: Cache = {}
_UNMASKED_PACKED: Cache = {}
# The same for all masks of a kind.
_MASKED: Cache = {}
# Launches of operators.
_OPERATORS: Cache = {}
_MASKED_OPERATORS: Cache = {}

_deterministic = torch.are_deterministic_algorithms_enabled


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
        known, stream = block_mask._launches, stream_of(q)
    inputs = (q, k, v, sinks, *cu_seqlens)
    options = (return_lse, *options)
    found = described(options, inputs, stream, gradients=not cu_seqlens, operands=3)
    if found is None:
        return call()
    key, addresses, trains = found
    if trains:
        # which gradients there will be depends on torch's own switch too
        key = (*key, _deterministic())
    kind = None
    recorded = kept(known, key) if known else None
    if recorded is None and block_mask is not None:
        kind = (key, _kind(block_mask))
        known = _MASKED
        recorded = _of_kind(kind, block_mask, trains)
        if recorded is not None and not torch.cuda.is_current_stream_capturing():
            keep(block_mask._launches, key, recorded)
    if recorded is not None:
        if trains:
            return recorded.attend(q, k, v, sinks, addresses, return_lse)
        return recorded(addresses)
    return _recorded_results(known, kind or key, inputs, options, block_mask, call, trains)


def _recorded_results(
    known: Cache,
    key: Any,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    mask: BlockMask | None,
    call: Callable[[], Tensors],
    trains: bool,
) -> Tensors:
    """Make a call, and keep its launches under `key`."""
    sinks = inputs[3]
    if (
        not may_record(options, inputs[:3], inputs[3:])
        or key in known
        # sinks with gaps are copied, which no launch repeats
        or (sinks is not None and not sinks.is_contiguous())
    ):
        return call()
    lists: Sequence[torch.Tensor] = ()
    if mask is not None:
        lists = _lists(mask)
        if key[1] is None:
            return call()
    wanted = 2 if trains or options[0] else 1
    with recorder((*inputs, *lists), wanted, closed=mask is not None) as made:
        results = call()
        recorded = made(results)
    again: Any = recorded
    if trains and recorded is not None:
        # who made the results for autograd knows the rest of the call
        attended = getattr(results[0].grad_fn, "attended", None)
        again = None if attended is None else attended.by(recorded)
    keep(known, key, again)
    return results


def _lists(mask: BlockMask) -> tuple[torch.Tensor, ...]:
    return (*mask._forward, mask._bits)


def _kind(mask: BlockMask) -> tuple[Any, ...] | None:
    """What launches depend on besides the addresses of lists; None where these are unusual."""
    bits, absent = 0, 0
    for x in _lists(mask):
        if type(x) is not torch.Tensor:
            return None
        address = x.data_ptr()
        bits |= address
        absent = 2 * absent + (address == 0)
    sizes = (mask._batch, mask._heads, mask._seq_lengths, mask._block_size)
    return None if bits & 15 else (absent, mask._bits.get_device(), *sizes)


def _of_kind(kind: Any, mask: BlockMask, trains: bool) -> Any:
    """What was recorded for masks of a kind, bound to `mask`."""
    recorded = kept(_MASKED, kind)
    if recorded is None or kind[1] is None:
        return None
    if trains:
        return recorded.bound(mask, lambda launches: _bound(launches, mask, _lists(mask)))
    return _bound(recorded, mask, _lists(mask))


def _bound(recorded: Recorded, mask: BlockMask, lists: Sequence[torch.Tensor]) -> Bound:
    derived = [derived_list(mask, make, *args) for make, args in recorded.derived]
    return Bound(recorded, (*lists, *derived))


def bound_to(recorded: Recorded, lists: Sequence[torch.Tensor], mask_shape: Sequence[int]) -> Bound:
    """Recorded launches of an operator, bound to a mask as operators get it."""
    batch, heads, *sizes = mask_shape
    mask = BlockMask._from_tensors(lists, batch, heads, sizes[:2], sizes[2:])
    return _bound(recorded, mask, lists)


def stream_of(x: Any) -> int | None:
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
    mask_shape: Sequence[int]
    options: tuple[Any, ...]

    def repeat(self) -> Tensors | None:
        """The results by recorded launches, or None where there are none."""
        call = self._described()
        recorded = None if call is None else self._known().get(call[0])
        if call is None or recorded is None:
            return None
        if self.mask:
            recorded = bound_to(recorded, self.mask, self.mask_shape)
        return recorded(call[1][: len(self.operands) + len(self.others)])

    def recorded(self) -> Recorded | None:
        """Recorded launches, which `bound_to` binds to a mask."""
        call = self._described()
        return None if call is None else self._known().get(call[0])

    def record(self, call: Callable[[], Tensors]) -> Tensors:
        """Make the results by `call` and keep its launches."""
        if is_recording():
            return call()
        return record(
            self._known(),
            self._options(),
            (*self.operands, *self.others, *self.mask),
            call,
            operands=len(self.operands),
            stream=self._stream(),
            below_autocast=True,
            closed=bool(self.mask),
        )

    def _described(self) -> tuple[tuple[Any, ...], list[int], bool] | None:
        if is_recording():
            return None
        inputs = (*self.operands, *self.others, *self.mask)
        return described(self._options(), inputs, self._stream(), below_autocast=True)

    def _known(self) -> Cache:
        return _MASKED_OPERATORS if self.mask else _OPERATORS

    def _options(self) -> tuple[Any, ...]:
        return (*self.mask_shape, *self.options)

    def _stream(self) -> int | None:
        # lists derived from a mask were made on one stream; another makes its own
        return stream_of(self.operands[0]) if self.mask else None
