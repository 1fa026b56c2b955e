"""Calls that were made before, without checks, operator and kernel lookup a second time.

The launches of a call depend on its sizes, strides, dtypes and options alone. They are recorded at
the first call; a later call that agrees in all of these only allocates its results and launches.
Gradients, modes and transforms of PyTorch need the operator, so where one of them could be at work,
nothing is recorded or repeated.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..core.launch import RecordedLaunches, recording
from .dispatch import is_explaining

# Recordings kept together. A model meets a handful of sizes; a stream of new ones starts over.
MAX_RECORDINGS = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# The precision of float32 products is a global switch, which a recording would not follow.
_DTYPES = (torch.float16, torch.bfloat16)

Tensors = tuple[torch.Tensor, ...]


class _Recorded(NamedTuple):
    launches: RecordedLaunches
    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]


class RepeatableCall(NamedTuple):
    """A call whose launches may be recorded and repeated: where they are kept, and as what."""

    known: dict[Any, _Recorded | None]
    key: Hashable
    inputs: tuple[torch.Tensor | None, ...]

    def repeat(self) -> Tensors | None:
        """The results by recorded launches, or None where there are none."""
        recorded = self.known.get(self.key)
        if recorded is None:
            return None
        first = self.inputs[0]
        assert first is not None
        results = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device=first.device)
            for shape, strides, dtype in recorded.results
        )
        recorded.launches.repeat(_roles(results, self.inputs))
        return results

    def record(self, call: Callable[[], Tensors]) -> Tensors:
        """Make the results by `call` and keep its launches."""
        if self.key in self.known or torch.cuda.is_current_stream_capturing():
            return call()
        with recording() as record:
            results = call()
        if len(self.known) >= MAX_RECORDINGS:
            self.known.clear()
        launches = RecordedLaunches.make(record, _roles(results, self.inputs))
        made = [(x.shape, x.stride(), x.dtype) for x in results]
        self.known[self.key] = None if launches is None else _Recorded(launches, made)
        return results


def _roles(results: Tensors, inputs: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """Tensors that launches may read or write; those without elements have no address."""
    return [x if x is not None and x.numel() else None for x in (*results, *inputs)]


def tensor_key(x: torch.Tensor | None) -> Hashable:
    """What a launch may depend on of a tensor, besides its address."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


def may_repeat(operands: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None]) -> bool:
    """Whether launches make the whole of a call: no gradient, mode or transform needs more.

    `operands` are multiplied with each other; `others` are read besides, None where absent.
    """
    tensors = [*operands, *(x for x in others if x is not None)]
    device = tensors[0].device
    return (
        device.type == "cuda"
        and all(x.dtype in _DTYPES for x in operands)
        and all(
            type(x) in _PLAIN and x.device == device and x.data_ptr() % 16 == 0 for x in tensors
        )
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and _nothing_else_looks()
    )


def _nothing_else_looks() -> bool:
    """Whether no mode, transform or autocast stands between this call and the kernels."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cuda")
        or is_explaining()
    )
