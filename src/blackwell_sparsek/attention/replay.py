"""Recorded launches of attention: found by sizes and options, bound to the mask at hand.

A call with a mask is recorded for all masks with the same sizes and block sizes, a *kind*. The
first call with another mask of that kind binds the recorded launches to the lists of that mask,
which keeps the result. `replayed` handles calls of the public functions, before anything is
checked; `CheckedCall` handles calls that arrive through operators, and gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..calls.attention import AttentionCall, AttnSpec
from ..launch.recording import is_recording
from ..launch.replay import (
    NO_RECORDER,
    Bound,
    Cache,
    Described,
    Launches,
    Recorded,
    Recorder,
    Tensors,
    described,
    keep,
    kept,
    may_record,
    seen_before,
    stream_of,
)
from ..masks.block_mask import BlockMask
from ..masks.derived_lists import derived_list

# Launches of public calls. Packed sequences, whose sizes change from batch to batch, have their own
# cache, so that they do not evict the others. Calls with a mask are kept for all masks of a kind.
_DENSE: Cache = {}
_PACKED: Cache = {}
_MASKED: Cache = {}
# Launches of checked calls, which come from operators and from autograd.
_FORWARD: Cache = {}
_BACKWARD: Cache = {}


def describe(options: tuple[Any, ...], inputs: tuple[Any, ...], mask: Any) -> Described | None:
    """The key of a call whose arguments are still unchecked; None to make the call in full.

    Parameters
    ----------
    options : all arguments of the public function but tensors, `return_lse` first
    inputs : q, k, v, the sinks, and the offsets of packed sequences
    mask : the block mask
    """
    stream = None
    if mask is not None:
        if torch.compiler.is_compiling() or not isinstance(mask, BlockMask):
            return None
        mask._check_unwritten()
        # a mask caches derived lists per stream, so a recording belongs to one stream too
        stream = stream_of(inputs[0])
    return described(options, inputs, stream, gradients=True, operands=3)


def replayed(
    found: Described | None,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    mask: Any,
    packed: bool = False,
) -> Tensors | None:
    """Output, and lse if requested, by recorded launches; None if the call must be made in full."""
    if found is None:
        return None
    key, _, addresses, trains, _ = found
    cache = mask._launches if mask is not None else _PACKED if packed else _DENSE
    launches = kept(cache, key) if cache else None
    if launches is None and mask is not None:
        launches = _bound_to_mask(key, mask, trains)
    if launches is None:
        return None
    if not trains:
        return launches(addresses)
    return_lse = options[0]
    return launches.attend(inputs, addresses, return_lse)


def recorder(
    found: Described | None,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    mask: BlockMask | None,
    packed: bool = False,
) -> Recorder:
    """Records the launches of a call that `replayed` did not find, if they can be replayed."""
    if torch.compiler.is_compiling():
        # a compiler can enter only context managers created in the code that it compiles
        return Recorder(None)
    if found is None or not seen_before(found.key):
        return NO_RECORDER
    q, k, v, sinks, *offsets = inputs
    if not may_record(options, (q, k, v), (sinks, *offsets)):
        return NO_RECORDER
    key, trains = found.key, found.trains
    cache = _PACKED if packed else _DENSE
    lists: tuple[torch.Tensor, ...] = ()
    if mask is not None:
        cache, lists = _MASKED, forward_lists(mask)
        if (kind := mask_kind(mask, lists)) is None:
            return NO_RECORDER
        key = (key, kind)
    if key in cache or not _is_contiguous(sinks):
        return NO_RECORDER
    make = _TrainingRecorder if trains else Recorder
    return_lse = options[0]
    wanted = 2 if trains or return_lse else 1
    return make(cache, key, (*inputs, *lists), wanted, closed=mask is not None)


class _TrainingRecorder(Recorder):
    """Keeps the `TrainingCall` of autograd together with the launches."""

    def repeatable(self, results: Tensors) -> Any:
        launches = super().repeatable(results)
        training = getattr(results[0].grad_fn, "training", None)
        return None if launches is None or training is None else training.replaying(launches)


def _is_contiguous(sinks: torch.Tensor | None) -> bool:
    """Sinks with gaps are copied, and a replay does not repeat the copy."""
    return sinks is None or sinks.is_contiguous()


def has_plain_sinks(call: AttentionCall) -> bool:
    """Whether kernels can read the sinks of a call without a copy."""
    return _is_contiguous(call.spec.sinks)


def forward_lists(mask: BlockMask) -> tuple[torch.Tensor, ...]:
    """The tensors of a mask that the forward pass reads."""
    return (*mask._forward, mask._bits)


def mask_kind(mask: BlockMask, lists: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """The properties of a mask that launches depend on, besides the addresses of its lists.

    None if a list is a subclass of tensor or not aligned to 16 bytes.
    """
    bits, absent = 0, 0
    for x in lists:
        if type(x) is not torch.Tensor:
            return None
        address = x.data_ptr()
        bits |= address
        absent = 2 * absent + (address == 0)
    sizes = (mask._batch, mask._heads, mask._seq_lengths, mask._block_size)
    return None if bits & 15 else (absent, mask._bits.get_device(), *sizes)


def _bound_to_mask(key: tuple[Any, ...], mask: BlockMask, trains: bool) -> Any:
    """Launches recorded for masks of this kind, bound to `mask`, which keeps them."""
    lists = forward_lists(mask)
    kind = mask_kind(mask, lists)
    recorded = None if kind is None else kept(_MASKED, (key, kind))
    if recorded is None:
        return None
    launches = recorded.bound(mask) if trains else bound(recorded, mask, lists)
    if not torch.cuda.is_current_stream_capturing():
        keep(mask._launches, key, launches)
    return launches


def bound(recorded: Recorded, mask: BlockMask, lists: Sequence[torch.Tensor]) -> Bound:
    """Recorded launches with the lists of a mask, and the lists derived from it."""
    derived = [derived_list(mask, make, *args) for make, args in recorded.derived]
    return Bound(recorded, (*lists, *derived))


class CheckedCall(NamedTuple):
    """A checked forward or backward call that recorded launches may repeat.

    Launches depend on the tensors, `options` and `needs`. Matrix products multiply the `operands`,
    not the `others`; `lists` are the tensors of the mask.
    """

    cache: Cache
    options: tuple[Any, ...]
    needs: tuple[bool, ...]
    operands: tuple[torch.Tensor, ...]
    others: tuple[torch.Tensor | None, ...]
    mask: BlockMask | None
    lists: Sequence[torch.Tensor]

    @classmethod
    def forward(cls, call: AttentionCall, impl: str) -> "CheckedCall | None":
        """The forward pass; None if launches alone cannot repeat it."""
        spec = call.spec
        if spec.is_varlen or spec.is_biased or call.out is not None or is_recording():
            return None
        mask = spec.block_mask
        lists = () if mask is None else forward_lists(mask)
        options = (impl, *spec.band, spec.scale, spec.softcap)
        operands, others = (call.q, call.k, call.v), (spec.sinks,)
        return cls(_FORWARD, options, (), operands, others, mask, lists)

    @classmethod
    def backward(
        cls,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        needs: tuple[bool, ...],
        impl: str,
    ) -> "CheckedCall | None":
        """Gradients of a call; None if launches alone cannot repeat them."""
        spec, mask = call.spec, call.spec.block_mask
        sinks = sinks_to_read(spec.sinks, needs)
        if spec.is_biased or is_recording() or not _is_contiguous(sinks):
            return None
        lists = () if mask is None else mask.tensors()
        offsets = given_offsets(spec.cu_seqlens_q, spec.cu_seqlens_k)
        has_sinks = spec.sinks is not None
        options = gradient_options(spec, has_sinks, call.deterministic, impl, spec.is_varlen)
        operands, others = (dout, call.q, call.k, call.v, out), (dlse, lse, sinks, *offsets)
        return cls(_BACKWARD, options, needs, operands, others, mask, lists)

    def replay(self) -> Tensors | None:
        """The results by recorded launches, or None."""
        found = self._described()
        if found is None:
            return None
        key, addresses = found.key, found.addresses
        if self.mask is None:
            launches: Any = self.cache.get((key, self.options, None))
        else:
            launches = bound_launches(self.cache, key, self.options, self.mask, self.lists)
        return None if launches is None else launches(addresses)

    def recorder(self) -> Recorder:
        """Records the launches of the call, if they can be replayed."""
        found = self._described()
        others = (*self.others, *self.lists)
        if found is None or not may_record(self.options, self.operands, others):
            return NO_RECORDER
        key = found.key
        kind = None
        if self.mask is not None and (kind := mask_kind(self.mask, self.lists)) is None:
            return NO_RECORDER
        key = (key, self.options, kind)
        if key in self.cache:
            return NO_RECORDER
        return Recorder(self.cache, key, (*self.operands, *others), closed=self.mask is not None)

    def _described(self) -> Described | None:
        # lists derived from a mask belong to the stream that made them; others make their own
        stream = None if self.mask is None else stream_of(self.operands[0])
        return described(self.needs, (*self.operands, *self.others), stream, below_autocast=True)


def gradient_options(
    spec: AttnSpec, has_sinks: bool, deterministic: bool, impl: str, packed: bool
) -> tuple[Any, ...]:
    """The options that the launches of gradients depend on, besides `needs`.

    The last are the longest lengths of packed sequences, () of dense batches.
    """
    # the shapes of packed tensors do not tell the longest lengths
    longest = (spec.max_q, spec.max_k) if packed else ()
    return (impl, *spec.band, spec.scale, spec.softcap, has_sinks, deterministic, longest)


def sinks_to_read(sinks: torch.Tensor | None, needs: tuple[bool, ...]) -> torch.Tensor | None:
    """The sinks as an input of gradients: only their own gradient reads them."""
    *_, of_sinks = needs
    return sinks if of_sinks else None


def given_offsets(cu_q: torch.Tensor | None, cu_k: torch.Tensor | None) -> tuple[Any, ...]:
    """Offsets of packed sequences as inputs of launches; None for `cu_k` if it is `cu_q`.

    A replay tells tensors apart by their addresses, and most calls pass the same offsets twice.
    """
    return () if cu_q is None else (cu_q, None if cu_k is cu_q else cu_k)


def bound_launches(
    cache: Cache,
    key: tuple[Any, ...],
    options: tuple[Any, ...],
    mask: BlockMask,
    lists: Sequence[torch.Tensor],
) -> Launches | None:
    """The launches of a checked call with a mask, bound to it."""
    kind = mask_kind(mask, lists)
    recorded = None if kind is None else cache.get((key, options, kind))
    return None if recorded is None else bound(recorded, mask, lists)


def recorded_gradients(
    key: tuple[Any, ...], options: tuple[Any, ...], mask: BlockMask | None
) -> Any:
    """Launches recorded for gradients under a key of `described`; `bound` binds them to a mask."""
    if not _BACKWARD:
        return None
    kind = None if mask is None else mask_kind(mask, mask.tensors())
    if mask is not None and kind is None:
        return None
    return _BACKWARD.get((key, options, kind))
