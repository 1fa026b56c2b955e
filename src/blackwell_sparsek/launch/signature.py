"""Compiles a kernel for the arguments of a launch, without a GPU and without a framework.

Triton's front end derives types, constants and attributes from arguments, but wants a GPU and
torch for that. This derives the same from types, or from described arrays.
"""

from collections.abc import Sequence
from typing import Any

from ..core.sizes import dtype_name
from .assembler import assembler_options
from .cache_keys import settle_cache_keys
from .descriptors import TRITON_NAMES
from .prepared import COMPILE_OPTIONS

_ALIGNED = [["tt.divisibility", 16]]


def pointer_type(dtype: Any) -> str:
    """The type of a pointer to elements of a dtype, in Triton's spelling."""
    return f"*{TRITON_NAMES[dtype_name(dtype)]}"


class Unaligned(str):
    """A type of a pointer whose address may be anything; others are multiples of 16 bytes."""


class Signature:
    """Types, constants and attributes of the parameters of one launch.

    Parameters
    ----------
    kernel : a `@triton.jit` or `@gluon.jit` function
    args : a value for each parameter, constants included. A `str` is a type in Triton's spelling;
        ints, floats, None and tuples are passed as they are, and specialise as in a launch
    """

    def __init__(self, kernel: Any, args: Sequence[Any]):
        settle_cache_keys()
        self._kernel = kernel
        self.signature: dict[str, Any] = {}
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attrs: dict[tuple[int, ...], Any] = {}
        for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
            if parameter.is_constexpr:
                self.signature[parameter.name] = "constexpr"
                self.constants[(i,)] = value
            else:
                kind = self._type(value, (i,), not parameter.do_not_specialize)
                self.signature[parameter.name] = kind

    def _type(self, value: Any, path: tuple[int, ...], specialise: bool) -> Any:
        if isinstance(value, tuple):
            types = [self._type(x, (*path, j), specialise) for j, x in enumerate(value)]
            # a named tuple keeps its names in the kernel
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        if value is None or hasattr(value, "is_gluon") or (specialise and is_one(value)):
            self.constants[path] = value
            return "constexpr"
        if isinstance(value, str):
            if value.startswith("*") and not isinstance(value, Unaligned):
                self.attrs[path] = _ALIGNED
            return str(value)
        if isinstance(value, bool):
            return "i1"
        if isinstance(value, float):
            return "fp32"
        if specialise and value % 16 == 0:
            self.attrs[path] = _ALIGNED
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    def compiled(self, sm: int, options: dict[str, Any]) -> Any:
        """The kernel that Triton compiles for this compute capability, such as 90."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource if self._kernel.is_gluon() else ASTSource
        return triton.compile(
            source(self._kernel, self.signature, self.constants, self.attrs),
            target=GPUTarget("cuda", sm, 32),
            options=COMPILE_OPTIONS | assembler_options(self._kernel, sm) | options,
        )


def is_one(value: Any) -> bool:
    """Whether Triton makes a constant of a number."""
    return type(value) is int and value == 1
