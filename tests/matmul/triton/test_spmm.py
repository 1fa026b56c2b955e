import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.matmul import BsrProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.matmul.plan import build_spmm_plan, spmm_plan
from blackwell_sparsek.matmul.rows import BlockRows, Views
from blackwell_sparsek.matmul.triton import spmm
from blackwell_sparsek.matmul.triton.spmm import launch_spmm
from blackwell_sparsek.matmul.triton.tuning import SpmmConfig, spmm_config
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.bsr import ORDERS, assert_product, operand_for, product, random_bsr
from blackwell_sparsek.testing.guard import guarded, huge_zeros
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.poison import nan_like

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BLOCKS = [(16, 16), (48, 32), (32, 96), (128, 16), (16, 128)]
SMALL = SpmmConfig(16, 16, 16, 4, 2, "ieee", 1000)


def launch(a, x, *, config=SMALL, out=None, bias=None, residual=None, activation=None, plan=None):
    """The kernel alone on a matrix that is not transposed and x [B, K, N]."""
    pattern = a.pattern
    if out is None:
        out = nan_like(x.new_empty((x.shape[0], a.shape[0], x.shape[2])))
    if plan is None:
        plan = spmm_plan(pattern.indptr, a.nnz_blocks, pattern.cols_b, config.chunk)
    rows = BlockRows(a.storage, pattern.indptr, pattern.indices, None, pattern.cols_b)
    launch_spmm(Views(out, x, residual), rows, bias, activation, plan, config)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_shape", BLOCKS)
def test_products_in_all_orders_keep_the_budget(device, dtype, block_shape):
    bh, bw = block_shape
    a = random_bsr((3 * bh - 7, 2 * bw + 5), block_shape, seed=1, dtype=dtype, device=device)
    for i, order in enumerate(ORDERS):
        x = operand_for(a, order, 21, seed=i)
        assert_product(a, order, x, impl="triton", layouts=i + 1)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("order", ["A@X", "X@A.T"])
def test_epilogue(device, activation, order):
    a = random_bsr((70, 60), (32, 16), seed=2, dtype=torch.float16, device=device)
    x = operand_for(a, order, 19, seed=3, batch=(2,))
    bias = normal(70, seed=4, dtype=torch.float16, device=device)
    shape = (2, 70, 19) if order == "A@X" else (2, 19, 70)
    residual = normal(*shape, seed=5, device=device)
    for out_dtype in (None, torch.float32):
        assert_product(
            *(a, order, x),
            **{"impl": "triton", "layouts": 2, "bias": bias, "residual": residual},
            **{"activation": activation, "out_dtype": out_dtype},
        )


@pytest.mark.parametrize("n", [1, 2, 15, 17, 63, 65, 127, 129])
def test_awkward_numbers_of_columns(device, n):
    a = random_bsr((33, 31), (16, 16), seed=6, dtype=torch.float16, device=device)
    for order in ("A@X", "X@A"):
        assert_product(a, order, operand_for(a, order, n, seed=n), impl="triton", layouts=1)


@pytest.mark.parametrize("shape", [(1, 1), (15, 17), (16, 16), (17, 15), (1, 63), (65, 1)])
def test_awkward_shapes(device, shape):
    a = random_bsr(shape, (16, 16), seed=7, device=device, density=1.0)
    for order in ORDERS:
        assert_product(a, order, operand_for(a, order, 3, seed=8), impl="triton")


def test_vectors(device):
    a = random_bsr((40, 50), (16, 16), seed=9, device=device)
    x = normal(50, seed=10, device=device)
    torch.testing.assert_close(matmul(a, x, impl="triton"), a.to_dense() @ x)
    x = normal(40, seed=10, device=device)
    torch.testing.assert_close(matmul(x, a, impl="triton"), x @ a.to_dense())


@pytest.mark.parametrize("order", ORDERS)
def test_whole_numbers_are_exact(device, order):
    a = random_bsr((90, 70), (32, 16), seed=11, dtype=torch.float16, device=device, whole=True)
    x = operand_for(a, order, 18, seed=12, whole=True)
    expected = product(a.to(torch.float32), order, x.float(), impl="reference").half()
    assert torch.equal(product(a, order, x, impl="triton"), expected)


def test_batches_of_any_layout(device):
    a = random_bsr((20, 40), (16, 16), seed=13, device=device)
    x = normal(2, 3, 40, 5, seed=14, device=device)
    for view in (x.transpose(0, 1), x[:, :1].expand(2, 3, 40, 5), x[:, :, :, :1]):
        assert_product(a, "A@X", view, impl="triton")
    x = normal(2, 3, 5, 20, seed=15, device=device)
    for view in (x.transpose(0, 1), x.transpose(1, 2), x[:, :1].expand(2, 3, 5, 20)):
        assert_product(a, "X@A", view, impl="triton")


def test_nothing_to_do(device):
    empty = BSRMatrix.from_mask(
        torch.zeros(40, 50, device=device),
        torch.zeros(3, 4, dtype=torch.bool, device=device),
        (16, 16),
    )
    bias = normal(40, seed=16, device=device)
    x = normal(50, 3, seed=17, device=device)
    got = matmul(empty, x, bias=bias, activation="silu", impl="triton")
    torch.testing.assert_close(got, torch.nn.functional.silu(bias)[:, None].expand(40, 3))
    a = random_bsr((40, 50), (16, 16), seed=18, device=device)
    assert matmul(a, x[:, :0], impl="triton").shape == (40, 0)
    assert matmul(a, x.expand(0, 50, 3), impl="triton").shape == (0, 40, 3)
    no_inner = BSRMatrix.from_mask(
        torch.zeros(40, 0, device=device),
        torch.zeros(3, 0, dtype=torch.bool, device=device),
        (16, 16),
    )
    assert torch.equal(matmul(no_inner, x[:0], impl="triton"), torch.zeros(40, 3, device=device))


def test_what_no_block_meets_is_not_read(device):
    a = random_bsr((64, 96), (16, 16), seed=19, dtype=torch.float16, device=device, density=0.2)
    keep = torch.zeros(4, 6, dtype=torch.bool, device=device)
    keep[:, ::2] = True
    a = BSRMatrix.from_mask(a.to_dense(), keep, (16, 16))
    x = operand_for(a, "A@X", 17, seed=20)
    expected = matmul(a, x, impl="triton")
    x.view(6, 16, 17)[1::2] = float("nan")
    assert torch.equal(matmul(a, x, impl="triton"), expected)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("order", ["A@X", "X@A"])
def test_cut_rows(device, chunk, order, monkeypatch):
    def cutting(problem, precision):
        return replace(spmm_config(problem, precision), chunk=chunk)

    monkeypatch.setattr(spmm, "spmm_config", cutting)
    a = random_bsr((40, 70), (16, 16), seed=21, dtype=torch.float16, device=device)
    x = operand_for(a, order, 19, seed=22, batch=(2,))
    features = 40 if order == "A@X" else 70
    shape = (2, features, 19) if order == "A@X" else (2, 19, features)
    extras = {
        "bias": normal(features, seed=23, device=device),
        "residual": normal(*shape, seed=24, device=device),
    }
    assert_product(a, order, x, impl="triton", layouts=3, activation="gelu", **extras)
    again = [product(a, order, x, impl="triton", **extras) for _ in range(2)]
    assert torch.equal(*again)


def test_padding_of_a_plan_changes_nothing(device):
    a = random_bsr((40, 70), (16, 16), seed=25, device=device)
    x = operand_for(a, "A@X", 5, seed=26).unsqueeze(0)
    expected = launch(a, x, config=replace(SMALL, chunk=2))
    indptr = a.pattern.indptr
    exact = spmm_plan(indptr, a.nnz_blocks, a.pattern.cols_b, 2)
    sizes = (exact.n_items + 7, exact.n_split_rows + 2, exact.n_slots + 5)
    sizes = (sizes[0], min(sizes[1], a.pattern.rows_b), sizes[2])
    padded = build_spmm_plan(indptr, 2, sizes)
    # what stands before and behind the output must stay as it is
    around = nan_like(expected.new_empty((3, *expected.shape)))
    got = launch(a, x, config=replace(SMALL, chunk=2), plan=padded, out=around[1])
    assert torch.equal(got, expected)
    assert around[0].isnan().all() and around[2].isnan().all()


def _arch(sm):
    sms, smem = {80: (108, 166912), 89: (128, 101376), 90: (132, 232448), 100: (148, 232448)}[sm]
    return Arch("cuda", sm, sms, smem, False)


def shipped_configs():
    """Every config that the tuner gives out for blocks of 16 to 128, once."""
    configs = {}
    for sm, dtype, side, n in itertools.product(
        (80, 89, 90, 100), (torch.float16, torch.float32), (16, 32, 64, 128), (1, 33, 100, 9000)
    ):
        problem = BsrProblem(
            "matmul", _arch(sm), dtype, dtype, (8192, 8192), (side, side), 10**6 // side**2, n
        )
        for precision in ("ieee", "tf32") if dtype == torch.float32 else ("ieee",):
            config = spmm_config(problem, precision)
            configs[replace(config, chunk=1)] = (config, dtype, side)
    return list(configs.values())


@pytest.mark.parametrize(("config", "dtype", "side"), shipped_configs())
def test_every_shipped_config_alone(device, config, dtype, side):
    if device.type == "cuda" and config.smem_bytes(dtype.itemsize) > _smem(device):
        pytest.skip("needs more shared memory than this GPU has")
    a = random_bsr(
        (side, 2 * side - 3),
        (side, side),
        seed=27,
        dtype=dtype,
        device=device,
        density=1.0,
        whole=True,
    )
    keep = torch.tensor([[False, True]], device=device)
    a = BSRMatrix.from_mask(a.to_dense(), keep, (side, side))
    x = operand_for(a, "A@X", min(config.tile_n + 1, 260), seed=28, whole=True)
    expected = a.to_dense().double() @ x.double()
    assert torch.equal(launch(a, x.unsqueeze(0), config=config)[0].double(), expected)


def _smem(device):
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_outside_of_the_tensors_is_touched(interpreted, side):
    a = random_bsr((40, 45), (16, 16), seed=29)
    x, bias, residual = normal(2, 45, 19, seed=30), normal(40, seed=31), normal(2, 40, 19, seed=32)
    expected = matmul(a, x, bias=bias, residual=residual, impl="reference")
    pattern = a.pattern
    for chunk in (2, 1000):
        plan = spmm_plan(pattern.indptr, a.nnz_blocks, 3, chunk)
        plan = replace(
            plan, items=guarded(plan.items, side), split_rows=guarded(plan.split_rows, side)
        )
        out = guarded(nan_like(expected), side)
        rows = BlockRows(
            guarded(a.storage, side), pattern.indptr, guarded(pattern.indices, side), None, 3
        )
        views = Views(out, guarded(x, side), guarded(residual, side))
        launch_spmm(views, rows, guarded(bias, side), None, plan, SMALL)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("far", ["x", "out", "residual", "values"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("tile_k", [16, 32])
def test_strides_past_2_to_the_31(interpreted, far, dim, tile_k):
    a = random_bsr((32, 48), (16, 16), seed=33, density=1.0, whole=True)
    tensors = {
        "x": normal(3, 48, 18, seed=34).round(),
        "out": torch.zeros(3, 32, 18),
        "residual": normal(3, 32, 18, seed=35).round(),
        "values": a.storage,
    }
    expected = matmul(a, tensors["x"], residual=tensors["residual"], impl="reference")
    like = tensors[far]
    strides = [2048, 32, 1]
    # at least three of everything, so that the stride is an int32 and only its multiples are not
    strides[dim] = 2**31 // (like.shape[dim] - 1) + 1
    view = huge_zeros(like.shape, like.dtype, strides)
    view.copy_(like)
    tensors[far] = view
    pattern = a.pattern
    plan = spmm_plan(pattern.indptr, a.nnz_blocks, 3, 1000)
    # a loaded entry is an int32 of the kernel; without a permutation the interpreter has an int
    perm = torch.arange(a.nnz_blocks, dtype=torch.int32)
    rows = BlockRows(tensors["values"], pattern.indptr, pattern.indices, perm, 3)
    views = Views(tensors["out"], tensors["x"], tensors["residual"])
    launch_spmm(views, rows, None, None, plan, replace(SMALL, tile_k=tile_k))
    assert torch.equal(tensors["out"], expected)


def test_a_config_that_does_not_fit_is_refused():
    a = random_bsr((48, 48), (48, 48), seed=36)
    x = operand_for(a, "A@X", 3, seed=37).unsqueeze(0)
    with pytest.raises(InvalidInput, match="tile_m=32 does not divide the block height 48"):
        launch(a, x, config=replace(SMALL, tile_m=32))
    launch(a, x, config=SMALL)
