"""Copies of block-sparse matrices: they compute the same, and a malformed one is refused."""

import copy
import io
import pickle

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.sparse.matrix import BSRMatrix, BSRPattern
from blackwell_sparsek.testing.inputs import block_pattern, normal


def through_torch(x, **options):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: through_torch(x, weights_only=False),
    "weights only": lambda x: through_torch(x, weights_only=True),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def matrix(dtype=torch.float32, rows=65, cols=63):
    return BSRMatrix.from_mask(
        normal(rows, cols, seed=1).to(dtype), block_pattern(5, 2, density=0.6, seed=2), (16, 32)
    )


@ways
@pytest.mark.parametrize("seen", [lambda m: m, lambda m: m.T], ids=["stored", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_compute_the_same(way, seen, dtype):
    one = seen(matrix(dtype))
    x = normal(one.shape[1], 3, seed=3).to(dtype)
    before = one @ x
    one.pattern.launches["recorded"] = "launches"
    other = way(one)
    assert other.is_transposed == one.is_transposed and other.shape == one.shape
    assert torch.equal(other @ x, before)
    assert torch.equal(other.to_dense(), one.to_dense())
    assert torch.equal(other.T.indices, one.T.indices)
    other.validate()
    if way is not copy.copy:
        assert other.pattern.launches == {}
        other.storage.zero_()
        assert torch.equal(one @ x, before)


@ways
@pytest.mark.parametrize("seen", [lambda m: m, lambda m: m.T], ids=["stored", "transposed"])
def test_copies_keep_the_scales_of_blocks(way, seen):
    one = seen(matrix().to_fp8())
    other = way(one)
    assert other.dtype == torch.float8_e4m3fn and torch.equal(other.descale, one.descale)
    assert torch.equal(other.to_dense(), one.to_dense())
    other.validate()
    if way is not copy.copy:
        other.descale.zero_()
        other.stored_descale.zero_()
        assert one.descale.all()


def test_a_shallow_copy_shares_values_and_pattern():
    one = matrix()
    other = copy.copy(one)
    assert other is not one
    assert other.storage is one.storage and other.pattern is one.pattern


def test_gradients_reach_copied_values():
    one = matrix()
    one = one.with_data(one.data.clone().requires_grad_())
    for way in WAYS.values():
        other = way(one)
        assert other.storage.requires_grad
        (other @ torch.ones(63, 1)).sum().backward()
        assert other.storage.grad is not None


@ways
def test_patterns(way):
    one = matrix().pattern
    for pattern in (one, one.transposed()):
        other = way(pattern)
        assert other.shape == pattern.shape and other.block_shape == pattern.block_shape
        assert all(map(torch.equal, other.tensors(), pattern.tensors()))
        assert torch.equal(other.transposed().indices, pattern.transposed().indices)


def test_meta_patterns():
    one = matrix().to("meta")
    for way in WAYS.values():
        assert way(one).device.type == "meta" and way(one).shape == (65, 63)


@pytest.mark.parametrize(
    ("name", "entry", "value", "problem"),
    [
        ("indices", 0, 2, "indices is out of range at entry 0"),
        ("indices", 0, -1, "indices is out of range at entry 0"),
        ("indptr", -1, 99, "indptr has a wrong end"),
        ("indptr", 0, 1, "indptr has a wrong start"),
    ],
)
@pytest.mark.parametrize("kind", [BSRMatrix, BSRPattern])
def test_a_malformed_copy_is_refused(kind, name, entry, value, problem):
    one = matrix() if kind is BSRMatrix else matrix().pattern
    state = one.__getstate__()
    state[name] = state[name].clone()
    state[name][entry] = value
    with pytest.raises(InvalidInput, match=f"{kind.__name__}: {problem}"):
        kind.__new__(kind).__setstate__(state)


def test_values_that_do_not_fit_are_refused():
    state = matrix().__getstate__()
    for storage, problem in (
        (state["storage"][1:], "data has a wrong shape"),
        (torch.ones_like(state["storage"]), "is not zero beyond the shape"),
        (state["storage"].int(), "data has an unsupported dtype"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            BSRMatrix.__new__(BSRMatrix).__setstate__({**state, "storage": storage})
    with pytest.raises(InvalidInput, match=r"state of a saved BSRMatrix.*got \['shape'\]"):
        BSRMatrix.__new__(BSRMatrix).__setstate__({"shape": (1, 1)})
