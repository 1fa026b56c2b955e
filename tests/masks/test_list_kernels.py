"""Lists from values of blocks, and back, against the torch functions that make the same."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.masks import list_kernels as kept_lists
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.block_lists import lists_from_blocks, transpose_lists
from blackwell_sparsek.masks.device_build import band_lists
from blackwell_sparsek.masks.parts import Problem, band_mask

UNTOUCHED = -7


def values_of(shape, density, partial, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator) < density
    kind = torch.randint(2, 9, shape, generator=generator, dtype=torch.int32)
    is_partial = torch.rand(shape, generator=generator) < partial
    return torch.where(is_partial, kind, 1) * kept


def expected_lists(values):
    rows, cols = torch.nonzero(values.flatten(0, 2), as_tuple=True)
    bits_id = (values.flatten(0, 2)[rows, cols] - 2).long()
    return lists_from_blocks(rows, cols, bits_id, values.shape[:3].numel(), values.shape[3])


def made_lists(values, device, room):
    rows = values.shape[:3].numel()
    sizes = (rows + 1, rows, room, room)
    made = [torch.full((n,), UNTOUCHED, dtype=torch.int32, device=device) for n in sizes]
    kept_lists.launch_kept_lists(*made, values)
    return made


def assert_same(made, expected):
    count = expected.indices.numel()
    for got, want in zip(made, expected, strict=True):
        n = want.numel()
        assert torch.equal(got[:n].cpu(), want)
    for entries in made[2:]:
        assert bool((entries[count:] == UNTOUCHED).all())


SHAPES = [(1, 1, 1, 1), (1, 1, 17, 1), (2, 3, 5, 7), (1, 2, 9, 129), (3, 1, 1, 300)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_lists_of_truth_values(shape, density, device):
    values = values_of(shape, density, 0.0)
    made = made_lists(values.bool().to(device), device, values.numel())
    assert_same(made, expected_lists(values))


@pytest.mark.parametrize("shape", SHAPES)
def test_partial_blocks_come_first(shape, device):
    values = values_of(shape, 0.6, 0.5)
    assert_same(made_lists(values.to(device), device, values.numel()), expected_lists(values))


def test_programs_take_several_tiles_of_rows(device, monkeypatch):
    monkeypatch.setattr(kept_lists, "MAX_PROGRAMS", 4)
    values = values_of((1, 3, 31, 20), 0.4, 0.3)
    assert_same(made_lists(values.to(device), device, values.numel()), expected_lists(values))


def test_any_strides(device):
    wide = values_of((2, 20, 3, 12), 0.5, 0.0).bool()
    values = wide.permute(2, 0, 3, 1)[:, :, 1:, ::2]
    assert_same(made_lists(values.to(device), device, values.numel()), expected_lists(values.int()))
    expanded = wide[:1, :1].expand(2, 3, 3, 12)
    made = made_lists(wide.to(device)[:1, :1].expand(2, 3, 3, 12), device, expanded.numel())
    assert_same(made, expected_lists(expanded.int()))


@pytest.mark.parametrize("partial", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 9, 70)])
def test_spread_lists_are_those_of_columns(shape, partial, device):
    values = values_of(shape, 0.5, partial)
    values[0, 0, 0, 0] = 1
    lists = expected_lists(values)
    batch, heads, mb, nb = shape
    dtype = torch.int32 if partial else torch.int8
    spread = torch.zeros(batch, heads, nb, mb, dtype=dtype, device=device)
    room = (torch.full((3,), UNTOUCHED, dtype=torch.int32) for _ in range(2))
    padded = [torch.cat([x, more]).to(device) for x, more in zip(lists[2:], room, strict=True)]
    kept_lists.launch_spread(spread, lists.indptr.to(device), *padded)
    assert torch.equal(spread.cpu().int(), values.transpose(2, 3))
    made = made_lists(spread, device, values.numel())
    assert_same(made, transpose_lists(lists, batch * heads, mb, nb))


# Lists and bit masks of bands from one launch, against the torch functions of patterns.

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
def test_band_lists_equal_the_torch_mask(band, p, device):
    expected = band_mask(band, p)
    made = band_lists(band, *p, torch.device(device))
    if expected.nnz_blocks == 0:
        assert made is None
        return
    lists, pool = made
    for got, want in zip((*lists, pool), (*expected.forward, expected.bits), strict=True):
        assert torch.equal(got.cpu(), want)


def test_band_lists_of_rows_behind_many_others(device, monkeypatch):
    from blackwell_sparsek.masks import list_kernels as kernels

    monkeypatch.setattr(kernels, "TILE_BEFORE", 8)
    p = Problem((16 * 50 - 3, 16 * 60), (16, 16))
    for band in (Band(100, 3), Band(None, 0)):
        expected = band_mask(band, p)
        lists, pool = band_lists(band, *p, torch.device(device))
        for got, want in zip((*lists, pool), (*expected.forward, expected.bits), strict=True):
            assert torch.equal(got.cpu(), want)


def test_a_band_without_blocks_is_left_to_torch(device):
    assert band_lists(Band(0, 0), (0, 64), (16, 16), torch.device(device)) is None
    assert band_lists(Band(None, 0), (16, 0), (16, 16), torch.device(device)) is None
