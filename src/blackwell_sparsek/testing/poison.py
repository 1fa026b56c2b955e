"""Poison: NaN in memory that was not written, so that results that depend on it show."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

_FACTORIES = ("empty", "empty_like", "empty_strided", "empty_permuted")
_METHODS = ("new_empty", "new_empty_strided")


def poison_(x: torch.Tensor) -> torch.Tensor:
    """Fill `x` in place with NaN, or with the largest value of an integer dtype; return it."""
    with torch.no_grad():
        if x.is_floating_point() or x.is_complex():
            return x.fill_(float("nan"))
        return x.fill_(True) if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)


def nan_like(x: torch.Tensor) -> torch.Tensor:
    """A poisoned tensor with the shape, strides, dtype and device of `x`."""
    return poison_(torch.empty_like(x))


def poison_unused_(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Poison in place the slots of `x` past each length, e.g. of a KV cache; return `x`.

    Parameters
    ----------
    x : [B, ..., slots, D], any dtype
    lengths : int [B], how many slots are in use
    """
    slot = torch.arange(x.shape[-2], device=x.device)[:, None]
    unused = slot >= lengths.to(x.device).view(-1, *[1] * (x.dim() - 1))
    return x.masked_fill_(unused, poison_(torch.empty((), dtype=x.dtype)).item())


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, `torch.empty`, its variants and `Tensor.new_empty` return poisoned tensors.

    Kernels must write every element of what their callers allocate; an element that is not written
    is then NaN instead of whatever the memory held.

    Examples
    --------
    >>> import torch
    >>> with poisoned_empty():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    originals = {name: getattr(torch, name) for name in _FACTORIES}
    # these belong to a base class of Tensor, so the patch adds an attribute to delete again
    inherited = [name for name in _METHODS if name not in vars(torch.Tensor)]
    try:
        for name, original in originals.items():
            setattr(torch, name, _poisoning(original))
        for name in inherited:
            setattr(torch.Tensor, name, _poisoning(getattr(torch.Tensor, name)))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
        for name in inherited:
            delattr(torch.Tensor, name)


def _poisoning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(factory)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison_(factory(*args, **kwargs))

    return poisoned
