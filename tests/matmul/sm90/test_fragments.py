"""Blocks in the order of `mma.sync` operands."""

import pytest
import torch

from blackwell_sparsek.matmul.sm90.layouts import fragment_columns, in_fragments


def _fragment(block):
    """One 16 x 16 block by the table of the PTX manual: eight elements for each of 32 threads."""
    elements = []
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(8):
            row = group if i // 2 % 2 == 0 else group + 8
            col = thread * 2 + i % 2 + (8 if i >= 4 else 0)
            elements.append(block[row, col])
    return torch.stack(elements)


@pytest.mark.parametrize("width", [16, 32, 48])
@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("transposed", [False, True])
def test_fragments_are_those_of_the_manual(width, count, transposed):
    blocks = torch.randn(count, 16, width).half()
    stored, perm = blocks, None
    if transposed:
        perm = torch.randperm(count).int()
        stored = torch.empty(count, width, 16).half()
        stored[perm.long()] = blocks.mT
    per_block = width // 16
    fragments = in_fragments(stored, width, perm, 2)
    assert fragments.shape == (count * per_block + 2, 128)
    for i in range(count * per_block):
        part = blocks[i // per_block][:, i % per_block * 16 :][:, :16]
        assert torch.equal(fragments[i].view(torch.float16), _fragment(part))


def test_columns_of_fragments():
    indptr, indices = torch.tensor([0, 2, 3]).int(), torch.tensor([1, 4, 0]).int()
    assert fragment_columns(indptr, indices, 1) is indices
    columns = fragment_columns(indptr, indices, 3)
    assert columns.tolist() == [3, 4, 5, 12, 13, 14, 0, 1, 2] and columns.dtype == torch.int32
    assert fragment_columns(indptr, indices, 3) is columns
