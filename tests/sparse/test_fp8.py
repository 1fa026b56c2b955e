"""Block-sparse matrices in fp8: a scale for each block, and what refuses to lose it."""

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.core.fp8 import SMALLEST_SCALE
from blackwell_sparsek.fp8.api import quantize
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.inputs import block_pattern, normal

E4M3 = torch.float8_e4m3fn


def matrix(dtype=torch.float32):
    keep = block_pattern(5, 2, density=0.7, seed=1)
    return BSRMatrix.from_mask(normal(65, 63, seed=2).to(dtype), keep, (16, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_each_block_is_rounded_as_a_tensor_of_its_own(dtype):
    wide = matrix(dtype)
    rounded = wide.to_fp8()
    assert rounded.dtype == E4M3 and rounded.descale.dtype == torch.float32
    for i in range(wide.nnz_blocks):
        alone = quantize(wide.data[i].float(), "tensor", impl="eager")
        assert torch.equal(rounded.descale[i], alone.descale)
        assert torch.equal(rounded.data[i].view(torch.uint8), alone.data.view(torch.uint8))
    rounded.validate()


def test_blocks_of_zeros_of_tiny_and_of_infinite_values():
    x = torch.zeros(4, 2)
    x[1, 0], x[2, 0], x[3, 0] = 2.0**-130, torch.inf, torch.nan
    x[2, 1] = 3.5
    keep = torch.ones(4, 1, dtype=torch.bool)
    rounded = BSRMatrix.from_mask(x, keep, (1, 2)).to_fp8()
    assert rounded.descale.tolist() == [1.0, SMALLEST_SCALE, 3.5 / 448, 1.0]
    assert rounded.to_dense()[2].tolist() == [3.5, 3.5]
    assert rounded.to_dense()[3].isnan().tolist() == [True, False]


def test_views_and_conversions_apply_the_scales():
    rounded = matrix().to_fp8()
    dense = rounded.to_dense()
    assert dense.dtype == torch.float32
    values = rounded.data.float() * rounded.descale[:, None, None]
    assert torch.equal(rounded.dequantize().data, values)
    assert rounded.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(rounded.T.to_dense(), dense.T)
    again = BSRMatrix(
        rounded.T.data, rounded.T.indices, rounded.T.indptr, (63, 65), rounded.T.descale
    )
    assert torch.equal(again.to_dense(), dense.T)
    assert torch.equal(rounded.with_data(rounded.data, 2 * rounded.descale).to_dense(), 2 * dense)
    assert rounded.to_fp8().storage is rounded.storage
    moved = rounded.to("meta")
    assert moved.stored_descale.is_meta and moved.storage.is_meta


def test_empty():
    keep = torch.zeros(1, 1, dtype=torch.bool)
    empty = BSRMatrix.from_mask(torch.ones(16, 16), keep, (16, 16)).to_fp8()
    assert empty.descale.shape == (0,) and not empty.to_dense().any()


F8 = matrix().to_fp8()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: F8.to(torch.float16), InvalidInput, r"scale for each block.*dequantize\(\)"),
        (lambda: F8.to_torch(), InvalidInput, "BSRMatrix.to_torch.*would be lost"),
        (lambda: F8.to_scipy(), InvalidInput, "BSRMatrix.to_scipy.*would be lost"),
        (lambda: matrix().to(E4M3), InvalidInput, "without scales.*BSRMatrix.to_fp8"),
        (lambda: matrix().dequantize(), InvalidInput, "no scales to be applied"),
        (lambda: F8.dequantize(torch.int32), InvalidType, "data"),
        (lambda: F8.with_data(F8.data), InvalidInput, "without scales"),
        (lambda: F8.with_data(F8.data, F8.descale[1:]), InvalidInput, "descale"),
        (lambda: F8.with_data(F8.data, F8.descale.double()), InvalidType, "descale"),
        (lambda: F8.with_data(F8.data.float(), F8.descale), InvalidType, "float8_e4m3fn"),
        (
            lambda: matrix().with_data(matrix().data.requires_grad_()).to_fp8(),
            InvalidInput,
            "requires gradients, which rounding does not have",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_saved_state_without_scales_is_refused():
    state = F8.__getstate__()
    del state["descale"]
    with pytest.raises(InvalidType, match=r"data has an unsupported dtype.*uint8"):
        BSRMatrix.__new__(BSRMatrix).__setstate__(state)


def test_parameters_are_rounded_without_gradients():
    wide = matrix()
    trained = wide.with_data(wide.data.clone().requires_grad_())
    with torch.no_grad():
        assert trained.to_fp8().storage.equal(wide.to_fp8().storage)
