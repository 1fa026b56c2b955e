"""Launches as data: a kernel, its grid and its arguments, independent of the framework.

Each kernel has a planner, a function that takes arrays and numbers and returns a `KernelLaunch`, or
None if there is nothing to compute. It reads only the shape, strides and dtype of an array, so it
takes torch tensors, which `run` passes to the kernel, as well as an `ArraySpec`, which stands for
an array that another framework allocates later.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Role = Literal["input", "output", "scratch", "zeroed", "counters"]
"""What is read; what is returned; what is written and dropped; the same, zero before the launch;
and what the kernel finds zero and leaves zero, which its stream keeps."""


@dataclass(frozen=True, eq=False)
class ArraySpec:
    """An array without its memory, with the methods of a tensor that planners call.

    `dtype` is an object with an `itemsize`; `strides` count elements. `name` is unique in a launch.
    Views of one array share `name` and `memory`, the shape of what is contiguous; they begin at
    element `offset` of it.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]
    memory: tuple[int, ...]
    offset: int = 0

    @classmethod
    def contiguous_of(cls, name: str, role: Role, shape: Any, dtype: Any) -> "ArraySpec":
        """An array whose last dimension is the fastest."""
        shape = tuple(shape)
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return cls(name, role, shape, dtype, strides, shape)

    def transpose(self, first: int, second: int) -> "ArraySpec":
        """The same memory with two dimensions exchanged."""
        dims = list(range(self.dim()))
        dims[first], dims[second] = dims[second], dims[first]
        shape, strides = (tuple(x[d] for d in dims) for x in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def with_batch(self, batch: int) -> "ArraySpec":
        """This array, or the same memory for each of `batch` where its first dimension is 1."""
        if self.shape[0] in (0, batch):
            return self
        shape, strides = (batch, *self.shape[1:]), (0, *self.strides[1:])
        return replace(self, shape=shape, strides=strides)

    def halves(self) -> tuple["ArraySpec", "ArraySpec"]:
        """The first half of a vector, and the rest."""
        (length,) = self.shape
        first = replace(self, shape=(length // 2,))
        return first, replace(self, shape=(length - length // 2,), offset=length // 2)

    def stride(self, dim: int | None = None) -> Any:
        """The stride of one dimension, or of all."""
        return self.strides if dim is None else self.strides[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def contiguous(self) -> "ArraySpec":
        """This array: a description cannot be copied, so it must be contiguous already."""
        if self.strides != self.contiguous_of("", "input", self.shape, self.dtype).strides:
            raise ValueError(f"{self.name} has strides {self.strides}; expected it contiguous")
        return self

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class KernelLaunch(NamedTuple):
    """One launch: a kernel on `programs` programs.

    `args` are all its parameters in order, constants included: arrays, numbers, None, and records
    of these. `options` are those of Triton, such as `num_warps`.
    """

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]


def arrays_of(planned: KernelLaunch) -> dict[str, ArraySpec]:
    """The arrays without memory among the arguments of a launch, by name, in order."""
    found: dict[str, ArraySpec] = {}

    def visit(value: Any) -> None:
        if isinstance(value, ArraySpec):
            found.setdefault(value.name, value)
        elif isinstance(value, tuple):
            for item in value:
                visit(item)

    visit(planned.args)
    return found


def run(planned: KernelLaunch | None, on: Any) -> None:
    """Run a launch whose arguments are torch tensors, on the device of the tensor `on`."""
    if planned is None:
        return
    # imported late: programs without torch import the kernels and planners above this
    from .launcher import launch, on_device_of

    kernel, programs, args, options = planned
    with on_device_of(on):
        launch(kernel, programs, args, **options)
