"""Lists of blocks: order, boundaries, transposition."""

import torch

from blackwell_sparsek.masks.block_lists import lists_from_blocks, transpose_lists


def test_partial_blocks_come_first_and_both_groups_ascend():
    #   row 0: nothing; row 1: partial 3, 1 and full 2, 0; row 2: full 1
    rows = torch.tensor([1, 2, 1, 1, 1])
    cols = torch.tensor([3, 1, 2, 1, 0])
    bits_id = torch.tensor([7, -1, -1, 5, -1])
    lists = lists_from_blocks(rows, cols, bits_id, 3, 4)
    assert lists.indptr.tolist() == [0, 0, 4, 5]
    assert lists.partial_end.tolist() == [0, 2, 4]
    assert lists.indices.tolist() == [1, 3, 0, 2, 1]
    assert lists.bits_id.tolist() == [5, 7, -1, -1, -1]
    assert lists.row_indices().tolist() == [1, 1, 1, 1, 2]
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lists)


def test_transposition_by_hand():
    rows, cols = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 2, 2, 0, 2])
    bits_id = torch.tensor([-1, 4, -1, 9, 6])
    flipped = transpose_lists(lists_from_blocks(rows, cols, bits_id, 3, 3), 1, 3, 3)
    assert flipped.indptr.tolist() == [0, 2, 2, 5]
    assert flipped.partial_end.tolist() == [1, 2, 4]
    assert flipped.indices.tolist() == [2, 0, 0, 2, 1]
    assert flipped.bits_id.tolist() == [9, -1, 4, 6, -1]


def test_transposing_twice_is_nothing():
    generator = torch.Generator().manual_seed(0)
    planes, mb, nb = 3, 5, 4
    rows, cols = (torch.rand(planes * mb, nb, generator=generator) < 0.5).nonzero(as_tuple=True)
    bits_id = torch.randint(-1, 3, rows.shape, generator=generator)
    lists = lists_from_blocks(rows, cols, bits_id, planes * mb, nb)
    again = transpose_lists(transpose_lists(lists, planes, mb, nb), planes, nb, mb)
    assert all(map(torch.equal, again, lists))


def test_transposing_leaves_spare_entries_out():
    """Kernels list blocks in memory that is long enough for all; what is behind them is unset."""
    rows, cols = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 2, 2, 0, 2])
    lists = lists_from_blocks(rows, cols, torch.tensor([-1, 4, -1, 9, 6]), 3, 3)
    unset = torch.tensor([-(2**31), 0, 1, 2**31 - 1]).int()
    spare = lists._replace(
        indices=torch.cat([lists.indices, unset]), bits_id=torch.cat([lists.bits_id, unset.flip(0)])
    )
    assert spare.row_indices().tolist() == [0, 0, 1, 2, 2, 3, 3, 3, 3]
    made, expected = transpose_lists(spare, 1, 3, 3), transpose_lists(lists, 1, 3, 3)
    assert all(torch.equal(a[: b.numel()], b) for a, b in zip(made, expected, strict=True))


def test_no_rows_and_no_columns():
    nothing = torch.empty(0, dtype=torch.int64)
    lists = lists_from_blocks(nothing, nothing, nothing, 0, 0)
    assert lists.indptr.tolist() == [0] and lists.row_indices().numel() == 0
    assert transpose_lists(lists, 2, 0, 3).indptr.tolist() == [0] * 7


def test_lists_of_one_row_are_aligned():
    """A tensor that begins inside of another has kernels compiled for its address."""
    lists = lists_from_blocks(*(torch.zeros(1, dtype=torch.int64) for _ in range(3)), 1, 1)
    assert all(x.storage_offset() == 0 for x in lists)
