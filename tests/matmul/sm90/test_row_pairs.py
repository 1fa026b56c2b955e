"""Pairs of rows: everybody's blocks once, what both have first and in the same order."""

import pytest
import torch

from blackwell_sparsek.matmul.sm90 import row_pairs as pairs
from blackwell_sparsek.matmul.sm90.row_pairs import PairedRow, build_row_pairs, row_pairs


def pattern(keep):
    indptr = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
    return indptr, keep.nonzero()[:, 1].int()


def random_keep(rows, cols, density, seed=1):
    return torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) < density


@pytest.mark.parametrize(
    ("rows", "cols", "density"),
    [(33, 40, 0.3), (6, 9, 0.2), (12, 30, 0.97), (1, 7, 0.6), (6, 4, 0)],
)
def test_each_block_has_its_place_and_shared_ones_come_first(rows, cols, density):
    keep = random_keep(rows, cols, density)
    if rows > 3:
        keep[rows // 2] = True
        keep[0] = False
        keep[2] = keep[3]
    indptr, indices = pattern(keep)
    perm = torch.randperm(indices.numel(), generator=torch.Generator().manual_seed(2)).int()
    plan = build_row_pairs(indptr, indices, perm, cols)
    assert plan.n_items == (rows + 1) // 2
    seen = torch.zeros_like(keep)
    for pair in plan.items.view(-1, 2, 5).tolist():
        one, other = (PairedRow(*fields) for fields in pair)
        assert one.shared == other.shared and one.longest == other.longest
        assert one.longest == max(one.end - one.begin, other.end - other.begin)
        shared = [plan.cols[row.begin : row.begin + row.shared].tolist() for row in (one, other)]
        assert shared[0] == shared[1]
        for row, begin, end, common, _ in (one, other):
            if row < 0:
                assert begin == end and common == 0
                continue
            assert (begin, end) == (indptr[row], indptr[row + 1])
            own = plan.cols[begin:end]
            assert not seen[row, own.long()].any()
            seen[row, own.long()] = True
            entry = torch.argsort(perm)[plan.entries[begin:end].long()]
            assert (indices[entry] == own).all() and (entry >= begin).all() and (entry < end).all()
    assert (seen == keep).all()


def test_longest_pairs_come_first_and_random_rows_share_what_is_expected():
    keep = random_keep(128, 128, 0.3)
    plan = build_row_pairs(*pattern(keep), None, 128)
    first = PairedRow(*plan.items[::2].unbind(1))
    assert (first.longest[:-1] >= first.longest[1:]).all()
    saved = float(first.shared.sum()) / float(keep.sum())
    assert saved == pytest.approx(pairs.pairs_saved(0.3), abs=0.02)


def test_equal_rows_are_paired():
    kinds = random_keep(4, 24, 0.4, seed=3)
    keep = kinds[torch.tensor([0, 1, 2, 3, 3, 1, 2, 0])]
    plan = build_row_pairs(*pattern(keep), None, 24)
    assert all(keep[a].equal(keep[b]) for a, b in plan.items[:, 0].view(-1, 2).tolist())


def test_tall_matrices_are_paired_by_groups_of_rows(monkeypatch):
    monkeypatch.setattr(pairs, "MATCHED_ROWS", 8)
    plan = build_row_pairs(*pattern(random_keep(21, 30, 0.3)), None, 30)
    rows = plan.items[:, 0].view(-1, 2)
    assert sorted(rows.flatten().tolist()) == [-1, *range(21)]
    real = rows[(rows >= 0).all(1)]
    assert (real[:, 0] // 8 == real[:, 1] // 8).all()


def test_a_pattern_and_the_transpose_of_its_transpose_have_plans_of_their_own():
    # the row pointers of one are those of the other, the stored order is not
    indptr, indices = pattern(random_keep(6, 8, 0.5))
    perm = torch.arange(indices.numel()).flip(0).int()
    for order in (None, perm, None):
        found = row_pairs(indptr, indices, order, 8)
        assert torch.equal(found.entries, build_row_pairs(indptr, indices, order, 8).entries)


def test_plans_are_kept_by_pattern():
    indptr, indices = pattern(torch.ones(4, 4, dtype=torch.bool))
    assert row_pairs(indptr, indices, None, 4) is row_pairs(indptr, indices, None, 4)
