import pytest
import torch

from blackwell_sparsek import BSRMatrix, Unsupported, matmul, sddmm
from blackwell_sparsek.calls.matmul import PatternTensors
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.launch.recording import recording
from blackwell_sparsek.matmul import dense
from blackwell_sparsek.testing.bsr import (
    ORDERS,
    assert_product,
    assert_sddmm,
    operand_for,
    product,
    random_bsr,
)
from blackwell_sparsek.testing.inputs import normal

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "block"), [((65, 49), (16, 8)), ((32, 48), (8, 16))])
def test_products_are_within_the_budget(order, dtype, shape, block, device):
    a = random_bsr(shape, block, seed=1, density=0.7, dtype=dtype, device=device)
    for n in (1, 17):
        assert_product(a, order, operand_for(a, order, n, seed=2), impl="dense")
    assert_product(a, order, operand_for(a, order, 5, seed=2, batch=(2, 3)), impl="dense")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
def test_the_epilogue_is_applied_before_rounding(order, out_dtype, device):
    a = random_bsr((65, 49), (16, 8), seed=3, dtype=torch.float16, device=device)
    x = operand_for(a, order, 15, seed=4, batch=(2,))
    shape = product(a, order, x).shape
    features = shape[-1] if order.startswith("X") else shape[-2]
    extras = {
        "bias": normal(features, seed=5, dtype=torch.float16).to(device),
        "residual": normal(*shape, seed=6, dtype=torch.float16).to(device),
        "out_dtype": out_dtype,
    }
    for activation in (None, "relu", "gelu", "silu"):
        assert_product(a, order, x, impl="dense", activation=activation, **extras)


@pytest.mark.parametrize("order", ORDERS)
def test_whole_numbers_are_exact(order, device):
    a = random_bsr((40, 56), (8, 8), seed=7, device=device, whole=True)
    x = operand_for(a, order, 9, seed=8, whole=True)
    expected = product(a, order, x, impl="reference")
    assert torch.equal(product(a, order, x, impl="dense"), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_sampled_products_are_within_the_budget(dtype, batch, device):
    pattern = random_bsr((65, 49), (16, 8), seed=9, dtype=dtype, device=device)
    a = normal(*batch, 65, 33, seed=10, dtype=dtype).to(device)
    b = normal(*batch, 33, 49, seed=11, dtype=dtype).to(device)
    assert_sddmm(a, b, pattern, impl="dense")


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_equal_those_of_the_stored_blocks(order, device):
    grads = {}
    for impl in ("dense", "reference"):
        a = random_bsr((36, 28), (8, 8), seed=12, dtype=torch.float64, device=device)
        storage = a.storage.detach().requires_grad_()
        a = BSRMatrix._from_parts(a.pattern, storage)
        x = operand_for(a, order, 5, seed=13).requires_grad_()
        y = product(a, order, x, impl=impl, activation="gelu")
        grads[impl] = torch.autograd.grad(y.square().sum(), (storage, x))
    for got, expected in zip(*grads.values(), strict=True):
        torch.testing.assert_close(got, expected)


def test_second_derivatives_exist(device):
    a = random_bsr((12, 8), (4, 4), seed=14, dtype=torch.float64, device=device)
    x = operand_for(a, "A@X", 3, seed=15).requires_grad_()

    def run(values, dense):
        return matmul(BSRMatrix._from_parts(a.pattern, values), dense, impl="dense")

    storage = a.storage.detach().requires_grad_()
    assert torch.autograd.gradcheck(run, (storage, x))
    assert torch.autograd.gradgradcheck(run, (storage, x))


def test_empty_and_unstored(device):
    a = BSRMatrix.from_dense(torch.zeros(20, 28, device=device), (4, 8))
    bias = torch.arange(20.0, device=device)
    out = matmul(a, torch.ones(28, 3, device=device), bias=bias, impl="dense")
    assert torch.equal(out, bias[:, None].expand(20, 3))
    assert matmul(a, torch.ones(28, 0, device=device), impl="dense").shape == (20, 0)
    assert sddmm(torch.ones(20, 2), torch.ones(2, 28), a.to("cpu"), impl="dense").nnz_blocks == 0


def test_two_sparse_operands_have_no_dense_twin(device):
    a = random_bsr((16, 16), (8, 8), seed=16, device=device)
    with pytest.raises(Unsupported, match="bsr_pair_products has no dense implementation"):
        matmul(a, a, impl="dense")


@pytest.mark.parametrize(
    ("sm", "block", "contiguous", "in_one_pass"),
    [
        (80, (16, 8), True, True),
        (80, (8, 24), True, True),
        (75, (16, 8), True, False),
        (80, (16, 4), True, False),
        (80, (16, 12), True, False),
        (80, (16, 8), False, False),
    ],
)
def test_who_densifies(sm, block, contiguous, in_one_pass, monkeypatch, interpreted):
    """The kernel where it can, torch elsewhere: the same matrix, and nothing to replay."""
    from blackwell_sparsek.matmul.triton import densify

    a = random_bsr((65, 49), block, seed=20)
    values = a.storage if contiguous else a.storage.mT.contiguous().mT
    launches, launch = [], densify.launch_densify
    monkeypatch.setattr(dense, "arch_of", lambda device: Arch("cuda", sm, 108, 166912, False))
    monkeypatch.setattr(
        densify, "launch_densify", lambda *args: launches.append(args) or launch(*args)
    )
    pattern = PatternTensors(*a.pattern.tensors())
    with recording() as record:
        full = dense.densified(values, pattern, a.pattern.shape)
    assert torch.equal(full, a.to_dense())
    assert len(launches) == int(in_one_pass) and not record.launches
    monkeypatch.setattr(dense, "why_no_kernels", lambda arch: "no Triton")
    assert torch.equal(dense.densified(values, pattern, a.pattern.shape), a.to_dense())
    assert len(launches) == int(in_one_pass)
