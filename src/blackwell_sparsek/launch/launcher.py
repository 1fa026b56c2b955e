"""Launching kernels on the device of their tensors.

Calling a Triton kernel spends most of its host time on finding the compiled variant again. `launch`
therefore keeps what it launched while a call is recorded, and `launch.templates` launches the same
variants again with other tensors.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..core.compat import launch_in_clusters
from .recording import Launch, current_recording


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` current: Triton launches on the current one, whatever it is given."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def launch(
    kernel: Any, grid: int, args: Sequence[Any], *, cluster: int = 1, **options: Any
) -> None:
    """Run `kernel` on `grid` programs with all its parameters in order, constants included.

    With `cluster`, on `grid` clusters of `cluster` programs each.
    """
    if cluster > 1:
        launch_in_clusters(kernel.warmup(*args, grid=(grid,), **options), cluster)
    compiled = kernel[(grid,)](*args, **options)
    record = current_recording()
    if record is not None:
        # the interpreter compiles nothing
        record.complete &= compiled is not None
        record.launches.append(Launch(compiled, grid, list(args)))
