"""Calls without a mask that differ only in their lengths from a call made before.

Prompts and ragged batches have new lengths in almost every call, so that no recorded launches fit.
Such a call skips what does not depend on lengths: most checks, the choice of an implementation, the
lookup of the kernel. What depends on them (configuration, order, grid) is computed by the same
functions as in a full call.
"""

from typing import Any, NamedTuple

import torch

from ..calls.attention import AttentionCall, AttnSpec, ResizedCall, tma_takes_strides
from ..core.torch_private import raw_device
from ..launch.recording import recording
from ..launch.replay import (
    NO_RECORDER,
    Cache,
    Described,
    Recorder,
    Tensors,
    keep,
    kept,
    may_record,
    seen_before,
)
from ..launch.resize import MapSource
from . import replay
from .autograd import TrainingCall
from .sm90.config import AttnFwdSm90Config

# What calls have in common that differ only in their lengths, by `_key`.
_FAMILIES: Cache = {}


class _Family(NamedTuple):
    """The options of calls that differ only in their lengths, and their launches."""

    spec: AttnSpec
    """Without tensors."""
    deterministic: bool
    impl: str
    device: int
    launches: Any


def repeated(
    found: Described | None,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    mask: Any,
    packed: bool = False,
) -> Tensors | None:
    """Output and lse of a call by recorded launches; None if the call must be made in full.

    The arguments are those of `replay.replayed`. Lengths that come for the second time are left to
    the full call, whose launches are recorded.
    """
    results = replay.replayed(found, options, inputs, mask, packed)
    if results is None and found is not None and mask is None and _FAMILIES:
        return _resized(found, options, inputs)
    return results


def _resized(found: Described, options: tuple[Any, ...], inputs: tuple[Any, ...]) -> Tensors | None:
    given = _given(found, options)
    family = None if given is None else kept(_FAMILIES, given.family)
    if family is None or given is None or family.device != raw_device():
        return None
    if seen_before(found.key, note=False):
        return None
    results: Tensors | None = family.launches.run(given.call)
    if results is not None:
        seen_before(found.key)
    if results is None or not found.trains:
        return results
    spec = family.spec._replace(max_q=given.call.max_q, max_k=given.call.max_k)
    training = TrainingCall(spec, family.deterministic, family.impl)
    q, k, v, sinks = inputs
    return training.attend_with(results, q, k, v, sinks, options[0])


class _Given(NamedTuple):
    """A call of a family."""

    family: Any
    """All that launches depend on but for lengths."""
    call: ResizedCall


def _given(found: Described, options: tuple[Any, ...]) -> _Given | None:
    """Take a call apart; None if it has to be checked or prepared in full."""
    q, k, v, sinks, *offsets = found.tensors
    if q is None or k is None or v is None:
        return None
    shape_q, strides_q, dtype, device, _ = q
    shape_k, strides_k, dtype_k, device_k, _ = k
    shape_v, strides_v, dtype_v, device_v, _ = v
    if not (dtype == dtype_k == dtype_v and device == device_k == device_v):
        return None
    if len(shape_q) != (3 if offsets else 4) or len(shape_k) != len(shape_q):
        return None
    *outer_k, head_dim = shape_k
    *outer_v, head_dim_v = shape_v
    if shape_q[-1] != head_dim or outer_k != outer_v or 0 in shape_q or 0 in shape_k:
        return None
    # sinks with gaps are copied
    if sinks is not None and sinks[1] != (1,):
        return None
    if not all(map(tma_takes_strides, (strides_q, strides_k, strides_v))):
        return None
    family = (
        # packed sequences have their maximal lengths after `return_lse`
        options[3:] if offsets else options[1:],
        # the types of options, since True equals 1, and BSK_IMPL
        found.key[1 : len(options) + 2],
        # which backward will run depends on a switch, at the end of the key
        found.trains and found.key[-1],
        *(len(offsets), dtype, device, shape_q[1], shape_k[1], head_dim, head_dim_v, sinks),
    )
    at_q, at_k, at_v, at_sinks, *at_offsets = found.addresses
    tensors = (
        MapSource(at_q, shape_q, strides_q),
        MapSource(at_k, shape_k, strides_k),
        MapSource(at_v, shape_v, strides_v),
    )
    if not offsets:
        batch, _, max_q, _ = shape_q
        batch_k, _, max_k, _ = shape_k
        if batch_k != batch:
            return None
        return _Given(family, ResizedCall(*tensors, at_sinks, 0, 0, batch, max_q, max_k))
    # offsets that serve keys too are given once
    cu_q, cu_k = offsets
    at_cu_q, at_cu_k = at_offsets
    cu_k, at_cu_k = cu_k or cu_q, at_cu_k or at_cu_q
    _, max_q, max_k, *_ = options
    if cu_q != cu_k or cu_q is None or not (type(max_q) is type(max_k) is int):
        return None
    shape, strides, kind, of_offsets, _ = cu_q
    if strides != (1,) or kind != torch.int32 or of_offsets != device:
        return None
    if shape[0] < 2 or max_k < 1:
        return None
    call = ResizedCall(*tensors, at_sinks, at_cu_q, at_cu_k, shape[0] - 1, max_q, max_k)
    return _Given(family, call)


class _FamilyRecorder(Recorder):
    """Keeps the launch of a call for calls with other lengths."""

    def __init__(self, key: Any, call: AttentionCall, impl: str):
        super().__init__(None)
        self._family, self._call, self._impl = key, call, impl
        self._recording = recording()

    def keep(self, results: Tensors) -> Tensors:
        """Learn from the launch that computed `results`, if it is one that can be resized."""
        record, call = self._record, self._call
        launches = record.launches
        alone = record.complete and len(launches) == 1 and not record.derived
        if alone and isinstance(launches[0].args[-1], AttnFwdSm90Config):
            family = _FAMILIES.get(self._family)
            if family is None:
                spec = call.spec._replace(sinks=None, cu_seqlens_q=None, cu_seqlens_k=None)
                device, made = call.q.get_device(), _launches_of(call)
                family = _Family(spec, call.deterministic, self._impl, device, made)
                keep(_FAMILIES, self._family, family)
            family.launches.learn(launches[0])
        return results


def _launches_of(call: AttentionCall) -> Any:
    # with kernels, which are imported when they are first needed
    from .sm90.resize import ForwardLaunches

    return ForwardLaunches(call.problem, call.spec, call.q.device)


def recorder(
    found: Described | None,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    call: AttentionCall,
    impl: str,
) -> Recorder:
    """Records a call that `repeated` did not make, if others can be made from its launches."""
    spec = call.spec
    exact = replay.recorder(found, options, inputs, spec.block_mask, packed=spec.is_varlen)
    if exact is not NO_RECORDER or found is None or spec.block_mask is not None:
        return exact
    q, k, v, *others = inputs
    given = _given(found, options) if may_record(options, (q, k, v), others) else None
    return NO_RECORDER if given is None else _FamilyRecorder(given.family, call, impl)
