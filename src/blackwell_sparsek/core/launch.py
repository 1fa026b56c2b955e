"""Launching kernels: the device they run on, and launches that can be repeated cheaply.

A call of a Triton kernel spends most of its host time on finding out again which compiled variant
it needs. `launch` therefore can record what it launched; `RecordedLaunches` runs the same variants
again with other tensors. Only what is the same in both calls (shapes, strides, options) may have
gone into a recording: whoever keeps one looks after that.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .compat import KernelLauncher, kernel_launcher, tensor_map
from .resting import resting

# Tensor maps kept for each descriptor: the allocator hands out the same few addresses again.
MAX_TENSOR_MAPS = 16


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` current: Triton launches on the current one, whatever it is given."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


class _Launch(NamedTuple):
    compiled: Any
    grid: int
    args: list[Any]


@dataclass
class _Recording:
    launches: list[_Launch] = field(default_factory=list)
    scratch: list[tuple[torch.Tensor, bool]] = field(default_factory=list)
    resting: list[torch.Tensor] = field(default_factory=list)
    complete: bool = True


_recording: ContextVar[_Recording | None] = ContextVar("bsk_recording", default=None)


@contextmanager
def recording() -> Iterator[_Recording]:
    """Inside, `launch` and `scratch` note what they do."""
    record = _Recording()
    token = _recording.set(record)
    try:
        yield record
    finally:
        _recording.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, launches are nobody's: for what is made once and kept."""
    token = _recording.set(None)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Whether somebody notes what is launched, who would miss launches that are repeated."""
    return _recording.get() is not None


def launch(kernel: Any, grid: int, args: Sequence[Any], **options: Any) -> None:
    """Run `kernel` on `grid` programs with all its parameters in order, constants included."""
    compiled = kernel[(grid,)](*args, **options)
    record = _recording.get()
    if record is not None:
        # the interpreter compiles nothing
        record.complete &= compiled is not None
        record.launches.append(_Launch(compiled, grid, list(args)))


def scratch(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zero: bool = False
) -> torch.Tensor:
    """Memory for one call of an operator, which a repeated call allocates anew.

    Zeroed memory is for counters: int32, a few words.
    """
    assert not zero or dtype == torch.int32, dtype
    make = torch.zeros if zero else torch.empty
    memory = make(tuple(shape), dtype=dtype, device=device)
    record = _recording.get()
    if record is not None:
        record.scratch.append((memory, zero))
    return memory


def resting_words(count: int, device: torch.device) -> torch.Tensor:
    """`count` int32 that are zero when a launch finds them and that it must leave so."""
    words = resting(count, device)
    record = _recording.get()
    if record is not None:
        record.resting.append(words)
    return words


class _Slot(NamedTuple):
    """A place in a launcher's argument list that differs from call to call."""

    place: int
    role: int


class _Template:
    """One recorded launch as the argument list of Triton's C launcher.

    Tensors are given as addresses, which the launcher takes without asking them again.
    """

    def __init__(self, launched: _Launch, launcher: KernelLauncher, role_of: dict[int, int]):
        self.launch = launcher.launch
        self.args: list[Any] = [launched.grid, 1, 1, 0, *launcher.prefix]
        self.tensors: list[_Slot] = []
        self.nested: list[tuple[int, list[_Slot]]] = []
        self.descriptors: list[tuple[_Slot, Any, Any, dict[int, Any]]] = []
        self.kept: list[torch.Tensor] = []
        metadata = iter(launcher.descriptors)
        for arg in launched.args:
            place = len(self.args)
            if isinstance(getattr(arg, "base", None), torch.Tensor):
                meta = next(metadata)
                slot = _Slot(place, role_of[arg.base.data_ptr()])
                self.args += tensor_map(arg, meta)
                self.descriptors.append((slot, copy(arg), meta, {}))
                self.descriptors[-1][1].base = None
            elif isinstance(arg, tuple):
                slots: list[_Slot] = []
                self.args.append([self._value(x, i, role_of, slots) for i, x in enumerate(arg)])
                self.nested.append((place, slots))
            else:
                self.args.append(self._value(arg, place, role_of, self.tensors))

    def _value(self, arg: Any, place: int, role_of: dict[int, int], slots: list[_Slot]) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        address = arg.data_ptr()
        if address in role_of:
            slots.append(_Slot(place, role_of[address]))
        else:
            self.kept.append(arg)
        return address

    def run(self, stream: int, tensors: list[torch.Tensor | None], addresses: list[int]) -> None:
        """Launch with these tensors, by role."""
        args = [*self.args]
        args[3] = stream
        for place, role in self.tensors:
            args[place] = addresses[role]
        for place, slots in self.nested:
            items = [*args[place]]
            for item, role in slots:
                items[item] = addresses[role]
            args[place] = tuple(items)
        for (place, role), descriptor, meta, maps in self.descriptors:
            args[place] = maps.get(addresses[role]) or self._map(
                descriptor, meta, maps, tensors[role]
            )
        self.launch(*args)

    @staticmethod
    def _map(descriptor: Any, meta: Any, maps: dict[int, Any], tensor: Any) -> Any:
        if len(maps) >= MAX_TENSOR_MAPS:
            maps.clear()
        descriptor = copy(descriptor)
        descriptor.base = tensor
        maps[tensor.data_ptr()] = made = tensor_map(descriptor, meta)[0]
        return made


class _Zeros:
    """Zeroed words for counters: each is handed out once, so that streams cannot meet in one.

    Made for one stream, on which they were zeroed.
    """

    WORDS = 4096

    def __init__(self, device: torch.device):
        self.words = torch.zeros(self.WORDS, dtype=torch.int32, device=device)
        self.used = 0

    def take(self, count: int) -> torch.Tensor | None:
        """The next `count` words, or None when they are used up."""
        first = self.used
        self.used = first + count
        return self.words[first : self.used] if self.used <= self.WORDS else None


_zeros: dict[tuple[int, int], _Zeros] = {}
# two threads on one stream must not get the same words: the second launch would find them used
_zeros_lock = threading.Lock()


def _counter(count: int, device: torch.device, stream: int) -> torch.Tensor:
    """`count` zeroed int32 for a launch on `stream`."""
    # a graph must zero its counters at every replay
    if not torch.cuda.is_current_stream_capturing():
        key = (device.index or 0, stream)
        with _zeros_lock:
            if key not in _zeros:
                _zeros[key] = _Zeros(device)
            words = _zeros[key].take(count)
            if words is None:
                del _zeros[key]
        if words is not None:
            return words
    return torch.zeros(count, dtype=torch.int32, device=device)


class RecordedLaunches:
    """The launches of one call of an operator, to be repeated with other tensors.

    `make` takes the tensors of the recorded call, None for an absent one, in the order in which
    `repeat` takes their successors. It returns None where the recording cannot tell the tensors
    apart, where kernels were interpreted, or where Triton hides its launcher.
    """

    def __init__(
        self,
        templates: list[_Template],
        scratch_made: list[tuple[torch.Tensor, bool]],
        resting_made: list[torch.Tensor],
        device: torch.device,
    ):
        self._templates = templates
        self._scratch = [(x.shape, x.dtype, x.device, zero) for x, zero in scratch_made]
        self._resting = [(x.numel(), x.device) for x in resting_made]
        self._device = device.index

    @classmethod
    def make(
        cls, record: _Recording, roles: Sequence[torch.Tensor | None]
    ) -> "RecordedLaunches | None":
        """Find the `roles` and the scratch memory among the arguments of the launches."""
        known = [*roles, *(x for x, _ in record.scratch), *record.resting]
        role_of = {x.data_ptr(): i for i, x in enumerate(known) if x is not None}
        distinct = len(role_of) == sum(x is not None for x in known)
        if not (distinct and record.launches and record.complete):
            return None
        templates = []
        for launched in record.launches:
            launcher = kernel_launcher(launched.compiled)
            if launcher is None or not _descriptors_have_roles(launched.args, role_of):
                return None
            templates.append(_Template(launched, launcher, role_of))
        device = next(x.device for x in known if x is not None)
        return cls(templates, record.scratch, record.resting, device)

    def repeat(self, roles: Sequence[torch.Tensor | None]) -> None:
        """Launch again with `roles` in place of the recorded tensors, on the current stream."""
        from triton.runtime import driver

        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.repeat(roles)
        stream = driver.active.get_current_stream(self._device)
        tensors = [*roles]
        for shape, dtype, device, zero in self._scratch:
            if zero:
                tensors.append(_counter(shape.numel(), device, stream))
            else:
                tensors.append(torch.empty(shape, dtype=dtype, device=device))
        tensors += [resting(count, device, stream) for count, device in self._resting]
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        for template in self._templates:
            template.run(stream, tensors, addresses)
        return None


def _descriptors_have_roles(args: list[Any], role_of: dict[int, int]) -> bool:
    bases = [getattr(arg, "base", None) for arg in args]
    return all(b.data_ptr() in role_of for b in bases if isinstance(b, torch.Tensor))
