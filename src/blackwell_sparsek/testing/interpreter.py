"""Settings and fixes without which results of Triton's interpreter cannot be trusted.

Out of the box it wraps int32 silently, skips `device_assert`, accesses any memory, and treats
bfloat16 as 16-bit integers: products of bf16 tiles are garbage without an error, and casts to bf16
truncate. `interpreter_checks` turns the first three into failures (the third by
`interpreter_bounds`) and handles bf16 as follows:

- loads, stores, selects and shape changes only move bits and stay as they are;
- casts round to nearest even, as the hardware does;
- `tl.dot` on bf16 tiles multiplies in fp32, which is exact for the products, and accumulates in
  fp32, as tensor cores do;
- arithmetic and reductions on bf16 values raise `TypeError`. Kernels of this package compute in
  fp32, so bf16 arithmetic means that a cast is missing.

Comparisons give int1, as `launch.interpreted` says, also in kernels that a test launches itself.
Triton before 3.8 also turns one-element arrays into indices in a way that numpy 2.4 refuses, so
that `range(0, n)` over an argument fails; that is fixed here as well.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from ..core.env import triton_interpreted
from ..core.torch_state import bf16_mended
from ..launch.interpreted import comparisons_are_bits
from .interpreter_bounds import bounds_checked

# Builder methods that compute with values. Selects are allowed: they only move bits.
_ARITHMETIC = ("binary_op", "unary_op", "create_fma", "create_clampf", "create_atomic_rmw")
_NEEDED = ("options", "cast_impl", "create_dot", "binary_op", "unary_op")


@contextmanager
def interpreter_checks() -> Iterator[None]:
    """Inside, interpreted kernels assert on int32 overflow, check bounds and handle bf16 as above.

    Does nothing when kernels are not interpreted. Raises `RuntimeError` when the installed
    interpreter has no hooks for these checks, rather than running without them.
    """
    if not triton_interpreted():
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    cls = type(builder)
    missing = [name for name in _NEEDED if not hasattr(builder, name)]
    options = {field.name for field in dataclasses.fields(builder.options)}
    missing += [f"options.{n}" for n in ("debug", "sanitize_overflow") if n not in options]
    if missing:
        raise RuntimeError(f"this triton's interpreter lacks {', '.join(missing)}")

    checked = dataclasses.replace(builder.options, debug=True, sanitize_overflow=True)
    with ExitStack() as stack:
        stack.enter_context(comparisons_are_bits())
        stack.enter_context(bounds_checked())
        stack.enter_context(mock.patch.object(builder, "options", checked))
        for name in _ARITHMETIC:
            if hasattr(cls, name):
                refusing = _refuse_bf16(getattr(cls, name), name)
                stack.enter_context(mock.patch.object(cls, name, refusing))
        dot, cast = _dot_in_fp32(cls.create_dot), _rounding_cast(cls.cast_impl)
        stack.enter_context(mock.patch.object(cls, "create_dot", dot))
        stack.enter_context(mock.patch.object(cls, "cast_impl", cast))
        reductions = getattr(interpreter, "ReduceScanOpInterface", None)
        if reductions is not None:
            refusing = _refuse_bf16_reduction(reductions.check_tensor)
            stack.enter_context(mock.patch.object(reductions, "check_tensor", refusing))
        if hasattr(interpreter, "_patch_lang_tensor"):
            indexable = _indexable(interpreter._patch_lang_tensor)
            stack.enter_context(mock.patch.object(interpreter, "_patch_lang_tensor", indexable))
        stack.enter_context(bf16_mended())
        yield


def _indexable(patch_tensor: Callable[..., None]) -> Callable[..., None]:
    def patch(tensor: Any, scope: Any, *rest: Any) -> None:
        patch_tensor(tensor, scope, *rest)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Widen bf16 values, given as uint16; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round fp32 to bf16 as uint16: to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _is_bf16(handle: Any) -> bool:
    return getattr(getattr(getattr(handle, "dtype", None), "scalar", None), "name", "") == "bf16"


def _refuse_bf16(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def refusing(self: Any, *args: Any) -> Any:
        if any(_is_bf16(arg) for arg in args):
            raise TypeError(
                f"arithmetic on bf16 values ({name}) in an interpreted kernel; cast to fp32 first"
            )
        return method(self, *args)

    return refusing


def _refuse_bf16_reduction(method: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(self: Any, inputs: Any) -> Any:
        if any(_is_bf16(getattr(x, "handle", None)) for x in inputs):
            raise TypeError("reduction of bf16 values in an interpreted kernel; cast to fp32 first")
        return method(self, inputs)

    return refusing


def _dot_in_fp32(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, *(_widened(x) if _is_bf16(x) else x for x in (a, b)), *rest)

    return dot


def _rounding_cast(method: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
        to_bf16 = dst_type.scalar.name == "bf16"
        if _is_bf16(src):
            wide = src if to_bf16 else _widened(src)
            same = wide.dtype.scalar.name == dst_type.scalar.name
            return wide if same else method(self, wide, dst_type, *rest)
        if to_bf16:
            return type(src)(fp32_to_bf16(src.data.astype(np.float32)), dst_type.scalar)
        return method(self, src, dst_type, *rest)

    return cast


def _widened(handle: Any) -> Any:
    import triton.language as tl

    return type(handle)(bf16_to_fp32(handle.data), tl.float32)
