"""A faster interpreter of Triton's, for tests.

Interpreted kernels compute on small tiles, so that nearly all of their time is spent around numpy:
in redirecting `triton.language` to it, in types, and in checks for overflow that are made of eight
further operations. `quick_interpreter` does the same with less; results and errors stay the same.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

from ..core.env import triton_interpreted


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Inside, interpreted kernels take a fraction of their time."""
    if not triton_interpreted():
        yield
        return
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    redirect = _Redirection(interpreter._patch_lang, interpreter.GridExecutor.__call__)
    replaced = (
        (interpreter, "_patch_lang", redirect.once),
        (
            interpreter.GridExecutor,
            "__call__",
            # a bound method would not be given the grid
            lambda *args, **kwargs: redirect.launch(*args, **kwargs),
        ),
        (interpreter, "_get_np_dtype", _numpy_dtypes(interpreter._get_np_dtype)),
        (tl.tensor, "__init__", _new_tensor),
        (tl.block_type, "__init__", _new_block_type(tl.block_type.__init__)),
        (TritonSemantic, "binary_op_sanitize_overflow_impl", _check_overflow),
        (TritonSemantic, _CHECK_TYPES, _check_types(getattr(TritonSemantic, _CHECK_TYPES))),
    )
    with ExitStack() as patches:
        for owner, name, quick in replaced:
            patches.enter_context(mock.patch.object(owner, name, quick))
        yield


class _NothingToRestore:
    def restore(self) -> None:
        """Do nothing: the first redirection of the launch is the one that is undone."""


class _Redirection:
    """Redirects `triton.language` to numpy in each module of device functions once per launch.

    The interpreter does so when a kernel starts, and once more on every call of a device function
    inside it. Kernels made of many small functions spend half of their time on that.
    """

    def __init__(self, redirect: Callable[..., Any], launch: Callable[..., Any]):
        self._redirect = redirect
        self._launch = launch
        self._redirected: set[int] = set()

    def once(self, fn: Any) -> Any:
        """Replaces `_patch_lang`."""
        module = id(fn.__globals__)
        if module in self._redirected:
            return _NothingToRestore()
        self._redirected.add(module)
        return self._redirect(fn)

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the call of a grid."""
        self._redirected.clear()
        return self._launch(*args, **kwargs)


def _numpy_dtypes(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`find`, which builds a table of all dtypes in every call, with its answers kept by name."""
    known: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        found = known.get(name)
        if found is None:
            found = known[name] = find(dtype)
        return found

    return numpy_dtype


def _new_tensor(self: Any, handle: Any, type: Any) -> None:
    """`tl.tensor.__init__`, which makes constants of the same few shapes over and over."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constant_shape(tuple(type.shape) if type.is_block() else ())


@cache
def _constant_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """How many elements such a tensor has, and its shape, which is a tuple of Triton's."""
    import triton.language as tl

    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _new_block_type(make: Callable[..., None]) -> Callable[..., None]:
    """`tl.block_type.__init__`, with sizes checked and names written once for each type."""
    known: dict[Any, tuple[Any, ...]] = {}

    def new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (*[getattr(size, "value", size) for size in shape], element_ty.name)
        found = known.get(key)
        if found is None:
            make(self, element_ty, shape)
            known[key] = (self.shape, self.numel, self.name)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found

    return new_block_type


_CHECK_TYPES = "binary_op_type_checking_impl"
# What operations on two tensors of one such dtype are computed in.
_COMPUTED_AS_THEY_ARE = ("int32", "int64", "fp32", "fp64")


def _check_types(check: Callable[..., Any]) -> Callable[..., Any]:
    """`check`, which casts and broadcasts operands, for those that need neither."""
    import triton.language as tl

    def check_types(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            kind = lhs.type
            if kind.name == rhs.type.name and kind.scalar.name in _COMPUTED_AS_THEY_ARE:
                return lhs, rhs
        return check(self, lhs, rhs, *options, **named)

    return check_types


_UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _check_overflow(self: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
    """`TritonSemantic.binary_op_sanitize_overflow_impl`, by two operations of numpy."""
    kind, options = lhs.type.scalar, self.builder.options
    if kind.int_bitwidth >= 64 or not (options.sanitize_overflow and options.debug):
        return
    name = operation.__name__
    exact = _UFUNCS[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    least, most = kind.get_int_min_value(), kind.get_int_max_value()
    assert least <= exact.min() and exact.max() <= most, (
        f"int{kind.int_bitwidth} overflow detected for operation {name}"
    )
