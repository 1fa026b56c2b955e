"""Strided views as the BSR kernels take them: [batch, rows, columns], any strides."""

from typing import NamedTuple

import torch


class Strides(NamedTuple):
    """Element strides of a [batch, rows, columns] view."""

    batch: int
    row: int
    col: int


def strides_of(x: torch.Tensor) -> Strides:
    """The strides of a 3-D tensor."""
    return Strides(*x.stride())
