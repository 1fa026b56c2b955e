"""Private functions of torch, because the public ones make checks that a launch cannot afford.

Where a private function is missing, its public counterpart takes its place.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

raw_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _public_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


# torch.compile does not trace decorated functions; the public decorator imports the compiler
_untraced: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def untraced(function: F) -> F:
    """Let `torch.compile` call `function` without tracing it."""
    made: F = _untraced(function)
    return made


def _public_empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# (shape, strides, dtype) -> memory on the current GPU; compiled models allocate with it
empty_on_gpu: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _public_empty
)
