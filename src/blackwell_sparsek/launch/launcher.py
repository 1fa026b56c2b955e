"""Launching kernels on the device of their tensors.

While a call is recorded, `launch` also notes each launch; `launch.templates` launches the same
variants again with other tensors.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..core.sizes import cdiv as cdiv
from ..core.torch_private import raw_device, raw_stream
from .assembler import assembler_options
from .compile_hooks import constants_as_text
from .interpreted import comparisons_are_bits
from .prepared import COMPILE_OPTIONS
from .recording import Launch, current_recording
from .variants import Launchable, current_sm, find_variant, for_triton


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` current: launches go there, not to the device of their tensors."""
    if not x.is_cuda or x.get_device() == raw_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def launch(
    kernel: Any, grid: int, args: Sequence[Any], *, cluster: int = 1, **options: Any
) -> None:
    """Run `kernel` on `grid` programs with all its parameters in order, constants included.

    With `cluster`, on `grid` clusters of `cluster` programs each.
    """
    launched = launch_kernel(kernel, grid, args, cluster, options)
    record = current_recording()
    if record is not None:
        # a launch by Triton's front end cannot be replayed by the driver
        record.complete &= launched is not None
        record.launches.append(Launch(launched, grid, list(args), kernel))


def launch_kernel(
    kernel: Any, grid: int, args: Sequence[Any], cluster: int, options: dict[str, Any]
) -> Launchable | None:
    """Launch through the CUDA driver, or else through Triton, which returns None."""
    found = find_variant(kernel, args, cluster, options)
    if found is not None:
        found.launch(grid, raw_stream(raw_device()))
        return found
    if cluster > 1:
        raise RuntimeError("Triton's front end does not launch single programs in clusters")
    options = COMPILE_OPTIONS | assembler_options(kernel, current_sm()) | options
    with constants_as_text(), comparisons_are_bits():
        kernel[(grid,)](*map(for_triton, args), **options)
    return None
