"""What the transforms of `torch.func` and forward-mode derivatives make of the operators."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from ..core.checks import check_derivatives


def without_tangents(name: str, impl: Callable[..., Any]) -> Callable[..., Any]:
    """`impl` for operators that are called directly; public functions check before."""

    def checked(*args: Any) -> Any:
        if forward_ad._current_level >= 0:
            for x in _tensors(args):
                check_derivatives(name, "an argument", x)
        return impl(*args)

    return checked


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for x in args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def one_by_one(op: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of `torch.vmap` for an operator without side effects: a call for each entry."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        results = [
            op(*(_entry(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)

    return rule


def _entry(x: Any, dim: Any, index: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_entry(y, d, index) for y, d in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, index)
