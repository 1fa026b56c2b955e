"""Where tiles lie for TMA: in dense batches, and in sequences that are packed end to end.

Copies must stop at the end of a sequence, since the next one begins there: a NaN of its values
would spoil products, and outputs would overwrite its own. TMA stops only at the end of a
dimension, so packed tensors [T, H, D] are described in five,

    [back, end, head, row, D]      strides  [2**34 - s, s, head, s, 1]      s from token to token

and row `r` of a sequence of `n` tokens that ends before token `e` is found at `back` 2**30, `end` e
and `row` 2**30 - n + r. The sequence then ends with the row dimension, which has 2**30. Addresses
wrap at 2**64, so 2**30 steps of 2**34 - s elements of a power of two bytes go back by 2**30 * s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROW_END = gl.constexpr(2**30)
# More than any coordinate of the first two dimensions; those are int32.
BEYOND = gl.constexpr(2**31 - 2**16)
WRAP = gl.constexpr(2**34)


@gluon.jit
def plane_place(cu_seqlens_ptr, batch, head, first, length):
    """What tells the tiles of a plane apart; `first` and `length` are those of its sequence."""
    place = (batch, head)
    if cu_seqlens_ptr is not None:
        place = (first + length, head, ROW_END - length)
    return place


@gluon.jit
def tile_at(place, row):
    """Coordinates of the tile that begins at `row` of a plane."""
    if len(place) == 2:
        coordinates = (place[0], place[1], row, 0)
    else:
        coordinates = (ROW_END, place[0], place[1], place[2] + row, 0)
    return coordinates
