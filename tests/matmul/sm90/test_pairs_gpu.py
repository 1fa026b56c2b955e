"""Rows in pairs that share X: every orientation, uneven rows, edges, epilogues and graphs."""

import pytest
import torch

from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.matmul.sm90 import spmm_launch as spmm_sm90_launch
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.sm90


@pytest.fixture(autouse=True)
def configs(monkeypatch):
    """What the product was launched with."""
    seen, run = [], spmm_sm90_launch.launch

    def launch(kernel, grid, args, **options):
        seen.append(args[-1])
        return run(kernel, grid, args, **options)

    monkeypatch.setattr(spmm_sm90_launch, "launch", launch)
    return seen


def _integers(*shape, dtype=torch.float16):
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def _matrix(rows, cols, block, density=0.3, dtype=torch.float16):
    """With an empty row, a full one and two that are equal."""
    keep = torch.rand(-(-rows // block[0]), -(-cols // block[1]), device="cuda") < density
    keep[0], keep[1], keep[3] = False, True, keep[2]
    return BSRMatrix.from_mask(_integers(rows, cols, dtype=dtype), keep, block)


@pytest.mark.parametrize("block", [(64, 64), (64, 16), (32, 32), (16, 32)])
@pytest.mark.parametrize("order", ["A@X", "A.T@X", "X@A", "X@A.T"])
@pytest.mark.parametrize(
    ("rows", "cols", "n"), [(5120, 2560, 2560), (5000, 2600, 2624), (5064, 2504, 2504)]
)
def test_integers_are_exact(block, order, rows, cols, n, configs):
    torch.manual_seed(rows + n)
    a = _matrix(rows, cols, block, 0.2)
    dense = a.to_dense().float()
    seen, full = (a.T, dense.T) if "A.T" in order else (a, dense)
    left = order.startswith("X")
    x = _integers(*((n, full.shape[0]) if left else (full.shape[1], n)))
    with poisoned_empty():
        out = matmul(x, seen, impl="sm90") if left else matmul(seen, x, impl="sm90")
    exact = x.float() @ full if left else full @ x.float()
    assert (out.float() == exact).all()
    if block[0] == 64 and block[1] == 64:
        assert configs[-1].PAIRED


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_epilogues(out_dtype, activation, configs):
    torch.manual_seed(3)
    a = _matrix(5000, 1152, (64, 64))
    x, bias, residual = _integers(2560, 1152), _integers(5000), _integers(2560, 5000)
    options = {"bias": bias, "residual": residual, "activation": activation}
    out = matmul(x, a.T, impl="sm90", out_dtype=out_dtype, **options)
    exact = x.float() @ a.to_dense().float().T + bias
    exact = (exact.relu() if activation else exact) + residual
    assert configs[-1].PAIRED and (out.float() == exact).all()


def test_repeated_calls_give_the_same_bits_and_graphs_too(configs):
    torch.manual_seed(4)
    a = _matrix(8192, 2048, (64, 64), dtype=torch.bfloat16)
    x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    first = matmul(a, x, impl="sm90")
    assert configs[-1].PAIRED
    for _ in range(50):
        assert matmul(a, x, impl="sm90").equal(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = matmul(a, x, impl="sm90")
    captured.zero_()
    graph.replay()
    assert captured.equal(first)


@pytest.mark.parametrize("block", [(64, 64), (128, 128)])
def test_captured_before_rows_were_looked_at(block):
    """Lists are padded then, with rows that stand for none: nothing may be stored for them."""
    torch.manual_seed(5)
    x = _integers(8192, 1024)
    keep = torch.rand(2048 // block[0], 8192 // block[1], device="cuda") < 0.05
    keep[3] = True
    warm, a = (BSRMatrix.from_mask(_integers(2048, 8192), keep, block) for _ in range(2))
    matmul(warm, x, impl="sm90")
    exact = a.to_dense().float() @ x.float()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(a, x, impl="sm90")
    out.fill_(float("nan"))
    graph.replay()
    assert (out.float() == exact).all()
