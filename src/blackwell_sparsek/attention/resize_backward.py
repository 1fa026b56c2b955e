"""Gradients of dense calls without a mask that differ only in their lengths from earlier ones.

The counterpart of `resize` for the backward pass.
"""

from typing import Any, NamedTuple

import torch

from ..calls.attention import AttentionCall, tma_takes_strides
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
    found : what `described` gave for (dout, q, k, v, out, dlse, lse)
    options : those of `replay.gradient_options`
    tensors : q, k and v
    """
    given = _given(found, options) if _FAMILIES else None
    if given is None:
        return None
    key, sources = given
    family = kept(_FAMILIES, key)
    if family is None or family.device != raw_device():
        return None
    if times_seen(found.key) >= RESIZED_CALLS:
        return None
    gradients = family.launches.run(sources, tensors)
    if gradients is None:
        return None
    note_call(found.key)
    return (*gradients, _NOTHING)


_NOTHING = torch.empty(0)


class _Family(NamedTuple):
    """Shared by gradients that differ only in their lengths."""

    device: int
    launches: Any


def _given(found: Described, options: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """The family of gradients, and dout, q, k, v, out and lse by address, shape and strides.

    None if they must be computed in full.
    """
    needs, *_ = found.key
    dout, q, k, v, out, dlse, lse = found.tensors
    if needs != _NEEDS or dlse is not None:
        return None
    if dout is None or q is None or k is None or v is None or out is None or lse is None:
        return None
    shape_q, strides_q, dtype, device, _ = q
    if len(shape_q) != 4:
        return None
    shape_k, strides_k, *_ = k
    shape_v, strides_v, *_ = v
    shape_out, strides_out, *_ = out
    shape_lse, strides_lse, *_ = lse
    shape_dout, strides_dout, dtype_dout, *_ = dout
    _, heads, rows, head_dim = shape_q
    _, heads_kv, _, _ = shape_k
    _, _, _, head_dim_v = shape_v
    if 0 in shape_q or 0 in shape_k or (head_dim | head_dim_v) & 15:
        return None
    # the kernels around the backward are specialised on strides that 16 divides
    if strides_lse != (heads * rows, rows, 1) or not (
        tma_takes_strides(strides_dout, strides_out, step=16)
        and tma_takes_strides(strides_q, strides_k, strides_v)
    ):
        return None
    at_dout, at_q, at_k, at_v, at_out, _, at_lse = found.addresses
    sources = (
        (at_dout, shape_dout, strides_dout),
        (at_q, shape_q, strides_q),
        (at_k, shape_k, strides_k),
        (at_v, shape_v, strides_v),
        (at_out, shape_out, strides_out),
        (at_lse, shape_lse, strides_lse),
    )
    return (options, dtype, device, dtype_dout, heads, heads_kv, head_dim, head_dim_v), sources


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
    if found is None or spec.block_mask is not None or spec.is_varlen:
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
