"""Descriptors of packed sequences: which element of memory a coordinate is, by TMA's own rules."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.device.gluon.pipeline import tile_at, tile_place
from blackwell_sparsek.launch.descriptors import packed_descriptor

INT32 = range(-(2**31), 2**31)


def element(descriptor, coordinates):
    """Bytes from the tensor's first element, or None where TMA reads zero and writes nothing."""
    assert all(int(c) in INT32 for c in coordinates)
    sizes = descriptor.shape
    if not all(0 <= c < size for c, size in zip(coordinates, sizes, strict=True)):
        return None
    steps = sum(c * stride for c, stride in zip(coordinates, descriptor.strides, strict=True))
    return steps * descriptor.base.element_size() % 2**64


def tile_coordinates(cu, head, first, length, row):
    """The device functions, called as the plain Python that they are."""
    place = tile_place.fn(cu, 0, head, first, length)
    return tuple(getattr(c, "value", c) for c in tile_at.fn(place, row))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["contiguous", "fused", "heads outer", "one head", "one token"])
def test_rows_of_packed_sequences(kind, dtype):
    tokens, heads, dim = 1 if kind == "one token" else 23, 1 if kind == "one head" else 3, 16
    x = torch.empty(tokens, heads, dim, dtype=dtype)
    if kind == "fused":
        x = torch.empty(tokens, 5 * heads, dim, dtype=dtype)[:, heads : 2 * heads]
    if kind == "heads outer":
        x = torch.empty(heads, tokens, dim, dtype=dtype).transpose(0, 1)
    descriptor = packed_descriptor(x, (1, 1, 64, 64))
    assert len(descriptor.block) == len(descriptor.shape) == 5
    for stride in descriptor.strides[:-1]:
        bytes_ = stride * x.element_size()
        assert 0 < bytes_ < 2**40 and bytes_ % 16 == 0
    for first, length in itertools.product((0, 1, 7, 22, 23), (0, 1, 5, 23)):
        if first + length > tokens:
            continue
        for head, row in itertools.product(range(heads), (0, 1, 4, 5, 22, 63, 2**30 - 1 + length)):
            for column in (0, dim - 1, dim):
                *outer, zero = tile_coordinates(x, head, first, length, row)
                assert zero == 0
                found = element(descriptor, (*outer, column))
                if row < length and column < dim:
                    token = first + row
                    offset = token * x.stride(0) + head * x.stride(1) + column
                    assert found == offset * x.element_size()
                else:
                    assert found is None


def test_dense_batches_keep_their_coordinates():
    assert tile_coordinates(None, 5, 0, 100, 64) == (0, 5, 64, 0)


def test_the_longest_sequence():
    """Coordinates stay int32, and the last tile of 256 rows ends outside of the sequence."""
    x = torch.empty(2, 1, 16, dtype=torch.float16)
    descriptor = packed_descriptor(x, (1, 1, 64, 64))
    first, length = 2**30 - 2**17, 2**30 - 1
    for row, inside in ((0, True), (length - 1, True), (length, False), (length + 255, False)):
        coordinates = tile_coordinates(x, 0, first, length, row)
        found = element(descriptor, coordinates)
        assert (found == (first + row) * 16 * 2) if inside else found is None
