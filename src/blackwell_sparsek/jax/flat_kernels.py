"""Kernels whose parameters are records, as kernels with flat parameters, which jax-triton takes.

jax-triton passes arrays and numbers: first what is read, then what is written. The kernels of this
package take records of them, in an order of their own, and None. So a launch gets a kernel whose
parameters are the arrays and numbers of its arguments and whose body calls the real one:

    def flat(p_q, p_lists, n0, n1, p_out):
        kernel(p_out, MaskLists(p_lists, None), p_q, Strides(n0 * 16, n1), 128)

Lengths and strides stay arguments, so that other lengths compile no kernel anew. What Triton notes
of the numbers that torch passes, it sees here in the text: `n0 * 16` is a multiple of 16, and a
stride of 1 is written out.
"""

import itertools
import linecache
from functools import cache
from typing import Any, NamedTuple

from ..launch.description import ArraySpec, KernelLaunch

_serial = itertools.count()


class FlatKernel(NamedTuple):
    """A kernel that takes `arrays` in order, `numbers` before those that it writes."""

    kernel: Any
    numbers: tuple[int | float, ...]


class _Text:
    """Writes arguments as Python, and collects the numbers and classes that the text needs."""

    def __init__(self) -> None:
        self.numbers: list[int | float] = []
        self.records: dict[str, type] = {}

    def of(self, value: Any, unspecialised: bool) -> str:
        """One argument; `unspecialised` where the kernel wants no number as a constant."""
        if isinstance(value, ArraySpec):
            return _pointer(value)
        if isinstance(value, tuple):
            kind = type(value)
            self.records[kind.__name__] = kind
            return f"{kind.__name__}({', '.join(self.of(x, unspecialised) for x in value)})"
        if isinstance(value, float):
            return self._number(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return self._integer(value, unspecialised)
        return repr(value)

    def _number(self, value: int | float) -> str:
        self.numbers.append(value)
        return f"n{len(self.numbers) - 1}"

    def _integer(self, value: int, unspecialised: bool) -> str:
        if value == 1 and not unspecialised:
            return "1"
        step = 16 if value % 16 == 0 and not unspecialised else 1
        number = self._number(value // step)
        wide = not -(2**31) <= value < 2**31
        if wide or unspecialised:
            # jax-triton makes a constant of a 1, and the type of others depends on their value
            number = f"tl.cast({number}, tl.{'int64' if wide else 'int32'})"
        return number if step == 1 else f"{number} * {step}"


def _pointer(array: ArraySpec) -> str:
    """The pointer that a kernel takes: torch passes words of bits as int32, JAX as uint32."""
    name = f"p_{array.name}"
    if str(array.dtype) == "uint32":
        name = f"tl.cast({name}, tl.pointer_type(tl.int32), bitcast=True)"
    return f"{name} + {array.offset}" if array.offset else name


def flat_kernel(launch: KernelLaunch, read: list[str], written: list[str]) -> FlatKernel:
    """The kernel of a launch with flat parameters: arrays read, numbers, arrays written.

    An array in both lists is updated: its first parameter is not used, the second is the memory.
    """
    kernel, text, arguments = launch.kernel, _Text(), []
    for param, value in zip(kernel.params, launch.args, strict=True):
        if param.is_constexpr:
            arguments.append(repr(value))
        else:
            arguments.append(text.of(value, bool(param.do_not_specialize)))
    parameters = [f"p_{name}{'_before' if name in written else ''}" for name in read]
    parameters += [f"n{i}" for i in range(len(text.numbers))]
    parameters += [f"p_{name}" for name in written]
    name = f"{kernel.fn.__name__}_flat"
    source = f"def {name}({', '.join(parameters)}):\n    kernel({', '.join(arguments)})\n"
    made = _compiled(kernel, name, source, tuple(text.records.values()))
    return FlatKernel(made, tuple(text.numbers))


@cache
def _compiled(kernel: Any, name: str, source: str, records: tuple[type, ...]) -> Any:
    """The kernel of this text; one object for one text, so that it is compiled once."""
    import triton
    import triton.language as tl

    file = f"<flat kernel {next(_serial)}>"
    # where Triton finds the text of a function that has no file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"kernel": kernel, "tl": tl, "__name__": __name__}
    scope |= {kind.__name__: kind for kind in records}
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[name])
