"""Dtypes by name; needs no framework."""

from functools import cache
from typing import Any


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
