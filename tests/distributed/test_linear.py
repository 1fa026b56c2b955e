import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import FeatureSplit, split_features
from blackwell_sparsek.nn import BSRLinear


def skewed(rows, cols, seed):
    """Blocks that are dense in the first rows and rare in the last, as pruning may leave them."""
    chance = torch.linspace(1, 0.05, rows)[:, None].expand(rows, cols)
    return torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) < chance


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stored_blocks_are_even(ranks):
    up = BSRLinear(256, 2048, (32, 32), keep=skewed(64, 8, 0))
    down = BSRLinear(2048, 256, (16, 64), keep=skewed(32, 16, 1).T.contiguous())
    split = split_features([(up, "rows"), (down.weight, "columns")], ranks)
    assert split.unit == 64 and split.total == 2048
    rows = up.weight.to_dense() != 0
    cols = down.weight.to_dense() != 0
    stored = [
        int(rows[split.features(r)].sum() + cols[:, split.features(r)].sum()) for r in range(ranks)
    ]
    assert sum(stored) == int(rows.sum() + cols.sum())
    assert max(stored) * ranks / sum(stored) <= 1.05
    runs = FeatureSplit.contiguous(2048, 64, ranks)
    uneven = [int(rows[runs.features(r)].sum()) for r in range(ranks)]
    assert max(uneven) * ranks / sum(uneven) > 1.2
    assert sorted(split.order().tolist()) == list(range(2048))


def test_heads_stay_together():
    q = BSRLinear(64, 256, (16, 16), keep=skewed(16, 4, 0))
    split = split_features([(q, "rows")], 2, unit=64)
    assert split.unit == 64 and all(len(units) == 2 for units in split.units)
    assert split.features(0).view(2, 64).diff(dim=1).eq(1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), "layers is empty"),
        (([(3, "rows")], 2), "layers has a wrong type; expected BSRLinear or BSRMatrix, got int"),
        (([(BSRLinear(64, 64, (16, 16)), "outputs")], 2), "side is unknown"),
        (
            ([(BSRLinear(64, 96, (16, 16)), "rows"), (BSRLinear(64, 96, (16, 16)), "columns")], 2),
            r"layers have different numbers of shared features; expected one, got \[64, 96\]",
        ),
        (([(BSRLinear(64, 96, (16, 16)), "rows")], 4), "features cannot be split evenly"),
        (([(BSRLinear(64, 90, (16, 16)), "rows")], 1), "features cannot be split evenly"),
    ],
)
def test_errors_of_splits(arguments, message):
    with pytest.raises(bsk.InvalidInput, match=message):
        split_features(*arguments)


def test_a_unit_holds_whole_blocks():
    with pytest.raises(bsk.InvalidInput, match="unit does not hold whole blocks; expected a mult"):
        split_features([(BSRLinear(64, 64, (32, 16)), "rows")], 2, unit=16)


@pytest.mark.parametrize(
    ("unit", "units", "message"),
    [
        (0, ((0,), (1,)), "unit is out of range"),
        (16, ((0, 1), (2,)), "units are no split"),
        (16, ((0, 1), (1, 2)), "units are no split"),
        (16, ((0, 3), (1, 4)), "units are no split"),
        (16, ((1, 0), (2, 3)), "units are no split"),
    ],
)
def test_what_is_no_split_is_refused(unit, units, message):
    with pytest.raises(bsk.InvalidInput, match=message):
        FeatureSplit(unit, units)
