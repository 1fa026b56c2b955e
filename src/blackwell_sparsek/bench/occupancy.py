"""How many warps of a kernel fit on a multiprocessor, and what keeps out the rest."""

from typing import NamedTuple

REGISTERS = 65536
# By architecture: warps and blocks of an SM, and its shared memory in bytes.
_LIMITS = {
    80: (64, 32, 167936),
    89: (48, 24, 102400),
    90: (64, 32, 233472),
    100: (64, 32, 233472),
    120: (48, 24, 102400),
}
# What the driver takes of each block's shared memory.
_RESERVED = 1024


class Occupancy(NamedTuple):
    """Warps on an SM, the most that it holds, and the scarcest resource."""

    warps: int
    most: int
    limit: str


def occupancy(arch: int, registers: int, shared: int, num_warps: int) -> Occupancy:
    """Warps that fit, by registers per thread, shared memory per block and warps per block.

    Examples
    --------
    >>> occupancy(90, registers=128, shared=200000, num_warps=8)
    Occupancy(warps=8, most=64, limit='shared memory')
    """
    most, blocks, memory = _LIMITS.get(arch, _LIMITS[90])
    # registers are given out to warps in units of 256
    each = -(-max(registers, 1) * 32 // 256) * 256 * num_warps
    fitting = {
        "warps": most // num_warps,
        "blocks": blocks,
        "registers": REGISTERS // each,
        "shared memory": memory // (shared + _RESERVED),
    }
    limit = min(fitting, key=lambda name: fitting[name])
    return Occupancy(fitting[limit] * num_warps, most, limit)
