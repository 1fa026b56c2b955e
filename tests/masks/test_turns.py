"""Turns of tiles of keys under a mask: as many as see a block of queries, in order of pieces."""

import itertools

import pytest
import torch

from blackwell_sparsek.masks.band import EVERYTHING, Band, q_range
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.order import longest_columns_first
from blackwell_sparsek.masks.turns import groups_of_columns, pieces_of_programs, turns_of_blocks

BANDS = (EVERYTHING, Band(None, 0), Band(70, 20), Band(0, 0))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("batch, heads, group, tile", [(1, 1, 3, 64), (2, 4, 2, 64), (2, 4, 2, 32)])
@pytest.mark.parametrize("section", [1, 4])
def test_every_turn_once_and_in_the_order_of_pieces(band, batch, heads, group, tile, section):
    sq, sk, block, kv_heads = 300, 211, (16, 64), 2
    keep = torch.rand(batch, heads, 19, 4, generator=torch.Generator().manual_seed(tile)) < 0.6
    mask = BlockMask.from_dense(keep, block, (sq, sk))
    order = longest_columns_first(mask, 2, kv_heads, group, band, section, tile)
    turns = turns_of_blocks(mask, order, kv_heads, group, band, tile)
    tiles, in_block, lists = -(-sk // tile), 64 // tile, mask.transposed
    assert turns.shape == (lists.indices.numel(), in_block) and turns.dtype == torch.int32
    taken = {}
    for entry in order.tolist():
        plane, kv_tile = entry // tiles, entry % tiles
        lo, hi = q_range(band, kv_tile * tile, (kv_tile + 1) * tile, sq, sk)
        for member in range(group):
            q_head = plane % kv_heads * group + member
            row = (plane // kv_heads if batch > 1 else 0) * heads + (q_head if heads > 1 else 0)
            row = row * 4 + kv_tile // in_block
            for unit in range(lists.indptr[row], lists.indptr[row + 1]):
                q_block = int(lists.indices[unit])
                if lo < hi and lo // 16 <= q_block < -(-hi // 16):
                    turn = int(turns[unit, kv_tile % in_block])
                    taken.setdefault((plane // kv_heads, q_head, q_block), []).append(turn)
    assert taken
    for numbers in taken.values():
        assert numbers == list(range(len(numbers)))


def test_no_blocks():
    mask = BlockMask.from_dense(torch.zeros(2, 2, dtype=torch.bool), 64)
    order = longest_columns_first(mask, 1, 1, 1, EVERYTHING, 1, 64)
    assert turns_of_blocks(mask, order, 1, 1, EVERYTHING, 64).shape == (0, 1)


@pytest.mark.parametrize("batch, heads, group, tile", [(1, 1, 3, 64), (2, 4, 2, 64), (1, 4, 2, 32)])
@pytest.mark.parametrize("section, programs", [(1, 5), (3, 9), (4, 2)])
def test_programs_take_every_tile_once(batch, heads, group, tile, section, programs):
    """Groups one after the other, and in each the columns of a lane as they are queued."""
    keep = torch.rand(batch, heads, 7, 4, generator=torch.Generator().manual_seed(section)) < 0.4
    keep[..., 1] = True
    mask = BlockMask.from_dense(keep, (16, 64), (112, 211))
    order = longest_columns_first(mask, 2, 2, group, EVERYTHING, section, tile)
    groups = groups_of_columns(mask, order, 2, 2, group, section, tile, programs)
    queue, table = groups.queue.tolist(), groups.table.tolist()
    lanes = [i % row[2] for row in table for i in range(row[1] - row[0])]
    sizes = (2, 2, section, tile, programs)
    pieces = pieces_of_programs(mask, groups, torch.tensor(lanes), *sizes).tolist()
    bounds, pieces = pieces[: programs + 1], pieces[programs + 1 :]
    tiles, in_block = -(-211 // tile), 64 // tile
    assert bounds[0] == 0 and bounds[-1] == len(pieces)
    assert sorted(pieces) == list(range(4 * tiles))
    for begin, end in itertools.pairwise(bounds):
        places = {}
        for plane, kv_tile in (divmod(piece, tiles) for piece in pieces[begin:end]):
            own = plane // 2 * (batch > 1) * (len(queue) // 4 // batch) + plane % 2 * (heads > 1)
            at = queue.index(own * 4 + kv_tile // in_block)
            places.setdefault((plane, kv_tile % in_block), []).append((at, lanes[at]))
        for taken in places.values():
            assert taken == sorted(taken)
            by_group = [{lane for at, lane in taken if row[0] <= at < row[1]} for row in table]
            assert all(len(lanes_of_group) <= 1 for lanes_of_group in by_group)
