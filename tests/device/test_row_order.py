"""The order of rows from two launches, against the torch functions that sort."""

import pytest
import torch

from blackwell_sparsek.formats.band import EVERYTHING, Band
from blackwell_sparsek.formats.block_mask import BlockMask
from blackwell_sparsek.formats.block_order import longest_first

pytest.importorskip("triton")

from blackwell_sparsek.formats.block_lists import BlockLists
from blackwell_sparsek.formats.block_mask_kernels import row_order


def check(mask, batch, heads, band, section, device):
    expected = longest_first(mask, batch, heads, band, section)
    lists = BlockLists(*(x.to(device) for x in mask.forward))
    sizes = (batch, heads), (mask.batch, mask.heads), mask.seq_lengths, mask.block_size
    made = row_order(lists, *sizes, band, section)
    assert torch.equal(made.cpu(), expected)


def skewed(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(*shape[:3], 1, generator=generator) ** 4
    return torch.rand(shape, generator=generator) < share


@pytest.mark.parametrize("band", [EVERYTHING, Band(None, 0), Band(40, 5), Band(0, 0)])
@pytest.mark.parametrize("section", [1, 3])
def test_equals_the_sort(band, section, device):
    mask = BlockMask.from_dense(skewed((2, 3, 9, 20)), (32, 16), (280, 310))
    check(mask, 2, 3, band, section, device)


@pytest.mark.parametrize("planes", [(1, 1), (1, 4), (2, 1)])
@pytest.mark.parametrize("band", [EVERYTHING, Band(60, 0)])
def test_broadcast_masks(planes, band, device):
    mask = BlockMask.from_dense(skewed((*planes, 17, 33), seed=1), 16)
    check(mask, 2, 4, band, 2, device)


@pytest.mark.parametrize("keep", [torch.zeros(1, 1, 3, 5), torch.ones(1, 2, 1, 1)])
def test_nothing_and_everything(keep, device):
    mask = BlockMask.from_dense(keep.bool(), 16)
    check(mask, 1, 2, EVERYTHING, 1, device)
    check(mask, 1, 2, Band(None, 0), 1, device)


def test_heavy_rows_come_first_across_sections(device):
    keep = torch.zeros(1, 6, 8, 40, dtype=torch.bool)
    keep[..., 0] = True
    keep[0, 5, 3] = True
    keep[0, 2, 7, :20] = True
    mask = BlockMask.from_dense(keep, 16)
    check(mask, 1, 6, EVERYTHING, 2, device)


def test_too_many_rows_are_left_to_the_sort(device):
    mask = BlockMask.from_dense(torch.ones(1, 1, 4, 1).bool(), 16)
    lists = BlockLists(*(x.to(device) for x in mask.forward))
    sizes = mask.seq_lengths, mask.block_size
    assert row_order(lists, (1, 2**14), (1, 1), *sizes, EVERYTHING, 1) is None
    assert row_order(lists, (0, 1), (1, 1), *sizes, EVERYTHING, 1) is None
