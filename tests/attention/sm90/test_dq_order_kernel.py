"""When columns of a mask visit query blocks: the same ones, at times when no other column is there."""

import itertools
import random

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.sm90 import dq_order_kernel
from blackwell_sparsek.attention.sm90.dq_order import (
    Columns,
    block_ranks,
    column_groups,
    program_tiles,
)
from blackwell_sparsek.attention.sm90.dq_order_kernel import (
    LATER,
    PATIENCE,
    REACH,
    STEPS,
    plan_visits,
)
from blackwell_sparsek.masks.band import EVERYTHING
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.order import longest_columns_first


class Case:
    """A mask of `heads` heads, broadcast to a batch of 2 with 2 KV heads of `group` query heads."""

    def __init__(self, device, heads, group, queries, batch, raster_group, sink, programs, tile=64):
        generator = torch.Generator().manual_seed(heads + raster_group)
        keep = torch.rand(batch, heads, 16, 4, generator=generator) < 0.4
        keep[..., 0] |= sink
        self.mask = BlockMask.from_dense(keep.to(device), (16, 64), (queries, 250))
        self.group, self.parts, self.tile = group, raster_group, tile
        self.columns = Columns(2, 2, group, EVERYTHING, raster_group, tile)
        self.order = longest_columns_first(self.mask, *self.columns)
        self.groups = column_groups(self.mask, self.order, self.columns, programs)

    def plan(self, pack):
        """Visits, times, ranks of each tile of a block, and lanes."""
        *plan, lanes = plan_visits(self.mask, self.groups, self.group, pack, self.parts)
        ranks = [
            block_ranks(self.mask, self.order, self.columns, *p) for p in zip(*plan, strict=True)
        ]
        return *plan, torch.stack(ranks), lanes

    def tiles(self, visits, row, pack):
        """Entries of a row of the lists as they are visited, in tiles."""
        begin, end = self.mask.transposed.indptr[row : row + 2].tolist()
        ragged = self.mask.seq_lengths[0] // self.mask.block_size[0]
        cut = int(end > begin and int(visits[end - 1]) == ragged)
        lead = (end - begin - cut) % pack + cut
        entries = list(range(end - 1, begin - 1, -1))
        rest = [entries[i : i + pack] for i in range(lead, end - begin, pack)]
        return [entries[:lead]] * (lead > 0) + rest


def planned_by_hand(case, pack):
    """What the kernel does, one visit at a time."""
    mask, queue, lists = case.mask, case.groups.queue.tolist(), case.mask.transposed
    (mb, nb), shared, heads = mask.grid, mask.heads == 1, case.group
    nnz = lists.indices.numel()
    all_visits = [lists.indices.tolist() for _ in range(heads if shared else 1)]
    all_times, taken, all_lanes = [[0] * nnz for _ in all_visits], {}, []
    sweep = -(-nnz // (mask.batch * mask.heads * nb)) * heads // pack + 1
    for first, end_place, lanes, later in case.groups.table.tolist():
        idle = [0] * lanes
        for entry in queue[first:end_place]:
            lane = idle.index(min(idle))
            time = idle[lane] + 1
            all_lanes.append(lane)
            for head in range(heads):
                batch_head = entry // nb * heads + head
                visits, times = (x[head if shared else 0] for x in (all_visits, all_times))
                row = (entry // nb if shared else batch_head) * nb + entry % nb
                tiles = case.tiles(visits, row, pack)
                left = [visits[i] for tile in tiles for i in tile]
                there = {b: taken.setdefault((later, batch_head, b), set()) for b in left}
                late, forced = 0, len(tiles) > 0 and left[0] == mask.seq_lengths[0] // 16
                begin, front = time, mb - 1 - time * mb // sweep % mb
                part = {b: (front - b) % mb * case.parts // mb for b in left}
                while tiles:
                    # the times that were read reach so far
                    end = time - (time - begin) % STEPS.value - 1 + REACH.value
                    free = {b: time not in there[b] for b in left}
                    wanted = {b: sum(time + 1 < t < end for t in there[b]) for b in left}
                    keys = {b: (not free[b], part[b] * REACH.value - wanted[b]) for b in left}
                    chosen = sorted(left, key=keys.get)
                    if forced:
                        chosen = [left[0], *(b for b in chosen if b != left[0])]
                    chosen = chosen[: len(tiles[0])]
                    if all(free[b] for b in chosen[forced:]) or late >= PATIENCE.value:
                        for i, block in zip(tiles.pop(0), chosen, strict=True):
                            visits[i], times[i] = block, time + later * LATER.value
                            there[block].add(time)
                            left.remove(block)
                        late, forced = 0, False
                    else:
                        late += 1
                    time += 1
            idle[lane] = time
    return all_visits, all_times, all_lanes


@pytest.mark.parametrize("heads, group, batch", [(1, 3, 2), (4, 2, 2), (2, 1, 1)])
@pytest.mark.parametrize("queries, pack, sink", [(250, 1, True), (256, 2, False)])
def test_plan(heads, group, batch, queries, pack, sink, device):
    case = Case(device, heads, group, queries, batch, 2, sink, 9)
    visits, times, _, lanes = case.plan(pack)
    assert (visits.tolist(), times.tolist(), lanes.tolist()) == planned_by_hand(case, pack)
    lists = case.mask.transposed
    assert not visits.equal(lists.indices)
    rows = lists.row_indices() * 16
    for of_head in visits:
        assert (rows + of_head).sort().values.equal((rows + lists.indices).sort().values)
        if queries % 16:
            assert (of_head == 15).equal(lists.indices == 15)


def test_partial_blocks_and_long_columns_stay(device, monkeypatch):
    monkeypatch.setattr(dq_order_kernel, "MAX_VISITS", 8)
    visible = torch.zeros(256, 128, dtype=torch.bool)
    visible[:, :64] = True
    visible[::3, 64:] = True
    mask = BlockMask.from_element_mask(visible.to(device), (16, 64))
    order = torch.tensor([1, 0], device=device)
    groups = column_groups(mask, order, Columns(1, 1, 1, EVERYTHING, 1, 64), 4)
    visits, times, _ = plan_visits(mask, groups, 1, 1, 1)
    assert visits[0].equal(mask.transposed.indices)
    assert (times[0] % LATER.value).tolist() == [*range(16, 0, -1)] * 2


def test_heads_that_share_an_empty_list_have_none_of_their_own(device, monkeypatch):
    """They read rows of lists that are not there, wherever those pointed to."""
    mask = BlockMask.from_dense(torch.zeros(2, 3, dtype=torch.bool, device=device), (16, 64))
    order = torch.arange(3, dtype=torch.int32, device=device)
    groups = column_groups(mask, order, Columns(1, 1, 4, EVERYTHING, 1, 64), 2)
    given = {}
    launch = dq_order_kernel.launch

    def noted(kernel, grid, args, **options):
        given.update(zip(kernel.arg_names, args, strict=True))
        launch(kernel, grid, args, **options)

    monkeypatch.setattr(dq_order_kernel, "launch", noted)
    visits, _, lanes = plan_visits(mask, groups, 4, 1, 1)
    assert visits.shape == (4, 0) and lanes.tolist() == [0, 1, 0]
    assert given["heads"] == 4 and given["step"] > 0


@pytest.mark.parametrize("heads, group, batch", [(1, 2, 1), (4, 2, 2), (4, 2, 1)])
@pytest.mark.parametrize(
    "raster_group, pack, sink, programs, tile",
    [(1, 1, True, 3, 64), (3, 2, False, 3, 64), (3, 1, True, 2, 32), (2, 1, False, 9, 32)],
)
def test_programs_never_all_wait(
    heads, group, batch, raster_group, pack, sink, programs, tile, device
):
    """Programs with the tiles that were planned for them, which run at any speed."""
    case = Case(device, heads, group, 250, batch, raster_group, sink, programs, tile)
    visits, _, ranks, lanes = case.plan(pack)
    tiles_taken = program_tiles(case.mask, case.groups, lanes, case.columns, programs).tolist()
    bounds, tiles_taken = tiles_taken[: programs + 1], tiles_taken[programs + 1 :]
    assert sorted(tiles_taken) == sorted(case.order.tolist()) and bounds[-1] == len(tiles_taken)
    queues = [tiles_taken[a:b] for a, b in itertools.pairwise(bounds)]
    rng, in_block, tiles = random.Random(raster_group), 64 // tile, -(-250 // tile)
    visits, ranks, sums, running = visits.tolist(), ranks.tolist(), {}, [[] for _ in queues]
    while any(queues) or any(running):
        moved = False
        for i in rng.sample(range(programs), programs):
            program = running[i]
            if not program and queues[i]:
                batch_head, kv_tile = divmod(queues[i].pop(0), tiles)
                b, h = (batch_head // 2 if batch > 1 else 0), batch_head % 2
                for head in range(group):
                    row = b * heads + (h * group + head if heads > 1 else 0)
                    own = 0 if heads > 1 else head
                    in_list = case.tiles(visits[own], row * 4 + kv_tile // in_block, pack)
                    for entries in in_list:
                        at = [(visits[own][e], ranks[own][e][kv_tile % in_block]) for e in entries]
                        program.append([(batch_head, head, *block) for block in at])
                moved = True
            for _ in range(rng.choice((1, 1, 2, 40)) * bool(program)):
                waiting = []
                for *block, rank in program[0]:
                    count = sums.get(tuple(block), 0)
                    if count == rank:
                        sums[tuple(block)] = count + 1
                        moved = True
                    else:
                        waiting.append((*block, rank))
                program[0] = waiting
                if not waiting:
                    program.pop(0)
                if waiting or not program:
                    break
        assert moved, "all programs wait"
    assert sum(sums.values()) >= len(ranks[0])
