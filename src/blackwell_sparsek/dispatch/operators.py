"""Defining operators, with their rules for `torch.vmap` and forward-mode derivatives."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..core.checks import check_derivatives, is_differentiated_by_func
from ..core.errors import Unsupported

# Defining operators in the namespace `bsk`.
#
# `torch.library.custom_op` wraps every call in Python that checks aliasing; defining the schema and
# registering the kernel for all backends has the same effect at a third of that cost per call.

NAMESPACE = "bsk"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


Operator = Callable[..., Any]
"""An operator in `torch.ops`; torch does not type their arguments."""


def define_op(
    name: str,
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
) -> Operator:
    """Register `bsk::<name><schema>` with its implementation and its fake; return the operator."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, without_tangents(name, impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if not op._schema.is_mutable:
        rule = one_by_one(op)
        torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=_LIBRARY)
        _LIBRARY.impl(name, batched_gradients(rule), "Batched")
    return op


def define_autograd(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Register the derivative of `bsk::<name>`."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_LIBRARY
    )


def transformable(op: Any, setup: Callable[..., None], backward: Callable[..., Any]) -> Operator:
    """`op`, also for gradients that `torch.func` asks for: it ignores the derivatives of operators.

    `setup` and `backward` are those of `define_autograd`. Derivatives of derivatives exist if
    `backward` calls what this returns.
    """

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            made = backward(ctx, *gradients)
            # an operator has a gradient for each tensor of a list, a function one for the list
            return tuple(None if isinstance(x, list) else x for x in made)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            name = op._schema.name.removeprefix(f"{NAMESPACE}::")
            raise Unsupported(
                f"{name}: no forward-mode derivative, which "
                "torch.func.hessian and jacfwd ask for; use torch.func.jacrev"
            )

    def call(*args: Any) -> Any:
        if is_differentiated_by_func(*_tensors(args)):
            return Transformed.apply(*args)
        return op(*args)

    return call


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
        if not results:
            return _no_results(op, in_dims, args)
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)

    return rule


def _entry(x: Any, dim: Any, index: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_entry(y, d, index) for y, d in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, index)


def _no_results(op: Callable[..., Any], in_dims: Any, args: Any) -> tuple[Any, Any]:
    """The results of `torch.vmap` over an empty batch; the operator's fake knows their shapes."""
    made = op(*(_described_entry(x, dim) for x, dim in zip(args, in_dims, strict=True)))
    device = next(_tensors(args)).device
    if isinstance(made, torch.Tensor):
        return torch.empty((0, *made.shape), dtype=made.dtype, device=device), 0
    empty = tuple(torch.empty((0, *x.shape), dtype=x.dtype, device=device) for x in made)
    return empty, (0,) * len(empty)


def _described_entry(x: Any, dim: Any) -> Any:
    """Shape, strides and dtype of an entry of `x` along `dim`, without data."""
    if isinstance(x, (list, tuple)):
        dims = dim if isinstance(dim, (list, tuple)) else [None] * len(x)
        return [_described_entry(y, d) for y, d in zip(x, dims, strict=True)]
    if not isinstance(x, torch.Tensor):
        return x
    if dim is None:
        return x.detach().to("meta")
    return x.new_empty([n for i, n in enumerate(x.shape) if i != dim % x.dim()], device="meta")


# Batched gradients: `torch.autograd.grad(..., is_grads_batched=True)`, and with it
# `torch.autograd.gradcheck` and `torch.autograd.functional.jacobian(..., vectorize=True)`, use an
# older batching of torch than `torch.vmap` does, with a dispatch key of its own.


class _Batch(NamedTuple):
    """Stands in for the `info` that torch passes to a rule for `torch.vmap`."""

    batch_size: int


def batched_gradients(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for tensors of the older batching, from a rule of `torch.vmap`."""

    def kernel(*args: Any) -> Any:
        level = _innermost_level(args)
        dims = tuple(_batched_dims(x, level) for x in args)
        whole = tuple(_whole(x, level) for x in args)
        first = next(x for x in _tensors(args) if _is_batched(x, level))
        results, _ = rule(_Batch(_whole(first, level).shape[0]), dims, *whole)
        if isinstance(results, torch.Tensor):
            return torch._add_batch_dim(results, 0, level)
        return tuple(torch._add_batch_dim(x, 0, level) for x in results)

    return kernel


# The older batching of torch has levels 1 to 63.
_LEVELS = 64


def _innermost_level(args: Any) -> int:
    """The level of the innermost batching that any tensor takes part in.

    torch keeps the current level for each thread, and a GPU's gradients run in a thread of their
    own, where it is zero: only the tensors know.
    """
    tensors = [x for x in _tensors(args) if is_in_older_batch(x)]
    return next(n for n in range(_LEVELS - 1, 0, -1) if any(_is_batched(x, n) for x in tensors))


def _is_batched(x: torch.Tensor, level: int) -> bool:
    """Whether `x` takes part in the batching `level`."""
    if not is_in_older_batch(x):
        return False
    # a tensor that does not take part is expanded to the size given
    sizes = {torch._remove_batch_dim(x, level, size, 0).shape[0] for size in (1, 2)}
    return len(sizes) == 1


def is_in_older_batch(x: torch.Tensor) -> bool:
    """Whether `x` stands for a batch of gradients; such a tensor has no memory of its own."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(x))


def _batched_dims(x: Any, level: int) -> Any:
    if isinstance(x, (list, tuple)):
        return [_batched_dims(y, level) for y in x]
    return 0 if isinstance(x, torch.Tensor) and _is_batched(x, level) else None


def _whole(x: Any, level: int) -> Any:
    """`x` with its batch as the first dimension."""
    if isinstance(x, (list, tuple)):
        return [_whole(y, level) for y in x]
    if isinstance(x, torch.Tensor) and _is_batched(x, level):
        return torch._remove_batch_dim(x, level, 1, 0)
    return x
