"""The oracle itself, against dense torch and against loops over blocks."""

import pytest
import torch
import torch.nn.functional as F

from blackwell_sparsek.calls.matmul import (
    MatmulCall,
    PairProductsCall,
    PatternTensors,
    SddmmCall,
)
from blackwell_sparsek.reference import matmul as reference
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.sparse.product import product_pattern
from blackwell_sparsek.testing.inputs import block_pattern, integers, normal

ACT = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def matrix(shape=(10, 13), block_shape=(3, 4), seed=0, dtype=torch.float64):
    rows, cols = (-(-s // b) for s, b in zip(shape, block_shape, strict=True))
    keep = block_pattern(rows, cols, density=0.5, seed=seed)
    return BSRMatrix.from_mask(integers(*shape, seed=seed, dtype=dtype), keep, block_shape)


def run(a, dense, dense_left, bias=None, residual=None, activation=None, out_dtype=None):
    call = MatmulCall(
        a.storage,
        PatternTensors(*a.pattern.tensors()),
        list(a.pattern.shape),
        a.is_transposed,
        dense,
        dense_left,
        bias,
        residual,
        activation,
        out_dtype,
    )
    return reference.matmul(call)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dense_left", [False, True])
@pytest.mark.parametrize("batch", [(), (2,), (2, 0), (2, 3)])
@pytest.mark.parametrize("activation", ACT)
def test_matmul_is_the_dense_formula(transposed, dense_left, batch, activation):
    a = matrix().T if transposed else matrix()
    m, k = a.shape
    x = integers(*batch, *((5, m) if dense_left else (k, 5)), seed=1, dtype=torch.float64)
    product = x @ a.to_dense() if dense_left else a.to_dense() @ x
    bias = normal(k if dense_left else m, seed=2, dtype=torch.float64)
    residual = normal(*product.shape, seed=3, dtype=torch.float64)
    expected = ACT[activation](product + (bias if dense_left else bias[:, None])) + residual
    actual = run(a, x, dense_left, bias, residual, activation)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(run(a, x, dense_left), product)
    assert actual.is_contiguous()


def test_low_precision_is_rounded_once():
    a = matrix(dtype=torch.float16)
    x = normal(13, 5, seed=1, dtype=torch.float16)
    exact = a.to_dense().double() @ x.double()
    assert torch.equal(run(a, x, False), exact.half())
    assert torch.equal(run(a, x, False, out_dtype=torch.float32), exact.float())


def test_nan_reaches_only_rows_that_store_its_block():
    keep = torch.tensor([[True, False], [False, True]])
    a = BSRMatrix.from_mask(torch.zeros(4, 4), keep)
    x = torch.ones(4, 2)
    x[3, 0] = float("nan")
    assert run(a, x, False).isnan().tolist() == [[False] * 2, [False] * 2] + [[True, False]] * 2


@pytest.mark.parametrize("batch", [(), (3,), (0,)])
def test_sddmm_block_by_block(batch):
    p = matrix().pattern
    a, b = integers(*batch, 10, 6, seed=1), integers(*batch, 6, 13, seed=2)
    values = reference.sddmm(SddmmCall(a, b, PatternTensors(*p.tensors()), list(p.shape), [3, 4]))
    product = (a @ b).flatten(0, -3).sum(0) if batch else a @ b
    expected = torch.zeros(p.nnz_blocks, 3, 4)
    for e, (r, c) in enumerate(zip(p.row_indices().tolist(), p.indices.tolist(), strict=True)):
        block = product[3 * r : 3 * r + 3, 4 * c : 4 * c + 4]
        expected[e, : block.shape[0], : block.shape[1]] = block
    assert torch.equal(values, expected)


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_pair_products_are_the_dense_product(a_transposed, b_transposed):
    a = matrix((13, 10), (4, 3)).T if a_transposed else matrix()
    b = matrix((7, 13), (2, 4), 5).T if b_transposed else matrix((13, 7), (4, 2), 5)
    pattern, pairs = product_pattern(a.pattern, b.pattern, a_transposed, b_transposed)
    pattern.validate()
    values = reference.pair_products(
        PairProductsCall(a.storage, b.storage, pairs, a_transposed, b_transposed)
    )
    out = BSRMatrix(values, pattern.indices, pattern.indptr, pattern.shape)
    assert torch.equal(out.to_dense(), a.to_dense() @ b.to_dense())
    keeps = [_keep(m.logical_pattern).double() for m in (a, b)]
    assert torch.equal(_keep(pattern), keeps[0] @ keeps[1] > 0)


def _keep(p):
    return reference.block_keep(p.indptr, p.indices, list(p.shape), list(p.block_shape))
