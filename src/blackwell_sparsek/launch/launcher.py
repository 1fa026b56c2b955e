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

from ..core.compat import (
    KernelLauncher,
    kernel_launcher,
    launch_in_clusters,
    raw_stream,
    tensor_map,
)
from .workspace import MOST_KEPT_BYTES, made_apart, resting, stream_memory, words_at_rest

# Tensor maps kept for each descriptor, 128 bytes each: the layers of a model have tensors of one
# shape at as many addresses, which come back with every step.
MAX_TENSOR_MAPS = 256
# Pieces of scratch memory begin at multiples of this, as an allocation of their own would.
_ALIGNMENT = 512


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
    derived: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
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


def launch(
    kernel: Any, grid: int, args: Sequence[Any], *, cluster: int = 1, **options: Any
) -> None:
    """Run `kernel` on `grid` programs with all its parameters in order, constants included.

    With `cluster`, on `grid` clusters of as many programs.
    """
    if cluster > 1:
        launch_in_clusters(kernel.warmup(*args, grid=(grid,), **options), cluster)
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


def note_derived(how: Any, made: torch.Tensor) -> None:
    """Note that launches were given a tensor that another call makes in the same way, by `how`."""
    record = _recording.get()
    if record is not None:
        record.derived.append((how, made))


class _Slot(NamedTuple):
    """A place in a launcher's argument list that differs from call to call."""

    place: int
    role: int


class _Address:
    """Stands for a tensor where only its address is asked for."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        """As a tensor tells it."""
        return self.address


class _Template:
    """One recorded launch as the argument list of Triton's C launcher.

    Tensors are given as addresses, which the launcher takes without asking them again.
    """

    def __init__(self, launched: _Launch, launcher: KernelLauncher, role_of: dict[int, int]):
        self.launch = launcher.launch
        self.overlaps = launcher.overlaps
        self.args: list[Any] = [launched.grid, 1, 1, 0, *launcher.prefix]
        self.tensors: list[_Slot] = []
        self.nested: list[tuple[int, list[Any], list[_Slot]]] = []
        self.descriptors: list[tuple[int, int, Any, Any, dict[int, Any]]] = []
        self.kept: list[torch.Tensor] = []
        metadata = iter(launcher.descriptors)
        for arg in launched.args:
            place = len(self.args)
            if isinstance(getattr(arg, "base", None), torch.Tensor):
                meta = next(metadata)
                role = role_of[arg.base.data_ptr()]
                self.args += tensor_map(arg, meta)
                self.descriptors.append((place, role, copy(arg), meta, {}))
                self.descriptors[-1][2].base = None
            elif isinstance(arg, tuple):
                slots: list[_Slot] = []
                items = [self._value(x, i, role_of, slots) for i, x in enumerate(arg)]
                self.args.append(tuple(items))
                if slots:
                    self.nested.append((place, items, slots))
            else:
                self.args.append(self._value(arg, place, role_of, self.tensors))

    def _value(self, arg: Any, place: int, role_of: dict[int, int], slots: list[_Slot]) -> Any:
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
        for place, recorded, slots in self.nested:
            items = recorded.copy()
            for item, role in slots:
                items[item] = addresses[role]
            args[place] = tuple(items)
        for place, role, descriptor, meta, maps in self.descriptors:
            address = addresses[role]
            args[place] = maps.get(address) or self._map(descriptor, meta, maps, address)
        self.launch(*args)

    @staticmethod
    def _map(descriptor: Any, meta: Any, maps: dict[int, Any], address: int) -> Any:
        if len(maps) >= MAX_TENSOR_MAPS:
            maps.clear()
        descriptor = copy(descriptor)
        descriptor.base = _Address(address)
        maps[address] = made = tensor_map(descriptor, meta)[0]
        return made


class _Zeros:
    """Zeroed words for counters: each is handed out once, so that streams cannot meet in one.

    Made for one stream, on which they were zeroed.
    """

    WORDS = 4096

    def __init__(self, device: torch.device):
        self.words = torch.zeros(self.WORDS, dtype=torch.int32, device=device)
        self.used = 0

    def take(self, count: int) -> int | None:
        """The address of the next `count` words, or None when they are used up."""
        first = self.used
        self.used = first + count
        return self.words.data_ptr() + 4 * first if self.used <= self.WORDS else None


_zeros: dict[tuple[int, int], _Zeros] = {}
# two threads on one stream must not get the same words: the second launch would find them used
_zeros_lock = threading.Lock()


def _counter(
    count: int, device: torch.device, stream: int, capturing: bool
) -> tuple[int, torch.Tensor]:
    """The address of `count` zeroed int32 for a launch on `stream`, and who owns them."""
    # a graph must zero its counters at every replay
    if not capturing:
        key = (device.index or 0, stream)
        with _zeros_lock:
            if key not in _zeros:
                _zeros[key] = made_apart(lambda: _Zeros(device), device)
            words = _zeros[key].words
            address = _zeros[key].take(count)
            if address is None:
                del _zeros[key]
        if address is not None:
            return address, words
    words = torch.zeros(count, dtype=torch.int32, device=device)
    return words.data_ptr(), words


class RecordedLaunches:
    """The launches of one call of an operator, to be repeated with other tensors.

    `make` takes the tensors of the recorded call, None for an absent one, in the order in which
    `repeat` takes their successors. It returns None where the recording cannot tell the tensors
    apart, where kernels were interpreted, or where Triton hides its launcher.
    """

    def __init__(
        self,
        templates: list[_Template],
        scratch_made: list[torch.Tensor],
        counters: list[torch.Tensor],
        resting_made: list[torch.Tensor],
        device: torch.device,
    ):
        self._templates = templates
        self._offsets: list[int] = []
        self._bytes = 0
        for memory in scratch_made:
            self._offsets.append(self._bytes)
            self._bytes += cdiv(memory.nbytes, _ALIGNMENT) * _ALIGNMENT
        # What one launch leaves to the next must be this call's own: another thread's launches may
        # come between them on the stream. One that overlaps would meet the launch ahead of it.
        alone = len(templates) == 1 and not templates[0].overlaps
        self._shares = alone and self._bytes <= MOST_KEPT_BYTES
        self._counters = [(x.numel(), x.device) for x in counters]
        self._resting = [(x.numel(), x.device) for x in resting_made]
        self._device = device

    @classmethod
    def make(
        cls, record: _Recording, roles: Sequence[torch.Tensor | None], closed: bool = False
    ) -> "RecordedLaunches | None":
        """Find the `roles` and the scratch memory among the arguments of the launches.

        Other tensors are given to all repetitions as they are, or are refused: `closed`.
        """
        counters = [x for x, zero in record.scratch if zero]
        memories = [x for x, zero in record.scratch if not zero]
        known = [*roles, *memories, *counters, *record.resting]
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
        if closed and any(template.kept for template in templates):
            return None
        device = next(x.device for x in known if x is not None)
        return cls(templates, memories, counters, record.resting, device)

    def repeat(self, roles: Sequence[int]) -> None:
        """Launch again on the current stream with tensors at the addresses `roles`.

        The device of the recorded tensors must be current.
        """
        stream = raw_stream(self._device.index)
        addresses = [*roles]
        # memory stays with this call until its launches are on the stream
        owners: list[torch.Tensor] = []
        if self._offsets or self._counters or self._resting:
            capturing = torch.cuda.is_current_stream_capturing()
            if self._offsets:
                memory = self._memory(stream, capturing)
                start = memory.data_ptr()
                addresses += [start + offset for offset in self._offsets]
            for count, device in self._counters:
                address, owner = _counter(count, device, stream, capturing)
                addresses.append(address)
                owners.append(owner)
            for count, device in self._resting:
                owners.append(words_at_rest(count, device, stream, capturing))
                addresses.append(owners[-1].data_ptr())
        for template in self._templates:
            template.run(stream, addresses)

    def _memory(self, stream: int, capturing: bool) -> torch.Tensor:
        """Scratch memory for all pieces: that of the stream, or for this call alone."""
        if self._shares and not capturing:
            return stream_memory(self._bytes, self._device, stream)
        return torch.empty(self._bytes, dtype=torch.uint8, device=self._device)


def _descriptors_have_roles(args: list[Any], role_of: dict[int, int]) -> bool:
    bases = [getattr(arg, "base", None) for arg in args]
    return all(b.data_ptr() in role_of for b in bases if isinstance(b, torch.Tensor))
