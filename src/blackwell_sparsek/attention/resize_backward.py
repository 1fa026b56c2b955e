"""Gradients of calls without a mask that differ only in their lengths from earlier ones.

The counterpart of `resize` for the backward pass.
"""

from typing import Any, NamedTuple

import torch

from ..calls.attention import AttentionCall, ResizedGradients, tma_takes_strides
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
from .sm90.config import AttnBwdSm90Config
from .sm90.tuning import attn_bwd_sm90_is_split

# Launches by all that gradients depend on but for lengths.
_FAMILIES: Cache = {}
# Which inputs want a gradient: q, k and v, no sinks.
_NEEDS = (True, True, True, False)


def resized_gradients(
    found: Described, options: tuple[Any, ...], tensors: Tensors
) -> Tensors | None:
    """Gradients of q, k, v and of no sinks; None if they must be computed in full.

    Parameters
    ----------
    found : what `described` gave for (dout, q, k, v, out, dlse, lse, None) and, of packed
        sequences, their offsets
    options : those of `replay.gradient_options`
    tensors : q, k and v
    """
    given = _given(found, options) if _FAMILIES else None
    if given is None:
        return None
    key, call = given
    family = kept(_FAMILIES, key)
    if family is None or family.device != raw_device():
        return None
    if times_seen(found.key) >= RESIZED_CALLS:
        return None
    gradients = family.launches.run(call, tensors)
    if gradients is None:
        return None
    note_call(found.key)
    return (*gradients, _NOTHING)


_NOTHING = torch.empty(0)


class _Family(NamedTuple):
    """Shared by gradients that differ only in their lengths."""

    device: int
    launches: Any


def _given(found: Described, options: tuple[Any, ...]) -> tuple[Any, ResizedGradients] | None:
    """The family of gradients, and everything else that their launches depend on.

    None if they must be computed in full.
    """
    needs, *_ = found.key
    dout, q, k, v, out, dlse, lse, _, *offsets = found.tensors
    if needs != _NEEDS or dlse is not None:
        return None
    if dout is None or q is None or k is None or v is None or out is None or lse is None:
        return None
    shape_q, strides_q, dtype, device, _ = q
    shape_k, strides_k, *_ = k
    shape_v, strides_v, *_ = v
    shape_out, strides_out, *_ = out
    _, strides_lse, *_ = lse
    shape_dout, strides_dout, dtype_dout, *_ = dout
    if 0 in shape_q or 0 in shape_k:
        return None
    alike: tuple[Any, ...] = options
    at_dout, at_q, at_k, at_v, at_out, _, at_lse, _, *at_offsets = found.addresses
    at_cu_q = at_cu_k = 0
    if not offsets:
        batch, heads, max_q, head_dim = shape_q
        _, heads_kv, max_k, head_dim_v = shape_v
        contiguous: tuple[int, ...] = (heads * max_q, max_q, 1)
    else:
        rows, heads, head_dim = shape_q
        _, heads_kv, head_dim_v = shape_v
        contiguous = (rows, 1)
        *alike_list, longest = options
        alike, (max_q, max_k) = tuple(alike_list), longest
        cu_q, _ = offsets
        if cu_q is None:
            return None
        (count, *_), *_ = cu_q
        batch = count - 1
        # offsets that queries and keys share are passed once
        at_cu_q, at_cu_k = at_offsets
        at_cu_k = at_cu_k or at_cu_q
    # the kernels around the backward are specialised on strides that 16 divides
    if (head_dim | head_dim_v) & 15 or strides_lse != contiguous:
        return None
    if not (
        tma_takes_strides(strides_dout, strides_out, step=16)
        and tma_takes_strides(strides_q, strides_k, strides_v)
    ):
        return None
    call = ResizedGradients(
        (at_dout, shape_dout, strides_dout),
        (at_q, shape_q, strides_q),
        (at_k, shape_k, strides_k),
        (at_v, shape_v, strides_v),
        (at_out, shape_out, strides_out),
        *(at_lse, at_cu_q, at_cu_k, batch, max_q, max_k),
    )
    sizes = (heads, heads_kv, head_dim, head_dim_v, bool(offsets))
    return (alike, dtype, device, dtype_dout, *sizes), call


class _FamilyRecorder(Recorder):
    """Keeps the launches of gradients for calls with other lengths."""

    def __init__(self, family: Any, call: AttentionCall):
        super().__init__(None)
        self._family, self._call = family, call
        self._recording = recording()

    def keep(self, results: Tensors) -> Tensors:
        """Learn from the launches that computed `results`, if they can be resized."""
        record, launches, call = self._record, self._record.launches, self._call
        config = None
        if record.complete and len(launches) in (3, 4) and not record.derived:
            _, backward, *_ = launches
            config = backward.args[-1]
        if isinstance(config, AttnBwdSm90Config):
            family = _FAMILIES.get(self._family)
            if family is None:
                # with kernels, which are imported when they are first needed
                from .sm90.resize import BackwardLaunches

                made = BackwardLaunches(call.problem, call.spec.band, call.q.device)
                family = _Family(call.q.get_device(), made)
                keep(_FAMILIES, self._family, family)
            family.launches.learn(launches)
        return results


def gradient_recorder(
    found: Described | None, options: tuple[Any, ...], call: AttentionCall, tensors: Tensors
) -> Recorder:
    """Records gradients that are computed in full, for calls with other lengths."""
    spec = call.spec
    if found is None or spec.block_mask is not None:
        return NO_RECORDER
    if attn_bwd_sm90_is_split(call.problem):
        # two kernels, whose launches are not those of one
        return NO_RECORDER
    dout, out, lse, q, k, v = tensors
    recordable = may_record(options, (dout, out, q, k, v), (lse,))
    given = _given(found, options) if recordable else None
    if given is None:
        return NO_RECORDER
    key, _ = given
    known = _FAMILIES.get(key)
    if known is not None and known.launches.knows(call.problem):
        return NO_RECORDER
    return _FamilyRecorder(key, call)
