"""Argument checks with one message grammar: `<op>: <arg> <problem>; expected <X>, got <Y>`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .errors import InvalidInput, InvalidType, Unsupported
from .messages import check_flag as check_flag
from .messages import message as message
from .messages import quoted


def check_tensor(op: str, arg: str, x: Any) -> None:
    """Accept only a plain strided tensor; the error names what was given instead."""
    if not isinstance(x, torch.Tensor):
        raise InvalidType(message(op, arg, "is not a tensor", "torch.Tensor", type(x).__name__))
    if x.is_nested or type(x).__name__ == "DTensor":
        kind = "nested tensor" if x.is_nested else type(x).__name__
        raise Unsupported(message(op, arg, "is a tensor subclass", "a plain tensor", kind))
    if x.layout != torch.strided:
        raise InvalidType(message(op, arg, "has a sparse layout", torch.strided, x.layout))


def check_derivatives(op: str, arg: str, x: torch.Tensor) -> None:
    """Refuse tensors with a derivative that torch does not ask operators for."""
    check_tangent(op, arg, x)
    if is_differentiated_by_func(x):
        problem = "is differentiated by torch.func (grad, vjp, jacrev)"
        expected = ".backward() or torch.autograd.grad"
        raise Unsupported(message(op, arg, problem, expected, "a transform"))


def check_tangent(op: str, arg: str, x: torch.Tensor) -> None:
    """Refuse a tensor with a forward-mode derivative."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        # torch would treat the tangent as zero
        problem = "has a forward-mode derivative (torch.func.jvp, dual tensors)"
        expected = ".backward() or torch.autograd.grad"
        raise Unsupported(message(op, arg, problem, expected, "a tangent"))


def is_differentiated_by_func(*tensors: torch.Tensor) -> bool:
    """Whether a transform of `torch.func` asks for the gradient of any of the tensors."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    if not any(level.key() == functorch.TransformType.Grad for level in stack):
        return False
    return any(wants_gradient(x) for x in tensors)


def wants_gradient(x: torch.Tensor) -> bool:
    """`x.requires_grad`, also inside of `torch.vmap`, where no tensor reports it."""
    return (x if torch.compiler.is_compiling() else _innermost(x)).requires_grad


def is_batched(x: torch.Tensor) -> bool:
    """Whether `x` is one entry of a batch inside of `torch.vmap`."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x)


def _innermost(x: torch.Tensor) -> torch.Tensor:
    """The tensor inside all levels of `torch.vmap`: batched ones never report `requires_grad`."""
    while is_batched(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def check_has_data(op: str, arg: str, x: torch.Tensor) -> None:
    """Refuse a meta tensor whose values are read on the host or counted."""
    if x.is_meta:
        expected = "a tensor with data (make it on another device, then call .to('meta'))"
        raise Unsupported(message(op, arg, "is on the meta device", expected, "no data"))


def check_dtype(op: str, arg: str, x: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """The dtype must be one of `allowed`."""
    if x.dtype not in allowed:
        names = ", ".join(str(d) for d in allowed)
        raise InvalidType(message(op, arg, "has an unsupported dtype", f"one of {names}", x.dtype))


def check_rank(op: str, arg: str, x: torch.Tensor, layout: str) -> None:
    """The rank must be that of `layout`, a string such as `[B, H, S, D]`."""
    if x.dim() != layout.count(",") + 1:
        raise InvalidInput(message(op, arg, "has a wrong rank", layout, list(x.shape)))


def check_shape(op: str, arg: str, x: torch.Tensor, expected: Sequence[int]) -> None:
    """The shape must be exactly `expected`."""
    if tuple(x.shape) != tuple(expected):
        raise InvalidInput(message(op, arg, "has a wrong shape", list(expected), list(x.shape)))


def check_same_device(op: str, tensors: dict[str, torch.Tensor | None]) -> None:
    """All given tensors must live on one device."""
    devices = {arg: x.device for arg, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        got = ", ".join(f"{arg} on {device}" for arg, device in devices.items())
        raise InvalidInput(message(op, "arguments", "are on different devices", "one", got))


def check_same_dtype(op: str, tensors: dict[str, torch.Tensor], *, autocasts: bool = True) -> None:
    """All given tensors must have one dtype; with `autocasts` the error suggests autocast."""
    if len({x.dtype for x in tensors.values()}) > 1:
        got = ", ".join(f"{arg} {x.dtype}" for arg, x in tensors.items())
        hint = f"one dtype (cast them{', or run under torch.autocast' if autocasts else ''})"
        raise InvalidType(message(op, "/".join(tensors), "have different dtypes", hint, got))


def check_last_dim_contiguous(op: str, arg: str, x: torch.Tensor) -> None:
    """The last dimension must have stride 1; copies are the caller's decision."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel() > 0:
        raise InvalidInput(
            message(
                op,
                arg,
                "is not contiguous in its last dimension",
                "stride 1 there (call .contiguous())",
                f"strides {tuple(x.stride())}",
            )
        )


def shares_elements(x: torch.Tensor) -> bool:
    """Whether two elements may share an address, as in an expanded tensor."""
    needed = 1 if x.numel() else 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < needed:
            return True
        needed += (size - 1) * stride
    return False


def check_finite(op: str, arg: str, value: float) -> None:
    """A float argument must be finite."""
    # not math.isfinite, which torch.compile does not trace for a number that it made symbolic
    if not -math.inf < value < math.inf:
        raise InvalidInput(message(op, arg, "must be finite", "a finite number", value))


def check_choice(op: str, arg: str, value: Any, allowed: Sequence[Any]) -> None:
    """`value` must be one of `allowed`, and of its type."""
    if isinstance(value, str) or value is None:
        known = value in allowed
    else:
        # 1 == 1.0 == True, and tensors are compared element by element
        same = (x for x in allowed if isinstance(value, type(x)) and isinstance(x, type(value)))
        known = any(value == x for x in same)
    if not known:
        names = ", ".join(repr(a) for a in allowed)
        raise InvalidInput(message(op, arg, "is unknown", f"one of {names}", quoted(value)))
