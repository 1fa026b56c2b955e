"""Launches that build something, recorded at the first call of a kind and repeated afterwards.

They belong to nobody's recording but their own: what they build is made once and kept.
"""

from collections.abc import Callable, Hashable, Sequence

import torch

from ..core.compat import raw_device
from .launcher import RecordedLaunches, on_device_of, recording, unrecorded

# A stream of ever new sizes starts over.
MAX_RECORDINGS = 64

_known: dict[Hashable, RecordedLaunches | None] = {}


def launch_recorded(
    key: Hashable, roles: Sequence[torch.Tensor], launches: Callable[[], None]
) -> RecordedLaunches | None:
    """Run `launches`, or repeat what they launched when the same `key` came before.

    Parameters
    ----------
    key : all that `launches` depends on, besides the device and the addresses of tensors
    roles : every tensor that kernels are given, none of them empty; scratch memory aside

    Returns
    -------
    What can be repeated by `repeat_at` with other tensors, all at addresses that 16 divides.
    """
    first, addresses = roles[0], [x.data_ptr() for x in roles]
    place = (key, first.get_device(), tuple([x % 16 == 0 for x in addresses]))
    recorded = _known.get(place)
    if recorded is not None:
        repeat_at(recorded, place[1], addresses)
    elif place in _known or not first.is_cuda or torch.cuda.is_current_stream_capturing():
        with unrecorded(), on_device_of(first):
            launches()
    else:
        with recording() as record, on_device_of(first):
            launches()
        if len(_known) >= MAX_RECORDINGS:
            _known.clear()
        _known[place] = recorded = RecordedLaunches.make(record, roles)
    return recorded if all(place[2]) else None


def repeat_at(recorded: RecordedLaunches, device: int, addresses: list[int]) -> None:
    """Launch on `device` with tensors at `addresses`, in the order of the recorded roles."""
    if raw_device() == device:
        recorded.repeat(addresses)
    else:
        with torch.cuda.device(device):
            recorded.repeat(addresses)
