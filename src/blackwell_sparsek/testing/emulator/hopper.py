"""Hopper's own parts: mbarriers, tensor maps and their copies, WGMMA and its operands.

Copies take effect some time after they were issued, as on a GPU: what does not wait for them reads
NaN, or overwrites what they still read.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import E4M3, from_bf16
from .memory import EmulatorError, GlobalMemory, SharedMemory

_ADDRESS_MASK = 2**64 - 1
# Bytes of a row of a swizzled tile, by CUtensorMapSwizzle and by the bits of a WGMMA descriptor.
MAP_SWIZZLES = (0, 32, 64, 128)
DESCRIPTOR_SWIZZLES = (0, 128, 64, 32)


def swizzled(addresses: Any, width: int) -> Any:
    """Where the byte of a tile lies whose rows have `width` bytes: chunks of 16 change places."""
    if width == 0:
        return addresses
    return addresses ^ (((addresses >> 7) & (width // 16 - 1)) << 4)


class Barrier:
    """An mbarrier."""

    def __init__(self, arrivals: int):
        self.arrivals = arrivals
        self.pending = arrivals
        self.bytes = 0
        self.phase = 0

    def arrive(self, count: int = 1) -> None:
        """Count arrivals."""
        self.pending -= count
        if self.pending < 0:
            raise EmulatorError(f"more than {self.arrivals} arrivals in one phase of an mbarrier")
        self._complete()

    def expect(self, size: int) -> None:
        """Expect bytes of copies."""
        self.bytes += size

    def receive(self, size: int) -> None:
        """Count bytes that have arrived."""
        self.bytes -= size
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.arrivals

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over."""
        return self.phase & 1 != parity & 1


class TensorMap(NamedTuple):
    """What a tensor map says; sizes, strides in bytes and box from the outermost dimension on."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int
    swizzle: int
    is_float: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return math.prod(self.box) * self.element

    def places(self, start: Sequence[int]) -> tuple[Any, Any]:
        """Addresses of the elements of a box that begins at `start`, and which of them exist."""
        first = self.address
        offsets = np.zeros(1, np.int64)
        inside = np.ones(1, np.bool_)
        for at, size, stride, width in zip(start, self.sizes, self.strides, self.box, strict=True):
            first += at * stride
            steps = np.arange(width)
            # a stride may count on addresses that wrap around; a box has one step along it
            along = steps * stride if width > 1 else np.zeros(1, np.int64)
            offsets = (offsets[:, None] + along).reshape(-1)
            exists = (at + steps >= 0) & (at + steps < size)
            inside = (inside[:, None] & exists).reshape(-1)
        first &= _ADDRESS_MASK
        return np.uint64(first) + offsets.astype(np.uint64), inside

    def shared_places(self, address: int) -> Any:
        """Addresses of the bytes of a box in shared memory, one row for each element."""
        places = address + np.arange(self.nbytes)
        return swizzled(places, MAP_SWIZZLES[self.swizzle]).reshape(-1, self.element)

    def check(self, address: int) -> None:
        """Refuse tiles that a GPU does not place as they are addressed."""
        least = {0: 16, 1: 128, 2: 128, 3: 128}[self.swizzle]
        if address % least:
            raise EmulatorError(f"a tensor copy at {address:#x} of shared memory")


def load_box(map_: TensorMap, start: Sequence[int], memory: GlobalMemory) -> Any:
    """The bytes of a box, zero where the tensor has no element."""
    addresses, inside = map_.places(start)
    found = np.zeros((len(addresses), map_.element), np.uint8)
    if inside.any():
        kind = {1: 1, 2: 2, 4: 4}[map_.element]
        (elements,) = memory.load(addresses[inside], kind, 1)
        found[inside] = elements.view(np.uint8).reshape(-1, map_.element)
    return found


def store_box(
    map_: TensorMap,
    start: Sequence[int],
    content: Any,
    memory: GlobalMemory,
    add: bool,
) -> None:
    """Write the bytes of a box, or add them as fp32; elements out of bounds are left out."""
    addresses, inside = map_.places(start)
    if not inside.any():
        return
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[map_.element]
    elements = np.ascontiguousarray(content[inside]).view(kind).reshape(-1)
    if add:
        if map_.element != 4 or not map_.is_float:
            raise EmulatorError("only sums in fp32 are known of reductions of tensor copies")
        (old,) = memory.load(addresses[inside], 4, 1)
        elements = (old.view(np.float32) + elements.view(np.float32)).view(np.uint32)
    memory.store(addresses[inside], map_.element, [elements])


# WGMMA.


class Descriptor(NamedTuple):
    """An operand of WGMMA in shared memory."""

    address: int
    leading: int
    stride: int
    width: int
    """Bytes of the rows of its swizzle; 0 for none."""

    @staticmethod
    def decode(bits: int) -> "Descriptor":
        """The descriptor in a 64-bit register."""
        if bits >> 49 & 7:
            raise EmulatorError("WGMMA operands with a base offset are not known")
        return Descriptor(
            (bits & 0x3FFF) << 4,
            (bits >> 16 & 0x3FFF) << 4,
            (bits >> 32 & 0x3FFF) << 4,
            DESCRIPTOR_SWIZZLES[bits >> 62 & 3],
        )

    def places(self, rows: Any, depth: Any, element: int, transposed: bool) -> Any:
        """Addresses of the elements [rows, depth], where products are summed along `depth`."""
        row, k = rows[:, None], depth[None, :]
        if self.width == 0:
            raise EmulatorError("WGMMA operands without swizzle are not known")
        if transposed:
            # rows are contiguous; a pattern has 8 numbers along the depth
            columns = self.width // element
            offsets = (
                row // columns * self.leading
                + k // 8 * self.stride
                + k % 8 * self.width
                + row % columns * element
            )
        else:
            offsets = row // 8 * self.stride + row % 8 * self.width + k * element
        return swizzled(self.address + offsets, self.width)


def read_matrix(
    shared: SharedMemory,
    descriptor: Descriptor,
    rows: int,
    depth: int,
    kind: str,
    transposed: bool,
    first_row: int = 0,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """fp32 [rows, depth] of an operand in shared memory; `check` is told its addresses."""
    element = 1 if kind == "e4m3" else 2
    places = descriptor.places(
        np.arange(first_row, first_row + rows), np.arange(depth), element, transposed
    )
    if check is not None:
        check(places)
    if element == 1:
        return E4M3[shared.bytes_at(places)]
    (bits,) = shared.load(places.reshape(-1), 2, 1)
    return decoded(bits, kind).reshape(rows, depth)


def decoded(bits: Any, kind: str) -> Any:
    """fp32 values of 16-bit words."""
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


_LANE = np.arange(32)


def fragment_places(columns: int) -> tuple[Any, Any]:
    """Row and column of each register [registers, lanes] of 16 rows of a WGMMA accumulator."""
    register = np.arange(columns // 2)[:, None]
    row = _LANE[None, :] // 4 + register % 4 // 2 * 8
    column = register // 4 * 8 + _LANE[None, :] % 4 * 2 + register % 2
    return row, column


def factor_from_registers(registers: Sequence[Any], kind: str) -> Any:
    """fp32 [16, depth] of a first operand in four registers of each lane."""
    packed = np.stack(registers)
    size = 1 if kind == "e4m3" else 2
    per_word = 4 // size
    depth = 8 * per_word
    found = np.empty((16, depth), np.float32)
    for register in range(4):
        row = _LANE // 4 + register % 2 * 8
        for i in range(per_word):
            bits = (packed[register] >> np.uint32(8 * size * i)) & np.uint32(2 ** (8 * size) - 1)
            column = _LANE % 4 * per_word + i + register // 2 * (4 * per_word)
            if size == 1:
                found[row, column] = E4M3[bits]
            else:
                found[row, column] = decoded(bits.astype(np.uint16), kind)
    return found
