import copy

import pytest
import torch
from torch import nn

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.nn import BSRLinear
from blackwell_sparsek.prune import block_magnitude, input_norms, sparsify_, wanda
from blackwell_sparsek.testing.inputs import normal


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.up = nn.Linear(32, 64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64, bias=False)])
        self.again = self.blocks[0]
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.up(self.embedding(tokens))
        for block in (*self.blocks, self.again):
            x = torch.relu(block(x))
        return self.head(self.down(x))


TOKENS = torch.arange(20).view(4, 5)


def test_replaces_layers_shares_them_and_skips_tied_ones():
    model = Model()
    weight = model.up.weight.detach().clone()
    summary = sparsify_(model, (16, 16), 0.75)
    names = [layer.name for layer in summary.layers]
    assert names == ["up", "blocks.0", "blocks.1", "down"]
    assert model.again is model.blocks[0] and isinstance(model.again, BSRLinear)
    assert summary.skipped == {"head": "shares a parameter with another module"}
    assert isinstance(model.head, nn.Linear)
    keep = block_magnitude(weight, (16, 16), 0.75)
    elements = keep.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(model.up.weight.to_dense(), weight * elements)
    assert summary.density == 0.25
    assert summary.bytes_after < 0.35 * summary.bytes_before
    text = str(summary)
    assert "blocks.1  64 x 64  4/16 blocks  density 0.250" in text
    assert "head: skipped, it shares a parameter" in text and "4 layers, density 0.250" in text
    model(TOKENS).sum().backward()
    assert model.up.values.grad is not None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "blocks.*"}, ["blocks.0", "blocks.1"]),
        ({"include": ["up", "down"]}, ["up", "down"]),
        ({"exclude": ("blocks.?", "again")}, ["up", "down"]),
        ({"include": "*o*", "exclude": ["down"]}, ["blocks.0", "blocks.1"]),
    ],
)
def test_include_and_exclude(options, expected):
    model = Model()
    summary = sparsify_(model, (16, 16), 0.5, **options)
    assert [layer.name for layer in summary.layers] == expected
    sparse = {name for name, m in model.named_modules() if isinstance(m, BSRLinear)}
    assert sparse == set(expected)


@pytest.mark.parametrize(
    ("options", "sparse"),
    [({"include": "blocks.0"}, True), ({"include": "again"}, True), ({"exclude": "again"}, False)],
)
def test_a_layer_in_several_places_stays_one_layer(options, sparse):
    model = Model()
    sparsify_(model, (16, 16), 0.5, **options)
    assert model.again is model.blocks[0]
    assert isinstance(model.again, BSRLinear) is sparse


def test_wanda_uses_the_activations_of_the_dense_model():
    model = Model().train()
    model.blocks[1].eval()
    modes = {name: m.training for name, m in model.named_modules()}
    dense = copy.deepcopy(model)
    batches = [TOKENS[:2], (TOKENS[2:],), {"tokens": TOKENS[:1]}]
    sparsify_(model, (16, 16), 0.5, method="wanda", calibration=iter(batches), exclude="head")
    assert {name: m.training for name, m in model.named_modules()} == modes
    rows = torch.cat([TOKENS[:2], TOKENS[2:], TOKENS[:1]])
    x = dense.embedding(rows).detach()
    for name in ("up", "blocks.0", "blocks.1"):
        linear = dense.get_submodule(name)
        if name != "blocks.0":
            keep = wanda(linear.weight, x, (16, 16), 0.5)
            got = model.get_submodule(name).pattern
            expected = torch.zeros_like(keep)
            expected[got.row_indices().long(), got.indices.long()] = True
            assert torch.equal(keep, expected), name
        x = torch.relu(linear(x)).detach() if name != "up" else linear(x).detach()
    assert not dense.up._forward_pre_hooks


def test_input_norms():
    model = nn.Sequential(nn.Linear(3, 2))
    x = normal(2, 5, 3, seed=0)
    norms = input_norms(model, ["0"], [x, x[0]])["0"]
    exact = torch.cat([x.flatten(0, 1), x[0]]).double().square().sum(0).sqrt()
    torch.testing.assert_close(norms.double(), exact, rtol=3e-7, atol=0)
    with pytest.raises(InvalidInput, match=r"did not reach some layers.*got nothing for 0"):
        input_norms(model, ["0"], [])
    with pytest.raises(RuntimeError, match="shape"):
        input_norms(model, ["0"], [torch.ones(1, 4)])
    with pytest.raises(InvalidInput, match=r"'up', which is no module.*got 0"):
        input_norms(model, ["0", "up"], [x])
    with pytest.raises(InvalidType, match="names has a wrong type"):
        input_norms(model, [0], [x])
    assert model.training and not model[0]._forward_pre_hooks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_input_norms_of_one_sample_and_of_other_dtypes(dtype):
    model = nn.ModuleDict({"up": nn.Linear(3, 2)}).to(dtype)
    model.forward = lambda x: model["up"](x)
    found = input_norms(model, "up", [torch.tensor([3.0, -1, 0], dtype=dtype)])
    assert found["up"].tolist() == [3, 1, 0] and found["up"].dtype == torch.float32


class TwoInputs(nn.Module):
    """Takes two inputs, drops half of what reaches its layer while it trains."""

    def __init__(self):
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(3, 2)

    def forward(self, x, factor):
        return self.linear(self.dropout(x * factor))


@pytest.mark.parametrize(
    "batch",
    [{"factor": 2.0, "x": torch.ones(4, 3)}, (torch.ones(4, 3), 2.0), [torch.ones(4, 3), 2.0]],
)
def test_batches_are_what_the_model_is_called_with(batch):
    """Without dropout: each of 4 rows of 2.0 counts, so each feature has the norm 4."""
    model = TwoInputs()
    model.linear.eval()
    assert input_norms(model, ["linear"], [batch])["linear"].tolist() == [4.0] * 3
    assert model.training and model.dropout.training and not model.linear.training


@pytest.mark.parametrize("batches", [torch.ones(2, 3), {"input": torch.ones(2, 3)}, 3])
def test_one_batch_is_not_taken_for_a_sequence_of_them(batches):
    model = nn.Sequential(nn.Linear(3, 2))
    kind = type(batches).__name__
    with pytest.raises(InvalidType, match=rf"expected an iterable of batches.*got {kind}"):
        sparsify_(model, (1, 1), 0.5, method="wanda", calibration=batches)


def test_transformer_encoder_layers_leave_their_fused_path():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2)
    x = normal(2, 6, 32, seed=1)
    expected = encoder(x)
    summary = sparsify_(encoder, (16, 16), 0.0)
    assert len(summary.layers) == 4
    assert set(summary.skipped) == {f"layers.{i}.self_attn.out_proj" for i in (0, 1)}
    assert "NonDynamicallyQuantizableLinear" in summary.skipped["layers.0.self_attn.out_proj"]
    padding = torch.zeros(2, 6, dtype=torch.bool)
    torch.testing.assert_close(encoder(x), expected)
    encoder.eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), expected)
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), expected)


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda *args: None),
    "forward_pre": lambda m: m.register_forward_pre_hook(lambda *args: None),
    "backward": lambda m: m.register_full_backward_hook(lambda *args: None),
    "backward_pre": lambda m: m.register_full_backward_pre_hook(lambda *args: None),
    "parameter": lambda m: m.weight.register_hook(lambda grad: None),
    "accumulated": lambda m: m.bias.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_layers_with_hooks_are_skipped(kind):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    HOOKS[kind](model[0])
    summary = sparsify_(model, (16, 16), 0.0)
    assert summary.skipped == {"0": "has hooks"} and len(summary.layers) == 1


def test_layers_with_a_forward_of_their_own_are_skipped():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    inner = model[0].forward
    model[0].forward = lambda x: inner(x.to(torch.float32))
    model[1].forward = model[1].forward  # as where it was replaced and put back
    summary = sparsify_(model, (16, 16), 0.0)
    assert summary.skipped == {"0": "has a forward of its own"} and len(summary.layers) == 1


class Adapted(nn.Module):
    """As a layer of PEFT holds the layer of the model and its adapters."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 16)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, base_layer.out_features)})


def test_adapters_stay_dense():
    model = nn.Sequential(Adapted(nn.Linear(64, 64)), nn.Linear(64, 32))
    summary = sparsify_(model, 16, 0.5)
    assert [layer.name for layer in summary.layers] == ["0.base_layer", "1"]
    reason = "is part of an adapter"
    assert summary.skipped == {"0.lora_A.default": reason, "0.lora_B.default": reason}
    assert type(model[0].lora_A["default"]) is nn.Linear


def test_progress_is_shown_for_long_work_only(capsys, monkeypatch):
    from blackwell_sparsek.prune import sparsify as progress

    sparsify_(Model(), (16, 16), 0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    sparsify_(Model(), (16, 16), 0.5)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith("sparsify_: 1/4 after 0 s up") and len(lines) == 4


def test_progress_on_a_terminal_is_one_line_which_ends(capsys, monkeypatch):
    from blackwell_sparsek.prune import sparsify as progress

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    # too short to be shown: not even the end of a line
    sparsify_(Model(), (16, 16), 0.5)
    assert capsys.readouterr().err == ""
    for name in ("QUIET_SECONDS", "SECONDS_BETWEEN_UPDATES"):
        monkeypatch.setattr(progress, name, 0.0)
    sparsify_(Model(), (16, 16), 0.5)
    shown = capsys.readouterr().err
    assert shown.count("\r\x1b[Ksparsify_: ") == 4
    assert shown.endswith("\n") and shown.count("\n") == 1


def test_errors_change_nothing():
    model = Model()
    cases = [
        (r"include has the pattern 'mlp', which matches no.*got up", {"include": "mlp"}),
        (r"exclude has the pattern 'lm_head'", {"exclude": ["lm_head"]}),
        (r"method is unknown.*'l0'", {"method": "l0"}),
        (r"'wanda' and no calibration", {"method": "wanda"}),
        (r"calibration does not fit the method", {"calibration": [TOKENS]}),
    ]
    for problem, options in cases:
        with pytest.raises(InvalidInput, match=problem):
            sparsify_(model, (16, 16), 0.5, **options)
    with pytest.raises(InvalidInput, match="sparsity is out of range"):
        sparsify_(model, (16, 16), 2.0)
    for arg, value in (("exclude", None), ("include", [3])):
        with pytest.raises(InvalidType, match=f"{arg} has a wrong type; expected str or several"):
            sparsify_(model, (16, 16), 0.5, **{arg: value})
    with pytest.raises(InvalidType, match="block_shape is not a pair"):
        sparsify_(model, "16", 0.5)
    with pytest.raises(InvalidType, match=r"BSRLinear.from_linear makes a single one"):
        sparsify_(model.up, (16, 16), 0.5)
    assert not any(isinstance(m, BSRLinear) for m in model.modules())
    with torch.no_grad():
        model.down.weight[3, 5] = torch.nan
    with pytest.raises(InvalidInput, match=r"sparsify_: layer 'down': block_magnitude: w gives"):
        sparsify_(model, (16, 16), 0.5)
    assert not any(isinstance(m, BSRLinear) for m in model.modules())
