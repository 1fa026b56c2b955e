import gc
import itertools
import math

import pytest
import torch

from blackwell_sparsek.matmul import plan as plan_module
from blackwell_sparsek.matmul.plan import build_spmm_plan, spmm_plan


def indptr_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def make(lengths, chunk):
    return spmm_plan(indptr_of(lengths), sum(lengths), max(lengths), chunk)


LENGTHS = [
    [0],
    [5],
    [0, 0, 0],
    [3, 0, 17, 1, 4, 9, 16, 8],
    [1] * 40 + [100],
    [63, 64, 65, 1, 0, 127, 128, 129],
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("chunk", [1, 4, 7, 64, 1000])
def test_items_cover_every_block_once_and_every_row(lengths, chunk):
    plan = make(lengths, chunk)
    starts = indptr_of(lengths).tolist()
    seen = {row: [] for row in range(len(lengths))}
    for row, begin, end, _ in plan.items.tolist():
        assert end - begin <= chunk
        seen[row].append((begin, end))
    for row, ranges in seen.items():
        ranges.sort()
        assert len(ranges) == max(1, math.ceil(lengths[row] / chunk))
        assert ranges[0][0] == starts[row] and ranges[-1][1] == starts[row + 1]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        sizes = [end - begin for begin, end in ranges]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_slots_of_a_row_follow_its_parts(lengths, chunk):
    plan = make(lengths, chunk)
    by_slot = {slot: (row, begin) for row, begin, _, slot in plan.items.tolist() if slot >= 0}
    assert sorted(by_slot) == list(range(plan.n_slots))
    split = plan.split_rows.tolist()
    assert [row for row, _, _ in split] == [r for r, n in enumerate(lengths) if n > chunk]
    for row, first, last in split:
        begins = [by_slot[slot][1] for slot in range(first, last)]
        assert begins == sorted(begins)
        assert {by_slot[slot][0] for slot in range(first, last)} == {row}
    assert sum(last - first for _, first, last in split) == plan.n_slots


def test_longest_items_come_first_and_ties_keep_the_order_of_rows():
    plan = make([3, 5, 3, 0, 5], 8)
    assert [(row, end - begin) for row, begin, end, _ in plan.items.tolist()] == [
        (1, 5),
        (4, 5),
        (0, 3),
        (2, 3),
        (3, 0),
    ]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_plan_for_capture_is_the_exact_one_with_padding(lengths, chunk):
    indptr = indptr_of(lengths)
    sizes = plan_module._largest_sizes(indptr, sum(lengths), chunk)
    exact, padded = make(lengths, chunk), build_spmm_plan(indptr, chunk, sizes)
    assert padded.n_items >= exact.n_items and padded.n_slots >= exact.n_slots
    assert torch.equal(padded.items[: exact.n_items], exact.items) or chunk >= max(lengths)
    assert (padded.items[exact.n_items :, 0] == -1).all()
    assert torch.equal(padded.split_rows[: exact.n_split_rows], exact.split_rows)
    assert (padded.split_rows[exact.n_split_rows :, 0] == -1).all()


class OnGpu(torch.Tensor):
    """A vector that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("chunk", [4, 1000])
def test_a_capture_gets_a_plan_of_its_own_that_is_padded(chunk, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    lengths = LENGTHS[3]
    indptr = indptr_of(lengths).as_subclass(OnGpu)
    given = (indptr, sum(lengths), max(lengths), chunk)
    captured, cut = spmm_plan(*given), chunk if chunk < max(lengths) else 0
    padded = build_spmm_plan(indptr, cut, plan_module._largest_sizes(indptr, sum(lengths), cut))
    assert torch.equal(captured.items, padded.items) and captured.n_slots == padded.n_slots
    assert torch.equal(captured.split_rows, padded.split_rows)
    assert not plan_module._PLANS[indptr] and spmm_plan(*given) is not captured


def test_plans_are_kept_per_chunk_and_die_with_the_pattern():
    indptr = indptr_of([9, 2, 30])
    before = len(plan_module._PLANS)
    a = spmm_plan(indptr, 41, 30, 8)
    assert spmm_plan(indptr, 41, 30, 8) is a
    assert spmm_plan(indptr, 41, 30, 16) is not a
    # no row reaches 32 blocks: both are the plan that cuts nothing
    assert spmm_plan(indptr, 41, 30, 32) is spmm_plan(indptr, 41, 30, 64)
    assert len(plan_module._PLANS) == before + 1
    del indptr
    gc.collect()
    assert len(plan_module._PLANS) == before


def test_no_rows():
    plan = spmm_plan(torch.zeros(1, dtype=torch.int32), 0, 0, 4)
    assert (plan.n_items, plan.n_split_rows, plan.n_slots) == (0, 0, 0)


def test_rows_that_are_bearable_are_not_cut():
    lengths = [20, 3, 0, 7]
    indptr = indptr_of(lengths)
    assert spmm_plan(indptr, 30, 40, 8).n_split_rows == 1
    uncut = spmm_plan(indptr, 30, 40, 8, 3)
    assert uncut.n_split_rows == 0 and uncut.n_items == 4
    assert spmm_plan(indptr, 30, 40, 8, 3) is uncut
    # 20 blocks are more than three times six: then all rows longer than six are cut
    assert spmm_plan(indptr, 30, 40, 6, 3).n_split_rows == 2
