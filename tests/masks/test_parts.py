"""Parts of the patterns: runs, their expansion, and the bit masks along a band."""

import itertools

import pytest
import torch

from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.masks.band import Band, classify_tile
from blackwell_sparsek.masks.parts import BandBits, Problem, Runs, band_runs, expand, lists_of_runs

BANDS = [Band(None, 0), Band(0, 0), Band(20, 0), Band(3, 40), Band(0, None), Band(None, None)]
PROBLEMS = [
    Problem(seq, block)
    for seq in [(40, 70), (70, 40), (64, 64), (1, 100), (100, 1)]
    for block in [(16, 16), (32, 16), (16, 32)]
]


def test_expand():
    starts, lengths = torch.tensor([5, 0, 9, 2]), torch.tensor([2, 0, 1, 3])
    assert expand(starts, lengths).tolist() == [5, 6, 9, 2, 3, 4]
    assert expand(starts, lengths, step=3).tolist() == [5, 8, 9, 2, 5, 8]
    assert expand(starts[:0], lengths[:0]).tolist() == []
    assert expand(starts.int(), lengths.int()).dtype == torch.int32


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_runs_agree_with_the_classification_of_tiles(band, p):
    runs = band_runs(band, p)
    (bq, bk), (mb, nb) = p.block, p.grid()
    for r, c in itertools.product(range(mb), range(nb)):
        kind = "empty"
        if runs.start[r] <= c < runs.end[r]:
            kind = "full" if runs.full_start[r] <= c < runs.full_end[r] else "partial"
        assert kind == classify_tile(band, r * bq, r * bq + bq, c * bk, c * bk + bk, *p.seq)


def test_a_long_band_has_few_bit_masks():
    p = Problem((10**6 + 7, 10**6 + 3), (128, 128))
    assert BandBits(Band(2047, 0), p).pool.shape[0] <= 4 * 4
    assert BandBits(Band(None, None), p).pool.shape[0] == 0


def test_too_many_blocks_are_refused_before_they_are_listed():
    rows = 2**16
    zeros, many = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 2**15)
    with pytest.raises(Unsupported, match=r"has 2147483648 blocks; at most 2\*\*31 - 1"):
        lists_of_runs(Runs(zeros, zeros, many, many))
