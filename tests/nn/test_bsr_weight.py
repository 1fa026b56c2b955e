import contextlib
import copy
import io

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.nn import BSRLinear, strict_patterns
from blackwell_sparsek.nn.bsr_weight import check_state


def layer(sparsity=0.5, sizes=(50, 40), **options):
    return BSRLinear(*sizes, (16, 16), sparsity=sparsity, **options)


def with_blocks(*positions):
    keep = torch.zeros(3, 4, dtype=torch.bool)
    for row, col in positions:
        keep[row, col] = True
    return BSRLinear(50, 40, (16, 16), keep=keep)


def test_round_trip_through_torch_save():
    model = nn.Sequential(layer(), nn.ReLU(), layer(sizes=(40, 7)))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert set(state) == {
        f"{i}.{name}"
        for i in (0, 2)
        for name in ("values", "bias", "indptr", "indices", "weight_shape")
    }
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    values = other[0].values
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    x = torch.randn(3, 50)
    assert torch.equal(other(x), model(x))
    assert other[0].values is values


def test_round_trip_through_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(layer(dtype=torch.bfloat16))
    path = tmp_path / "model.safetensors"
    safetensors.save_file(model.state_dict(), path)
    other = copy.deepcopy(model)
    other[0].reset_parameters()
    other.load_state_dict(safetensors.load_file(path))
    assert torch.equal(other[0].values, model[0].values)
    safetensors.save_model(model, str(path))
    other[0].reset_parameters()
    safetensors.load_model(other, str(path))
    assert torch.equal(other[0].values, model[0].values)


@pytest.mark.parametrize("tied", [False, True])
def test_layers_of_one_matrix_round_trip_through_safetensors(tmp_path, tied):
    safetensors = pytest.importorskip("safetensors.torch")
    matrix, path = layer().weight, str(tmp_path / "model.safetensors")

    def model():
        both = nn.Sequential(*(BSRLinear.from_matrix(matrix, torch.randn(40)) for _ in range(2)))
        if tied:
            both[1].values = both[0].values
        return both

    saved, other = model(), model()
    with torch.no_grad():
        saved[0].values.mul_(2.0)
    safetensors.save_model(saved, path)
    assert safetensors.load_model(other, path) == (set(), [])
    x = torch.randn(3, 50)
    for theirs, ours in zip(saved, other, strict=True):
        assert torch.equal(ours(x), theirs(x)) and torch.equal(ours.values, theirs.values)
    assert (other[0].values is other[1].values) == tied


def test_layers_of_one_matrix_share_no_memory_with_it_or_with_each_other():
    matrix = layer().weight
    one, two = (BSRLinear.from_matrix(matrix) for _ in range(2))
    tensors = [*one.state_dict().values(), *two.state_dict().values()]
    tensors += [matrix.storage, *matrix.pattern.tensors(), matrix.pattern.row_indices()]
    places = [x.untyped_storage().data_ptr() for x in tensors]
    assert len(set(places)) == len(places)


def test_values_may_come_from_elsewhere_if_the_pattern_is_the_same():
    ours, theirs = with_blocks((0, 0), (2, 3)), with_blocks((0, 0), (2, 3))
    state, before = theirs.state_dict(), ours.values.clone()
    del state["values"]
    assert ours.load_state_dict(state, strict=False).missing_keys == ["values"]
    assert torch.equal(ours.bias, theirs.bias) and torch.equal(ours.values, before)
    with pytest.raises(RuntimeError, match=r'Missing key.*"values"'):
        ours.load_state_dict(state)
    state = with_blocks((0, 1), (2, 3)).state_dict()
    del state["values"]
    with pytest.raises(RuntimeError, match="state_dict is incomplete"):
        ours.load_state_dict(state, strict=False)


def test_state_is_what_safetensors_can_store():
    state = nn.Sequential(layer(), layer()).state_dict()
    assert all(type(x) is torch.Tensor and x.is_contiguous() for x in state.values())
    storages = [x.untyped_storage().data_ptr() for x in state.values()]
    assert len(set(storages)) == len(storages)


def test_another_pattern_is_loaded_unless_patterns_are_strict():
    ours, theirs = with_blocks((0, 0), (2, 3)), with_blocks((0, 1), (2, 3))
    before = copy.deepcopy(ours.state_dict())
    told = r"has another pattern.*\(2 of 12 blocks\).*strict_patterns"
    with strict_patterns(), pytest.raises(RuntimeError, match=told):
        ours.load_state_dict(theirs.state_dict())
    assert all(torch.equal(x, before[name]) for name, x in ours.state_dict().items())
    values = ours.values
    ours.load_state_dict(theirs.state_dict())
    assert ours.values is values
    assert torch.equal(ours.weight.to_dense(), theirs.weight.to_dense())
    x = torch.randn(4, 50, requires_grad=True)
    (got,) = torch.autograd.grad(ours(x).sum(), x)
    (expected,) = torch.autograd.grad(theirs(x).sum(), x)
    assert torch.equal(got, expected)
    with strict_patterns(), pytest.raises(RuntimeError, match="has another pattern"):
        ours.load_state_dict(with_blocks((1, 1)).state_dict())


def test_another_number_of_blocks_keeps_the_parameter_and_whether_it_trains():
    ours, theirs = with_blocks((0, 0)), with_blocks((0, 1), (1, 0), (2, 3))
    ours.values.requires_grad_(False)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours.values, nn.Parameter) and not ours.values.requires_grad
    assert torch.equal(ours.weight.to_dense(), theirs.weight.to_dense())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_assign_takes_values_and_copies_metadata(index_dtype):
    theirs = layer()
    x = torch.randn(2, 50)
    expected = theirs(x)
    state = theirs.state_dict()
    for name in ("indptr", "indices"):
        state[name] = state[name].to(index_dtype)
    with torch.device("meta"):
        ours = layer()
    ours.load_state_dict(state, assign=True)
    assert ours.values.data_ptr() == theirs.values.data_ptr()
    assert ours.indices.dtype == torch.int32
    state["indices"].fill_(10**6)
    ours.weight.validate()
    assert torch.equal(ours(x), expected)


def test_values_alone_load_where_not_strict():
    ours, theirs = with_blocks((0, 0)), with_blocks((0, 0))
    missing, _ = ours.load_state_dict({"values": theirs.state_dict()["values"]}, strict=False)
    assert set(missing) == {"bias", "indptr", "indices", "weight_shape"}
    assert torch.equal(ours.values, theirs.values)


def broken(name, change):
    state = with_blocks((0, 0), (0, 2), (2, 3)).state_dict()
    state = {key: x.clone() for key, x in state.items()}
    state[name] = change(state[name])
    return state


def at(position, value):
    def change(x):
        x = x.clone()
        x.view(-1)[position] = value
        return x

    return change


# Entry 0 is block (0, 0), 2 is block (2, 3), of which 8 x 2 elements are inside of 40 x 50.
MALFORMED = [
    ("indices", at(1, 4), r"indices is out of range at entry 1.*\[0, 4\), got 4"),
    ("indices", at(1, -1), r"indices is out of range at entry 1.*got -1"),
    ("indices", at(1, 0), "indices has a duplicate at entry 1"),
    ("indices", lambda x: x[:2], "indptr has a wrong end"),
    ("indices", lambda x: x.float(), "indices has an unsupported dtype"),
    ("indices", lambda x: x.to_sparse(), "indices has a sparse layout"),
    ("indices", lambda x: x.to("meta"), "indices has no contents to check"),
    ("indices", lambda x: x.long(), "have different dtypes"),
    ("indptr", at(1, 7), "indptr decreases at row 1"),
    ("indptr", at(3, 2**31 - 1), "indptr has a wrong end"),
    ("indptr", at(0, 1), "indptr has a wrong start"),
    ("indptr", lambda x: x[:-1], "indptr has a wrong length"),
    ("weight_shape", at(1, 64), r"another layer; expected \[40, 50\], got \[40, 64\]"),
    ("weight_shape", lambda x: x[:1], "weight_shape has a wrong shape"),
    ("values", lambda x: x[:2], r"values has a wrong shape; expected \[3, 16, 16\]"),
    ("values", lambda x: x.to_sparse(), "values has a sparse layout"),
    ("values", lambda x: x.to(torch.int8), "values has an unsupported dtype"),
    ("values", at(-1, 1.0), "is not zero beyond the shape at entry 2"),
    ("values", at(-1, float("nan")), "is not zero beyond the shape at entry 2"),
]


@pytest.mark.parametrize(("name", "change", "problem"), MALFORMED)
@pytest.mark.parametrize("strict", [False, True])
def test_malformed_checkpoints_are_refused_and_change_nothing(name, change, problem, strict):
    model = nn.Sequential(with_blocks((0, 0), (0, 2), (2, 3)))
    before = copy.deepcopy(model.state_dict())
    state = {f"0.{key}": x for key, x in broken(name, change).items()}
    with pytest.raises(RuntimeError, match=f"(?s)0: BSRLinear.load_state_dict: .*{problem}"):
        if strict:
            with strict_patterns():
                model.load_state_dict(state)
        else:
            model.load_state_dict(state, strict=False)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_the_unbroken_checkpoint_is_accepted():
    model = with_blocks((0, 0), (0, 2), (2, 3))
    state = broken("values", at(0, 5.0))
    model.load_state_dict(state)
    assert model.values.view(-1)[0] == 5.0


def test_part_of_a_pattern_is_refused():
    state = layer(0.0).state_dict()
    del state["indptr"]
    with pytest.raises(
        RuntimeError, match="state_dict is incomplete; expected all of weight_shape"
    ):
        layer(0.0).load_state_dict(state, strict=False)
    with pytest.raises(InvalidInput, match="incomplete"):
        check_state({"indices": state["indices"]}, (40, 50), (16, 16))


SHAPES = st.sampled_from([(), (0,), (1,), (2,), (3,), (4,), (6,), (6, 16, 16), (1, 6), (6, 16, 15)])
DTYPES = st.sampled_from(
    [
        torch.int32,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.float32,
        torch.float64,
        torch.complex64,
    ]
)


@st.composite
def strange_entries(draw):
    """What a checkpoint may hold instead of a tensor of a layer."""
    kind = draw(st.sampled_from(["other", "filled", "sparse", "meta", "strided"]))
    if kind == "other":
        return draw(st.sampled_from([None, "x", 3, 2.5, [0, 3, 6], {"a": 1}, b"\x80\x04", ()]))
    shape, dtype = draw(SHAPES), draw(DTYPES)
    fill = draw(st.sampled_from([0, 1, -1, 3, 127]))
    made = torch.full(shape, fill).to(dtype)
    if kind == "sparse" and made.dim():
        return made.to_sparse()
    if kind == "meta":
        return made.to("meta")
    return made.t() if kind == "strided" and made.dim() == 2 else made


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.sets(st.sampled_from(["values", "indptr", "indices", "weight_shape"]), min_size=1),
    data=st.data(),
    strict=st.booleans(),
)
def test_strange_checkpoints_are_refused_or_make_a_valid_layer(names, data, strict):
    made = with_blocks((0, 1), (0, 3), (1, 0), (2, 0), (2, 1), (2, 2))
    before = {name: x.clone() for name, x in made.state_dict().items()}
    state = {name: x.clone() for name, x in before.items()}
    for name in sorted(names):
        state[name] = data.draw(strange_entries(), label=name)
    try:
        with strict_patterns() if strict else contextlib.nullcontext():
            made.load_state_dict(state)
    except RuntimeError as error:  # what torch raises for every problem of a checkpoint
        assert "Error(s) in loading state_dict" in str(error)
        after = made.state_dict()
        for name in ("indptr", "indices", "weight_shape"):
            assert torch.equal(after[name], before[name])
    made.weight.validate()
    assert made(torch.ones(1, 50)).shape == (1, 40)
