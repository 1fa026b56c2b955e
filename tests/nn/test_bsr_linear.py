import copy
import io
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from blackwell_sparsek import matmul
from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.nn import BSRLinear
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.inputs import block_pattern, integers, normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

# (in, out, block): whole, ragged in one or both, one block, block larger than the layer, slivers
SIZES = [
    (64, 32, (16, 16)),
    (65, 33, (16, 32)),
    (63, 64, (16, 16)),
    (17, 15, (32, 32)),
    (1, 1, (1, 1)),
    (48, 7, (1, 16)),
]


def make(in_features, out_features, block_shape, *, density=0.6, seed=0, **options):
    blocks = (-(-out_features // block_shape[0]), -(-in_features // block_shape[1]))
    keep = block_pattern(*blocks, density=density, seed=seed)
    return BSRLinear(in_features, out_features, block_shape, keep=keep, **options)


def padding_of(layer):
    """The stored elements that lie beyond the sizes."""
    shape = (layer.out_features, layer.in_features)
    inside = BSRMatrix.from_mask(
        torch.ones(shape),
        torch.ones(layer.pattern.rows_b, layer.pattern.cols_b, dtype=torch.bool),
        layer.block_shape,
    )
    rows, cols = layer.pattern.row_indices().long(), layer.indices.long()
    return inside.storage.view(layer.pattern.rows_b, layer.pattern.cols_b, *layer.block_shape)[
        rows, cols
    ].eq(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", SIZES)
def test_forward_and_gradients_equal_those_of_the_dense_layer(sizes, dtype, device):
    layer = make(*sizes, dtype=dtype, device=device)
    dense = layer.to_linear()
    x = normal(2, 5, sizes[0], seed=1, dtype=dtype, device=device).requires_grad_()
    x_dense = x.detach().clone().requires_grad_()
    exact = copy.deepcopy(dense).double()
    x_exact = x.detach().double().requires_grad_()
    grad = normal(2, 5, sizes[1], seed=2, dtype=dtype, device=device)
    y, y_dense, y_exact = layer(x), dense(x_dense), exact(x_exact)
    assert_within_budget(y, y_exact, y_dense, what="y")
    y.backward(grad)
    y_dense.backward(grad)
    y_exact.backward(grad.double())
    assert_within_budget(x.grad, x_exact.grad, x_dense.grad, what="dx")
    assert_within_budget(layer.bias.grad, exact.bias.grad, dense.bias.grad, what="dbias")
    at = layer.weight.pattern
    kept = BSRMatrix._from_parts(at, torch.ones_like(layer.values)).to_dense().bool()
    for other in (exact, dense):
        other.weight.grad[~kept] = 0
    d_weight = BSRMatrix._from_parts(at, layer.values.grad).to_dense()
    assert_within_budget(d_weight, exact.weight.grad, dense.weight.grad, what="dvalues")


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activation(activation):
    layer = make(40, 24, (8, 16), activation=activation)
    x = normal(3, 40, seed=3)
    plain = copy.deepcopy(layer)
    plain.activation = None
    function = getattr(nn.functional, activation)
    exact = function(plain.double()(x.double()))
    assert_within_budget(layer(x), exact, function(plain.float()(x)))
    with torch.no_grad():
        assert_within_budget(layer(x), exact, function(plain.float()(x)))


def test_integer_values_are_exact_and_a_vector_works():
    layer = make(33, 20, (8, 8))
    with torch.no_grad():
        layer.values.copy_(integers(*layer.values.shape, seed=4) * ~padding_of(layer))
        layer.bias.copy_(integers(20, seed=5))
    x = integers(33, seed=6)
    assert torch.equal(layer(x), layer.to_linear()(x))
    assert torch.equal(layer(x), layer(x[None])[0])


def test_without_bias_and_without_blocks():
    layer = BSRLinear(32, 16, (16, 16), sparsity=1.0, bias=False)
    assert layer.values.shape == (0, 16, 16) and layer.bias is None
    x = torch.randn(3, 32, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, torch.zeros(3, 16))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert layer.values.grad.shape == layer.values.shape
    assert "bias=False" in repr(layer)


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.77, 1.0])
def test_random_pattern_has_the_exact_count_and_balanced_rows(sparsity):
    layer = BSRLinear(160, 112, (16, 16), sparsity=sparsity)
    assert layer.nnz_blocks == 70 - round(sparsity * 70)
    counts = layer.indptr.diff()
    assert counts.max() - counts.min() <= 1
    layer.weight.validate()


def test_initial_scale_counts_the_inputs_that_exist():
    keep = torch.zeros(3, 8, dtype=torch.bool)
    keep[0] = True
    keep[1, 7] = True
    layer = BSRLinear(8 * 64 - 30, 3 * 64, (64, 64), keep=keep)
    w = layer.weight.to_dense().detach()
    for rows, inputs in ((slice(0, 64), 8 * 64 - 30), (slice(64, 128), 34)):
        stored = w[rows][w[rows] != 0]
        bound = inputs**-0.5
        assert 0.97 * bound < stored.abs().max() <= bound
        # The deviation of a uniform distribution, within five standard errors.
        assert stored.std() == pytest.approx(bound / 3**0.5, rel=5 / (2 * len(stored)) ** 0.5)
        assert 0 < layer.bias[rows].abs().max() <= bound
    assert torch.equal(layer.bias[128:], torch.zeros(64))
    assert torch.equal(layer.values[padding_of(layer)], torch.zeros(int(padding_of(layer).sum())))


OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
    "ASGD": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_padding_stays_zero_under_elementwise_optimizers(name):
    layer = make(35, 21, (16, 16), density=1.0, activation="gelu")
    padding = padding_of(layer)
    assert padding.any()
    optimizer = getattr(torch.optim, name)(layer.parameters(), **OPTIMIZERS[name])
    before = layer.values.detach().clone()
    for seed in range(3):
        optimizer.zero_grad()
        layer(normal(9, 35, seed=seed)).square().sum().backward()
        optimizer.step()
    assert torch.all(layer.values[padding] == 0)
    assert not torch.equal(layer.values, before)
    layer.weight.validate()


def test_flattened_parameters_as_fsdp_does():
    model = nn.Sequential(make(33, 40, (16, 16)), nn.GELU(), make(40, 8, (8, 16), seed=1))
    dense = copy.deepcopy(model)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    places = [
        (module, name, p.shape)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
    ]
    for module, name, _ in places:
        del module._parameters[name]
    pieces = flat.split([shape.numel() for _, _, shape in places])
    for (module, name, shape), piece in zip(places, pieces, strict=True):
        setattr(module, name, piece.view(shape))
    x = normal(4, 33, seed=7)
    model(x).square().sum().backward()
    dense(x).square().sum().backward()
    assert torch.equal(flat.grad, torch.cat([p.grad.flatten() for p in dense.parameters()]))


def through_torch(layer):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_deepcopy_pickle_and_save_are_independent_copies():
    layer = make(33, 20, (16, 16), activation="silu")
    x = normal(4, 33, seed=8)
    expected = layer(x).detach()
    copies = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), through_torch(layer))
    for other in copies:
        assert torch.equal(other(x), expected)
        places = [x.untyped_storage().data_ptr() for x in other.state_dict().values()]
        assert not {x.untyped_storage().data_ptr() for x in layer.state_dict().values()} & {*places}
        other.keep_blocks_(torch.arange(other.nnz_blocks) > 0)
        assert other.nnz_blocks == layer.nnz_blocks - 1
        with torch.no_grad():
            other.values.zero_()
        assert torch.equal(layer(x), expected)


def test_a_shallow_copy_shares_weights_and_pattern_as_for_any_module():
    layer = make(33, 20, (16, 16))
    other, x = copy.copy(layer), normal(4, 33, seed=8)
    assert torch.equal(other(x), layer(x)) and other.values is layer.values
    with torch.no_grad():
        other.values.mul_(2.0)
    other.keep_blocks_(torch.arange(layer.nnz_blocks) > 0)
    assert layer.nnz_blocks == other.nnz_blocks and torch.equal(other(x), layer(x))
    assert_within_budget(layer(x), layer.to_linear().double()(x.double()), layer.to_linear()(x))


def test_dtype_conversions_keep_the_metadata():
    layer = make(33, 20, (16, 16))
    indptr = layer.indptr
    for convert, dtype in (
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.double(), torch.float64),
    ):
        other = convert(copy.deepcopy(layer))
        assert other.values.dtype == other.bias.dtype == dtype
        assert other.indices.dtype == torch.int32
        assert other(torch.ones(2, 33, dtype=dtype)).dtype == dtype
    assert layer.float().indptr is indptr


def test_to_empty_keeps_the_pattern():
    layer = make(48, 32, (16, 16))
    indices = layer.indices.clone()
    layer.to_empty(device="cpu")
    assert torch.equal(layer.indices, indices)
    layer.reset_parameters()
    layer.weight.validate()


def test_meta_module_needs_its_pattern():
    with torch.device("meta"):
        layer = BSRLinear(48, 33, (16, 16), sparsity=0.5)
    assert layer.indptr.is_meta and layer(torch.empty(2, 48, device="meta")).shape == (2, 33)
    layer.to_empty(device="cpu")
    for use in (lambda: layer(torch.zeros(2, 48)), layer.reset_parameters):
        with pytest.raises(InvalidInput, match="made on the meta device and has no pattern yet"):
            use()
    trained = BSRLinear(48, 33, (16, 16), sparsity=0.5)
    layer.load_state_dict(trained.state_dict())
    x = torch.randn(2, 48)
    assert torch.equal(layer(x), trained(x))


def test_parameters_alone_may_be_made_on_the_meta_device(monkeypatch):
    """As under accelerate's `init_empty_weights()`."""
    register = nn.Module.register_parameter

    def register_empty(module, name, x):
        x = None if x is None else nn.Parameter(x.to("meta"), requires_grad=x.requires_grad)
        register(module, name, x)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "register_parameter", register_empty)
        layers = [BSRLinear(48, 33, (16, 16), sparsity=0.5) for _ in range(3)]
    trained = BSRLinear(48, 33, (16, 16), sparsity=0.5)
    x = torch.randn(2, 48)
    assert layers[0].values.is_meta and not layers[0].indices.is_meta
    layers[0].load_state_dict(trained.state_dict(), assign=True)
    layers[1].to_empty(device="cpu").load_state_dict(trained.state_dict())
    for layer in layers[:2]:
        assert torch.equal(layer(x), trained(x))
    layers[2].to_empty(device="cpu").reset_parameters()
    layers[2].weight.validate()


def test_compiles_in_one_graph_with_gradients():
    layer = make(33, 20, (16, 16), activation="gelu")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = normal(4, 33, seed=9).requires_grad_()
    y = compiled(x)
    assert torch.equal(y, layer(x))
    (got,) = torch.autograd.grad(y.sum(), layer.values)
    (expected,) = torch.autograd.grad(layer(x).sum(), layer.values)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_of_the_other_16_bits_casts_the_bias_too(dtype):
    layer = BSRLinear(32, 32, 16, sparsity=0.5, dtype=dtype)
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    x = torch.randn(4, 32, dtype=dtype)
    with torch.autocast("cpu", dtype=other):
        y, plain = layer(x), layer.to_linear()(x)
        with pytest.raises(InvalidType, match="bias has an unsupported dtype"):
            matmul(x, layer.weight.T, bias=torch.ones(32, dtype=torch.int64))
    assert y.dtype == other
    assert_within_budget(y, layer.to_linear().double()(x.double()), plain)
    y.sum().backward()
    assert layer.bias.grad.dtype == dtype


@pytest.mark.parametrize("shape", [(2, 16, 16), (4, 16, 16), (3, 16, 8)], ids=str)
def test_values_that_do_not_fit_the_pattern_are_refused(shape):
    layer = BSRLinear(48, 32, 16, sparsity=0.5)
    problem = r"b has values that do not fit its pattern; expected \[3, 16, 16\], got "
    layer.values = nn.Parameter(torch.ones(shape))
    for x in (torch.ones(2, 48), torch.ones(2, 48, requires_grad=True)):
        with pytest.raises(InvalidInput, match=problem + re.escape(str(list(shape)))):
            layer(x)
    with pytest.raises(InvalidInput, match="a has values that do not fit its pattern"):
        matmul(layer.weight, layer.weight.T)


def test_autocast():
    layer = make(33, 20, (16, 16))
    x = normal(4, 33, seed=10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    exact = layer.to_linear().double()(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = layer.to_linear()(x)
    assert_within_budget(y, exact, plain)
    y.float().sum().backward()
    assert layer.values.grad.dtype == torch.float32


@pytest.mark.parametrize("method", ["magnitude", "random", "wanda"])
def test_from_linear_keeps_the_weights_of_its_blocks(method):
    linear = nn.Linear(50, 35).eval()
    linear.bias.requires_grad_(False)
    inputs = torch.rand(7, 50) if method == "wanda" else None
    layer = BSRLinear.from_linear(linear, (8, 16), 0.5, method, inputs=inputs)
    assert layer.nnz_blocks == 10 and not layer.training
    assert layer.values.requires_grad and not layer.bias.requires_grad
    w = layer.weight.to_dense()
    assert torch.equal(w[w != 0], linear.weight[w != 0])
    with torch.no_grad():
        linear.weight.zero_()
    assert layer.values.any()


def test_from_linear_without_loss_is_the_same_layer():
    linear = nn.Linear(50, 35)
    back = BSRLinear.from_linear(linear, (16, 16), 0.0).to_linear()
    assert torch.equal(back.weight, linear.weight) and torch.equal(back.bias, linear.bias)


def test_from_matrix_takes_a_transpose():
    matrix = BSRMatrix.from_mask(normal(48, 32, seed=11), torch.rand(3, 4) < 0.7)
    layer = BSRLinear.from_matrix(matrix.T)
    assert (layer.in_features, layer.out_features, layer.block_shape) == (48, 32, (8, 16))
    assert torch.equal(layer.weight.to_dense(), matrix.to_dense().T)


def test_keep_blocks():
    layer = make(64, 48, (16, 16), density=1.0)
    layer(torch.ones(1, 64)).sum().backward()
    dense, entries = layer.weight.to_dense().detach(), torch.arange(layer.nnz_blocks) % 3 == 0
    expected = layer.values.detach()[entries]
    grad = layer.values.grad[entries]
    new = layer.keep_blocks_(entries)
    assert new is layer.values and torch.equal(new, expected) and torch.equal(new.grad, grad)
    layer.weight.validate()
    w = layer.weight.to_dense()
    assert torch.equal(w[w != 0], dense[w != 0])
    with pytest.raises(InvalidInput, match=r"entries has a wrong shape; expected \[3\]"):
        layer.keep_blocks_(entries)
    with torch.inference_mode():
        layer.keep_blocks_(torch.arange(3) > 0)
    layer(torch.ones(1, 64)).sum().backward()
    assert layer.values.grad.shape[0] == 2
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        hook = getattr(layer.values, register)(lambda _: None)
        with pytest.raises(InvalidInput, match="values have hooks"):
            layer.keep_blocks_(torch.arange(2) > 0)
        assert layer.nnz_blocks == 2
        hook.remove()
    assert layer.keep_blocks_(torch.arange(2) > 0).shape[0] == 1


@pytest.mark.parametrize(
    ("entries", "error", "text"),
    [
        ([True], InvalidType, "entries is not a tensor"),
        (torch.ones(8).int(), InvalidType, "entries has an unsupported dtype; .*torch.bool"),
        (torch.ones(3, 4).bool(), InvalidInput, r"wrong shape; expected \[8\], got \[3, 4\]"),
    ],
)
def test_wrong_blocks_to_keep_change_nothing(entries, error, text):
    layer = make(64, 48, (16, 16), density=1.0)
    values = layer.values
    with pytest.raises(error, match=rf"BSRWeight\.keep_blocks_: .*{text}"):
        layer.keep_blocks_(entries)
    assert layer.values is values and layer.nnz_blocks == 8


def test_calls_share_what_products_keep_with_a_pattern_until_it_changes():
    layer = make(33, 20, (16, 16))
    first = layer.pattern
    assert layer.pattern is first and layer.weight.pattern.launches is first.launches
    first.launches["recorded"] = "launches"
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.pattern.launches == {}
        assert torch.equal(other.pattern.indptr, other.indptr)
    layer.indices.data = layer.indices.clone()  # as FSDP moves buffers
    assert layer.pattern is first
    layer.indices.copy_(layer.indices.clone())  # as DDP broadcasts them in every forward
    assert layer.pattern is first
    layer.keep_blocks_(torch.arange(layer.nnz_blocks) > 0)
    second = layer.pattern
    assert second is not first and second.launches == {}
    layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert layer.pattern is second


def test_errors():
    with pytest.raises(InvalidInput, match=r"keep has a wrong shape; expected \[2, 3\]"):
        BSRLinear(48, 32, (16, 16), keep=torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(InvalidType, match="keep has an unsupported dtype"):
        BSRLinear(48, 32, (16, 16), keep=torch.ones(2, 3))
    with pytest.raises(InvalidInput, match="keep/sparsity are both given"):
        BSRLinear(16, 16, (16, 16), keep=torch.ones(1, 1, dtype=torch.bool), sparsity=0.5)
    with pytest.raises(InvalidInput, match=r"sparsity is out of range.*got 1.5"):
        BSRLinear(16, 16, (16, 16), sparsity=1.5)
    with pytest.raises(InvalidInput, match=r"activation is unknown.*'tanh'"):
        BSRLinear(16, 16, (16, 16), activation="tanh")
    with pytest.raises(InvalidInput, match=r"impl is unknown.*'auto', .*'cuda'"):
        BSRLinear(16, 16, (16, 16), impl="cuda")
    with pytest.raises(InvalidType, match=r"values has an unsupported dtype.*int8"):
        BSRLinear(16, 16, (16, 16), dtype=torch.int8)
    with pytest.raises(InvalidInput, match=r"block_shape is out of range.*\[0, 16\]"):
        BSRLinear(16, 16, (0, 16))
    linear = nn.Linear(16, 16)
    with pytest.raises(InvalidInput, match=r"method is unknown.*'movement'"):
        BSRLinear.from_linear(linear, (16, 16), 0.5, "movement")
    with pytest.raises(InvalidInput, match=r"inputs does not fit.*'wanda' and no inputs"):
        BSRLinear.from_linear(linear, (16, 16), 0.5, "wanda")
    with pytest.raises(InvalidType, match=r"linear has a wrong type.*got Conv1d"):
        BSRLinear.from_linear(nn.Conv1d(1, 1, 1), (16, 16), 0.5)
    with pytest.raises(InvalidInput, match=r"activation cannot be part of a torch.nn.Linear"):
        BSRLinear(16, 16, (16, 16), activation="relu").to_linear()
    with pytest.raises(InvalidInput, match=r"a does not fit; expected 16 columns"):
        BSRLinear(16, 16, (16, 16))(torch.ones(2, 15))


@pytest.mark.gpu
def test_moves_to_cuda_loads_from_cpu_and_runs_in_a_cuda_graph():
    layer = make(65, 48, (16, 16), activation="gelu", dtype=torch.bfloat16)
    state = copy.deepcopy(layer.state_dict())
    layer.to("cuda")
    assert {x.device.type for x in (*layer.parameters(), *layer.buffers())} == {"cuda"}
    layer.reset_parameters()
    layer.load_state_dict(state)
    x = normal(32, 65, seed=12, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected = layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        y.zero_()
        graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_a_second_call_repeats_recorded_launches():
    layer = make(256, 128, (64, 64), density=0.6, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for seed in (14, 15):
            x = normal(32, 256, seed=seed, dtype=torch.bfloat16, device="cuda")
            y, plain = layer(x), layer.to_linear()(x)
            assert_within_budget(y, layer.to_linear().double()(x.double()), plain)
        assert any(recorded is not None for recorded in layer.pattern.launches.values())
        layer.keep_blocks_(torch.arange(layer.nnz_blocks, device="cuda") > 2)
        assert layer.pattern.launches == {}
        assert_within_budget(layer(x), layer.to_linear().double()(x.double()), layer.to_linear()(x))


def test_exports():
    layer = make(33, 20, (16, 16), activation="gelu")
    x = normal(4, 33, seed=13)
    exported = torch.export.export(layer, (x,)).module()
    assert torch.equal(exported(x), layer(x))


def test_import_is_cheap():
    code = (
        "import sys, torch; import blackwell_sparsek.nn\n"
        "bad = {'triton', 'scipy', 'matplotlib', 'torch._dynamo'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
