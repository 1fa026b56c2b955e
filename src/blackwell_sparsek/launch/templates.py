"""Recorded launches as templates, launched again with other tensors.

A recording may depend only on properties that both calls share (shapes, strides, options);
`launch.replay` ensures that.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..core.torch_private import empty_on_gpu, raw_stream
from . import workspace
from .descriptors import Descriptor
from .prepared import MapSlot, Slot, Template
from .recording import Recording
from .variants import Launchable
from .workspace import MOST_KEPT_BYTES, counters_of_stream, stream_memory, zeroed_counters

# Scratch tensors begin at multiples of this, as separate allocations would.
_ALIGNMENT = 512


class _Template(Template):
    """One recorded launch; tensors with a role are replaced in every call."""

    def __init__(self, launched: Launchable, grid: int, args: list[Any], role_of: dict[int, int]):
        variant, values = launched.variant, launched.values
        # tensors without a role, which all launches share
        self.kept = [x for x in _tensors(args) if x.data_ptr() and x.data_ptr() not in role_of]
        slots = [
            Slot(place, role_of[values[place]])
            for place in variant.pointers
            if values[place] in role_of
        ]
        maps = [
            MapSlot(place, role_of[x.base.data_ptr()], encode, x.shape, x.strides, {})
            for encode, (place, x) in zip(variant.encoders, launched.descriptors, strict=True)
        ]
        super().__init__(variant, grid, values, slots, maps)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a launch, except inside descriptors."""
    for x in args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple) and not isinstance(x, Descriptor):
            yield from _tensors(x)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class RecordedLaunches:
    """The launches of one call of an operator, to be repeated with other tensors.

    `make` takes the tensors of the recorded call, None for an absent one; `repeat` takes the
    addresses of their counterparts in the same order. `make` returns None if two tensors have the
    same address, or if only Triton's front end can launch the kernels.
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

        All replays share any other tensor; with `closed`, such a recording is refused.
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
        kept = [x for template in templates for x in template.kept]
        # a view of a tensor with a role: in another call it has another address
        memory = {_storage(x) for x in tensors if x is not None}
        if (closed and kept) or any(_storage(x) in memory for x in kept):
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
        """Scratch memory for the whole call: of the stream, or allocated for this call alone."""
        if self._shares and not capturing:
            return stream_memory(self._bytes, self._device, stream)
        return empty_on_gpu((self._bytes,), (1,), torch.uint8)
