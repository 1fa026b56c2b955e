"""`BSRLinear` in fp8: results, copies, checkpoints, casts, and what has no gradients."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import blackwell_sparsek as bsk
from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.nn import BSRLinear, strict_patterns
from blackwell_sparsek.prune import shrink_
from blackwell_sparsek.testing.inputs import block_pattern, normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

E4M3 = torch.float8_e4m3fn


def wide_layer(seed=0, density=0.6, dtype=torch.float32, device="cpu", **options):
    keep = block_pattern(5, 4, density=density, seed=seed)
    return BSRLinear(61, 70, (16, 16), keep=keep, dtype=dtype, device=device, **options)


def layer(seed=0, **options):
    return wide_layer(seed, **options).to_fp8()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_forward(dtype, activation, device):
    made = layer(dtype=dtype, activation=activation, device=device)
    x = normal(2, 5, 61, seed=1, dtype=dtype, device=device)
    with torch.no_grad():
        y = made(x)
    rounded = bsk.fp8.quantize(x, "1x128").dequantize()
    weight = made.weight.to_dense()
    act = nn.functional.gelu if activation else lambda x: x
    exact = act(rounded.double() @ weight.double().T + made.bias.double())
    plain = act(rounded @ weight.T + made.bias.float()).to(dtype)
    assert y.dtype == dtype
    assert_within_budget(y, exact, plain)


def test_what_it_is_made_of():
    wide = wide_layer(activation="silu").eval()
    made = wide.to_fp8()
    assert made.values.dtype == E4M3 and made.descale.dtype == torch.float32
    assert not any(p.requires_grad for p in made.parameters()) and not made.training
    assert made.activation == "silu" and torch.equal(made.bias, wide.bias)
    rounded = wide.weight.with_data(wide.values.detach()).to_fp8()
    assert torch.equal(made.weight.to_dense(), rounded.to_dense())
    assert made.bias.data_ptr() != wide.bias.data_ptr()
    assert "dtype=torch.float8_e4m3fn" in repr(made) and "dtype" not in repr(wide)
    assert layer(dtype=torch.bfloat16).to_linear().weight.dtype == torch.bfloat16
    assert layer(bias=False).to_linear().weight.dtype == torch.float32
    assert made.nnz_blocks == wide.nnz_blocks
    again = made.to_fp8()
    assert torch.equal(again.descale, made.descale) and again.values.dtype == E4M3


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, None])
def test_from_linear(dtype):
    dense = nn.Linear(64, 96)
    made = BSRLinear.from_linear(dense, (32, 32), sparsity=0.5, dtype=dtype)
    assert made.values.dtype == (dtype or torch.float32)
    assert (made.descale is not None) == (dtype == E4M3)
    with pytest.raises(InvalidInput, match="dtype"):
        BSRLinear.from_linear(dense, (32, 32), 0.5, dtype=torch.int8)


class Doubled(BSRLinear):
    """A layer with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_stays_one():
    dense, x = nn.Linear(64, 96), normal(3, 64, seed=6)
    once = BSRLinear.from_linear(dense, 32, 0.5, dtype=E4M3)
    twice = Doubled.from_linear(dense, 32, 0.5)
    for made in (twice.to_fp8(), Doubled.from_linear(dense, 32, 0.5, dtype=E4M3)):
        assert type(made) is Doubled and torch.equal(made(x), 2 * once(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_from_matrix_and_a_bias(dtype):
    weight = layer().weight
    bias, x = normal(70, seed=9, dtype=dtype), normal(3, 61, seed=1)
    made = BSRLinear.from_matrix(weight, bias.requires_grad_())
    assert not made.bias.requires_grad
    kept = torch.float32 if dtype == torch.float64 else dtype
    assert made.bias.dtype == kept and torch.equal(made.bias, bias.detach().to(kept))
    assert torch.equal(made(x), bsk.fp8.matmul(x, weight.T, bias=bias.detach().to(kept)))


def test_a_linear_in_double_precision():
    dense = nn.Linear(64, 96).double()
    made = BSRLinear.from_linear(dense, 32, 0.5, dtype=E4M3)
    x = normal(3, 64, seed=6)
    exact = bsk.fp8.quantize(x, "1x128").dequantize().double() @ made.weight.to_dense().double().T
    plain = bsk.fp8.quantize(x, "1x128").dequantize() @ made.weight.to_dense().T
    assert_within_budget(made(x), exact + dense.bias.detach(), plain + dense.bias.detach().float())


def through_torch(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), through_torch]
)
def test_copies_are_independent(way):
    made, x = layer(), normal(3, 61, seed=2)
    with torch.no_grad():
        before = made(x)
        other = way(made)
        assert other.values.dtype == E4M3 and torch.equal(other(x), before)
        other.descale.zero_()
        other.values.view(torch.uint8).zero_()
        assert not torch.equal(other(x), before) and torch.equal(made(x), before)


def test_a_copy_from_before_there_was_fp8():
    old = wide_layer()
    state = old.__getstate__()
    state["_buffers"] = {k: v for k, v in state["_buffers"].items() if k != "descale"}
    new = BSRLinear.__new__(BSRLinear)
    new.__setstate__(state)
    x = normal(3, 61, seed=2)
    assert torch.equal(new(x), old(x)) and new.descale is None


def test_state_dict():
    one, other, x = layer(), layer(), normal(3, 61, seed=3)
    state = one.state_dict()
    assert set(state) == {"values", "descale", "bias", "indptr", "indices", "weight_shape"}
    assert "descale" not in wide_layer().state_dict()
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    with torch.no_grad():
        assert torch.equal(other(x), one(x))
    another = layer(seed=5, density=0.3)
    with strict_patterns(), pytest.raises(RuntimeError, match="another pattern"):
        another.load_state_dict(state)
    another.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(another(x), one(x))


def test_state_dicts_of_another_precision_are_refused():
    wide, made = wide_layer(), layer()
    with pytest.raises(RuntimeError, match=r"all of .*descale \(to_fp8\(\) makes an fp8 layer"):
        made.load_state_dict(wide.state_dict())
    with pytest.raises(RuntimeError, match="unsupported dtype"):
        wide.load_state_dict(made.state_dict())
    short = {**made.state_dict(), "descale": made.descale[1:]}
    with pytest.raises(RuntimeError, match="descale"):
        made.load_state_dict(short)


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    one, other, x = layer(), layer(seed=7), normal(3, 61, seed=3)
    safetensors.save_model(one, str(tmp_path / "layer.safetensors"))
    safetensors.load_model(other, str(tmp_path / "layer.safetensors"))
    with torch.no_grad():
        assert torch.equal(other(x), one(x))


CASTS = [
    lambda m: m.half(),
    lambda m: m.bfloat16(),
    lambda m: m.to(torch.bfloat16),
    lambda m: m.half().float().half(),
]


@pytest.mark.parametrize("cast", CASTS)
def test_casts_are_for_the_other_layers_of_a_model(cast):
    model = nn.Sequential(layer(), nn.Linear(70, 8))
    values, descale = (x.clone() for x in (model[0].values, model[0].descale))
    cast(model)
    dtype = model[1].weight.dtype
    assert dtype != torch.float32 and model[0].bias.dtype == dtype
    assert model[0].values.dtype == E4M3
    assert torch.equal(model[0].values.view(torch.uint8), values.view(torch.uint8))
    assert model[0].descale.dtype == torch.float32 and torch.equal(model[0].descale, descale)
    with torch.no_grad():
        assert model(normal(3, 61, seed=4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.double(),
        lambda m: m.to(torch.float64),
        lambda m: m.to("meta", torch.float64),
        lambda m: m.to(torch.float8_e5m2),
        lambda m: m.to(E4M3),
    ],
)
def test_casts_that_products_cannot_follow_are_refused(cast, bias):
    made, x = layer(bias=bias), normal(3, 61, seed=4)
    before = {name: x.clone() for name, x in made.state_dict().items()}
    text = r"(?s)to a dtype that products in fp8 do not take.*dequantize\(\).*got torch.float"
    with pytest.raises(InvalidType, match=text):
        cast(made)
    for name, kept in made.state_dict().items():
        assert kept.dtype == before[name].dtype and kept.device == before[name].device
    wide = BSRLinear.from_matrix(made.weight.dequantize(), made.bias).double()
    with torch.no_grad():
        assert made(x).dtype == torch.float32 and wide(x.double()).dtype == torch.float64


def test_moves():
    made = layer().to("meta")
    assert made.values.is_meta and made.descale.is_meta and made.values.dtype == E4M3


def test_autocast_and_compile():
    made, x = layer(), normal(3, 61, seed=5)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert made(x).dtype == torch.bfloat16
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), made(x))


def test_dropping_blocks_drops_their_scales():
    made = layer()
    keep = torch.arange(made.nnz_blocks) % 2 == 0
    kept = made.weight.dequantize().data[keep]
    made.keep_blocks_(keep)
    assert torch.equal(made.weight.dequantize().data, kept)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda made: made(torch.randn(3, 61, requires_grad=True)), "x requires gradients"),
        (
            lambda made: (made.bias.requires_grad_(), made(torch.randn(3, 61))),
            r"bias requires gradients.*before to_fp8\(\)",
        ),
        (lambda made: made.reset_parameters(), r"in fp8.*before to_fp8\(\)"),
        (lambda made: shrink_(made, 0.9), r"in fp8.*before to_fp8\(\)"),
        (lambda made: made(torch.randn(3, 60)), "x does not fit"),
    ],
)
def test_errors(call, text):
    with pytest.raises(InvalidInput, match=text):
        call(layer())
