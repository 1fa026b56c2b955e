"""Launches that build something, recorded at the first call of a kind and repeated afterwards.

They belong to nobody's recording but their own: what they build is made once and kept.
"""

from collections.abc import Callable, Hashable, Sequence

import torch

from ..core.launch import RecordedLaunches, on_device_of, recording, unrecorded

# A stream of ever new sizes starts over.
MAX_RECORDINGS = 64

_known: dict[Hashable, RecordedLaunches | None] = {}


def launch_recorded(
    key: Hashable, roles: Sequence[torch.Tensor], launches: Callable[[], None]
) -> None:
    """Run `launches`, or repeat what they launched when the same `key` came before.

    Parameters
    ----------
    key : all that `launches` depends on, besides the device and the addresses of tensors
    roles : every tensor that kernels are given, none of them empty; scratch memory aside
    """
    first = roles[0]
    place = (key, first.device.index, tuple([x.data_ptr() % 16 == 0 for x in roles]))
    recorded = _known.get(place)
    if recorded is not None:
        recorded.repeat(roles)
    elif place in _known or not first.is_cuda or torch.cuda.is_current_stream_capturing():
        with unrecorded(), on_device_of(first):
            launches()
    else:
        with recording() as record, on_device_of(first):
            launches()
        if len(_known) >= MAX_RECORDINGS:
            _known.clear()
        _known[place] = RecordedLaunches.make(record, roles)
