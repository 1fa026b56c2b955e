"""Ceiling division, strides, names of dtypes, fp8 groups; imports neither torch nor JAX."""

from collections.abc import Sequence
from functools import cache
from typing import Any

# Channels of a token that share a scale in fp8.
SCALE_CHANNELS = 128


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype of torch, JAX or NumPy.

    Examples
    --------
    >>> import numpy
    >>> dtype_name(numpy.dtype("float16"))
    'float16'
    """
    return str(dtype).removeprefix("torch.")
