"""Small helpers of launchers: integer arithmetic and the device a kernel is launched on."""

from contextlib import AbstractContextManager, nullcontext

import torch


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` current: Triton launches on the current one, whatever it is given."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
