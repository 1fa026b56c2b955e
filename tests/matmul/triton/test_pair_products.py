import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.matmul.triton.pair_products import launch_pair_products
from blackwell_sparsek.matmul.triton.tuning import PairConfig
from blackwell_sparsek.sparse.product import PairLists, product_pattern
from blackwell_sparsek.testing.bsr import random_bsr
from blackwell_sparsek.testing.guard import guarded, huge_zeros
from blackwell_sparsek.testing.poison import nan_like, poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_within_budget

SMALL = PairConfig(16, 16, 16, 2, 2, "ieee")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [(16, 16, 16), (48, 32, 16), (16, 96, 32)])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_keeps_the_budget(device, dtype, blocks, transposed):
    bm, bk, bn = blocks
    m, k, n = 3 * bm - 7, 2 * bk + 5, 2 * bn + 1
    shapes = [((m, k), (bm, bk)), ((k, n), (bk, bn))]
    operands = []
    for i, (shape, block_shape) in enumerate(shapes):
        if transposed[i]:
            shape, block_shape = shape[::-1], block_shape[::-1]
        x = random_bsr(shape, block_shape, seed=i, dtype=dtype, device=device)
        operands.append(x.T if transposed[i] else x)
    with poisoned_empty():
        actual = matmul(*operands, impl="triton")
    actual.validate()
    plain = matmul(*operands, impl="eager")
    exact = matmul(*operands, out_dtype=torch.float64, impl="reference")
    assert_within_budget(actual.to_dense(), exact.to_dense(), plain.to_dense())


def _product(whole=True, device="cpu"):
    a = random_bsr((40, 45), (16, 16), seed=3, whole=whole, device=device)
    b = random_bsr((45, 50), (16, 16), seed=4, whole=whole, device=device)
    pattern, pairs = product_pattern(a.pattern, b.pattern, False, False)
    expected = (a.to_dense().double() @ b.to_dense().double()).float()
    return a, b, pattern, pairs, expected


def _dense(pattern, values):
    from blackwell_sparsek.sparse.matrix import BSRMatrix

    return BSRMatrix._from_parts(pattern, values).to_dense()


def test_whole_numbers_are_exact(device):
    a, b, pattern, pairs, expected = _product(device=device)
    out = nan_like(torch.empty(pattern.nnz_blocks, 16, 16, device=device))
    launch_pair_products(out, a.storage, b.storage, pairs, SMALL)
    assert torch.equal(_dense(pattern, out), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_outside_of_the_tensors_is_touched(interpreted, side):
    a, b, pattern, pairs, expected = _product()
    out = guarded(nan_like(torch.empty(pattern.nnz_blocks, 16, 16)), side)
    first, second, *lists = (guarded(x, side) for x in (a.storage, b.storage, *pairs))
    launch_pair_products(out, first, second, PairLists(*lists), SMALL)
    assert torch.equal(_dense(pattern, out), expected)


@pytest.mark.parametrize("far", [0, 1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_past_2_to_the_31(interpreted, far, dim):
    a, b, pattern, pairs, expected = _product()
    values = [a.storage, b.storage]
    like = values[far]
    strides = [1024, 32, 1]
    strides[dim] = 2**31 // (like.shape[dim] - 1) + 1
    values[far] = huge_zeros(like.shape, like.dtype, strides)
    values[far].copy_(like)
    out = nan_like(torch.empty(pattern.nnz_blocks, 16, 16))
    launch_pair_products(out, *values, pairs, SMALL)
    assert torch.equal(_dense(pattern, out), expected)
