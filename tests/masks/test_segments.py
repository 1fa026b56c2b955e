import pytest
import torch

from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.segments import every_block, every_key_block, segments, selected_blocks

SIZES = [(1, 1), (1, 17), (15, 17), (40, 40), (33, 100), (65, 63)]
BLOCKS = [(16, 16), (16, 64), (64, 32)]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def band_elements(band, sq, sk):
    left, right = band.scalars()
    distance = torch.arange(sk) - (torch.arange(sq)[:, None] + sk - sq)
    return (distance >= -left) & (distance <= right)


@pytest.mark.parametrize(("sq", "sk"), SIZES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("band", [Band(None, None), Band(None, 0), Band(9, 0)])
@pytest.mark.parametrize("sorted_numbers", [True, False])
def test_segments(sq, sk, block, band, sorted_numbers, generator):
    q = torch.randint(0, 3, (2, sq), generator=generator)
    k = torch.randint(0, 3, (2, sk), generator=generator)
    if sorted_numbers:
        q, k = q.sort(1).values, k.sort(1).values
    mask = segments(q, k, block, band=band)
    mask.validate()
    inside = band_elements(band, sq, sk)
    expected = (q[:, :, None] == k[:, None, :])[:, None] & inside
    assert torch.equal(mask.to_element_mask() & inside, expected)


def test_blocks_of_one_number_are_full_and_others_absent():
    numbers = torch.arange(4).repeat_interleave(32)[None]
    mask = segments(numbers, numbers, (16, 16))
    assert mask.nnz_blocks == 16 and mask.bits.shape[0] == 0


def test_blocks_outside_of_the_band_are_not_listed():
    numbers = torch.zeros(1, 64, dtype=torch.int64)
    assert segments(numbers, numbers, (16, 16), band=Band(None, 0)).nnz_blocks == 10
    assert segments(numbers, numbers, (16, 16), band=Band(15, 0)).nnz_blocks == 7


def test_segments_of_kept_blocks(generator):
    q = torch.randint(0, 2, (2, 40), generator=generator)
    keep = torch.rand(1, 3, 3, 3, generator=generator) < 0.5
    mask = segments(q, q, (16, 16), keep=keep)
    mask.validate()
    kept = keep.repeat_interleave(16, 2).repeat_interleave(16, 3)[..., :40, :40]
    expected = (q[:, :, None] == q[:, None, :])[:, None] & kept
    assert torch.equal(mask.to_element_mask(), expected)


@pytest.mark.parametrize(("sq", "sk"), SIZES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("padded", [False, True])
def test_selected_blocks(sq, sk, block, padded, generator):
    nb = -(-sk // block[1])
    selected = torch.rand(2, 3, sq, nb, generator=generator) < 0.5
    visible = torch.rand(2, sk, generator=generator) < 0.7 if padded else None
    mask = selected_blocks(selected, block, (sq, sk), visible_keys=visible)
    mask.validate()
    expected = selected.repeat_interleave(block[1], 3)[..., :sk]
    if visible is not None:
        expected = expected & visible[:, None, None]
    assert torch.equal(mask.to_element_mask(), expected)


@pytest.mark.parametrize(("sq", "sk"), SIZES)
@pytest.mark.parametrize("block", BLOCKS)
def test_masks_that_list_every_block(sq, sk, block, generator):
    keys = torch.rand(2, sk, generator=generator) < 0.5
    same = every_key_block(keys, sq, block)
    same.validate()
    expected = keys[:, None, None].expand(2, 1, sq, sk)
    assert torch.equal(same.to_element_mask(), expected)
    visible = torch.rand(2, 3, sq, sk, generator=generator) < 0.5
    mask = every_block(visible, block)
    mask.validate()
    assert torch.equal(mask.to_element_mask(), visible)
    assert mask.nnz_blocks == 6 * mask.grid[0] * mask.grid[1]


def test_bits_of_keys_do_not_grow_with_the_queries():
    keys = torch.ones(1, 256, dtype=torch.bool)
    short, long = (every_key_block(keys, sq, (64, 64)) for sq in (64, 4096))
    assert short.bits.numel() == long.bits.numel()
