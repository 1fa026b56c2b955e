"""The Hopper product against the fp64 oracle: every orientation, block shape, edge and epilogue."""

import random

import pytest
import torch

from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.dispatch.dispatcher import explain
from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.sm90

BLOCKS = [(128, 128), (128, 64), (128, 32), (128, 16), (256, 32), (64, 64), (64, 32), (32, 32)]
# In A @ X and X @ A.T it is 192 rows high; in the others 48, which WGMMA does not take.
FLAT = (192, 48)
BLOCKS += [(16, 16), (32, 64), (16, 128), FLAT, (256, 256)]


def _matrix(rows, cols, block, density, dtype, integers=False):
    keep = torch.rand(-(-rows // block[0]), -(-cols // block[1]), device="cuda") < density
    x = torch.randn(rows, cols, device="cuda")
    x = x.mul(3).round() if integers else x
    return BSRMatrix.from_mask(x.to(dtype), keep, block)


def _case(seed):
    """One random product: matrix as seen, dense operand, whether it is on the left, options."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    block = rng.choice(BLOCKS)
    transposed, left = rng.random() < 0.5, rng.random() < 0.5
    transposed = left if block == FLAT else transposed
    rows, cols = (rng.choice([1, 3, 5]) * b + rng.choice([0, 0, 24]) for b in block)
    matrix = _matrix(rows, cols, block, rng.choice([0.0, 0.3, 0.8]), dtype)
    matrix = matrix.T if transposed else matrix
    n = rng.choice([72, 136, 256, 520])
    inner, features = matrix.shape if left else matrix.shape[::-1]
    shape = (n, inner) if left else (inner, n)
    batch = rng.choice([(), (), (3,)])
    dense = torch.randn(*batch, *shape, device="cuda").to(dtype)
    if rng.random() < 0.3:
        dense = dense.mT.contiguous().mT
    out_shape = (*batch, n, features) if left else (*batch, features, n)
    options = {
        "bias": torch.randn(features, device="cuda").to(dtype) if rng.random() < 0.5 else None,
        "residual": torch.randn(out_shape, device="cuda").to(dtype) if rng.random() < 0.3 else None,
        "activation": rng.choice([None, None, "relu", "silu"]),
        "out_dtype": rng.choice([None, None, torch.float32]),
    }
    return matrix, dense, left, options


def _product(matrix, dense, left, **options):
    return matmul(dense, matrix, **options) if left else matmul(matrix, dense, **options)


def _double(x):
    if isinstance(x, BSRMatrix):
        return x.to(torch.float64)
    return x.double() if isinstance(x, torch.Tensor) else x


def _same_precision(matrix, dense, left, bias, residual, activation, out_dtype):
    """What torch makes of the same product in the same precision, densely."""
    dtype = out_dtype or dense.dtype
    a = matrix.to_dense()
    out = (dense @ a if left else a @ dense).float()
    if bias is not None:
        out = out + (bias if left else bias[:, None]).float()
    if activation is not None:
        out = getattr(torch.nn.functional, activation)(out)
    if residual is not None:
        out = out + residual.float()
    return out.to(dtype)


@pytest.mark.parametrize("seed", range(120))
def test_random_products_match_the_oracle(seed):
    matrix, dense, left, options = _case(seed)
    with poisoned_empty():
        out = _product(matrix, dense, left, impl="sm90", **options)
    exact_options = {key: _double(value) for key, value in options.items()} | {"out_dtype": None}
    exact = _product(_double(matrix), dense.double(), left, impl="reference", **exact_options)
    peer = _same_precision(matrix, dense, left, **options)
    assert_within_budget(out, exact, peer, what=f"seed {seed}")


@pytest.mark.parametrize(
    "block, left",
    [(block, left) for block in BLOCKS for left in (False, True) if not (left and block == FLAT)],
)
def test_integers_are_exact(block, left):
    matrix = _matrix(block[0] * 4, block[1] * 6, block, 0.4, torch.float16, integers=True)
    inner = matrix.shape[0] if left else matrix.shape[1]
    shape = (264, inner) if left else (inner, 264)
    dense = torch.randint(-3, 4, shape, device="cuda").half()
    out = _product(matrix, dense, left, impl="sm90", out_dtype=torch.float32)
    exact = _product(_double(matrix), dense.double(), left, impl="reference")
    assert torch.equal(out.double(), exact)


@pytest.mark.parametrize("residual", [False, True])
def test_one_long_row_among_empty_ones_is_cut_and_exact(residual):
    keep = torch.zeros(16, 256, dtype=torch.bool, device="cuda")
    keep[5] = True
    keep[9, 3] = True
    x = torch.randint(-2, 3, (16 * 128, 256 * 32), device="cuda").half()
    matrix = BSRMatrix.from_mask(x, keep, (128, 32))
    dense = torch.randint(-2, 3, (256 * 32, 512), device="cuda").half()
    bias = torch.randint(-9, 9, (16 * 128,), device="cuda").half()
    extra = torch.randint(-9, 9, (16 * 128, 512), device="cuda").half() if residual else None
    with poisoned_empty():
        out = matmul(
            *(matrix, dense), bias=bias, residual=extra, out_dtype=torch.float32, impl="sm90"
        )
    exact = matmul(_double(matrix), dense.double(), bias=bias.double(), impl="reference")
    exact = exact + extra.double() if residual else exact
    assert torch.equal(out.double(), exact)


def test_repeats_are_bitwise_equal():
    matrix = _matrix(4096, 4096, (128, 64), 0.2, torch.bfloat16)
    dense = torch.randn(4096, 2048, device="cuda").bfloat16()
    first = matmul(matrix, dense, impl="sm90")
    for _ in range(50):
        assert torch.equal(matmul(matrix, dense, impl="sm90"), first)


def test_cuda_graph_replays_with_new_inputs():
    matrix = _matrix(1024, 1024, (32, 32), 0.3, torch.float16)
    dense = torch.randn(1024, 256, device="cuda").half()
    matmul(matrix, dense, impl="sm90")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(matrix, dense, impl="sm90")
    for _ in range(3):
        dense.copy_(torch.randn_like(dense))
        matrix.storage.copy_(torch.randn_like(matrix.storage))
        graph.replay()
        assert torch.equal(out, matmul(matrix, dense, impl="sm90"))


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (128, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_never_seen(block, transposed):
    """Launches of earlier products, with new numbers of rows, blocks and addresses."""
    rng = random.Random(f"{block}{transposed}")
    torch.manual_seed(5)
    matrix = _matrix(1024, 1024, block, 0.3, torch.bfloat16, integers=True)
    for i in range(20):
        lead = rng.choice([(rng.randint(260, 3000),), (1, rng.randint(260, 3000)), (2, 400 + i)])
        matrix = BSRMatrix._from_parts(matrix.pattern, matrix.storage.roll(1, 0).contiguous())
        a = matrix.T if transposed else matrix
        x, residual = (
            torch.randn(*lead, 1024, device="cuda").mul(3).round().bfloat16() for _ in "xr"
        )
        with poisoned_empty():
            out = matmul(x, a, residual=residual if i % 2 else None, out_dtype=torch.float32)
        exact = x.double() @ a.to_dense().double()
        exact = exact + residual.double() if i % 2 else exact
        assert torch.equal(out.double(), exact), lead


def test_two_streams_do_not_disturb_each_other():
    matrix = _matrix(4096, 4096, (128, 128), 0.3, torch.float16)
    operands = [torch.randn(4096, 1024, device="cuda").half() for _ in range(2)]
    expected = [matmul(matrix, x, impl="sm90") for x in operands]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in operands]
    for _ in range(20):
        results = []
        for stream, x in zip(streams, operands, strict=True):
            with torch.cuda.stream(stream):
                results.append(matmul(matrix, x, impl="sm90"))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_auto_takes_it_and_says_why_not_for_odd_strides():
    matrix = _matrix(256, 256, (128, 128), 1.0, torch.float16)
    assert explain(matmul, matrix, torch.randn(256, 128, device="cuda").half()).chosen == "sm90"
    odd = torch.randn(256, 129, device="cuda").half()
    assert explain(matmul, matrix, odd).chosen == "triton"
    with pytest.raises(Unsupported, match="multiples of 16 bytes"):
        matmul(matrix, odd, impl="sm90")


def test_gradients_reach_values_and_dense():
    matrix = _matrix(256, 384, (64, 64), 0.5, torch.float16)
    dense = torch.randn(384, 128, device="cuda").half()
    dout = torch.randn(256, 128, device="cuda").half()

    def gradients(impl, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (matrix.storage, dense)]
        out = matmul(matrix.to(dtype).with_data(leaves[0]), leaves[1], impl=impl)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    ours, plain = (gradients(impl, torch.float16) for impl in ("sm90", "eager"))
    exact = gradients("reference", torch.float64)
    for name, *results in zip(("values", "dense"), ours, exact, plain, strict=True):
        assert_within_budget(*results, what=name)
