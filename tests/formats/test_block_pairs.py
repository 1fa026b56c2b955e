"""Pairs of mask rows: made by kernels and by torch, against what the rows see."""

import pytest
import torch

from blackwell_sparsek.formats import block_pairs
from blackwell_sparsek.formats.block_mask import BlockMask
from blackwell_sparsek.formats.block_pairs import longest_pairs_first, paired_rows

MASKS = [
    ((1, 1, 1, 1), 1.0),
    ((1, 3, 2, 9), 0.5),
    ((2, 1, 5, 8), 0.3),
    ((2, 3, 7, 300), 0.7),
    ((1, 1, 4, 6), 0.0),
    ((1, 1, 6, 20), None),
]


def made(shape, density):
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    # without a density rows differ in theirs
    share = torch.rand(*shape[:3], 1, generator=generator) ** 3 if density is None else density
    keep = torch.rand(shape, generator=generator) < share
    return keep, BlockMask.from_dense(keep, 64)


def rows_of(table, keep):
    """What the pairs of a table see: `[(first row, second row)]` as sorted blocks."""
    count = keep.shape[:2].numel() * -(-keep.shape[2] // 2)
    numbers = table.tolist()
    for pair in range(count):
        begin, both, first, second = numbers[count + 4 * pair : count + 4 * pair + 4]
        assert numbers[pair] == both + max(first, second)
        at = 5 * count + 2 * begin
        shared, alone = numbers[at : at + 2 * both], numbers[at + 2 * both :]
        rest = alone[2 * first : 2 * second : 2] + alone[2 * second + 1 : 2 * first : 2]
        assert all(block == keep.shape[-1] for block in rest)
        yield (
            sorted(shared + alone[: 2 * first : 2]),
            sorted(shared + alone[1 : 2 * second : 2]),
        )


def check(table, keep):
    padded = torch.nn.functional.pad(keep, (0, 0, 0, keep.shape[2] % 2)).flatten(0, 2)
    seen = [row.nonzero().flatten().tolist() for row in padded]
    assert list(rows_of(table, keep)) == list(zip(seen[::2], seen[1::2], strict=True))


@pytest.mark.parametrize(("shape", "density"), MASKS)
def test_pairs_see_what_their_rows_see(shape, density):
    keep, mask = made(shape, density)
    check(paired_rows(mask), keep)


def test_all_but_one_of_the_shared_blocks_are_fetched_once():
    keep = torch.ones(1, 1, 2, 7, dtype=torch.bool)
    table = paired_rows(BlockMask.from_dense(keep, 64))
    assert table[:5].tolist() == [4, 0, 3, 1, 1]


@pytest.mark.parametrize(("shape", "density"), MASKS)
def test_kernels_make_the_same(shape, density, device, monkeypatch):
    pytest.importorskip("triton")
    keep, mask = made(shape, density)
    expected = longest_pairs_first(mask, paired_rows(mask), 2, 3, 2)
    moved = mask.to(device)
    monkeypatch.setattr(block_pairs, "kernels_build", lambda *tensors: True)
    monkeypatch.setattr(block_pairs, "longest", None)
    table = paired_rows(moved)
    check(table.cpu(), keep)
    assert longest_pairs_first(moved, table, 2, 3, 2).cpu().equal(expected)
