"""What makes layers easy to use: int blocks, pruned checkpoints, patterns that are state, hints."""

import pytest
import torch
from torch import nn

import blackwell_sparsek as bsk
from blackwell_sparsek import InvalidInput, InvalidType
from blackwell_sparsek.dispatch.model_report import ModelReport
from blackwell_sparsek.nn import BSRLinear, strict_patterns
from blackwell_sparsek.testing.inputs import normal

BLOCK_MAKERS = {
    "from_dense": lambda x, b: bsk.BSRMatrix.from_dense(x, b),
    "from_mask": lambda x, b: bsk.BSRMatrix.from_mask(x, torch.ones(3, 4, dtype=torch.bool), b),
    "from_element_mask": lambda x, b: bsk.BSRMatrix.from_element_mask(x, x > 0, b),
    "from_linear": lambda x, b: BSRLinear.from_linear(nn.Linear(50, 40), b, 0.5),
    "BSRLinear": lambda x, b: BSRLinear(50, 40, b),
    "sparsify_": lambda x, b: _sparsified(b),
}


def _sparsified(block):
    model = nn.Sequential(nn.Linear(50, 40))
    bsk.prune.sparsify_(model, block, 0.5)
    return model[0]


@pytest.mark.parametrize("name", BLOCK_MAKERS)
def test_an_int_is_a_square_block(name):
    x = normal(40, 50, seed=0)
    assert BLOCK_MAKERS[name](x, 16).block_shape == (16, 16)


@pytest.mark.parametrize("name", BLOCK_MAKERS)
@pytest.mark.parametrize(
    ("block", "error"), [(0, InvalidInput), (True, InvalidType), (1.5, InvalidType)]
)
def test_an_int_that_is_no_size_is_refused(name, block, error):
    with pytest.raises(error, match=r"block_shape is .*expected one or two integers of at least 1"):
        BLOCK_MAKERS[name](normal(40, 50, seed=0), block)


def test_scores_take_an_int_too():
    w, inputs = normal(40, 50, seed=0), normal(50, seed=1).abs()
    for score in (
        lambda b: bsk.prune.block_magnitude(w, b, 0.5),
        lambda b: bsk.prune.wanda(w, inputs, b, 0.5),
    ):
        assert torch.equal(score(16), score((16, 16)))


def pruned_linear(bias=True):
    """Blocks (0, 0), (1, 2) and (2, 3) of 16 x 16 in [40, 50], the last two ragged."""
    linear = nn.Linear(50, 40, bias=bias)
    keep = torch.zeros(3, 4, dtype=torch.bool)
    keep[[0, 1, 2], [0, 2, 3]] = True
    mask = keep.repeat_interleave(16, 0).repeat_interleave(16, 1)[:40, :50]
    with torch.no_grad():
        linear.weight.mul_(mask)
    return linear


@pytest.mark.parametrize("bias", [False, True])
def test_a_pruned_linear_keeps_its_blocks_and_its_results(bias):
    linear = pruned_linear(bias).eval()
    linear.weight.requires_grad_(False)
    layer = BSRLinear.from_dense_linear(linear, 16)
    assert (layer.nnz_blocks, layer.blocks) == (3, 12)
    assert torch.equal(layer.weight.to_dense(), linear.weight)
    assert not layer.values.requires_grad and not layer.training
    x = normal(5, 50, seed=0)
    torch.testing.assert_close(layer(x), linear(x))
    with torch.no_grad():
        linear.weight.zero_()
    assert layer.weight.to_dense().any()  # a copy


def test_from_dense_linear_says_what_it_takes():
    with pytest.raises(InvalidType, match=r"from_dense_linear: linear has a wrong type.*ReLU"):
        BSRLinear.from_dense_linear(nn.ReLU(), 16)


def with_blocks(*blocks):
    keep = torch.zeros(3, 4, dtype=torch.bool)
    for block in blocks:
        keep[block] = True
    return BSRLinear(50, 40, (16, 16), keep=keep)


@pytest.mark.parametrize("theirs", [[(0, 1), (2, 3)], [(1, 1)], [(0, 1), (1, 0), (2, 3)]])
def test_the_pattern_of_a_checkpoint_is_loaded_with_its_values(theirs):
    ours, other = with_blocks((0, 0), (2, 3)), with_blocks(*theirs)
    parameter = ours.values
    ours.load_state_dict(other.state_dict())
    assert torch.equal(ours.weight.to_dense(), other.weight.to_dense())
    assert ours.values is parameter  # optimisers made before still hold it
    x = normal(4, 50, seed=0)
    assert torch.equal(ours(x), other(x))


def test_an_optimizer_made_before_trains_what_was_loaded():
    ours, other = with_blocks((0, 0)), with_blocks((0, 1), (1, 0), (2, 3))
    optimizer = torch.optim.AdamW(ours.parameters(), 0.1)
    ours(normal(4, 50, seed=0)).sum().backward()
    ours.load_state_dict(other.state_dict())
    assert ours.values.grad is None  # that of the old blocks means nothing for the new ones
    ours(normal(4, 50, seed=1)).sum().backward()
    optimizer.step()
    assert not torch.equal(ours.values, other.values)


def test_another_pattern_is_refused_where_that_is_asked_for():
    ours, other = with_blocks((0, 0), (2, 3)), with_blocks((0, 1), (2, 3))
    before = ours.weight.to_dense()
    with (
        strict_patterns(),
        pytest.raises(RuntimeError, match=r"has another pattern.*\(2 of 12.*strict_patterns"),
    ):
        ours.load_state_dict(other.state_dict())
    assert torch.equal(ours.weight.to_dense(), before)
    with strict_patterns():
        ours.load_state_dict(with_blocks((0, 0), (2, 3)).state_dict())


def test_a_forgotten_transpose_is_pointed_out():
    w = bsk.BSRMatrix.from_dense(normal(48, 64, seed=0), 16)
    with pytest.raises(InvalidInput, match=r"expected 48 columns \(b\.T has 64\), got \[4, 64\]"):
        bsk.matmul(normal(4, 64, seed=1), w)
    with pytest.raises(InvalidInput, match=r"expected 64 rows \(a\.T has 48\), got \[48, 4\]"):
        bsk.matmul(w, normal(48, 4, seed=1))
    with pytest.raises(InvalidInput, match=r"expected 48 columns, got \[4, 7\]"):
        bsk.matmul(normal(4, 7, seed=1), w)


def test_a_summary_names_what_was_left_out():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Bilinear(32, 32, 8))
    summary = bsk.prune.sparsify_(model, 16, 0.5, exclude="1")
    assert summary.skipped == {"1": "is excluded by '1'"}
    assert "1: skipped, it is excluded by '1'" in str(summary)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    assert bsk.prune.sparsify_(model, 16, 0.5, include="0").skipped == {"1": "is not included"}


class TestExplainModel:
    def model(self):
        layers = {"up": with_blocks((0, 0), (2, 3)), "act": nn.ReLU(), "out": nn.Linear(40, 3)}
        return nn.ModuleDict(layers)

    def test_lists_the_sparse_layers(self):
        found = bsk.explain(self.model())
        (layer,) = found.layers
        assert (layer.name, layer.nnz_blocks, layer.blocks) == ("up", 2, 12)
        assert layer.chosen == {1: "eager", 4096: "eager"}
        assert str(found).splitlines() == [
            "up  40 x 50 in 16 x 16  2/12 blocks  density 0.167"
            "  1 token: eager  4096 tokens: eager",
            "1 block-sparse layer, density 0.167; 1 dense linear layer",
        ]

    def test_with_inputs_it_explains_the_call(self):
        assert bsk.explain(self.model()["up"], normal(2, 50, seed=0)).chosen == "eager"

    def test_a_model_without_sparse_layers_says_so(self):
        found = bsk.explain(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        assert found.layers == ()
        assert str(found) == "no block-sparse layer; 2 dense linear layers"

    def test_neighbouring_layers_are_joined(self):
        report = ModelReport((), 0, {0: None, 1: None, 3: None, 2: "w"})
        assert str(report).splitlines()[:2] == [
            "attention of layers 0-1, 3: dense",
            "attention of layer 2: w",
        ]
