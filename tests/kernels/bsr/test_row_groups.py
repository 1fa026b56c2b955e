"""Groups of rows: everybody's blocks once, shared ones at the same step, one fetch for all."""

import pytest
import torch

from blackwell_sparsek.kernels.bsr.row_groups import FETCH_BIT, build_row_groups, row_groups


def pattern(keep):
    indptr = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
    return indptr, keep.nonzero()[:, 1].int()


def walk(plan, size):
    """(group, step) -> [(row, column, block, share) or None] for the programs of the group."""
    items = plan.items.view(-1, size, plan.items.shape[1]).tolist()
    lists = [x.tolist() for x in (plan.cols, plan.entries, plan.shares)]
    for group, rows in enumerate(items):
        assert len({row[3] for row in rows}) == 1
        for step in range(rows[0][3]):
            places = [(row, begin + step) for row, begin, end, *_ in rows if begin + step < end]
            found = dict(places)
            yield (
                group,
                step,
                [
                    (row, *(x[found[row]] for x in lists)) if row in found else None
                    for row, *_ in rows
                ],
            )


CASES = {
    "random": (33, 40, 0.3),
    "few": (5, 9, 0.2),
    "dense": (12, 30, 0.97),
    "one row": (1, 7, 0.6),
    "empty": (6, 4, 0.0),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_each_block_has_its_step_and_what_is_shared_is_fetched_once(size, case):
    rows, cols, density = CASES[case]
    keep = torch.rand(rows, cols, generator=torch.Generator().manual_seed(1)) < density
    if rows > 3:
        keep[rows // 2] = True
        keep[0] = False
        keep[2] = keep[3]
    indptr, indices = pattern(keep)
    plan = build_row_groups(indptr, indices, None, cols, size)
    seen = torch.zeros_like(keep)
    for _, _, programs in walk(plan, size):
        for number, block in enumerate(programs):
            if block is None:
                continue
            row, col, entry, share = block
            assert indptr[row] <= entry < indptr[row + 1] and indices[entry] == col
            assert not seen[row, col]
            seen[row, col] = True
            if not share:
                continue
            sharers = [i for i in range(size) if share >> i & 1]
            assert number in sharers and len(sharers) > 1
            assert all(programs[i][1] == col for i in sharers)
            halves = [programs[i][3] >> FETCH_BIT for i in sharers]
            assert sum(halves) == 3 and sum(h > 0 for h in halves) == 2
    assert (seen == keep).all()


def test_rows_follow_each_other_without_a_gap_and_longest_groups_come_first():
    keep = torch.rand(64, 64, generator=torch.Generator().manual_seed(2)) < 0.3
    plan = build_row_groups(*pattern(keep), None, 64, 4)
    items = plan.items.view(-1, 4, plan.items.shape[1])
    assert (items[:, :, 3] == (items[:, :, 2] - items[:, :, 1]).amax(1, keepdim=True)).all()
    assert (items[:-1, 0, 3] >= items[1:, 0, 3]).all()
    assert plan.n_items == 16
    # random rows at 30 %: two thirds of what the rows need apart
    apart = (plan.shares == 0).sum() * 2
    together = sum((plan.shares >> FETCH_BIT & 1 << i).ne(0).sum() for i in range(2))
    assert int(apart + together) < 0.7 * 2 * int(keep.sum())


def test_equal_rows_are_grouped():
    kinds = torch.rand(4, 24, generator=torch.Generator().manual_seed(3)) < 0.4
    keep = kinds[torch.tensor([0, 1, 2, 3] * 4)]
    plan = build_row_groups(*pattern(keep), None, 24, 4)
    assert (plan.shares & 15 == 15).all()


def test_plans_are_kept_by_pattern_and_size():
    keep = torch.ones(4, 4, dtype=torch.bool)
    indptr, indices = pattern(keep)
    assert row_groups(indptr, indices, None, 4, 2) is row_groups(indptr, indices, None, 4, 2)
    assert row_groups(indptr, indices, None, 4, 4).size == 4
