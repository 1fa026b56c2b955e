"""Memory of an emulated GPU: tensors in global memory, and the shared memory of programs.

Every access is checked: it must lie in one tensor, at a multiple of its size. Shared memory starts
out as NaN.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

# Where shared memory starts: tiles that are swizzled lie at multiples of 1 KiB.
SHARED_START = 1024
# Addresses of shared memory of another program of a cluster: its rank plus 1 above these bits.
RANK_SHIFT = 24
# Bytes that are written and fenced together: no tile begins in the middle of them.
CHUNK = 16
# Parameters are addressed too, for tensor maps: by 32 bits or by 64.
PARAMETERS_START = 0x7F000000
WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class EmulatorError(Exception):
    """A kernel did what a GPU would not forgive, or what this emulator does not know."""


class _Region(NamedTuple):
    """The memory of one tensor."""

    start: int
    end: int
    memory: Any


class GlobalMemory:
    """The memory of the tensors of a launch, in place.

    Parameters
    ----------
    tensors : found at their own addresses
    arrays : contiguous arrays by made-up addresses, which have to be multiples of 16
    """

    def __init__(self, tensors: Sequence[torch.Tensor], arrays: Mapping[int, Any] | None = None):
        regions: dict[int, _Region] = {}
        for start, array in (arrays or {}).items():
            if not array.flags.c_contiguous or start % 16:
                raise ValueError(f"an array at {start:#x} that is not contiguous, or not aligned")
            content = array.reshape(-1).view(np.uint8)
            regions[start] = _Region(start, start + content.size, content)
        for x in tensors:
            storage = x.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if size:
                memory: Any = (ctypes.c_uint8 * size).from_address(start)
                regions[start] = _Region(start, start + size, np.frombuffer(memory, np.uint8))
        self._regions = sorted(regions.values())
        # tensors share a storage that must outlive the launch
        self._tensors = list(tensors)

    def region(self, first: int, last: int) -> _Region:
        """The tensor that holds all bytes from `first` up to `last`."""
        for region in self._regions:
            if region.start <= first and last <= region.end:
                return region
        near = min(
            self._regions, key=lambda r: min(abs(first - r.start), abs(first - r.end)), default=None
        )
        place = "no tensors" if near is None else (
            f"{first - near.start} bytes after the start of the nearest tensor, "
            f"which has {near.end - near.start}"
        )  # fmt: skip
        raise EmulatorError(
            f"access to {last - first} bytes of global memory at {first:#x}: {place}"
        )

    def _places(self, addresses: Any, size: int) -> tuple[Any, Any]:
        """A tensor's memory in words of `size` bytes, and the places of addresses in it."""
        if (addresses % size).any():
            bad = int(addresses[addresses % size != 0].min())
            raise EmulatorError(f"misaligned address {bad:#x} of {size} bytes in global memory")
        region = self.region(int(addresses.min()), int(addresses.max()) + size)
        if region.start % size:
            raise EmulatorError(f"a tensor at {region.start:#x} is not aligned to {size} bytes")
        words = region.memory[: len(region.memory) // size * size]
        return words, (addresses - np.uint64(region.start)).astype(np.int64)

    def load(self, addresses: Any, size: int, count: int) -> list[Any]:
        """`count` words of `size` bytes each from every address."""
        try:
            words, places = self._places(addresses, size * count)
        except EmulatorError:
            if len(addresses) == 1:
                raise
            # lanes may read different tensors
            parts = [self.load(addresses[i : i + 1], size, count) for i in range(len(addresses))]
            return [np.concatenate([part[i] for part in parts]) for i in range(count)]
        kind = WORDS[size]
        view = words[: len(words) // size * size].view(kind)
        return [view[places // size + i] for i in range(count)]

    def store(self, addresses: Any, size: int, values: Sequence[Any]) -> None:
        """Store one word of `size` bytes after the other at every address."""
        try:
            words, places = self._places(addresses, size * len(values))
        except EmulatorError:
            if len(addresses) == 1:
                raise
            for i in range(len(addresses)):
                self.store(addresses[i : i + 1], size, [x[i : i + 1] for x in values])
            return
        view = words[: len(words) // size * size].view(WORDS[size])
        for i, x in enumerate(values):
            view[places // size + i] = x


class SharedMemory:
    """The shared memory of one program."""

    def __init__(self, size: int):
        # the view of 8-byte words needs whole words
        self.memory: Any = np.full(-(-size // CHUNK) * CHUNK, 0xFF, np.uint8)
        # when a thread last wrote to a chunk, 0 if a copy did since, and the warp of that thread
        self._written: Any = np.zeros(len(self.memory) // CHUNK, np.int64)
        self._writers: Any = np.zeros(len(self.memory) // CHUNK, np.int64)

    def _places(self, addresses: Any, size: int) -> Any:
        places = addresses.astype(np.int64) - SHARED_START
        if places.min() < 0 or places.max() + size > len(self.memory):
            raise EmulatorError(
                f"access to shared memory at {int(places.min())} to {int(places.max()) + size}, "
                f"of {len(self.memory)} bytes"
            )
        if (places % size).any():
            raise EmulatorError(f"misaligned access of {size} bytes to shared memory")
        return places

    def load(self, addresses: Any, size: int, count: int) -> list[Any]:
        """`count` words of `size` bytes each from every address."""
        places = self._places(addresses, size * count) // size
        view = self.memory.view(WORDS[size])
        return [view[places + i] for i in range(count)]

    def store(self, addresses: Any, size: int, values: Sequence[Any]) -> Any:
        """Store one word of `size` bytes after the other at every address.

        Returns which addresses now have other bytes.
        """
        places = self._places(addresses, size * len(values)) // size
        view = self.memory.view(WORDS[size])
        changed = np.zeros(len(places), np.bool_)
        for i, x in enumerate(values):
            changed |= view[places + i] != x
            view[places + i] = x
        return changed

    def bytes_at(self, addresses: Any) -> Any:
        """The bytes at these addresses, of any shape."""
        return self.memory[self._places(addresses, 1)]

    def set_bytes(self, addresses: Any, values: Any) -> None:
        """Write bytes at these addresses, as copies do: in whole chunks, or parts of one."""
        places = self._places(addresses, 1)
        self.memory[places] = values
        self._written[places.reshape(-1)[::CHUNK] // CHUNK] = 0

    def written(self, addresses: Any, warp: int, time: int) -> None:
        """Remember that a warp wrote to the chunks at these addresses."""
        chunks = (addresses.astype(np.int64) - SHARED_START) // CHUNK
        self._written[chunks] = time
        self._writers[chunks] = warp

    def unfenced(self, addresses: Any, reader: int, fences: Any) -> bool:
        """Whether threads wrote there after the last fence of both their warp and the reader's.

        `fences` has the time of the last fence of each warp.
        """
        chunks = (addresses.astype(np.int64) - SHARED_START) // CHUNK
        time = self._written[chunks]
        late = (time > fences[reader]) & (time > fences[self._writers[chunks]])
        return bool(late.any())
