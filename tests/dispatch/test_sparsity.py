"""`bsk.sparsity_report` counts what a model computes and stores."""

import pytest
import torch
from torch import nn

import blackwell_sparsek as bsk
from blackwell_sparsek import InvalidInput, InvalidType
from blackwell_sparsek.testing.inputs import normal

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16}
ATTENTION = {
    "moba": (bsk.nn.MixtureOfBlockAttention, {"block": 16, "top_k": 3}, "best 3 blocks of 16"),
    "indexer": (bsk.nn.IndexerAttention, {"index_dim": 8, "top_k": 20}, "best 20 keys"),
    "nsa": (
        bsk.nn.NativeSparseAttention,
        {"block": 16, "top_k": 3, "window": 10},
        "means of blocks of 16, best 3 of these blocks, window 10",
    ),
    "sparsek": (bsk.nn.SparsekAttention, {"keep": 8}, "SparseK weights that add up to 8"),
}


def stored(model):
    """Parameters and bytes of a model, by its state rather than by its modules."""
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}.values()
    size = sum(x.numel() * x.element_size() for x in tensors)
    return sum(x.numel() for x in model.parameters()), size


def model_of_layers():
    torch.manual_seed(0)
    sparse = bsk.nn.BSRLinear(50, 40, (16, 32), sparsity=0.5)
    return nn.Sequential(nn.Embedding(7, 50), nn.LayerNorm(50), sparse, nn.ReLU(), nn.Linear(40, 3))


def test_linear_layers_and_the_rest_add_up_to_the_model():
    model = model_of_layers()
    report = bsk.sparsity_report(model)
    sparse, dense = report.layers
    assert (sparse.name, sparse.kind, sparse.pattern) == ("2", "linear", "blocks of 16 x 32")
    assert (sparse.kept, sparse.total, sparse.unit, sparse.density) == (3, 6, "blocks", 0.5)
    assert sparse.parameters == 3 * 16 * 32 + 40
    own = [*model[2].parameters(), *model[2].buffers()]
    assert sparse.bytes == sum(x.numel() * x.element_size() for x in own)
    assert sparse.bytes > 4 * sparse.parameters  # the indices count
    assert dense == ("4", "linear", "dense", 1, 1, "blocks", 123, 492)
    assert (sparse.is_sparse, dense.is_sparse) == (True, False)
    assert (report.other_parameters, report.other_bytes) == (450, 1800)
    assert (report.parameters, report.bytes) == stored(model)
    assert str(report).splitlines()[0] == (
        f"2  linear, blocks of 16 x 32  3/6 blocks  density 0.500  1576 parameters"
        f"  {sparse.bytes} bytes"
    )
    assert str(report).splitlines()[1:] == [
        "4  linear, dense  123 parameters  492 bytes",
        "others  450 parameters  1800 bytes",
        f"1 of 2 layers are sparse; {report.parameters} parameters, {report.bytes} bytes",
    ]


def test_rounded_to_fp8_a_layer_takes_fewer_bytes():
    layer = bsk.nn.BSRLinear(256, 128, 128, sparsity=0.5, bias=False)
    (full,), (rounded,) = (bsk.sparsity_report(x).layers for x in (layer, layer.to_fp8()))
    assert full.parameters == rounded.parameters == 128 * 128
    assert 128 * 128 < rounded.bytes < full.bytes / 3


def test_a_shared_weight_counts_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    report = bsk.sparsity_report(model)
    assert [layer.parameters for layer in report.layers] == [64, 0]
    assert (report.parameters, report.bytes) == (64, 256)


@pytest.mark.parametrize("name", ["moba", "indexer"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 33, 70])
def test_pairs_of_a_layer_are_those_that_it_computes(name, tokens, monkeypatch):
    make, options, pattern = ATTENTION[name]
    torch.manual_seed(0)
    layer = make(64, **SIZES, **options)
    seen = []
    module = __import__(make.__module__, fromlist=["select_keys"])

    def recorded(*args, real=module.select_keys, **kwargs):
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(module, "select_keys", recorded)
    layer(normal(1, tokens, 64, seed=1))
    (chosen,) = seen
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    pairs = (chosen.to_dense() & causal).sum((0, 2, 3)).unique().tolist()
    found = bsk.sparsity_report(layer, tokens=tokens).layers[0]
    assert (found.kind, found.pattern, found.unit) == ("attention", pattern, "pairs")
    assert [found.kept] == pairs and found.total == tokens * (tokens + 1) // 2


@pytest.mark.parametrize("tokens", [1, 15, 16, 33, 70])
def test_pairs_of_three_branches(tokens):
    layer = bsk.nn.NativeSparseAttention(64, **SIZES, **ATTENTION["nsa"][1])
    q = torch.arange(tokens)[:, None]
    near = (q >= q.T) & (q - q.T < 10)
    means = 16 * torch.arange(1, tokens // 16 + 1) <= q + 1
    x = normal(1, tokens, 64, seed=1)
    with torch.no_grad():
        projected, k, v = layer._project(x, None)
        lse = torch.zeros(1, 4, tokens)
        chosen = layer._chosen(projected, layer._compressed(k, v)[0], lse).to_dense()
    selected = (chosen & (q >= q.T)).sum((0, 2, 3)).unique().tolist()
    found = bsk.sparsity_report(layer, tokens=tokens).layers[0]
    assert found.pattern == ATTENTION["nsa"][2]
    assert [found.kept] == [n + int(near.sum()) + int(means.sum()) for n in selected]
    assert found.parameters == layer.pooling.numel()


def test_what_sparsek_keeps_follows_from_its_scores():
    layer = bsk.nn.SparsekAttention(64, **SIZES, keep=8)
    found = bsk.sparsity_report(nn.ModuleDict({"a": layer}), tokens=20).layers[0]
    assert (found.name, found.pattern) == ("a", ATTENTION["sparsek"][2])
    assert (found.kept, found.total, found.density) == (None, 210, None)
    assert str(found).startswith(
        f"a  attention, {found.pattern}  210 pairs, kept by their values  "
    )


@pytest.mark.parametrize("name", ATTENTION)
def test_explain_names_layers_that_choose_their_keys(name):
    make, options, pattern = ATTENTION[name]
    model = nn.ModuleDict({"first": make(64, **SIZES, **options)})
    found = bsk.explain(model)
    assert (found.choosing, found.attention) == ({"first": pattern}, {})
    assert str(found).splitlines()[0] == f"first  attention, {pattern}"
    report = bsk.sparsity_report(model)
    assert (report.parameters, report.bytes) == stored(model)
    # the projections have records of their own
    assert [layer.name for layer in report.layers][:2] == ["first", "first.q"]


def test_a_model_without_memory_can_be_counted():
    with torch.device("meta"):
        model = nn.Linear(100, 10)
    assert bsk.sparsity_report(model).layers[0].bytes == 4 * 1010


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("x",), InvalidType, "model has a wrong type; expected torch.nn.Module, got str"),
        ((nn.ReLU(), True), InvalidType, "tokens is not an int; expected int, got bool"),
        ((nn.ReLU(), 0), InvalidInput, "tokens is too small; expected at least 1, got 0"),
    ],
)
def test_what_is_refused(arguments, error, text):
    model, *tokens = arguments
    with pytest.raises(error, match=text):
        bsk.sparsity_report(model, **dict(zip(["tokens"], tokens, strict=False)))
