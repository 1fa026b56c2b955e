"""Sizes of arrays, names of dtypes, and how scales are shared; needs no framework."""

from functools import cache
from typing import Any

# Channels of a token that share a scale in fp8.
SCALE_CHANNELS = 128


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)


@cache
def dtype_name(dtype: Any) -> str:
    """The name that torch and NumPy have for a dtype in common.

    Examples
    --------
    >>> import numpy
    >>> dtype_name(numpy.dtype("float16"))
    'float16'
    """
    return str(dtype).removeprefix("torch.")
