"""Strides of matrices as the kernels of products take them; needs no framework."""

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """Element strides of a [batch, rows, columns] view, as the kernels take them."""

    batch: int
    row: int
    col: int


def strides_of(x: Any) -> Strides:
    """The strides of a 3-D array."""
    return Strides(*x.stride())
