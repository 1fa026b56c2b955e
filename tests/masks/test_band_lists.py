"""Lists and bit masks of bands from one launch, against the torch functions of patterns."""

import pytest
import torch

from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.parts import Problem, band_mask

pytest.importorskip("triton")

from blackwell_sparsek.masks.device_build import band_lists

BANDS = [Band(None, None), Band(None, 0), Band(0, 0), Band(3, 0), Band(40, 17), Band(0, None)]
PROBLEMS = [
    Problem((1, 1), (16, 16)),
    Problem((200, 200), (16, 32)),
    Problem((65, 300), (64, 16)),
    Problem((300, 65), (16, 64)),
    Problem((513, 513), (128, 256)),
    Problem((256, 1024), (128, 128)),
]


@pytest.mark.parametrize("p", PROBLEMS)
@pytest.mark.parametrize("band", BANDS)
def test_equals_the_torch_mask(band, p, device):
    expected = band_mask(band, p)
    made = band_lists(band, *p, torch.device(device))
    if expected.nnz_blocks == 0:
        assert made is None
        return
    lists, pool = made
    for got, want in zip((*lists, pool), (*expected.forward, expected.bits), strict=True):
        assert torch.equal(got.cpu(), want)


def test_rows_behind_many_others(device, monkeypatch):
    from blackwell_sparsek.masks import list_kernels as kernels

    monkeypatch.setattr(kernels, "TILE_BEFORE", 8)
    p = Problem((16 * 50 - 3, 16 * 60), (16, 16))
    for band in (Band(100, 3), Band(None, 0)):
        expected = band_mask(band, p)
        lists, pool = band_lists(band, *p, torch.device(device))
        for got, want in zip((*lists, pool), (*expected.forward, expected.bits), strict=True):
            assert torch.equal(got.cpu(), want)


def test_nothing_to_see_is_left_to_torch(device):
    assert band_lists(Band(0, 0), (0, 64), (16, 16), torch.device(device)) is None
    assert band_lists(Band(None, 0), (16, 0), (16, 16), torch.device(device)) is None
