"""Ordered accumulation of dq under a mask: ranks, groups of columns, tiles of programs, lists."""

import itertools

import pytest
import torch

from blackwell_sparsek.attention.sm90 import dq_order as planning
from blackwell_sparsek.attention.sm90.dq_order import (
    Columns,
    GroupRow,
    Walk,
    block_ranks,
    column_groups,
    dq_order,
    program_tiles,
)
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.masks.band import EVERYTHING, Band, q_range
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.order import longest_columns_first

BANDS = (EVERYTHING, Band(None, 0), Band(70, 20), Band(0, 0))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("batch, heads, group, tile", [(1, 1, 3, 64), (2, 4, 2, 64), (2, 4, 2, 32)])
@pytest.mark.parametrize("raster_group", [1, 4])
def test_every_rank_once_and_in_the_order_of_tiles(band, batch, heads, group, tile, raster_group):
    sq, sk, block, kv_heads = 300, 211, (16, 64), 2
    keep = torch.rand(batch, heads, 19, 4, generator=torch.Generator().manual_seed(tile)) < 0.6
    mask = BlockMask.from_dense(keep, block, (sq, sk))
    columns = Columns(2, kv_heads, group, band, raster_group, tile)
    order = longest_columns_first(mask, *columns)
    ranks = block_ranks(mask, order, columns)
    tiles, in_block, lists = -(-sk // tile), 64 // tile, mask.transposed
    assert ranks.shape == (lists.indices.numel(), in_block) and ranks.dtype == torch.int32
    taken = {}
    for entry in order.tolist():
        batch_head, kv_tile = entry // tiles, entry % tiles
        lo, hi = q_range(band, kv_tile * tile, (kv_tile + 1) * tile, sq, sk)
        for member in range(group):
            q_head = batch_head % kv_heads * group + member
            row = (batch_head // kv_heads if batch > 1 else 0) * heads + (
                q_head if heads > 1 else 0
            )
            row = row * 4 + kv_tile // in_block
            for listed in range(lists.indptr[row], lists.indptr[row + 1]):
                q_block = int(lists.indices[listed])
                if lo < hi and lo // 16 <= q_block < -(-hi // 16):
                    rank = int(ranks[listed, kv_tile % in_block])
                    taken.setdefault((batch_head // kv_heads, q_head, q_block), []).append(rank)
    assert taken
    for numbers in taken.values():
        assert numbers == list(range(len(numbers)))


def test_no_blocks():
    mask = BlockMask.from_dense(torch.zeros(2, 2, dtype=torch.bool), 64)
    columns = Columns(1, 1, 1, EVERYTHING, 1, 64)
    order = longest_columns_first(mask, *columns)
    assert block_ranks(mask, order, columns).shape == (0, 1)


@pytest.mark.parametrize("batch, heads, group, tile", [(1, 1, 3, 64), (2, 4, 2, 64), (1, 4, 2, 32)])
@pytest.mark.parametrize("raster_group, programs", [(1, 5), (3, 9), (4, 2)])
def test_programs_take_every_tile_once(batch, heads, group, tile, raster_group, programs):
    """Groups one after the other, and in each the columns of a lane as they are queued."""
    keep = (
        torch.rand(batch, heads, 7, 4, generator=torch.Generator().manual_seed(raster_group)) < 0.4
    )
    keep[..., 1] = True
    mask = BlockMask.from_dense(keep, (16, 64), (112, 211))
    columns = Columns(2, 2, group, EVERYTHING, raster_group, tile)
    order = longest_columns_first(mask, *columns)
    groups = column_groups(mask, order, columns, programs)
    queue, table = groups.queue.tolist(), [GroupRow(*row) for row in groups.table.tolist()]
    lanes = [i % row.lanes for row in table for i in range(row.end - row.begin)]
    taken_tiles = program_tiles(mask, groups, torch.tensor(lanes), columns, programs).tolist()
    bounds, taken_tiles = taken_tiles[: programs + 1], taken_tiles[programs + 1 :]
    tiles, in_block = -(-211 // tile), 64 // tile
    assert bounds[0] == 0 and bounds[-1] == len(taken_tiles)
    assert sorted(taken_tiles) == list(range(4 * tiles))
    for begin, end in itertools.pairwise(bounds):
        places = {}
        for batch_head, kv_tile in (divmod(entry, tiles) for entry in taken_tiles[begin:end]):
            own = batch_head // 2 * (batch > 1) * (len(queue) // 4 // batch) + batch_head % 2 * (
                heads > 1
            )
            at = queue.index(own * 4 + kv_tile // in_block)
            places.setdefault((batch_head, kv_tile % in_block), []).append((at, lanes[at]))
        for taken in places.values():
            assert taken == sorted(taken)
            by_group = [{lane for at, lane in taken if row.begin <= at < row.end} for row in table]
            assert all(len(lanes_of_group) <= 1 for lanes_of_group in by_group)


# the lists of a call

SMS = 3


@pytest.fixture
def mask(monkeypatch, device):
    """Of four query heads on two, made for few SMs, with nothing kept from call to call."""
    pytest.importorskip("triton")
    monkeypatch.setattr(planning, "derived_list", lambda mask, make, *a: make(mask, *a))
    monkeypatch.setattr(planning, "arch_of", lambda _: Arch("cuda", 90, SMS, 232448, False))
    keep = torch.rand(1, 4, 3, 2, device=device) < 0.7
    return BlockMask.from_dense(keep, (64, 128), (180, 256))


def columns(band=EVERYTHING):
    return Columns(batch=1, heads=2, group_size=2, band=band, raster_group=1, tile=128)


def test_in_any_order_there_are_no_ranks(mask):
    order, ranks, visits = dq_order(mask, columns(), Walk(1, 1), deterministic=False)
    assert ranks is None and visits is None
    assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_ranks_of_a_block_of_queries_are_all_there(mask):
    order, ranks, visits = dq_order(mask, columns(), Walk(1, 1), deterministic=True)
    lists = mask.transposed
    seen, heads = visits[: lists.indices.numel(), 0], lists.row_indices() // 2
    for head, block in {(int(h), int(b)) for h, b in zip(heads, seen, strict=True)}:
        of_block = ranks.flatten()[(heads == head) & (seen == block)]
        assert sorted(of_block.tolist()) == list(range(len(of_block)))
    # where each program's tiles begin and end, then the tiles
    assert order[0] == 0 and order[SMS] == 4 and len(order) == SMS + 1 + 4
    assert sorted(order[SMS + 1 :].tolist()) == [0, 1, 2, 3]


def test_a_band_leaves_visits_as_they_are(mask):
    band = Band(None, 0)
    order, ranks, visits = dq_order(mask, columns(band), Walk(1, 1), deterministic=True)
    assert visits is None
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert ranks.equal(block_ranks(mask, order, columns(band)))
