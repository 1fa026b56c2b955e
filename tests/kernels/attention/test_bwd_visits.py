"""The order in which columns of a mask visit query blocks: the same ones, few waited for."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.formats.band import EVERYTHING
from blackwell_sparsek.formats.block_mask import BlockMask
from blackwell_sparsek.formats.block_order import longest_columns_first
from blackwell_sparsek.formats.block_turns import columns_in_order, turns_of_blocks
from blackwell_sparsek.kernels.attention import bwd_visits
from blackwell_sparsek.kernels.attention.bwd_visits import HOLD, OLDEST, plan_visits


def planned_by_hand(mask, order, group, lanes):
    """What the kernel does, one visit at a time."""
    (mb, nb), lists = mask.grid, mask.transposed
    visits, heads = lists.indices.tolist(), group if mask.heads > 1 else 1
    ragged = mask.seq_lengths[0] // mask.block_size[0]
    for plane, columns in enumerate(order.tolist()):
        idle, free = [0] * lanes, [[0] * mb for _ in range(heads)]
        for column in columns:
            lane = idle.index(min(idle))
            time = idle[lane] + 1
            for head in range(heads):
                row = (plane * heads + head) * nb + column
                begin, end = int(lists.partial_end[row]), int(lists.indptr[row + 1])
                left = visits[begin:end][::-1]
                wait = {b: free[head][b] - time if b != ragged else -OLDEST.value for b in left}
                for i, block in enumerate(sorted(left, key=wait.get)):
                    visits[end - 1 - i] = block
                left, begin_time = visits[begin:end][::-1], time
                for block in left:
                    time = max(time, begin_time + max(wait[block], 0))
                    free[head][block] = time + HOLD.value
                    time += 1
            idle[lane] = time
    return visits


@pytest.mark.parametrize("heads, group", [(1, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("queries", [512, 500])
def test_plan(heads, group, queries, device):
    keep = torch.rand(2, heads, 32, 5, generator=torch.Generator().manual_seed(heads)) < 0.4
    mask = BlockMask.from_dense(keep.to(device), (16, 64), (queries, 300))
    order = longest_columns_first(mask, 2, 2, group, EVERYTHING, 2, 64)
    columns = columns_in_order(mask, order, 2, 64)
    visits = plan_visits(mask, columns, group, 3)
    assert visits.tolist() == planned_by_hand(mask, columns, group, 3)
    lists = mask.transposed
    assert not visits.equal(lists.indices)
    rows = lists.row_indices() * 32
    assert (rows + visits).sort().values.equal((rows + lists.indices).sort().values)
    if queries % 16:
        assert (visits == 31).equal(lists.indices == 31)


def test_partial_blocks_and_long_columns_stay(device, monkeypatch):
    monkeypatch.setattr(bwd_visits, "MAX_VISITS", 8)
    visible = torch.zeros(256, 128, dtype=torch.bool)
    visible[:, :64] = True
    visible[::3, 64:] = True
    mask = BlockMask.from_element_mask(visible.to(device), (16, 64))
    columns = torch.tensor([[1, 0]], device=device)
    assert plan_visits(mask, columns, 1, 4).equal(mask.transposed.indices)


def test_turns_of_planned_visits(device):
    keep = torch.rand(1, 2, 19, 4, generator=torch.Generator().manual_seed(3)) < 0.6
    mask = BlockMask.from_dense(keep.to(device), (16, 64), (300, 256))
    order = longest_columns_first(mask, 1, 2, 1, EVERYTHING, 2, 64)
    visits = plan_visits(mask, columns_in_order(mask, order, 2, 64), 1, 2)
    before = turns_of_blocks(mask, order, 2, 1, EVERYTHING, 64)
    turns = turns_of_blocks(mask, order, 2, 1, EVERYTHING, 64, visits)
    rows = mask.transposed.row_indices() * 19
    expected = dict(
        zip((rows + mask.transposed.indices).tolist(), before[:, 0].tolist(), strict=True)
    )
    assert [expected[b] for b in (rows + visits).tolist()] == turns[:, 0].tolist()
