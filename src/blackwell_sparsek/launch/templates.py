"""Recorded launches as templates, launched again with other tensors.

A recording may depend only on what both calls have in common (shapes, strides, options);
`launch.replay` ensures that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..core.compat import empty_on_gpu, raw_stream
from . import workspace
from .descriptors import Descriptor
from .driver import TensorMap
from .recording import Recording
from .variants import Launchable, Prepared
from .workspace import MOST_KEPT_BYTES, counters_of_stream, stream_memory, zeroed_counters

# Tensor maps kept for each descriptor, 128 bytes each: the layers of a model have tensors of one
# shape at many addresses, which recur in every step.
MAX_TENSOR_MAPS = 256
# Scratch tensors begin at multiples of this, as separate allocations would.
_ALIGNMENT = 512


class _Slot(NamedTuple):
    """A parameter that takes the address of the tensor with this role."""

    place: int
    role: int


class _MapSlot(NamedTuple):
    """A parameter that takes the tensor map of a tensor; `maps` keeps those made, by address."""

    place: int
    role: int
    encode: Callable[..., TensorMap]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    maps: dict[int, TensorMap]


class _Template:
    """One recorded launch: packed parameters, some of which differ between calls."""

    def __init__(self, launched: Launchable, grid: int, args: list[Any], role_of: dict[int, int]):
        self.variant = launched.variant
        self._grid = grid
        self._values = launched.values
        # tensors without a role, which every launch takes as they are
        self.kept = [x for x in _tensors(args) if x.data_ptr() and x.data_ptr() not in role_of]
        self._slots: list[_Slot] = []
        for place in self.variant.pointers:
            if launched.values[place] in role_of:
                self._slots.append(_Slot(place, role_of[launched.values[place]]))
        self._maps: list[_MapSlot] = []
        for encode, (place, x) in zip(self.variant.encoders, launched.descriptors, strict=True):
            role = role_of[x.base.data_ptr()]
            self._maps.append(_MapSlot(place, role, encode, x.shape, x.strides, {}))
        self._free: list[Prepared] = []

    def run(self, stream: int, addresses: list[int]) -> None:
        """Launch with tensors at these addresses, by role."""
        # one for each thread that launches at the same time
        try:
            prepared = self._free.pop()
        except IndexError:
            prepared = self.variant.prepared(self._grid, self._values)
        words = prepared.words
        for place, role in self._slots:
            words[place] = addresses[role]
        for slot in self._maps:
            address = addresses[slot.role]
            encoded = slot.maps.get(address) or _encoded(slot, address)
            prepared.places[slot.place] = encoded.address
        prepared.launch(stream)
        self._free.append(prepared)


def _encoded(slot: _MapSlot, address: int) -> TensorMap:
    """The tensor map for a tensor at `address`, kept for later launches."""
    if len(slot.maps) >= MAX_TENSOR_MAPS:
        slot.maps.clear()
    slot.maps[address] = made = slot.encode(address, slot.shape, slot.strides)
    return made


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a launch, but for those of descriptors."""
    for x in args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple) and not isinstance(x, Descriptor):
            yield from _tensors(x)


class RecordedLaunches:
    """The launches of one call of an operator, to be repeated with other tensors.

    `make` takes the tensors of the recorded call, None for an absent one, in the order in which
    `repeat` takes those of a later call. It returns None if the recording cannot tell the tensors
    from each other, or if only Triton's front end can launch the kernels.
    """

    def __init__(self, templates: list[_Template], record: Recording, device: torch.device):
        self._templates = templates
        self._offsets: list[int] = []
        self._bytes = 0
        self._parts = [memory.nbytes for memory in record.scratch]
        self._gap = workspace.gap_bytes
        for size in self._parts:
            self._offsets.append(self._bytes)
            self._bytes += -(-(size + self._gap) // _ALIGNMENT) * _ALIGNMENT
        # Memory that passes data from one launch to the next must belong to this call: launches of
        # another thread may come between them on the stream. Under PDL a launch would share it with
        # the launch ahead, which may still be running.
        alone = len(templates) == 1 and not templates[0].variant.overlaps
        self._shares = alone and self._bytes <= MOST_KEPT_BYTES
        self._zeroed = [(x.numel(), x.device) for x in record.zeroed]
        self._self_resetting = [(x.numel(), x.device) for x in record.self_resetting]
        self._device = device

    @classmethod
    def make(
        cls, record: Recording, roles: Sequence[torch.Tensor | None], closed: bool = False
    ) -> "RecordedLaunches | None":
        """Find the `roles` and the scratch memory among the arguments of the launches.

        All replays take other tensors as they are; with `closed` they are refused.
        """
        tensors = [*roles, *record.scratch, *record.zeroed, *record.self_resetting]
        role_of = {x.data_ptr(): i for i, x in enumerate(tensors) if x is not None}
        distinct = len(role_of) == sum(x is not None for x in tensors)
        if not (distinct and record.launches and record.complete):
            return None
        templates = []
        for launched, grid, args, _ in record.launches:
            if any(x.base.data_ptr() not in role_of for _, x in launched.descriptors):
                return None
            templates.append(_Template(launched, grid, args, role_of))
        if closed and any(template.kept for template in templates):
            return None
        device = next(x.device for x in tensors if x is not None)
        return cls(templates, record, device)

    def repeat(self, roles: Sequence[int]) -> None:
        """Launch again on the current stream with tensors at the addresses `roles`.

        The device of the recorded tensors must be current.
        """
        stream = raw_stream(self._device.index)
        addresses = [*roles]
        # memory stays with this call until its launches are on the stream
        owners: list[torch.Tensor] = []
        if self._offsets or self._zeroed or self._self_resetting:
            capturing = torch.cuda.is_current_stream_capturing()
            if self._offsets:
                memory = self._memory(stream, capturing)
                start = memory.data_ptr()
                addresses += [start + offset for offset in self._offsets]
            for count, device in self._zeroed:
                address, owner = zeroed_counters(count, device, stream, capturing)
                addresses.append(address)
                owners.append(owner)
            for count, device in self._self_resetting:
                owners.append(counters_of_stream(count, device, stream, capturing))
                addresses.append(owners[-1].data_ptr())
        for template in self._templates:
            template.run(stream, addresses)

    def _memory(self, stream: int, capturing: bool) -> torch.Tensor:
        """Scratch memory for the whole call: the stream's, or allocated for this call alone."""
        if self._shares and not capturing:
            return stream_memory(self._bytes, self._device, stream)
        return empty_on_gpu((self._bytes,), (1,), torch.uint8)
