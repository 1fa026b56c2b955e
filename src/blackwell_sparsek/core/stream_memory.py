"""Scratch memory that a stream keeps, as cuBLAS keeps its workspace.

Launches on one stream follow each other, so that they may use the same memory: nothing is left in
it for a later one. Whoever captures a graph takes other memory, since the graph may run beside the
stream.
"""

import torch

from .apart import made_apart

# A stream keeps no more than this; larger pieces are allocated for each call. Calls that need more
# run long enough to hide an allocation.
MOST_KEPT_BYTES = 8 * 2**20
# Powers of two from this on, so that growing needs a few steps at most.
_LEAST_BYTES = 2**16

_kept: dict[tuple[int | None, int], torch.Tensor] = {}


def stream_memory(size: int, device: torch.device, stream: int) -> torch.Tensor:
    """At least `size` bytes for one launch on `stream`, which must be the current one."""
    key = (device.index, stream)
    memory = _kept.get(key)
    if memory is None or memory.numel() < size:
        enough = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        memory = made_apart(lambda: torch.empty(enough, dtype=torch.uint8, device=device), device)
        _kept[key] = memory
    return memory
