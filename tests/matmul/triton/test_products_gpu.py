"""What the interpreter cannot say about the BSR kernels. The bodies of `tests/kernels/bsr` run on
the GPU as well, through the `device` fixture."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.matmul import plan as plan_module
from blackwell_sparsek.matmul.api import matmul, sddmm
from blackwell_sparsek.matmul.triton import narrow, spmm
from blackwell_sparsek.matmul.triton.tuning import spmm_config
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.bsr import (
    ORDERS,
    assert_product,
    assert_sddmm,
    operand_for,
    product,
    random_bsr,
)
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture
def cut_rows(monkeypatch):
    """Cut every row that has more than two blocks."""

    def cutting(problem, precision):
        return replace(spmm_config(problem, precision), chunk=2)

    monkeypatch.setattr(spmm, "spmm_config", cutting)


@pytest.fixture
def tf32():
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "tf32"
    yield
    backend.fp32_precision = before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("n", [1, 16, 33, 64, 1000])
def test_large_products_keep_the_budget(dtype, side, n):
    a = random_bsr((1024, 1536), (side, side), seed=1, dtype=dtype, device=DEVICE, density=0.3)
    for order in ORDERS:
        x = operand_for(a, order, n, seed=2)
        assert_product(a, order, x, impl="triton")


@pytest.mark.parametrize("block_shape", [(128, 16), (16, 128), (48, 96), (112, 80), (64, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rectangular_blocks_and_epilogue(dtype, block_shape):
    a = random_bsr((1000, 777), block_shape, seed=3, dtype=dtype, device=DEVICE, density=0.3)
    bias = normal(1000, seed=4, dtype=dtype, device=DEVICE)
    x = operand_for(a, "X@A.T", 515, seed=5, batch=(2,))
    residual = normal(2, 515, 1000, seed=6, dtype=dtype, device=DEVICE)
    extras = {"bias": bias, "residual": residual, "activation": "gelu"}
    assert_product(a, "X@A.T", x, impl="triton", layouts=1, **extras)


def test_tf32_is_as_close_as_cublas(tf32):
    a = random_bsr((512, 1024), (64, 64), seed=7, device=DEVICE)
    x = operand_for(a, "A@X", 300, seed=8)
    exact = a.to_dense().double() @ x.double()
    # Tensor cores cut float32 operands to tf32, cuBLAS rounds them first: half the error each.
    factor = 4.0
    assert_within_budget(matmul(a, x, impl="triton"), exact, a.to_dense() @ x, factor=factor)
    plain = normal(300, 512, seed=9, device=DEVICE)
    sampled = sddmm(plain.T, x.T.contiguous(), a, impl="triton").to_dense()
    mask = a.with_data(torch.ones_like(a.data)).to_dense()
    exact = (plain.T.double() @ x.T.double()) * mask
    assert_within_budget(sampled, exact, (plain.T @ x.T) * mask, factor=factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [16, 64, 128])
def test_large_sddmm_keeps_the_budget(dtype, side):
    pattern = random_bsr((1000, 777), (side, side), seed=10, dtype=dtype, device=DEVICE)
    a = normal(3, 1000, 1111, seed=11, dtype=dtype, device=DEVICE)
    b = normal(3, 1111, 777, seed=12, dtype=dtype, device=DEVICE)
    assert_sddmm(a, b, pattern, impl="triton")
    assert_sddmm(a.mT.contiguous().mT, b, pattern, impl="triton")


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_products_of_two(dtype):
    a = random_bsr((500, 600), (64, 32), seed=13, dtype=dtype, device=DEVICE)
    b = random_bsr((600, 700), (32, 128), seed=14, dtype=dtype, device=DEVICE)
    got = matmul(a, b, impl="triton").to_dense()
    exact = a.to_dense().double() @ b.to_dense().double()
    assert_within_budget(got, exact, a.to_dense() @ b.to_dense())


@pytest.mark.parametrize("order", ORDERS)
def test_same_bits_every_time(order, cut_rows):
    a = random_bsr((2048, 2048), (64, 64), seed=15, dtype=torch.bfloat16, device=DEVICE)
    x = operand_for(a, order, 192, seed=16)
    first = product(a, order, x, impl="triton")
    load = torch.randn(4096, 4096, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            load = (load @ load).clamp(-1, 1)
    for _ in range(100):
        assert torch.equal(product(a, order, x, impl="triton"), first)


def _skewed():
    keep = torch.zeros(16, 64, dtype=torch.bool)
    keep[3], keep[:, 5] = True, True
    x = normal(16 * 64, 64 * 64, seed=17, dtype=torch.bfloat16)
    return BSRMatrix.from_mask(x.to(DEVICE), keep.to(DEVICE), (64, 64))


@pytest.mark.parametrize("n", [1, 300])
def test_one_long_row(n, cut_rows):
    a = _skewed()
    assert_product(a, "A@X", operand_for(a, "A@X", n, seed=18), impl="triton")
    assert_product(a, "X@A.T", operand_for(a, "X@A.T", n, seed=18), impl="triton")


def test_repeated_products_of_batches_that_do_not_merge():
    """One launch for each entry of the first dimension, at addresses inside of the operands."""
    a = random_bsr((128, 96), (32, 32), seed=25, dtype=torch.bfloat16, device=DEVICE)
    for seed in range(26, 30):
        x = normal(3, 2, 40, 96, seed=seed, dtype=torch.bfloat16, device=DEVICE).transpose(0, 1)
        together = matmul(x.contiguous(), a.T, impl="triton")
        assert torch.equal(matmul(x, a.T, impl="triton"), together)


@pytest.mark.parametrize("warm", [True, False])
def test_graph_replays_with_new_values(warm, cut_rows):
    a = _skewed()
    x = operand_for(a, "A@X", 96, seed=19)
    bias = normal(a.shape[0], seed=20, dtype=torch.bfloat16, device=DEVICE)
    other = _skewed() if not warm else a
    # compiled and loaded, but with `warm` False the pattern has no plan yet
    matmul(other, x, bias=bias, activation="silu", impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = len(plan_module._PLANS)
    with torch.cuda.graph(graph):
        out = matmul(a, x, bias=bias, activation="silu", impl="triton")
    for seed in (21, 22):
        x.copy_(operand_for(a, "A@X", 96, seed=seed))
        a.storage.copy_(normal(*a.storage.shape, seed=seed, dtype=torch.bfloat16))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, matmul(a, x, bias=bias, activation="silu", impl="triton"))
    assert len(plan_module._PLANS) <= kept + 1


def test_graph_of_a_training_step():
    a = random_bsr((512, 512), (64, 64), seed=23, dtype=torch.bfloat16, device=DEVICE)
    values = a.storage.detach().requires_grad_()
    x = operand_for(a, "X@A.T", 128, seed=24).requires_grad_()
    matrix = BSRMatrix._from_parts(a.pattern, values)

    def step():
        out = matmul(x, matrix.T, impl="triton")
        return torch.autograd.grad(out.float().square().sum(), [x, values])

    for _ in range(3):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(got, expected, strict=True))


def test_other_streams_see_finished_plans():
    for seed in range(20):
        a = _skewed()
        x = operand_for(a, "A@X", 64, seed=seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            first = matmul(a, x, impl="triton")
        with torch.cuda.stream(torch.cuda.Stream()):
            second = matmul(a, x, impl="triton")
        torch.cuda.synchronize()
        assert torch.equal(first, second)
        dense = a.to_dense()
        assert_within_budget(first, dense.double() @ x.double(), dense @ x)


def test_no_synchronisation_after_the_first_call(cut_rows):
    a = _skewed()
    x = operand_for(a, "A@X", 64, seed=25)
    y = normal(a.shape[0], 64, seed=26, dtype=torch.bfloat16, device=DEVICE)
    run = [
        lambda: matmul(a, x, impl="triton"),
        lambda: matmul(y.T, a, impl="triton"),
        lambda: sddmm(y, x.T, a, impl="triton"),
    ]
    for f in run:
        f()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for f in run:
            f()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_tiles_than_a_grid_axis_holds():
    a = random_bsr((4096, 64), (16, 16), seed=27, dtype=torch.float16, device=DEVICE, whole=True)
    x = operand_for(a, "A@X", 16, seed=28, batch=(300,), whole=True)
    got = matmul(a, x, impl="triton")
    assert 256 * 300 > 65535
    assert torch.equal(got, a.to_dense() @ x)
    pattern = random_bsr(
        (4352, 4352), (16, 16), seed=29, dtype=torch.float16, device=DEVICE, density=1.0, whole=True
    )
    assert pattern.nnz_blocks > 65535
    left = operand_for(pattern, "X@A", 16, seed=30, whole=True).T
    right = operand_for(pattern, "X@A", 16, seed=31, whole=True)
    sampled = sddmm(left, right, pattern, impl="triton").to_dense()
    expected = left @ right
    expected[:16] = 0  # the empty block row
    assert torch.equal(sampled, expected)


def test_past_2_to_the_31_elements():
    rows = 2**31 // 4096 + 64
    keep = torch.zeros(1, 64, dtype=torch.bool, device=DEVICE)
    keep[0, -3:] = True
    dense = normal(64, 4096, seed=33, dtype=torch.float16, device=DEVICE).round()
    a = BSRMatrix.from_mask(dense, keep, (64, 64))
    x = torch.zeros(rows, 4096, dtype=torch.float16, device=DEVICE)
    x[-100:] = normal(100, 4096, seed=34, dtype=torch.float16, device=DEVICE).round()
    assert x.numel() > 2**31
    got = matmul(x, a.T, impl="triton")
    assert torch.equal(got[-100:], x[-100:] @ a.to_dense().T)
    assert not got[:-100].any()
    # the result past 2^31 elements
    b = BSRMatrix.from_mask(dense.T.contiguous(), keep.T, (64, 64))
    small = x[:, :64]
    small[-100:] = normal(100, 64, seed=35, dtype=torch.float16, device=DEVICE).round()
    got = matmul(small, b.T, impl="triton")
    assert got.numel() > 2**31
    assert torch.equal(got[-100:], small[-100:] @ b.to_dense().T)
    # the sum of a gradient over as many rows
    grad = sddmm(small.T, x, a, impl="triton").to_dense()
    expected = (small[-100:].T @ x[-100:]) * (a.with_data(torch.ones_like(a.data)).to_dense() > 0)
    # sums of whole numbers below 2048, which fp16 holds
    assert torch.equal(grad, expected)


def test_compiled_without_graph_breaks():
    a = random_bsr((256, 256), (64, 64), seed=36, dtype=torch.bfloat16, device=DEVICE)
    x = operand_for(a, "X@A.T", 64, seed=37)

    @torch.compile(fullgraph=True)
    def run(x):
        return matmul(x, a.T, activation="relu", impl="triton") * 2

    assert torch.equal(run(x), matmul(x, a.T, activation="relu", impl="triton") * 2)


@pytest.mark.parametrize("n", [1, 16, 64])
@pytest.mark.parametrize("captured", [False, True])
def test_narrow_products_wait_for_what_was_just_written(n, captured):
    """They start early: operands written by the kernel in front must not be read before."""
    layers = [
        random_bsr((1024, 1024), (64, 64), seed=i, dtype=torch.bfloat16, device=DEVICE)
        for i in range(4)
    ]
    fresh = [
        normal(*a.storage.shape, seed=i, device=DEVICE).bfloat16() for i, a in enumerate(layers)
    ]
    x = normal(n, 1024, seed=38, dtype=torch.bfloat16, device=DEVICE)

    def chain():
        y = x
        for a, values in zip(layers, fresh, strict=True):
            a.storage.fill_(float("nan"))
            a.storage.copy_(values)
            y = matmul(y, a.T, impl="triton")
            y = matmul(y * 0.05, a.T, impl="triton")
        return y

    expected = x
    for a, values in zip(layers, fresh, strict=True):
        a.storage.copy_(values)
        for factor in (1.0, 0.05):
            torch.cuda.synchronize()
            expected = matmul(expected * factor, a.T, impl="triton")
            torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
    for _ in range(20):
        if captured:
            got.fill_(float("nan"))
            graph.replay()
        else:
            got = chain()
        assert torch.equal(got, expected)


def test_narrow_products_write_after_their_predecessors_have_read():
    a = random_bsr((2048, 2048), (64, 64), seed=39, dtype=torch.bfloat16, device=DEVICE)
    x = normal(1, 2048, seed=40, dtype=torch.bfloat16, device=DEVICE)
    expected = matmul(x, a.T, impl="triton").clone()
    for _ in range(200):
        # the memory of each result is the next one's: freed when the product was only queued
        first = matmul(x, a.T, impl="triton")
        kept = first + 0
        del first
        matmul(-x, a.T, impl="triton")
        assert torch.equal(kept, expected)


def test_narrow_products_are_captured_without_a_table(monkeypatch):
    a = random_bsr((512, 512), (64, 64), seed=41, dtype=torch.bfloat16, device=DEVICE)
    other = random_bsr((512, 512), (64, 64), seed=41, dtype=torch.bfloat16, device=DEVICE)
    x = operand_for(a, "X@A.T", 16, seed=42)
    # the general kernel, compiled and loaded before the capture that has to take it
    with monkeypatch.context() as patch:
        patch.setattr(narrow, "narrow_config", lambda problem: None)
        expected = matmul(x, other.T, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = matmul(x, a.T, impl="triton")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, expected)
