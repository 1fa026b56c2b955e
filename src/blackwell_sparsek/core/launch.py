"""Launching kernels: the device they run on, and launches that can be repeated cheaply.

A call of a Triton kernel spends most of its host time on finding out again which compiled variant
it needs. `launch` therefore can record what it launched; `RecordedLaunches` runs the same variants
again with other tensors. Only what is the same in both calls (shapes, strides, options) may have
gone into a recording: whoever keeps one looks after that.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


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
    """Memory for one call of an operator, which a repeated call allocates anew."""
    make = torch.zeros if zero else torch.empty
    memory = make(tuple(shape), dtype=dtype, device=device)
    record = _recording.get()
    if record is not None:
        record.scratch.append((memory, zero))
    return memory


class _Place(NamedTuple):
    """An argument that holds a tensor: itself, in a tuple, or under a descriptor."""

    position: int
    item: int | None
    descriptor: bool
    role: int

    def put(self, args: list[Any], tensor: torch.Tensor | None) -> None:
        """Put `tensor` there."""
        if self.descriptor:
            # a copy: another thread may be launching with the same one
            args[self.position] = descriptor = copy(args[self.position])
            descriptor.base = tensor
        elif self.item is None:
            args[self.position] = tensor
        else:
            old = args[self.position]
            args[self.position] = (*old[: self.item], tensor, *old[self.item + 1 :])


def _tensors_in(args: list[Any]) -> Iterator[tuple[int, int | None, bool, torch.Tensor]]:
    """(index, item, whether under a descriptor, tensor) of each tensor among arguments."""
    for index, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            yield index, None, False, arg
        elif isinstance(getattr(arg, "base", None), torch.Tensor):
            yield index, None, True, arg.base
        elif isinstance(arg, tuple):
            for item, inner in enumerate(arg):
                if isinstance(inner, torch.Tensor):
                    yield index, item, False, inner


class RecordedLaunches:
    """The launches of one call of an operator, to be repeated with other tensors.

    `make` takes the tensors of the recorded call, None for an absent one, in the order in which
    `repeat` takes their successors. It returns None where the recording cannot tell the tensors
    apart, or where kernels were interpreted.
    """

    def __init__(self, record: _Recording, places: list[list[_Place]]):
        self._steps = list(zip(record.launches, places, strict=True))
        self._scratch = [(x.shape, x.dtype, x.device, zero) for x, zero in record.scratch]
        self._device = torch.cuda.current_device()
        # the tensors of the recorded call must not be kept alive
        for launched, where in self._steps:
            for place in where:
                place.put(launched.args, None)

    @classmethod
    def make(
        cls, record: _Recording, roles: Sequence[torch.Tensor | None]
    ) -> "RecordedLaunches | None":
        """Find the `roles` and the scratch memory among the arguments of the launches."""
        known = [*roles, *(x for x, _ in record.scratch)]
        role_of = {x.data_ptr(): i for i, x in enumerate(known) if x is not None}
        distinct = len(role_of) == sum(x is not None for x in known)
        if not (distinct and record.launches and record.complete):
            return None
        places = [
            [
                _Place(index, item, descriptor, role_of[tensor.data_ptr()])
                for index, item, descriptor, tensor in _tensors_in(launched.args)
                if tensor.data_ptr() in role_of
            ]
            for launched in record.launches
        ]
        return cls(record, places)

    def repeat(self, roles: Sequence[torch.Tensor | None]) -> None:
        """Launch again with `roles` in place of the recorded tensors, on the current stream."""
        from triton.runtime import driver

        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.repeat(roles)
        known = [*roles]
        for shape, dtype, device, zero in self._scratch:
            make = torch.zeros if zero else torch.empty
            known.append(make(shape, dtype=dtype, device=device))
        stream = driver.active.get_current_stream(self._device)
        for (compiled, grid, args), places in self._steps:
            # a copy: another thread may repeat the same launches
            args = [*args]
            for place in places:
                place.put(args, known[place.role])
            compiled.run(
                *(grid, 1, 1, stream, compiled.function, compiled.packed_metadata),
                *(None, None, None),
                *args,
            )
        return None
