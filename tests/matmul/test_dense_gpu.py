"""The dense product and its choice on a real GPU."""

import pytest
import torch

from blackwell_sparsek import explain, matmul
from blackwell_sparsek.bench.case import EAGER, GRAPH
from blackwell_sparsek.bench.machine import ClockLog
from blackwell_sparsek.bench.measure import measure
from blackwell_sparsek.bench.suites.matmul import DENSE, OURS, PEERS, Product, _case
from blackwell_sparsek.testing.bsr import random_bsr
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def test_auto_takes_the_dense_product_of_a_full_matrix():
    full = Product(8192, 8192, 8192, (16, 16), 0.6).build(GPU)
    sparse = Product(4096, 4096, 4096, (16, 16), 0.05).build(GPU)
    assert explain(matmul, full.sparse, full.x).chosen == "dense"
    assert explain(matmul, sparse.sparse, sparse.x).chosen in ("sm90", "triton")
    contender = PEERS[OURS].prepare(full)
    contender.check(contender.run())


def test_the_dense_product_works_in_a_graph_and_without_synchronising():
    a = random_bsr((256, 192), (32, 16), seed=1, dtype=torch.float16, device=GPU)
    x = torch.randn(192, 40, device=GPU).half()
    bias = torch.randn(256, device=GPU).half()
    expected = matmul(a, x, bias=bias, activation="silu", impl="dense")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        matmul(a, x, bias=bias, activation="silu", impl="dense")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(a, x, bias=bias, activation="silu", impl="dense")
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("block", [(16, 16), (128, 64), (32, 8), (16, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_all_of_the_matrix_is_written(block, dtype):
    a = random_bsr((520, 1100), block, seed=3, dtype=dtype, device=GPU, whole=True)
    x = torch.randint(-3, 4, (1100, 40), device=GPU).to(dtype)
    with poisoned_empty():
        out = matmul(a, x, impl="dense")
        left = matmul(x.mT, a.T, impl="dense")
    exact = (a.to_dense().double() @ x.double()).to(dtype)
    assert torch.equal(out, exact) and torch.equal(left, exact.mT)


def test_narrow_cases_have_times_in_both_modes():
    product = Product(1024, 1024, 4, (128, 128), 0.22, linear=True)
    case = _case(product, "narrow", (OURS, DENSE), (EAGER, GRAPH))
    result = measure(case, PEERS, GPU, seconds=0.02, clocks=ClockLog(torch.device("cpu")))
    for name in (OURS, DENSE):
        assert set(result["peers"][name]["times"]) == {"eager", "graph"}, result["peers"][name]
