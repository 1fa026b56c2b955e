"""Helpers for operands that the handlers of several kinds of instructions share."""

from typing import Any

from .machine import Warp
from .memory import RANK_SHIFT, EmulatorError

_WORD_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


def word_bytes(parts: tuple[str, ...]) -> int:
    """Bytes of the words that an instruction moves."""
    return _WORD_BYTES[parts[-1][1:]]


def chosen_lanes(mask: Any) -> Any:
    """An index of the lanes of a mask; None means all."""
    return slice(None) if mask is None else mask


def shared_of(warp: Warp, addresses: Any) -> Any:
    """The shared memory that addresses lie in, of this program or another of its cluster."""
    first = int(addresses.flat[0])
    if (addresses >> RANK_SHIFT != first >> RANK_SHIFT).any():
        raise EmulatorError("lanes access shared memory of different programs")
    block, _ = warp.block.machine.place(warp.block, first)
    return block.shared


def local(addresses: Any) -> Any:
    """Addresses within the shared memory of a program."""
    return addresses.astype("int64") & (2**RANK_SHIFT - 1)
