"""Calls without a mask that differ only in their lengths from a call made before.

Prompts and ragged batches have new lengths in almost every call, so that no recorded launches fit.
Such a call skips everything that does not depend on lengths: most checks, the choice of an
implementation, the lookup of the kernel. What does depend on them (configuration, order, grid) is
computed by the same functions as in a full call. Calls that differ only in their lengths are a
*family*.
"""

from typing import Any, NamedTuple

import torch

from ..calls.attention import AttentionCall, ResizedCall, tma_takes_strides
from ..core.torch_private import raw_device
from ..launch.recording import recording
from ..launch.replay import (
    NO_RECORDER,
    RESIZED_CALLS,
    Cache,
    Described,
    Recorder,
    Tensors,
    keep,
    kept,
    may_record,
    note_call,
    times_seen,
)
from . import replay
from .autograd import TrainingCall
from .sm90.config import AttnFwdSm90Config

# `_Family` by the key that `_family_call` returns.
_FAMILIES: Cache = {}


class _Family(NamedTuple):
    """Shared by calls that differ only in their lengths."""

    training: TrainingCall
    """The record of one of these calls."""
    device: int
    launches: Any
    """`sm90.resize.ForwardLaunches`."""


def replayed_or_resized(
    found: Described | None,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    mask: Any,
    packed: bool = False,
) -> Tensors | None:
    """Output and lse of a call, by its own recorded launches or by those of its family.

    None if the call must be made in full. Arguments as in `replay.replayed`.
    """
    results = replay.replayed(found, options, inputs, mask, packed)
    if results is None and found is not None and mask is None and _FAMILIES:
        return _resized(found, options, inputs)
    return results


def _resized(found: Described, options: tuple[Any, ...], inputs: tuple[Any, ...]) -> Tensors | None:
    family_call = _family_call(found, options)
    if family_call is None:
        return None
    key, call = family_call
    family = kept(_FAMILIES, key)
    if family is None or family.device != raw_device():
        return None
    # lengths that recur are left to the full call, which records its launches
    if times_seen(found.key) >= RESIZED_CALLS:
        return None
    results: Tensors | None = family.launches.run(call)
    if results is None:
        return None
    note_call(found.key)
    if not found.trains:
        return results
    training = family.training.resized(call.max_q, call.max_k)
    return_lse = options[0]
    return training.attend_with(results, inputs, return_lse)


def _family_call(found: Described, options: tuple[Any, ...]) -> tuple[Any, ResizedCall] | None:
    """The key of the family of a call, and everything else that its launches depend on.

    None if the call must be checked and prepared in full.
    """
    q, k, v, sinks, *offsets = found.tensors
    if q is None or k is None or v is None:
        return None
    shape_q, strides_q, dtype, device, _ = q
    shape_k, strides_k, dtype_k, device_k, _ = k
    shape_v, strides_v, dtype_v, device_v, _ = v
    if not (dtype == dtype_k == dtype_v and device == device_k == device_v):
        return None
    rank = 3 if offsets else 4
    if not (len(shape_q) == len(shape_k) == len(shape_v) == rank):
        return None
    if 0 in shape_q or 0 in shape_k or not tma_takes_strides(strides_q, strides_k, strides_v):
        return None
    # the full call copies sinks with gaps, and a resized one does not
    if sinks is not None and sinks[1] != (1,):
        return None
    at_q, at_k, at_v, at_sinks, *at_offsets = found.addresses
    tensors = ((at_q, shape_q, strides_q), (at_k, shape_k, strides_k), (at_v, shape_v, strides_v))
    if not offsets:
        batch, heads, max_q, head_dim = shape_q
        batch_k, heads_k, max_k, head_dim_k = shape_k
        batch_v, heads_v, max_v, head_dim_v = shape_v
        if not (batch == batch_k == batch_v and max_k == max_v):
            return None
        alike: tuple[Any, ...] = options
        call = ResizedCall(*tensors, at_sinks, 0, 0, batch, max_q, max_k)
    else:
        _, heads, head_dim = shape_q
        tokens_k, heads_k, head_dim_k = shape_k
        tokens_v, heads_v, head_dim_v = shape_v
        # offsets that queries and keys share are passed once
        cu_q, cu_k = offsets
        at_cu_q, at_cu_k = at_offsets
        cu_k, at_cu_k = cu_k or cu_q, at_cu_k or at_cu_q
        _, max_q, max_k, *alike_list = options
        if tokens_k != tokens_v or cu_q != cu_k or cu_q is None:
            return None
        shape, strides, kind, of_offsets, _ = cu_q
        if strides != (1,) or kind != torch.int32 or of_offsets != device or shape[0] < 2:
            return None
        if not (type(max_q) is type(max_k) is int) or max_k < 1:
            return None
        alike = tuple(alike_list)
        call = ResizedCall(*tensors, at_sinks, at_cu_q, at_cu_k, shape[0] - 1, max_q, max_k)
    if head_dim != head_dim_k or heads_k != heads_v:
        return None
    sizes = (heads, heads_k, head_dim, head_dim_v)
    return (alike, found.kind, rank, dtype, device, sizes, sinks), call


class _FamilyRecorder(Recorder):
    """Keeps the launch of a call for others of its family."""

    def __init__(self, key: Any, call: AttentionCall, impl: str):
        super().__init__(None)
        self._key, self._call, self._impl = key, call, impl
        self._recording = recording()

    def keep(self, results: Tensors) -> Tensors:
        """Learn from the launch that computed `results`, if it can be resized."""
        record, call = self._record, self._call
        if not record.complete or len(record.launches) != 1 or record.derived:
            return results
        (launch,) = record.launches
        config = launch.args[-1]
        if isinstance(config, AttnFwdSm90Config):
            # imported here because it imports kernels
            from .sm90.resize import ForwardLaunches

            family = _FAMILIES.get(self._key)
            if family is None:
                training = TrainingCall.of(call, self._impl)
                launches = ForwardLaunches(call.problem, call.spec, call.q.device)
                family = _Family(training, call.q.get_device(), launches)
                keep(_FAMILIES, self._key, family)
            family.launches.learn(launch)
        return results


def recorder(
    found: Described | None,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    call: AttentionCall,
    impl: str,
) -> Recorder:
    """Records a call that `replayed_or_resized` could not make: for itself or for its family."""
    spec = call.spec
    exact = replay.recorder(found, options, inputs, spec.block_mask, packed=spec.is_varlen)
    if exact is not NO_RECORDER or found is None or spec.block_mask is not None:
        return exact
    q, k, v, *others = inputs
    family_call = _family_call(found, options) if may_record(options, (q, k, v), others) else None
    if family_call is None:
        return NO_RECORDER
    key, _ = family_call
    return _FamilyRecorder(key, call, impl)
