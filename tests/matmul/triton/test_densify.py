import pytest
import torch

from blackwell_sparsek.matmul.triton.densify import block_table, launch_densify
from blackwell_sparsek.testing.bsr import random_bsr


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((65, 49), (16, 8)), ((48, 1100), (16, 16)), ((40, 96), (8, 48)), ((128, 512), (64, 32))],
)
def test_all_of_the_matrix_is_written(shape, block, density, device):
    a = random_bsr(shape, block, seed=1, density=density, dtype=torch.float16, device=device)
    table = block_table(a.pattern.indptr, a.pattern.indices, -(-shape[1] // block[1]))
    assert block_table(a.pattern.indptr, a.pattern.indices, table.shape[1]) is table
    rows, cols = table.shape[0] * block[0], table.shape[1] * block[1]
    full = torch.full((rows, cols), float("nan"), dtype=torch.float16, device=device)
    launch_densify(full, a.storage, table)
    assert torch.equal(full[: shape[0], : shape[1]], a.to_dense())
    # what lies beyond the shape of the matrix is zeros
    assert full.count_nonzero() == a.to_dense().count_nonzero()


def test_a_table_holds_entries_or_minus_one():
    a = random_bsr((32, 48), (16, 16), seed=2, density=0.5)
    table = block_table(a.pattern.indptr, a.pattern.indices, 3)
    found = [int(table[row, col]) for row in range(2) for col in range(3)]
    assert sorted(x for x in found if x >= 0) == list(range(a.nnz_blocks))
    for row in range(2):
        for entry in range(int(a.indptr[row]), int(a.indptr[row + 1])):
            assert table[row, int(a.indices[entry])] == entry
