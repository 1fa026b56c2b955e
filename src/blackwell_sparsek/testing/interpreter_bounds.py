"""Bounds of tensors in Triton's interpreter, which reads and writes whatever a pointer says.

Of one launch, the memory between the first and the last element of each tensor that the kernel was
given may be accessed, and no other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

# Builder methods that access memory, and which of their arguments are pointers, a mask or neither.
_ACCESSES = {
    "create_masked_load": ("pointers", "mask"),
    "create_masked_store": ("pointers", "value", "mask"),
    "create_atomic_cas": ("pointers",),
    "create_atomic_rmw": ("operation", "pointers", "value", "mask"),
}


@contextmanager
def bounds_checked() -> Iterator[None]:
    """Inside, an access outside of the tensors of an interpreted kernel raises `IndexError`."""
    from triton.runtime import interpreter

    bounds, cls = _Bounds(), type(interpreter.interpreter_builder)
    launches = interpreter.GridExecutor
    with ExitStack() as stack:
        noted = bounds.noted(launches._init_args_hst)
        stack.enter_context(mock.patch.object(launches, "_init_args_hst", noted))
        for name, arguments in _ACCESSES.items():
            checked = bounds.checked(getattr(cls, name), arguments)
            stack.enter_context(mock.patch.object(cls, name, checked))
        yield


class _Bounds:
    """First bytes and ends of the pieces of memory that a kernel may access, ascending."""

    def __init__(self) -> None:
        self._first = self._end = np.empty(0, np.uint64)

    def noted(self, arguments_of: Callable[..., Any]) -> Callable[..., Any]:
        """`GridExecutor._init_args_hst`, whose results are the arguments of the next launch."""

        def noted(executor: Any, *given: Any) -> Any:
            arguments = arguments_of(executor, *given)
            positional, named = arguments
            firsts: list[int] = []
            ends: list[int] = []
            for first, end in sorted(_pieces((*positional, *named.values()))):
                if ends and first <= ends[-1]:
                    ends[-1] = max(ends[-1], end)
                else:
                    firsts.append(first)
                    ends.append(end)
            self._first, self._end = np.array(firsts, np.uint64), np.array(ends, np.uint64)
            return arguments

        return noted

    def checked(self, access: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
        """A builder method, which raises before it accesses anything else."""
        place_of_pointers = names.index("pointers")
        place_of_mask = names.index("mask") if "mask" in names else None

        def checked(builder: Any, *given: Any) -> Any:
            pointers = given[place_of_pointers]
            mask = True if place_of_mask is None else given[place_of_mask].data
            self._check(pointers.data, mask, max(1, pointers.get_element_ty().itemsize))
            return access(builder, *given)

        return checked

    def _check(self, pointers: np.ndarray, mask: Any, size: int) -> None:
        live = pointers[np.broadcast_to(mask, pointers.shape)]
        if not live.size:
            return
        piece = np.searchsorted(self._first, live, side="right") - 1
        inside = piece >= 0
        inside[inside] = live[inside] + np.uint64(size) <= self._end[piece[inside]]
        if not inside.all():
            count = inside.size - int(inside.sum())
            raise IndexError(
                f"{count} of {inside.size} accesses of an interpreted kernel are outside of the "
                f"tensors that it was given"
            )


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor, with those between its own."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _pieces(arguments: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    """First byte and end of each tensor."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from _pieces(x)
            continue
        # of a tensor with another dtype, and of a descriptor
        tensor = getattr(x, "base", x)
        if isinstance(tensor, torch.Tensor):
            first = tensor.data_ptr()
            yield first, first + span(tensor.shape, tensor.stride()) * tensor.itemsize
