"""Packing low blocks into 64-row blocks: pattern and values."""

import pytest
import torch

from blackwell_sparsek.matmul.triton.pack import launch_pack, pack_pattern
from blackwell_sparsek.sparse.matrix import BSRMatrix


def _matrix(rows, cols, block, density, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows_b, cols_b = -(-rows // block[0]), -(-cols // block[1])
    keep = torch.rand(rows_b, cols_b, generator=g) < density
    x = torch.randn(rows, cols, generator=g, dtype=torch.float32)
    return BSRMatrix.from_mask(x, keep, block)


def _unpacked(packed, pattern, rows, cols, block_w):
    """The packed matrix as a dense one, by a plain loop."""
    height = packed.shape[1]
    dense = torch.zeros(-(-rows // height) * height, cols + block_w)
    indptr, indices = pattern.indptr.tolist(), pattern.indices.tolist()
    for row in range(len(indptr) - 1):
        for entry in range(indptr[row], indptr[row + 1]):
            col = indices[entry] * block_w
            dense[row * height : (row + 1) * height, col : col + block_w] += packed[entry]
    return dense[:rows, :cols]


@pytest.mark.parametrize("block", [(16, 16), (32, 32), (32, 16), (16, 48)])
@pytest.mark.parametrize("size", [(64, 96), (80, 112), (272, 48), (16, 16)])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("trim", [False, True])
def test_packed_matrix_is_the_same_matrix(block, size, density, transposed, trim):
    stored = block[::-1] if transposed else block
    matrix = _matrix(*(size[::-1] if transposed else size), stored, density)
    seen = matrix.T if transposed else matrix
    group = 64 // block[0]
    pattern = pack_pattern(seen.indptr, seen.indices, -(-size[1] // block[1]), group)
    if trim:
        pattern = pattern.trimmed()
    packed = torch.full((pattern.indices.shape[0], 64, block[1]), float("nan"))
    perm = matrix.pattern.transpose_perm if transposed else None
    launch_pack(packed, matrix.storage, pattern.source, perm)
    assert torch.equal(_unpacked(packed, pattern, *size, block[1]), seen.to_dense())


def test_packed_columns_are_the_sorted_union():
    keep = torch.tensor([[1, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    matrix = BSRMatrix.from_mask(torch.ones(80, 64), keep.bool(), (16, 16))
    untrimmed = pack_pattern(matrix.indptr, matrix.indices, 4, 4)
    assert untrimmed.indices.tolist() == [0, 2, 3, 1, 0]
    assert untrimmed.source[4].tolist() == 4 * [-1]
    pattern = untrimmed.trimmed()
    assert pattern.indptr.tolist() == [0, 3, 4]
    assert pattern.indices.tolist() == [0, 2, 3, 1]
    assert pattern.source.tolist() == [
        [0, -1, -1, -1],
        [-1, 2, -1, -1],
        [1, 3, -1, -1],
        [4] + 3 * [-1],
    ]
