"""Defining operators, with their rules for `torch.vmap` and forward-mode derivatives."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from ..core.checks import check_derivatives

# Defining operators in the namespace `bsk`.
#
# `torch.library.custom_op` wraps every call in Python that checks aliasing; defining the schema and
# registering the kernel for all backends has the same effect at a third of that cost per call.

NAMESPACE = "bsk"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_op(
    name: str,
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Register `bsk::<name><schema>` with its implementation and its fake; return the operator."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, without_tangents(name, impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if not op._schema.is_mutable:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", one_by_one(op), lib=_LIBRARY)
    return op


def define_autograd(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Register the derivative of `bsk::<name>`."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_LIBRARY
    )


def without_tangents(name: str, impl: Callable[..., Any]) -> Callable[..., Any]:
    """`impl` with a check for tangents, for direct calls; public functions check earlier."""

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
