"""The order of rows and columns from two launches, against the torch functions that sort."""

import pytest
import torch

from blackwell_sparsek.masks import order as block_order
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.device_build import MAX_ORDERED_ROWS, ordered

pytest.importorskip("triton")


@pytest.fixture
def check(monkeypatch, device):
    """Compares both ways through one of the public functions."""

    def compare(function, mask, *args):
        expected = function(mask, *args)
        _ = mask.transposed
        moved = mask.to(device)
        with monkeypatch.context() as patch:
            patch.setattr(block_order, "kernels_build", lambda *tensors: True)
            # the sort must not step in
            patch.setattr(block_order, "_longest", None)
            assert torch.equal(function(moved, *args).cpu(), expected)

    return compare


def skewed(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(*shape[:3], 1, generator=generator) ** 4
    return torch.rand(shape, generator=generator) < share


BANDS = [EVERYTHING, Band(None, 0), Band(40, 5), Band(0, 0)]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("section", [1, 3])
def test_rows(band, section, check):
    mask = BlockMask.from_dense(skewed((2, 3, 9, 20)), (32, 16), (280, 310))
    check(block_order.longest_first, mask, 2, 3, band, section)


@pytest.mark.parametrize("planes", [(1, 1), (1, 4), (2, 1)])
@pytest.mark.parametrize("band", [EVERYTHING, Band(60, 0)])
def test_broadcast_masks(planes, band, check):
    mask = BlockMask.from_dense(skewed((*planes, 17, 33), seed=1), 16)
    check(block_order.longest_first, mask, 2, 4, band, 2)
    check(block_order.longest_columns_first, mask, 2, 2, 2, band, 2, 16)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("heads", "group_size"), [(6, 1), (2, 3)])
def test_columns(band, heads, group_size, check):
    keep = skewed((2, 6, 20, 9)).transpose(2, 3)
    # tiles of half a block, and an odd number of them
    mask = BlockMask.from_dense(keep, (16, 32), (140, 628))
    check(block_order.longest_columns_first, mask, 2, heads, group_size, band, 2, 16)


@pytest.mark.parametrize("keep", [torch.zeros(1, 1, 3, 5), torch.ones(1, 2, 1, 1)])
def test_nothing_and_everything(keep, check):
    mask = BlockMask.from_dense(keep.bool(), 16)
    for band in (EVERYTHING, Band(None, 0)):
        check(block_order.longest_first, mask, 1, 2, band, 1)
        check(block_order.longest_columns_first, mask, 1, 2, 1, band, 1, 16)


def test_heavy_rows_come_first_across_sections(check):
    keep = torch.zeros(1, 6, 8, 40, dtype=torch.bool)
    keep[..., 0] = True
    keep[0, 5, 3] = True
    keep[0, 2, 7, :20] = True
    check(block_order.longest_first, BlockMask.from_dense(keep, 16), 1, 6, EVERYTHING, 2)


def test_too_many_rows_are_left_to_the_sort(device):
    mask = BlockMask.from_dense(torch.ones(1, 1, 4, 1).bool(), 16).to(device)
    sides = (mask.seq_lengths, mask.block_size, 0, 0)
    for planes in (0, MAX_ORDERED_ROWS // 4 + 1):
        sizes = (planes, 1, 4, 0, 0, 1, 1, 0, 1, 1)
        assert ordered(mask.forward, sizes, sides, EVERYTHING, columns=False, key=()) is None
