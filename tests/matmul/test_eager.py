"""Eager block-sparse products: exact on integers, within the error budget otherwise."""

import pytest
import torch

from blackwell_sparsek.calls.matmul import (
    MatmulCall,
    PairProductsCall,
    PatternTensors,
    SddmmCall,
)
from blackwell_sparsek.matmul import eager
from blackwell_sparsek.reference import matmul as reference
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.sparse.product import product_pattern
from blackwell_sparsek.testing.inputs import block_pattern, integers, normal
from blackwell_sparsek.testing.layouts import KINDS, strided_like
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_within_budget

SHAPES = [
    ((64, 64), (16, 16)),
    ((65, 63), (16, 32)),
    ((17, 15), (1, 4)),
    ((1, 1), (8, 8)),
    ((127, 129), (64, 16)),
    ((0, 8), (4, 4)),
    ((8, 0), (4, 4)),
]


def matrix(
    shape, block_shape, seed=0, dtype=torch.float32, device="cpu", make=integers, density=0.4
):
    rows, cols = (-(-s // b) for s, b in zip(shape, block_shape, strict=True))
    keep = block_pattern(rows, cols, density=density, seed=seed)
    x = make(*shape, seed=seed, dtype=dtype)
    return BSRMatrix.from_mask(x, keep, block_shape).to(device)


def call(a, dense, dense_left, bias=None, residual=None, activation=None, out_dtype=None):
    return MatmulCall(
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


@pytest.fixture(params=["one chunk", "many chunks", "row by row"])
def chunking(request, monkeypatch):
    """The three ways through a group of rows, which sizes decide otherwise."""
    rows = {"one chunk": 2**30, "many chunks": 2, "row by row": 1}[request.param]
    monkeypatch.setattr(eager, "rows_at_once", lambda device, elements: rows)
    if rows < 2**30:
        monkeypatch.setattr(eager, "columns_at_once", lambda device, elements: 3)


@pytest.mark.parametrize(("shape", "block_shape"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dense_left", [False, True])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
def test_integers_are_exact(shape, block_shape, transposed, dense_left, batch, chunking, device):
    a = matrix(shape, block_shape, device=device)
    a = a.T if transposed else a
    m, k = a.shape
    for n in (1, 7, 0):
        size = (n, m) if dense_left else (k, n)
        x = integers(*batch, *size, seed=1, device=device)
        expected = x @ a.to_dense() if dense_left else a.to_dense() @ x
        with poisoned_empty():
            row_major = eager.matmul(call(a, x, dense_left))
            col_major = eager.matmul(call(a, x.mT.contiguous().mT, dense_left))
        assert torch.equal(row_major, expected) and row_major.is_contiguous()
        assert torch.equal(col_major, expected) and col_major.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dense_left", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_within_budget_with_epilogue(dtype, dense_left, activation, out_dtype, device):
    a = matrix((129, 100), (32, 16), dtype=dtype, device=device, make=normal)
    x = normal(*((65, 129) if dense_left else (100, 65)), seed=1, dtype=dtype, device=device)
    features = 100 if dense_left else 129
    bias = normal(features, seed=2, dtype=dtype, device=device)
    out_shape = (65, 100) if dense_left else (129, 65)
    residual = normal(*out_shape, seed=3, dtype=dtype, device=device)
    extras = (bias, residual, activation)
    actual = eager.matmul(call(a, x, dense_left, *extras, out_dtype))
    exact = reference.matmul(call(a, x, dense_left, *extras, torch.float64))
    dense = a.to_dense()
    plain = x @ dense + bias if dense_left else dense @ x + bias[:, None]
    plain = (getattr(torch.nn.functional, activation)(plain) if activation else plain) + residual
    assert actual.dtype == (out_dtype or dtype)
    assert_within_budget(actual, exact, plain)
    rounded_once = exact.to(actual.dtype).double()
    if actual.dtype != torch.float32:
        # one rounding: nearly all elements are the exact result's nearest neighbours
        assert (actual.double() == rounded_once).double().mean() > 0.98


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dense_left", [False, True])
@pytest.mark.parametrize("as_transpose", [False, True])
def test_layouts(kind, dense_left, as_transpose, chunking, device):
    a = matrix((40, 30), (8, 4), device=device)
    size = (2, 3, 9, 40) if dense_left else (2, 3, 30, 9)
    x = integers(*size, seed=1, device=device)
    expected = x @ a.to_dense() if dense_left else a.to_dense() @ x
    x = strided_like(x.mT.contiguous(), kind).mT if as_transpose else strided_like(x, kind)
    assert torch.equal(eager.matmul(call(a, x, dense_left)), expected)


def test_expanded_batch(device):
    a = matrix((40, 30), (8, 4), device=device)
    x = integers(30, 9, seed=1, device=device).expand(2, 3, 30, 9)
    assert torch.equal(eager.matmul(call(a, x, False)), a.to_dense() @ x)


def test_strided_values(device):
    a = matrix((40, 30), (8, 4), device=device)
    for transposed in (False, True):
        strided = strided_like(a.storage, "outer_gap")
        b = BSRMatrix._from_parts(a.pattern, strided, transposed)
        x = integers(b.shape[1], 9, seed=1, device=device)
        assert torch.equal(eager.matmul(call(b, x, False)), b.to_dense() @ x)


def test_nan_reaches_only_rows_that_store_its_block(device):
    keep = torch.tensor([[True, False], [False, True]])
    a = BSRMatrix.from_mask(torch.ones(5, 5), keep, (3, 3)).to(device)
    x = torch.ones(5, 2, device=device)
    x[4, 0] = float("nan")
    out = eager.matmul(call(a, x, False))
    assert out.isnan().tolist() == [[False] * 2] * 3 + [[True, False]] * 2


@pytest.mark.parametrize(("shape", "block_shape"), SHAPES)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
def test_sddmm_integers(shape, block_shape, batch, chunking, device):
    p = matrix(shape, block_shape, device=device).pattern
    for k in (1, 9, 0):
        a = integers(*batch, shape[0], k, seed=1, device=device)
        b = integers(*batch, k, shape[1], seed=2, device=device)
        rest = (PatternTensors(*p.tensors()), shape, block_shape)
        expected = reference.sddmm(SddmmCall(a, b, *rest))
        for left in (a, a.mT.contiguous().mT):
            for right in (b, b.mT.contiguous().mT):
                with poisoned_empty():
                    actual = eager.sddmm(SddmmCall(left, right, *rest))
                assert torch.equal(actual, expected) and actual.is_contiguous()


def test_sddmm_padding_is_zero_even_next_to_infinity(device):
    p = BSRMatrix.from_mask(torch.ones(5, 5), torch.ones(2, 2) > 0, (3, 3)).to(device).pattern
    a = torch.full((5, 2), float("inf"), device=device)
    out = eager.sddmm(SddmmCall(a, a.mT, PatternTensors(*p.tensors()), (5, 5), (3, 3)))
    BSRMatrix(out, p.indices, p.indptr, p.shape).validate()
    assert out.isinf().sum() == 25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sddmm_within_budget(dtype, device):
    p = matrix((65, 63), (16, 32), device=device).pattern
    a = normal(3, 65, 33, seed=1, dtype=dtype, device=device)
    b = normal(3, 33, 63, seed=2, dtype=dtype, device=device)
    rest = (PatternTensors(*p.tensors()), (65, 63), (16, 32))
    actual = eager.sddmm(SddmmCall(a, b, *rest))
    exact = reference.sddmm(SddmmCall(a, b, *rest, torch.float64))
    plain = (a @ b).sum(0)
    plain = reference.sddmm(SddmmCall(plain, torch.eye(63, dtype=dtype, device=device), *rest))
    assert_within_budget(actual, exact, plain)


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("sizes", [(10, 13, 7), (64, 48, 40), (1, 1, 1), (0, 4, 4), (4, 0, 4)])
def test_pair_products_integers(a_transposed, b_transposed, sizes, chunking, device):
    m, k, n = sizes
    a = matrix((k, m), (4, 3), 1, device=device).T if a_transposed else None
    a = a or matrix((m, k), (3, 4), 1, device=device)
    b = matrix((n, k), (2, 4), 2, device=device).T if b_transposed else None
    b = b or matrix((k, n), (4, 2), 2, device=device)
    pattern, pairs = product_pattern(a.pattern, b.pattern, a_transposed, b_transposed)
    product = PairProductsCall(a.storage, b.storage, pairs, a_transposed, b_transposed)
    with poisoned_empty():
        values = eager.pair_products(product)
    assert torch.equal(values, reference.pair_products(product))
    out = BSRMatrix(values, pattern.indices, pattern.indptr, pattern.shape)
    assert torch.equal(out.to_dense(), a.to_dense() @ b.to_dense())


def test_pair_products_count_what_they_gather(monkeypatch):
    """Blocks of 3 x 4 and 4 x 2: 20 elements for each pair of a row of the result."""
    a, b = (
        matrix(size, block, density=1.0) for size, block in (((9, 8), (3, 4)), ((8, 6), (4, 2)))
    )
    _, pairs = product_pattern(a.pattern, b.pattern, False, False)
    counts = pairs.ptr_out.diff().unique().tolist()
    asked = []
    monkeypatch.setattr(eager, "rows_at_once", lambda _, elements: asked.append(elements) or 1)
    eager.pair_products(PairProductsCall(a.storage, b.storage, pairs, False, False))
    assert sorted(asked) == [20 * count for count in counts if count]


def test_row_groups_cover_every_entry_once_and_are_kept(device):
    indptr = torch.tensor([0, 2, 2, 5, 7, 7, 10], dtype=torch.int32, device=device)
    groups = eager.row_groups(indptr)
    assert [(g.rows, g.entries.tolist()) for g in groups] == [
        ([0, 3], [[0, 1], [5, 6]]),
        ([2, 5], [[2, 3, 4], [7, 8, 9]]),
    ]
    assert eager.row_groups(indptr) is groups
    kept = len(eager._groups_of)
    del indptr
    assert len(eager._groups_of) == kept - 1


def test_memory_is_proportional_to_what_is_gathered():
    # 1 of 64 x 64 blocks: a dense copy of the matrix would be 64 MiB
    data = torch.ones(1, 64, 64)
    a = BSRMatrix(data, torch.tensor([7]), torch.tensor([0] * 6 + [1] * 59), (4096, 4096))
    x = torch.ones(4096, 4)
    with torch.profiler.profile(profile_memory=True) as profile:
        out = eager.matmul(call(a, x, False))
    allocated = sum(
        e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0
    )
    assert out.sum() == 64 * 64 * 4
    assert allocated < 2**20


@pytest.mark.parametrize("order", ["A@x", "x@A.T", "A.T@x", "x@A"])
def test_long_sums_of_a_single_column_are_as_exact_as_torchs(order):
    a = matrix((256, 2048), (64, 64), make=normal, density=0.5)
    a, dense = (m.T if ".T" in order else m for m in (a, a.to_dense()))
    left = order.startswith("x")
    x = normal(1, a.shape[0], seed=2) if left else normal(a.shape[1], 1, seed=2)
    plain = x @ dense if left else dense @ x
    exact = x.double() @ dense.double() if left else dense.double() @ x.double()
    assert_within_budget(eager.matmul(call(a, x, left)), exact, plain)
