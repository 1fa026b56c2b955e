"""The order of a mask's rows: all of them, none of the long ones late."""

import pytest
import torch

from blackwell_sparsek.masks.band import EVERYTHING, Band, kv_range
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.order import longest_columns_first, longest_first, visible_blocks

BANDS = (EVERYTHING, Band(None, 0), Band(37, 0), Band(5, 90), Band(None, 3), Band(0, None))


def random_mask(batch=1, heads=1, sq=300, sk=211, block=(64, 16), keep=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    grid = (-(-sq // block[0]), -(-sk // block[1]))
    chosen = torch.rand((batch, heads, *grid), generator=generator) < keep
    return BlockMask.from_dense(chosen, block, (sq, sk))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("sq, sk", [(300, 211), (211, 300), (64, 16), (1, 300)])
def test_visible_blocks(band, sq, sk):
    mask = random_mask(heads=2, sq=sq, sk=sk)
    keep = mask.to_dense()[0]
    for plane, counts in enumerate(visible_blocks(mask, band).view(2, -1).tolist()):
        for row, count in enumerate(counts):
            lo, hi = kv_range(band, row * 64, row * 64 + 64, sq, sk)
            blocks = slice(lo // 16, -(-hi // 16)) if lo < hi else slice(0, 0)
            assert count == int(keep[plane, row, blocks].sum()), (plane, row)


@pytest.mark.parametrize("planes", [(1, 1), (1, 6), (2, 1), (2, 6)])
@pytest.mark.parametrize("section", [1, 4, 5, 12])
def test_every_row_once_and_longest_first(planes, section):
    mask = random_mask(*planes, seed=section)
    mb, _ = mask.grid
    order = longest_first(mask, 2, 6, EVERYTHING, section)
    assert order.dtype == torch.int32
    assert sorted(order.tolist()) == list(range(12 * mb))
    counts = visible_blocks(mask, EVERYTHING).view(*planes, mb).expand(2, 6, mb).flatten()
    heavy = counts > 2 * counts.float().mean()
    assert not heavy.any()
    last = (-1, 0)
    for entry in order.tolist():
        # planes too few for a section of their own belong to the last one
        in_section = min(entry // mb // section, 12 // section - 1)
        key = (in_section, -int(counts[entry]))
        assert key >= last
        last = key


def test_heavy_rows_come_before_all_sections():
    keep = torch.zeros(1, 8, 16, 16, dtype=torch.bool)
    keep[..., 0] = True
    keep[0, 7, 3, :] = True
    keep[0, 2, 5, :9] = True
    order = longest_first(BlockMask.from_dense(keep, 64), 1, 8, EVERYTHING, 1)
    assert order[:2].tolist() == [7 * 16 + 3, 2 * 16 + 5]
    assert order[2:4].tolist() == [15, 14]


@pytest.mark.parametrize("section", [1, 3, 8])
def test_equal_rows_go_as_without_an_order(section):
    """From the last tile of a section to the first, through its planes."""
    keep = torch.ones(1, 1, 5, 4, dtype=torch.bool)
    order = longest_first(BlockMask.from_dense(keep, 64), 2, 4, EVERYTHING, section)
    expected = [
        plane * 5 + tile
        for first in range(0, section * (8 // section), section)
        for tile in reversed(range(5))
        for plane in range(first, first + section if first + 2 * section <= 8 else 8)
    ]
    assert order.tolist() == expected


def test_a_band_changes_what_is_long():
    keep = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    keep[..., 3, 2:] = False
    mask = BlockMask.from_dense(keep, 64)
    assert longest_first(mask, 1, 1, EVERYTHING, 1).tolist() == [2, 1, 0, 3]
    assert longest_first(mask, 1, 1, Band(None, 0), 1).tolist() == [2, 3, 1, 0]


def test_no_rows():
    mask = BlockMask.from_dense(torch.zeros(1, 1, 0, 4, dtype=torch.bool), 64, (0, 256))
    assert longest_first(mask, 2, 3, EVERYTHING, 2).numel() == 0


def test_masks_forget_launches_when_copied():
    import copy

    mask = random_mask()
    mask._launches["key"] = object()
    assert copy.deepcopy(mask)._launches == {}
    assert mask._launches


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("heads, group, tile", [(1, 1, 64), (4, 2, 64), (4, 2, 32), (1, 3, 16)])
def test_every_tile_of_keys_once_and_longest_first(band, heads, group, tile):
    mask = random_mask(2, heads, sq=300, sk=211, block=(16, 64), keep=0.3, seed=tile)
    kv_heads = 2
    order = longest_columns_first(mask, 2, kv_heads, group, band, 4, tile)
    keep, tiles = mask.to_dense(), -(-211 // tile)
    assert order.dtype == torch.int32
    assert sorted(order.tolist()) == list(range(2 * kv_heads * tiles))

    def visits(entry):
        plane, column = entry // tiles, entry % tiles * tile // 64
        total = 0
        for member in range(group if heads > 1 else 1):
            head = plane % kv_heads * group + member if heads > 1 else 0
            for row in range(keep.shape[2]):
                lo, hi = kv_range(band, row * 16, row * 16 + 16, 300, 211)
                seen = max(lo, column * 64) < min(hi, column * 64 + 64)
                total += int(keep[plane // kv_heads, head, row, column]) * seen
        return total

    counts = [visits(entry) for entry in order.tolist()]
    light = [n for n in counts if n <= 2 * sum(counts) / len(counts)]
    assert light == sorted(light, reverse=True)
