"""Warps with a block row of 16 rows each: every orientation, width, edge and epilogue."""

import pytest
import torch

from blackwell_sparsek.matmul import estimate
from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.matmul.sm90 import spmm_launch as bsr_sm90
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.sm90


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Take the kernel wherever it can run, and count how often."""
    choose, calls = bsr_sm90.takes_warp_rows, []

    def takes(problem, x_transposed):
        monkeypatch.setattr(estimate, "packed_seconds", lambda _: 1e9)
        if choose(problem, x_transposed):
            calls.append(problem)
        return choose(problem, x_transposed)

    monkeypatch.setattr(bsr_sm90, "takes_warp_rows", takes)
    return calls


def _integers(*shape, dtype=torch.float16):
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def _matrix(rows, cols, block, density, dtype=torch.float16):
    keep = torch.rand(-(-rows // block[0]), -(-cols // block[1]), device="cuda") < density
    if keep.shape[0] > 2:
        keep[0], keep[1] = False, True
    return BSRMatrix.from_mask(_integers(rows, cols, dtype=dtype), keep, block)


def _exact(matrix, dense, left, bias=None, residual=None, activation=None):
    a = matrix.to_dense().double()
    out = dense.double() @ a if left else a @ dense.double()
    if bias is not None:
        out = out + (bias if left else bias[:, None]).double()
    out = out.relu() if activation == "relu" else out
    return out if residual is None else out + residual.double()


@pytest.mark.parametrize("order", ["A@X", "A.T@X", "X@A", "X@A.T"])
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "size", [(16, 16, 72), (272, 144, 136), (500, 1000, 264), (4096, 528, 392)]
)
def test_integers_are_exact(order, width, dtype, size, taken):
    torch.manual_seed(sum(size))
    rows, inner, n = (s - s % 8 for s in size)
    left, transposed = order.startswith("X"), ".T" in order
    # the matrix as the product reads it is [rows, inner] in blocks of 16 rows
    by_columns = left != transposed
    shape, block = ((inner, rows), (width, 16)) if by_columns else ((rows, inner), (16, width))
    stored = _matrix(*shape, block, 0.3, dtype)
    matrix = stored.T if transposed else stored
    dense = _integers(inner, n, dtype=dtype)
    dense = dense.mT if left else dense
    with poisoned_empty():
        out = matmul(*((dense, matrix) if left else (matrix, dense)), impl="sm90")
    assert torch.equal(out, _exact(matrix, dense, left).to(dtype))
    assert taken or not stored.nnz_blocks


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("residual", [False, True])
def test_epilogue(left, out_dtype, residual, taken):
    torch.manual_seed(3)
    stored = _matrix(296, 208, (16, 16), 0.4)
    matrix = stored.T if left else stored
    # contiguous along n either way, which the kernel wants
    dense = _integers(208, 200).mT if left else _integers(208, 200)
    bias = _integers(296)
    extra = _integers(200, 296) if left else _integers(296, 200)
    options = {"bias": bias, "activation": "relu", "residual": extra if residual else None}
    with poisoned_empty():
        out = matmul(
            *((dense, matrix) if left else (matrix, dense)),
            **options,
            out_dtype=out_dtype,
            impl="sm90",
        )
    assert torch.equal(out, _exact(matrix, dense, left, **options).to(out_dtype))
    assert taken


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activations(activation):
    torch.manual_seed(4)
    matrix, dense = _matrix(320, 256, (16, 16), 0.3), _integers(256, 128)
    out = matmul(matrix, dense, activation=activation, out_dtype=torch.float32, impl="sm90")
    apply, product = getattr(torch.nn.functional, activation), _exact(matrix, dense, False)
    # fp32 holds the product exactly
    assert_within_budget(out, apply(product), apply(product.float()))


def test_batches_and_repeats_are_equal(taken):
    matrix, dense = _matrix(640, 512, (16, 16), 0.22), torch.randn(3, 512, 256).cuda().half()
    first = matmul(matrix, dense, impl="sm90")
    for _ in range(20):
        assert torch.equal(matmul(matrix, dense, impl="sm90"), first)
    for i in range(3):
        assert torch.equal(matmul(matrix, dense[i], impl="sm90"), first[i])
    assert taken


def test_one_full_row_among_empty_ones(taken):
    keep = torch.zeros(40, 512, dtype=torch.bool, device="cuda")
    keep[7] = True
    matrix = BSRMatrix.from_mask(_integers(640, 8192), keep, (16, 16))
    dense = _integers(8192, 256)
    out = matmul(matrix, dense, out_dtype=torch.float32, impl="sm90")
    assert torch.equal(out.double(), _exact(matrix, dense, False))
    assert taken


def test_cuda_graph_replays_with_new_values(taken):
    matrix, dense = _matrix(1024, 1024, (16, 16), 0.3), torch.randn(1024, 256).cuda().half()
    graph = torch.cuda.CUDAGraph()
    matmul(matrix, dense, impl="sm90")
    with torch.cuda.graph(graph):
        out = matmul(matrix, dense, impl="sm90")
    for _ in range(3):
        dense.copy_(torch.randn_like(dense))
        matrix.storage.copy_(torch.randn_like(matrix.storage))
        graph.replay()
        assert torch.equal(out, matmul(matrix, dense, impl="sm90"))
    assert taken
