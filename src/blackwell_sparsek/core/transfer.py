"""Copies of small host data to a device, without waiting for them."""

from collections.abc import Sequence

import torch

from .errors import BskError

# Rows of int32 start at multiples of 16 bytes: kernels are compiled for aligned pointers.
ALIGNED_INTS = 4


def to_device(
    values: Sequence[int] | Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`values` as a tensor on `device`, or in `out`.

    For a GPU they pass through pinned memory, which the allocator keeps until the copy is done.
    """
    on_gpu = device.type == "cuda"
    # named, because torch's default device may be another, whose memory cannot be pinned
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=on_gpu)
    if out is not None:
        return out.copy_(host, non_blocking=on_gpu)
    return host.to(device, non_blocking=on_gpu)


def aligned_rows(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Pad rows of equal length with zeros, so that each row starts aligned."""
    width = -(-len(rows[0]) // ALIGNED_INTS) * ALIGNED_INTS
    return [[*row, *[0] * (width - len(row))] for row in rows]


def is_capturing(device: torch.device) -> bool:
    """Whether launches on `device` are being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(op: str, device: torch.device) -> None:
    """Raise during the capture of a CUDA graph: host accounting would run once, not per replay."""
    if is_capturing(device):
        raise BskError(
            f"{op}: keeps accounts on the host, which a CUDA graph would not repeat; call it "
            "before each replay and capture only write or kv_append"
        )
