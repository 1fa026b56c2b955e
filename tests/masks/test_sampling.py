"""Sampling of blocks: counts, ranges and uniformity."""

import pytest
import torch

from blackwell_sparsek.masks.parts import sample_blocks


@pytest.mark.parametrize("seed", range(4))
def test_every_row_gets_its_count_within_its_limit(seed):
    generator = torch.Generator().manual_seed(seed)
    limits = torch.randint(0, 40, (50,), generator=generator)
    counts = (limits * torch.rand(50, generator=generator)).round().long()
    rows, cols = sample_blocks(limits, counts, 40, generator)
    assert torch.equal(torch.bincount(rows, minlength=50), counts)
    assert bool((cols >= 0).all()) and bool((cols < limits[rows]).all())
    keys = rows * 40 + cols
    assert bool((keys[1:] > keys[:-1]).all())


@pytest.mark.parametrize(("limit", "count"), [(6, 1), (6, 2), (6, 3), (6, 4), (6, 5)])
def test_all_sets_are_equally_likely(limit, count):
    trials = 20_000
    full = torch.full((trials,), limit)
    rows, cols = sample_blocks(
        full, torch.full((trials,), count), limit, torch.Generator().manual_seed(0)
    )
    chosen = torch.zeros(trials, limit, dtype=torch.int64)
    chosen[rows, cols] = 1
    codes = (chosen << torch.arange(limit)).sum(1)
    seen = torch.bincount(codes, minlength=1 << limit)
    sets = int((seen > 0).sum())
    assert sets == len(list(torch.combinations(torch.arange(limit), count)))
    expected = trials / sets
    # five standard deviations of a binomial count
    assert (seen[seen > 0] - expected).abs().max() < 5 * expected**0.5


def test_nothing_to_draw():
    none = torch.empty(0, dtype=torch.int64)
    for limits, counts, width in [
        (none, none, 0),
        (torch.zeros(3).long(), torch.zeros(3).long(), 0),
    ]:
        rows, cols = sample_blocks(limits, counts, width, None)
        assert rows.numel() == cols.numel() == 0
