"""Results without a gradient: as in flash-attn, only asking for it raises."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ...core.errors import Unsupported

P = ParamSpec("P")
R = TypeVar("R")


class _NoGradient(torch.autograd.Function):
    """Results of inputs that want a gradient, which is refused in a backward."""

    @staticmethod
    def forward(
        ctx: Any, reason: str, results: tuple[torch.Tensor, ...], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Pass the results on."""
        ctx.reason = reason
        return tuple(x.view_as(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Refuse."""
        raise Unsupported(ctx.reason)


def want_gradients(*inputs: Any) -> bool:
    """Whether autograd records any of these; None is absent, and others are checked elsewhere."""
    given = (x for x in inputs if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def attached(
    reason: str, call: Callable[[], tuple[torch.Tensor, torch.Tensor]], *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of a call that has no gradients; for inputs that want one, it is refused later."""
    if not want_gradients(*inputs):
        return call()
    with torch.no_grad():
        results = call()
    wanted = [x for x in inputs if want_gradients(x)]
    out, lse = _NoGradient.apply(reason, results, *wanted)
    return out, lse


def without_gradients(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same for a whole function."""

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            wanted = [x for x in (*args, *kwargs.values()) if want_gradients(x)]
            if not wanted:
                return function(*args, **kwargs)
            with torch.no_grad():
                made: Any = function(*args, **kwargs)
            results = (made,) if isinstance(made, torch.Tensor) else made
            results = _NoGradient.apply(reason, results, *wanted)
            return results[0] if isinstance(made, torch.Tensor) else results

        return wrapper

    return decorator
