"""Autocast: operands are cast before an operator, and nothing is cast inside of it."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast asks for on `device`, or None where it is off."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_operand(x: torch.Tensor) -> torch.Tensor:
    """What autocast does to an operand of a product: cast all but float64."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, PyTorch computes in the dtypes it is given.

    An implementation in plain PyTorch runs below the operator, but autocast still sees its calls
    and would round the float32 accumulation.
    """
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
