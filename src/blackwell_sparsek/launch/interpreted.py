"""A fix of Triton's interpreter without which it rejects some kernels of this package."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ..core.env import triton_interpreted


@contextmanager
def comparisons_are_bits() -> Iterator[None]:
    """Inside, results of comparisons in interpreted kernels are of type int1, as in compiled ones.

    The interpreter gives them the type of their operands. A mask combined with such a scalar is
    then int32, which loads and stores accept up to Triton 3.8 and reject from 3.9 on.
    """
    if not triton_interpreted():
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    compute = builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = compute(self, lhs, rhs, op)
        return type(result)(result.data, tl.int1) if result.data.dtype == bool else result

    with mock.patch.object(builder, "binary_op", binary_op):
        yield
