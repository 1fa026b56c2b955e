"""State of PyTorch and Triton that a call depends on besides its arguments.

That is autocast (operands are cast before an operator, nothing inside it), whether Triton's
interpreter computes bfloat16 correctly, and whether operators are asked to explain their choice.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


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


# Triton's interpreter silently treats bfloat16 as 16-bit integers; `testing.interpreter` fixes it.
_mended = 0


@contextmanager
def bf16_mended() -> Iterator[None]:
    """Declare that, inside, the interpreter computes bfloat16 correctly."""
    global _mended
    _mended += 1
    try:
        yield
    finally:
        _mended -= 1


def bf16_is_exact() -> bool:
    """Whether the interpreter computes bfloat16 correctly now."""
    return _mended > 0


_explaining: ContextVar[bool] = ContextVar("bsk_explaining", default=False)


@contextmanager
def explaining() -> Iterator[None]:
    """Inside, the first operator raises `Explained` instead of computing."""
    token = _explaining.set(True)
    try:
        yield
    finally:
        _explaining.reset(token)


def is_explaining() -> bool:
    """Whether operators report what they would run instead of running it.

    Code that is traced never does: tracers cannot read context variables, and the operators in what
    they make are asked when it runs.
    """
    return not torch.compiler.is_compiling() and _explaining.get()


def usable_in_training(make: Callable[P, T]) -> Callable[P, T]:
    """Leave inference mode inside `make`, which builds a mask or a pattern.

    Autograd cannot save tensors that were made in inference mode, and a mask built there may well
    be used by a training step later.
    """

    @wraps(make)
    def outside_of_inference(*args: P.args, **kwargs: P.kwargs) -> T:
        # torch.compile traces `inference_mode` but not `is_inference_mode_enabled`
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False):
            return make(*args, **kwargs)

    return outside_of_inference
