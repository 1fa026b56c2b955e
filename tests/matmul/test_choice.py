from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.matmul import BsrProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.dispatch.machine import fp32_precision
from blackwell_sparsek.matmul.api import matmul, sddmm
from blackwell_sparsek.matmul.choice import matmul_dispatch, pairs_dispatch, sddmm_dispatch
from blackwell_sparsek.matmul.triton.tuning import why_not_triton
from blackwell_sparsek.testing.bsr import ORDERS, operand_for, product, random_bsr
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

H200 = Arch("cuda", 90, 132, 232448, False)
HALF = torch.float16
PROBLEM = BsrProblem(
    *("matmul", H200, HALF, HALF, (256, 256), (64, 32), 9, 8), other_block_shape=(32, 16)
)


@pytest.mark.parametrize("dispatch", [matmul_dispatch, sddmm_dispatch, pairs_dispatch])
def test_auto_takes_triton_on_a_gpu_and_never_the_interpreter(dispatch):
    assert dispatch.decide("auto", PROBLEM).chosen == "triton"
    interpreted = replace(PROBLEM, arch=Arch("cpu", 0, 1, 0, True))
    assert dispatch.decide("auto", interpreted).chosen == "eager"
    assert dispatch.decide("triton", interpreted).chosen == "triton"
    cpu = replace(PROBLEM, arch=Arch("cpu", 0, 1, 0, False))
    assert dispatch.decide("auto", cpu).chosen == "eager"
    assert dispatch.decide("triton", cpu).chosen is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": Arch("cuda", 75, 40, 65536, False)}, "needs a CUDA GPU of sm_80 .* got sm_75"),
        ({"arch": Arch("cpu", 0, 1, 0, False)}, "needs a CUDA GPU of sm_80 or newer, got cpu"),
        ({"dtype": torch.float64}, "needs float16, bfloat16 or float32, got torch.float64"),
        ({"out_dtype": torch.float64}, "needs float16, bfloat16 or float32, got torch.float64"),
        ({"block_shape": (8, 16)}, r"multiples of 16 up to 256, got \(8, 16\)"),
        ({"block_shape": (16, 40)}, r"multiples of 16 up to 256, got \(16, 40\)"),
        ({"block_shape": (272, 16)}, r"multiples of 16 up to 256, got \(272, 16\)"),
        ({"kind": "pairs", "other_block_shape": (32, 8)}, r"up to 256, got \(32, 8\)"),
    ],
)
def test_reasons(change, reason):
    import re

    assert re.search(reason, why_not_triton(replace(PROBLEM, **change)))
    for good in ({}, {"block_shape": (256, 48)}, {"kind": "pairs"}):
        assert why_not_triton(replace(PROBLEM, **good)) is None


def test_an_explicit_impl_does_not_fall_back(device):
    a = random_bsr((20, 20), (8, 8), seed=1, device=device)
    with pytest.raises(Unsupported, match="impl='triton' cannot run this: needs block sides"):
        matmul(a, torch.ones(20, 3, device=device), impl="triton")


def test_tf32_only_where_torch_may_use_it(monkeypatch):
    matmul_backend = torch.backends.cuda.matmul
    before = matmul_backend.fp32_precision
    try:
        matmul_backend.fp32_precision = "ieee"
        assert fp32_precision(torch.float32) == "ieee"
        matmul_backend.fp32_precision = "tf32"
        assert fp32_precision(torch.float32) == "tf32"
        assert fp32_precision(torch.float16) == "ieee"
    finally:
        matmul_backend.fp32_precision = before


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_of_matmul(device, order, activation):
    a = random_bsr((40, 35), (16, 32), seed=2, device=device)
    x = operand_for(a, order, 7, seed=3, batch=(2,))
    features = 35 if order in ("X@A", "A.T@X") else 40
    bias = normal(features, seed=4, device=device)

    def run(impl, dtype):
        values = a.storage.detach().to(dtype).requires_grad_()
        leaves = [values, x.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()]
        matrix = type(a)._from_parts(a.pattern, values)
        out = product(matrix, order, leaves[1], bias=leaves[2], activation=activation, impl=impl)
        seed = normal(*out.shape, seed=5, device=device).to(dtype)
        return torch.autograd.grad(out, leaves, seed)

    exact = run("reference", torch.float64)
    plain = run("eager", torch.float32)
    for got, want, other in zip(run("triton", torch.float32), exact, plain, strict=True):
        assert_within_budget(got, want, other)


def test_gradients_of_sddmm_and_of_a_product_of_two(device):
    pattern = random_bsr((40, 35), (16, 32), seed=6, device=device)
    other = random_bsr((35, 20), (32, 16), seed=7, device=device)
    a, b = normal(40, 9, seed=8, device=device), normal(9, 35, seed=9, device=device)

    def run(impl, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (a, b, other.storage)]
        sampled = sddmm(leaves[0], leaves[1], pattern, impl=impl)
        out = matmul(sampled, type(other)._from_parts(other.pattern, leaves[2]), impl=impl)
        seed = normal(*out.data.shape, seed=10, device=device).to(dtype)
        return torch.autograd.grad(out.data, leaves, seed)

    exact = run("reference", torch.float64)
    plain = run("eager", torch.float32)
    for got, want, other_grad in zip(run("triton", torch.float32), exact, plain, strict=True):
        assert_within_budget(got, want, other_grad)


def test_second_derivatives(device):
    a = random_bsr((20, 20), (16, 16), seed=11, device=device)
    x = operand_for(a, "A@X", 3, seed=12).requires_grad_()
    values = a.storage.detach().requires_grad_()

    def run(impl):
        out = matmul(type(a)._from_parts(a.pattern, values), x, impl=impl)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), values)[0]

    torch.testing.assert_close(run("triton"), run("eager"))


def test_opcheck(device):
    a = random_bsr((20, 40), (16, 16), seed=13, device=device)
    x = operand_for(a, "A@X", 3, seed=14)
    pattern, shape = a.pattern.tensors(), list(a.shape)
    checks = ("test_schema", "test_faketensor")
    operands = normal(20, 5, seed=15, device=device), normal(5, 40, seed=16, device=device)
    torch.library.opcheck(
        torch.ops.bsk.bsr_matmul.default,
        (a.storage, pattern, shape, False, x, False, None, None, "gelu", None, "triton"),
        test_utils=checks,
    )
    torch.library.opcheck(
        torch.ops.bsk.bsr_sddmm.default,
        (*operands, pattern, shape, [16, 16], None, "triton"),
        test_utils=checks,
    )


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "sm90"),
        ({"block_shape": (64, 64), "nnz_blocks": 3604}, "sm90"),
        # nearly all blocks are stored: torch's product is faster
        ({"nnz_blocks": 4000}, "dense"),
        # low blocks in random places leave little out
        ({"block_shape": (16, 16), "nnz_blocks": 57672}, "dense"),
        ({"block_shape": (128, 48), "nnz_blocks": 300}, "triton"),
        ({"tma": False, "nnz_blocks": 200}, "triton"),
        ({"arch": Arch("cuda", 80, 108, 166912, False), "nnz_blocks": 200}, "triton"),
        ({"arch": Arch("cpu", 0, 1, 0, False)}, "eager"),
    ],
)
def test_which_implementation_of_a_sampled_product(change, chosen):
    """auto on 8192 cubed in 22 % of the blocks, and what changes its mind."""
    problem = BsrProblem(
        *("sddmm", H200, HALF, HALF, (8192, 8192), (128, 128), 901, 8192), tma=True
    )
    assert sddmm_dispatch.decide("auto", replace(problem, **change)).chosen == chosen
