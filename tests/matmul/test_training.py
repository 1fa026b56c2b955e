"""Gradients of products without the operator: results, replay, and who takes which path."""

import pytest
import torch

from blackwell_sparsek import BSRMatrix, matmul
from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.launch.replay import described
from blackwell_sparsek.matmul import products, training
from blackwell_sparsek.matmul.autograd import product_gradients
from blackwell_sparsek.matmul.inputs import Options
from blackwell_sparsek.matmul.op import bsr_matmul
from blackwell_sparsek.testing.bsr import ORDERS, operand_for, product, random_bsr
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget


def leaves(order, dtype, device="cpu", n=9, batch=()):
    a = random_bsr((40, 56), (16, 8), seed=1, dtype=dtype, device=device)
    x = operand_for(a, order, n, seed=2, batch=batch)
    features = a.shape[1] if order in ("X@A", "A.T@X") else a.shape[0]
    return a, x, normal(features, seed=3, dtype=dtype).to(device)


def gradients(order, a, x, bias, *, activation, impl, residual=None, create_graph=False):
    storage, x, bias = (t.detach().requires_grad_() for t in (a.storage, x, bias))
    matrix = BSRMatrix._from_parts(a.pattern, storage)
    inputs = [storage, x, bias]
    if residual is not None:
        residual = residual.detach().requires_grad_()
        inputs.append(residual)
    options = {"bias": bias, "activation": activation, "residual": residual, "impl": impl}
    y = product(matrix, order, x, **options)
    dy = normal(*y.shape, seed=4).to(y)
    return torch.autograd.grad(y, inputs, dy, create_graph=create_graph)


@pytest.fixture
def by_function(monkeypatch):
    """Counts calls that take the path of this file."""
    calls, original = [], training._replayed_gradients

    def counted(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(training, "_replayed_gradients", counted)
    return calls


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_gradients_keep_the_budget(order, activation, with_residual, device, by_function):
    a, x, bias = leaves(order, torch.float32, device, batch=(2,))
    shape = product(a, order, x).shape
    residual = normal(*shape, seed=5).to(device) if with_residual else None
    options = {"activation": activation, "residual": residual}
    made = gradients(order, a, x, bias, impl="eager", **options)
    assert len(by_function) == 1
    plain = gradients(order, a, x, bias, impl="dense", **options)
    wide = (a.to(torch.float64), x.double(), bias.double())
    options["residual"] = None if residual is None else residual.double()
    exact = gradients(order, *wide, impl="reference", **options)
    for name, got, peer, truth in zip("wxbr", made, plain, exact, strict=False):
        assert got.dtype == torch.float32
        assert_within_budget(got, truth, peer, what=f"{order} d{name}")


def test_only_what_is_needed_is_kept_and_computed(by_function):
    a, x, _ = leaves("X@A.T", torch.float32)
    storage = a.storage.detach().requires_grad_()
    y = matmul(x, BSRMatrix._from_parts(a.pattern, storage).T)
    values, dense, pre = y.grad_fn.saved_tensors
    assert values is None and dense is x and pre is None
    (d_storage,) = torch.autograd.grad(y.sum(), storage)
    assert d_storage.shape == storage.shape
    x = x.requires_grad_()
    y = matmul(x, a.T, activation="gelu")
    values, dense, pre = y.grad_fn.saved_tensors
    assert values is not None and dense is None and pre.shape == y.shape
    (product_, saved, grad, needs, _) = by_function[0]
    assert product_gradients(product_, saved, grad, needs).dense is None


@pytest.mark.parametrize("activation", [None, "silu"])
def test_second_derivatives(activation):
    a = random_bsr((7, 5), (4, 4), seed=1, dtype=torch.float64)
    x, bias = normal(2, 5, seed=2).double(), normal(7, seed=3).double()
    storage = a.storage.detach()

    def layer(storage, x, bias):
        matrix = BSRMatrix._from_parts(a.pattern, storage)
        return matmul(x, matrix.T, bias=bias, activation=activation)

    inputs = tuple(t.detach().requires_grad_() for t in (storage, x, bias))
    assert torch.autograd.gradcheck(layer, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(layer, inputs)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_arguments_are_checked_as_without_gradients(activation):
    a, x, _ = leaves("X@A.T", torch.float32)
    x = x.requires_grad_()
    with pytest.raises(InvalidInput, match="activation is unknown"):
        matmul(x, a.T, activation="tanh")
    for shape in ((40,), (2, 9, 40)):
        with pytest.raises(InvalidInput, match=r"wrong shape; expected \[9, 40\]"):
            matmul(x, a.T, activation=activation, residual=torch.ones(shape))
    with pytest.raises(InvalidType, match="residual has an unsupported dtype"):
        matmul(x, a.T, activation=activation, residual=torch.ones(9, 40, dtype=torch.int64))


def test_calls_that_something_intercepts_take_the_operator(by_function, monkeypatch):
    a, x, _ = leaves("X@A.T", torch.float32)
    x = x.requires_grad_()

    def grad_of(fn):
        (grad,) = torch.autograd.grad(fn().sum(), x)
        return grad

    expected = grad_of(lambda: matmul(x, a.T))
    assert len(by_function) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = matmul(x, a.T)
    assert y.dtype == torch.bfloat16 and "TrainedProduct" not in type(y.grad_fn).__name__
    tensors = (a.storage, a.pattern.tensors(), a.pattern.shape, True, x, True)
    by_operator = grad_of(lambda: bsr_matmul(*tensors, None, None, None, None, "auto"))
    torch.testing.assert_close(by_operator, expected)
    # a vector is a matrix of one row to the operator
    row = x[0].detach().requires_grad_()
    assert "TrainedProduct" not in type(matmul(row, a.T).grad_fn).__name__


def test_a_weight_that_was_changed_before_the_backward_pass_is_noticed():
    a, x, _ = leaves("X@A.T", torch.float32)
    storage = a.storage.detach().requires_grad_()
    x = x.requires_grad_()
    y = matmul(x, BSRMatrix._from_parts(a.pattern, storage).T)
    with torch.no_grad():
        storage.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_are_computed_by_the_implementation_that_was_asked_for(monkeypatch):
    asked = []
    for dispatch in (training.matmul_dispatch, training.sddmm_dispatch):

        def run(impl, call, original=dispatch.run):
            asked.append(impl)
            return original(impl, call)

        monkeypatch.setattr(dispatch, "run", run)
    a, x, bias = leaves("X@A.T", torch.float32)
    gradients("X@A.T", a, x, bias, activation=None, impl="dense")
    assert asked == ["dense"] * 3


def test_products_that_torch_makes_are_repeated_without_checks(monkeypatch):
    a, x, bias = leaves("X@A.T", torch.float32)
    options = Options(True, True, "gelu", None, "dense")
    residual = normal(9, 40, seed=6)
    checked = products._checked(a.T, x, bias, residual, options)
    again = products.dense_product(checked, "dense")
    for seed in (7, 8):
        values, other = normal(*a.storage.shape, seed=seed), normal(*x.shape, seed=seed + 2)
        matrix = BSRMatrix._from_parts(a.pattern, values)
        rest = {"bias": bias, "residual": residual, "activation": "gelu", "impl": "dense"}
        expected = matmul(other, matrix.T, **rest)
        assert torch.equal(again(values, other, bias, residual), expected)
    # other implementations have launches to replay, and vectors become matrices first
    assert products.dense_product(checked, "eager") is None
    row = products._checked(a.T, x[0], bias, None, options)
    assert row.is_vector and products.dense_product(row, "dense") is None


def test_a_recording_that_torch_has_to_finish_becomes_a_dense_product(monkeypatch):
    a, x, _ = leaves("X@A.T", torch.float32)
    options = Options(True, True, None, None, "dense")
    made = []

    def record(known, options, inputs, run, *args, operands):
        # what a GPU records of a call whose launches are not all of it
        known[described(options, inputs).key] = None
        made.append(run)
        return run(*args)

    monkeypatch.setattr(products, "record", record)
    first = products.replayed_product(a.T, x, None, None, options)
    (kept,) = a.pattern.launches.values()
    assert isinstance(kept, products.DenseProduct)
    assert torch.equal(products.replayed_product(a.T, x, None, None, options), first)
    assert len(made) == 1
