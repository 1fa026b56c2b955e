"""Recorded launches as templates for Triton's C launcher, launched again with other tensors.

A recording may depend only on what both calls have in common (shapes, strides, options);
`launch.replay` ensures that.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch

from ..core.compat import KernelLauncher, kernel_launcher, raw_stream, tensor_map
from . import workspace
from .recording import Launch, Recording
from .workspace import MOST_KEPT_BYTES, counters_of_stream, stream_memory, zeroed_counters

# Tensor maps kept for each descriptor, 128 bytes each: the layers of a model have tensors of one
# shape at many addresses, which recur in every step.
MAX_TENSOR_MAPS = 256
# Scratch tensors begin at multiples of this, as separate allocations would.
_ALIGNMENT = 512


class _Slot(NamedTuple):
    """A place in an argument list that takes the address of the tensor with this role."""

    place: int
    role: int


class _TupleSlot(NamedTuple):
    """A place that takes a tuple, with slots for addresses in it and in nested tuples."""

    place: int
    recorded: list[Any]
    slots: list[_Slot]
    nested: "list[_TupleSlot]"


class _DescriptorSlot(NamedTuple):
    """A place that takes the tensor map of a descriptor; `maps` keeps those made, by address."""

    place: int
    role: int
    descriptor: Any
    metadata: Any
    maps: dict[int, Any]


class _Address:
    """Stands in for a tensor where only its address is needed."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        """The address, as a tensor returns it."""
        return self.address


class _Template:
    """One recorded launch as the argument list of Triton's C launcher.

    Tensors are passed as addresses, which saves the launcher from asking each tensor.
    """

    def __init__(self, launched: Launch, launcher: KernelLauncher, role_of: dict[int, int]):
        self.launch = launcher.launch
        self.overlaps = launcher.overlaps
        self.args: list[Any] = [launched.grid, 1, 1, 0, *launcher.prefix]
        self.tensors: list[_Slot] = []
        self.nested: list[_TupleSlot] = []
        self.descriptors: list[_DescriptorSlot] = []
        self.kept: list[torch.Tensor] = []
        metadata = iter(launcher.descriptors)
        for arg in launched.args:
            place = len(self.args)
            if isinstance(getattr(arg, "base", None), torch.Tensor):
                meta = next(metadata)
                role = role_of[arg.base.data_ptr()]
                self.args += tensor_map(arg, meta)
                descriptor = copy(arg)
                descriptor.base = None
                self.descriptors.append(_DescriptorSlot(place, role, descriptor, meta, {}))
            else:
                self.args.append(self._value(arg, place, role_of, self.tensors, self.nested))

    def _value(
        self,
        arg: Any,
        place: int,
        role_of: dict[int, int],
        slots: list[_Slot],
        nested: list[_TupleSlot],
    ) -> Any:
        """`arg` as the launcher takes it; what differs from call to call gets a slot."""
        if isinstance(arg, tuple):
            inside = _TupleSlot(place, [], [], [])
            for i, x in enumerate(arg):
                inside.recorded.append(self._value(x, i, role_of, inside.slots, inside.nested))
            if inside.slots or inside.nested:
                nested.append(inside)
            return tuple(inside.recorded)
        if not isinstance(arg, torch.Tensor):
            return arg
        address = arg.data_ptr()
        if address in role_of:
            slots.append(_Slot(place, role_of[address]))
        elif address:
            self.kept.append(arg)
        return address

    def run(self, stream: int, addresses: list[int]) -> None:
        """Launch with tensors at these addresses, by role."""
        args = self.args.copy()
        args[3] = stream
        for place, role in self.tensors:
            args[place] = addresses[role]
        for place, recorded, slots, nested in self.nested:
            items = recorded.copy()
            for item, role in slots:
                items[item] = addresses[role]
            if nested:
                _fill(items, nested, addresses)
            args[place] = tuple(items)
        for place, role, descriptor, metadata, maps in self.descriptors:
            address = addresses[role]
            args[place] = maps.get(address) or self._map(descriptor, metadata, maps, address)
        self.launch(*args)

    @staticmethod
    def _map(descriptor: Any, metadata: Any, maps: dict[int, Any], address: int) -> Any:
        if len(maps) >= MAX_TENSOR_MAPS:
            maps.clear()
        descriptor = copy(descriptor)
        descriptor.base = _Address(address)
        maps[address] = made = tensor_map(descriptor, metadata)[0]
        return made


def _fill(args: list[Any], nested: list[_TupleSlot], addresses: list[int]) -> None:
    """Put tuples with the tensors at `addresses` into their places."""
    for slot in nested:
        items = slot.recorded.copy()
        for item, role in slot.slots:
            items[item] = addresses[role]
        _fill(items, slot.nested, addresses)
        args[slot.place] = tuple(items)


class RecordedLaunches:
    """The launches of one call of an operator, to be repeated with other tensors.

    `make` takes the tensors of the recorded call, None for an absent one, in the order in which
    `repeat` takes those of a later call. It returns None if the recording cannot tell the tensors
    from each other, if kernels were interpreted, or if Triton hides its launcher.
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
        alone = len(templates) == 1 and not templates[0].overlaps
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
        for launched in record.launches:
            launcher = kernel_launcher(launched.compiled)
            if launcher is None or not _descriptors_have_roles(launched.args, role_of):
                return None
            templates.append(_Template(launched, launcher, role_of))
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
        return torch.empty(self._bytes, dtype=torch.uint8, device=self._device)


def _descriptors_have_roles(args: Sequence[Any], role_of: dict[int, int]) -> bool:
    """Whether each descriptor is of a tensor with a role, and none is inside a tuple."""
    bases = [getattr(arg, "base", None) for arg in args]
    return all(b.data_ptr() in role_of for b in bases if isinstance(b, torch.Tensor)) and not any(
        map(_holds_descriptors, args)
    )


def _holds_descriptors(arg: Any) -> bool:
    return isinstance(arg, tuple) and any(
        isinstance(getattr(x, "base", None), torch.Tensor) or _holds_descriptors(x) for x in arg
    )
