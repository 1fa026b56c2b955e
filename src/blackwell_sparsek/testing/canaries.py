"""Canary bytes around everything that is allocated, to find kernels that write out of bounds.

Inside `canaries()`, every tensor that torch allocates for the library, results and workspaces
alike, lies between two regions of known bytes. Scratch memory and counters that streams keep
between calls are allocated anew, and so is what replayed launches share: there the bytes after
each part are watched. `Canaries.check` fails with the place that allocated what was overrun.
Works on any device; a sanitizer sees single accesses, but not those that hit another live tensor.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..launch import templates, workspace
from .poison import poison_

# A multiple of the 512 bytes to which torch aligns memory, and wider than a row of most tiles.
GUARD_BYTES = 4096
CANARY = 0xA5

_EMPTY = ("empty", "empty_like", "empty_strided")
_ZEROS = ("zeros", "zeros_like")
_METHODS = {"new_empty": False, "new_zeros": True}


class Region(NamedTuple):
    """Bytes that nothing may write to, and who allocated what lies beside them."""

    memory: torch.Tensor
    where: str
    side: str


class Canaries:
    """The regions that are being watched."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def surround(self, x: torch.Tensor, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Memory like that of `x` between two regions; its contents are those of `x`."""
        span = _span(x)
        if span == 0 or x.layout != torch.strided or x.device.type == "meta":
            return x
        size = span * x.element_size()
        padded = -(-size // 16) * 16
        memory = empty(padded + 2 * GUARD_BYTES, dtype=torch.uint8, device=x.device)
        memory.fill_(CANARY)
        begin, end = GUARD_BYTES, GUARD_BYTES + size
        where = _caller()
        self.regions.append(Region(memory[:begin], where, "before"))
        self.regions.append(Region(memory[end:], where, "after"))
        typed = memory[begin : begin + padded].view(x.dtype)
        inside = typed.as_strided(x.shape, x.stride(), typed.storage_offset())
        return inside.requires_grad_(x.requires_grad)

    def watch_gaps(self, memory: torch.Tensor, offsets: list[int], parts: list[int]) -> None:
        """Watch the bytes after each part of a replayed call's scratch memory."""
        for i, (offset, size) in enumerate(zip(offsets, parts, strict=True)):
            gap = memory[offset + size : offset + size + GUARD_BYTES]
            gap.fill_(CANARY)
            self.regions.append(Region(gap, f"part {i} of a replayed call's scratch", "after"))

    def check(self) -> None:
        """Fail if a region has changed."""
        for memory, where, side in self.regions:
            changed = (memory != CANARY).nonzero().flatten()
            if changed.numel():
                distance = changed - memory.numel() if side == "before" else changed
                edge, nearest = ("start", -1) if side == "before" else ("end", 0)
                raise AssertionError(
                    f"{changed.numel()} bytes {side} memory from {where} were overwritten, the "
                    f"nearest at byte {int(distance[nearest]):+d} from its {edge}"
                )


def _span(x: torch.Tensor) -> int:
    if x.numel() == 0 or x.layout != torch.strided:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


def _caller() -> str:
    """The innermost place in the library that asked for memory."""
    frame: Any = sys._getframe(1)
    here = __name__.rpartition(".")[0]
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("blackwell_sparsek.") and not module.startswith(here):
            return f"{module}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "outside of the library"


@contextmanager
def canaries() -> Iterator[Canaries]:
    """Watch all memory that is allocated inside; checked at the end, and by `check` before.

    Memory that `torch.empty` returns inside is poisoned, as by `poisoned_empty`. Launches that were
    recorded before have no gaps to watch, so calls should not have been made before.

    Examples
    --------
    >>> import torch
    >>> with canaries() as watched:
    ...     x = torch.zeros(3)
    ...     watched.check()
    """
    watched = Canaries()
    empty = torch.empty
    recorded = templates.RecordedLaunches

    def memory_of(self: Any, stream: int, capturing: bool) -> torch.Tensor:
        # not the stream's: launches of other calls would share the gaps
        memory = empty(self._bytes, dtype=torch.uint8, device=self._device).fill_(0xFF)
        if self._gap:
            watched.watch_gaps(memory, self._offsets, self._parts)
        return memory

    with ExitStack() as patches:
        for name, zero in {**dict.fromkeys(_EMPTY, False), **dict.fromkeys(_ZEROS, True)}.items():
            made = _surrounding(getattr(torch, name), watched, empty, zero)
            patches.enter_context(mock.patch.object(torch, name, made))
        for name, zero in _METHODS.items():
            made = _surrounding(getattr(torch.Tensor, name), watched, empty, zero)
            patches.enter_context(mock.patch.object(torch.Tensor, name, made, create=True))
        for kept in ("_kept", "_zeros", "_of_streams", "_for_captures"):
            patches.enter_context(mock.patch.object(workspace, kept, {}))
        patches.enter_context(mock.patch.object(workspace, "gap_bytes", GUARD_BYTES))
        patches.enter_context(mock.patch.object(recorded, "_memory", memory_of))
        yield watched
        watched.check()


def _surrounding(
    factory: Callable[..., torch.Tensor],
    watched: Canaries,
    empty: Callable[..., torch.Tensor],
    zero: bool,
) -> Callable[..., torch.Tensor]:
    @wraps(factory)
    def surrounded(*args: Any, **kwargs: Any) -> torch.Tensor:
        plain = factory(*args, **kwargs)
        if "out" in kwargs or kwargs.get("pin_memory"):
            return plain
        made = watched.surround(plain, empty)
        with torch.no_grad():
            return made.zero_() if zero else poison_(made)

    return surrounded
