import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import ColwiseBSR, FeatureSplit, RowwiseBSR, split_features
from blackwell_sparsek.nn import BSRLinear

from .. import fuzzing


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
        (([(BSRLinear(64, 64, (16, 16)), "rows")], 2.0), "world_size is not an int"),
        (([BSRLinear(64, 64, (16, 16))], 2), "layers are not pairs; expected .layer, .rows. or"),
    ],
)
def test_errors_of_splits(arguments, message):
    with pytest.raises(bsk.InvalidInput, match=message):
        split_features(*arguments)


def test_a_unit_holds_whole_blocks():
    with pytest.raises(bsk.InvalidInput, match="unit does not hold whole blocks; expected a mult"):
        split_features([(BSRLinear(64, 64, (32, 16)), "rows")], 2, unit=16)


@pytest.mark.parametrize("unit", [0, -16, 16.0])
def test_a_unit_is_a_positive_int(unit):
    with pytest.raises(bsk.InvalidInput, match=r"unit is (too small|not an int)"):
        split_features([(BSRLinear(64, 64, (16, 16)), "rows")], 2, unit=unit)
    with pytest.raises(bsk.InvalidInput, match=r"unit is (too small|not an int)"):
        FeatureSplit.contiguous(64, unit, 2)


@pytest.mark.parametrize(
    ("unit", "units", "message"),
    [
        (0, ((0,), (1,)), "unit is out of range"),
        (16, ((0, 1), (2,)), "units are no split"),
        (16, ((0, 1), (1, 2)), "units are no split"),
        (16, ((0, 3), (1, 4)), "units are no split"),
        (16, ((1, 0), (2, 3)), "units are no split"),
        (16, 5, "units are malformed; expected the units of each rank"),
        (16, (0, 1), "units are malformed"),
    ],
)
def test_what_is_no_split_is_refused(unit, units, message):
    with pytest.raises(bsk.InvalidInput, match=message):
        FeatureSplit(unit, units)


def test_splits_from_lists_compare_and_hash():
    made, expected = FeatureSplit(16, [[0], [1]]), FeatureSplit(16, ((0,), (1,)))
    assert made == expected and hash(made) == hash(expected)


def test_a_style_takes_a_split_first():
    with pytest.raises(bsk.InvalidType, match="split has a wrong type; expected FeatureSplit"):
        ColwiseBSR("rows")


# Checkpoints of layers that are split, in a group of one.


@pytest.fixture(scope="module")
def mesh():
    if not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# the side that is split has whole blocks, the other one ends inside of a block
STYLES = {"outputs": (ColwiseBSR, 50, 48), "inputs": (RowwiseBSR, 64, 40)}
ENTRIES = ("values", "indptr", "indices", "weight_shape", "bias")


def split_layer(mesh, name):
    torch.manual_seed(0)
    style, inputs, outputs = STYLES[name]
    layer = BSRLinear(inputs, outputs, (16, 16), keep=skewed(3, 4, 0))
    return parallelize_module(layer, mesh, style())


def assert_refused_or_loaded(mesh, style, changes):
    """Whether a checkpoint is taken; if not, the layer has not changed."""
    layer = split_layer(mesh, style)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    assert sorted(before) == sorted(ENTRIES)
    try:
        layer.load_state_dict({**before, **changes})
    except RuntimeError as error:  # what torch raises for every problem of a checkpoint
        head, problem = str(error).split("\n\t", 1)
        assert "Error(s) in loading state_dict" in head
        assert fuzzing.is_one_sentence(problem), problem
        after = layer.state_dict()
        assert all(torch.equal(after[name], x) for name, x in before.items())
        return False
    finally:
        layer.weight.validate()
        _, inputs, outputs = STYLES[style]
        assert layer(torch.ones(1, inputs)).shape == (1, outputs)
    return True


def test_a_last_block_row_may_be_empty_and_not_whole(mesh):
    """The row pointers of a rank cover all block rows, also those without blocks of its own."""
    keep = torch.ones(3, 4, dtype=torch.bool)
    keep[2] = False
    layer = parallelize_module(BSRLinear(64, 40, (16, 16), keep=keep), mesh, RowwiseBSR())
    assert layer.indptr.tolist() == [0, 4, 8, 8]
    layer.weight.validate()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("conversion", ["to_linear", "to_fp8"])
def test_conversions_that_would_drop_the_split_are_refused(mesh, style, conversion):
    layer = split_layer(mesh, style)
    way_out = rf"{conversion} does not apply.*expected a BSRLinear \(its state_dict\(\)"
    with pytest.raises(bsk.Unsupported, match=way_out):
        getattr(layer, conversion)()
    _, inputs, outputs = STYLES[style]
    whole = BSRLinear(inputs, outputs, (16, 16), keep=skewed(3, 4, 0))
    whole.load_state_dict(layer.state_dict())
    assert whole.to_fp8()(torch.ones(1, inputs)).shape == (1, outputs)


@pytest.mark.parametrize("style", STYLES)
def test_any_wrong_entry_is_refused_or_loaded(mesh, style):
    assert assert_refused_or_loaded(mesh, style, {})
    others = [torch.zeros(1), torch.zeros(()), torch.zeros(48).int(), torch.zeros(40).to("meta")]
    others += [DTensor.from_local(torch.zeros(9, 16, 16), mesh, [Replicate()])]
    for name in ENTRIES:
        for value in [*fuzzing.ODD_STATES, *others]:
            try:
                assert not assert_refused_or_loaded(mesh, style, {name: value})
            except Exception as error:
                raise AssertionError(f"{type(value)} as {name}") from error


NUMBERS = st.integers(-1, 5) | st.sampled_from([2**31 - 1, -(2**31)])


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_pattern_is_refused_or_loaded(mesh, data):
    indptr = [0, *data.draw(st.lists(NUMBERS, min_size=3, max_size=3))]
    indices = data.draw(st.lists(NUMBERS, max_size=5))
    lists = [torch.tensor(x, dtype=torch.int32) for x in (indptr, indices)]
    values = torch.zeros(len(indices), 16, 16)
    changes = {"indptr": lists[0], "indices": lists[1], "values": values}
    loaded = assert_refused_or_loaded(mesh, "outputs", changes)
    rows = [indices[a:b] for a, b in itertools.pairwise(indptr)]
    ascends = indptr == sorted(indptr) and indptr[-1] == len(indices)
    assert loaded == (ascends and all(x == sorted({*x} & {0, 1, 2, 3}) for x in rows))
