"""Recordings of the launches of one call with their arguments, to be replayed later."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One launch: what was launched (None by Triton's front end), with its arguments in order."""

    launched: Any
    grid: int
    args: list[Any]
    kernel: Any


class Derived(NamedTuple):
    """A tensor that launches took, and how to make its counterpart for another call."""

    how: Any
    made: torch.Tensor


@dataclass
class Recording:
    """Everything that a replay passes to kernels, as recorded or newly allocated."""

    launches: list[Launch] = field(default_factory=list)
    scratch: list[torch.Tensor] = field(default_factory=list)
    zeroed: list[torch.Tensor] = field(default_factory=list)
    """Scratch memory for counters, zeroed before each call."""
    self_resetting: list[torch.Tensor] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    complete: bool = True
    """Whether the CUDA driver made all launches; those by Triton's front end cannot be replayed."""


_current: ContextVar[Recording | None] = ContextVar("bsk_recording", default=None)


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the launches made in this context, and their workspaces."""
    record = Recording()
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing in this context: for launches that build something once and keep it."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def current_recording() -> Recording | None:
    """The recording that launches belong to, if any."""
    return _current.get()


def is_recording() -> bool:
    """Whether launches are being recorded; the recording would miss replayed launches."""
    return _current.get() is not None


def note_derived(how: Any, made: torch.Tensor) -> None:
    """Record a tensor that launches take; `how` makes its counterpart for another call."""
    record = _current.get()
    if record is not None:
        record.derived.append(Derived(how, made))
