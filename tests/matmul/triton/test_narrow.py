from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.matmul.rows import Views
from blackwell_sparsek.matmul.sm90.row_schedule import build_row_table
from blackwell_sparsek.matmul.triton import narrow as spmm_narrow
from blackwell_sparsek.matmul.triton import spmm
from blackwell_sparsek.matmul.triton.narrow import launch_spmm_narrow
from blackwell_sparsek.matmul.triton.tuning import NarrowConfig, narrow_config
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.bsr import ORDERS, assert_product, operand_for, product, random_bsr
from blackwell_sparsek.testing.guard import guarded, huge_zeros
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.poison import nan_like

DTYPES = [torch.float16, torch.bfloat16]
BLOCKS = [(16, 16), (48, 80), (16, 128), (128, 32)]
ONE = NarrowConfig(8, 1, 256, 1)
SOME = NarrowConfig(16, 16, 128, 2)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Take the tuner's tiles in the interpreter too, in shorter steps, and no other kernel."""

    def config(problem):
        arch = problem.arch
        if arch.interpreted:
            problem = replace(problem, arch=replace(arch, sm=80, num_sms=132))
        # the kernel takes more columns than the tuner gives it
        wide = NarrowConfig(16, max(16, 1 << (problem.n - 1).bit_length()), 256, 4)
        chosen = narrow_config(problem) or wide
        return replace(chosen, tile_k=chosen.tile_k // 2, num_warps=chosen.num_warps // 2)

    def unexpected(*args):
        raise AssertionError("the general kernel was taken")

    monkeypatch.setattr(spmm_narrow, "narrow_config", config)
    monkeypatch.setattr(spmm, "launch_spmm", unexpected)


def launch(a, x, config, out=None):
    """The kernel alone on a matrix that is not transposed and x [B, K, N]."""
    if out is None:
        out = nan_like(x.new_empty((x.shape[0], a.shape[0], x.shape[2])))
    table = build_row_table(a.pattern.indptr, a.pattern.indices, None)
    launch_spmm_narrow(Views(out, x), a.storage, table, None, None, config)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_shape", BLOCKS)
def test_products_in_all_orders_keep_the_budget(device, dtype, block_shape):
    bh, bw = block_shape
    a = random_bsr((3 * bh - 7, 3 * bw + 5), block_shape, seed=1, dtype=dtype, device=device)
    for i, order in enumerate(ORDERS):
        # one and several columns in each order, the one in fp16, the others in bf16
        n = 1 if (i % 2 == 0) == (dtype == torch.float16) else 21
        x = operand_for(a, order, n, seed=i)
        assert_product(a, order, x, impl="triton", layouts=i + 1)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 63, 64])
def test_awkward_numbers_of_columns(device, n):
    a = random_bsr((33, 31), (16, 16), seed=6, dtype=torch.float16, device=device)
    for order in ("A@X", "X@A", "X@A.T"):
        assert_product(a, order, operand_for(a, order, n, seed=n), impl="triton", layouts=1)


@pytest.mark.parametrize("shape", [(1, 1), (15, 17), (16, 16), (1, 63), (65, 1)])
def test_awkward_shapes(device, shape):
    a = random_bsr(shape, (16, 16), seed=7, dtype=torch.bfloat16, device=device, density=1.0)
    for order in ORDERS:
        assert_product(a, order, operand_for(a, order, 1, seed=8), impl="triton")


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("order", ["A@X", "X@A.T"])
@pytest.mark.parametrize("n", [1, 19])
def test_epilogue(device, activation, order, n):
    a = random_bsr((70, 60), (32, 16), seed=2, dtype=torch.float16, device=device)
    x = operand_for(a, order, n, seed=3, batch=(2,))
    bias = normal(70, seed=4, dtype=torch.float16, device=device)
    residual = normal(*((2, 70, n) if order == "A@X" else (2, n, 70)), seed=5, device=device)
    # BLAS sums one column up more exactly than any order of fp32 sums; whole numbers test those
    out_dtype = torch.float32 if n > 1 else None
    assert_product(
        *(a, order, x),
        **{"impl": "triton", "layouts": 2, "bias": bias, "residual": residual},
        **{"activation": activation, "out_dtype": out_dtype},
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 18])
def test_whole_numbers_are_exact(device, order, n):
    a = random_bsr((90, 700), (32, 16), seed=11, dtype=torch.float16, device=device, whole=True)
    x = operand_for(a, order, n, seed=12, whole=True)
    expected = product(a.to(torch.float32), order, x.float(), impl="reference").half()
    assert torch.equal(product(a, order, x, impl="triton"), expected)


@pytest.mark.parametrize("config", [ONE, SOME])
@pytest.mark.parametrize("blocks", [0, 1, 15, 16, 17, 31, 32, 33, 48])
def test_rows_that_end_before_at_and_after_a_step(device, config, blocks):
    keep = torch.zeros(2, 50, dtype=torch.bool, device=device)
    keep[0, 2 : 2 + blocks], keep[1, 7] = True, True
    values = normal(32, 800, seed=13, dtype=torch.float16).round().to(device)
    a = BSRMatrix.from_mask(values, keep, (16, 16))
    x = operand_for(a, "A@X", 1, seed=14, whole=True)
    expected = a.to_dense().double() @ x.double()
    assert torch.equal(launch(a, x[None], config)[0].double(), expected)


@pytest.mark.parametrize("n", [1, 17])
def test_what_no_block_meets_is_not_read(device, n):
    dense = normal(64, 96, seed=19, dtype=torch.float16).to(device)
    keep = torch.zeros(4, 6, dtype=torch.bool, device=device)
    keep[:, ::2] = True
    a = BSRMatrix.from_mask(dense, keep, (16, 16))
    x = operand_for(a, "A@X", n, seed=20)
    expected = matmul(a, x, impl="triton")
    x.view(6, 16, n)[1::2] = float("nan")
    assert torch.equal(matmul(a, x, impl="triton"), expected)


def test_nothing_to_do(device):
    half = {"dtype": torch.float16, "device": device}
    empty = BSRMatrix.from_mask(
        torch.zeros(40, 50, **half), torch.zeros(3, 4, dtype=torch.bool, device=device), (16, 16)
    )
    bias, x = normal(40, seed=16, **half), normal(50, 3, seed=17, **half)
    got = matmul(empty, x, bias=bias, activation="relu", impl="triton")
    assert torch.equal(got, bias.relu()[:, None].expand(40, 3))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", [ONE, replace(SOME, tile_n=32)])
def test_nothing_outside_of_the_tensors_is_touched(interpreted, side, config):
    half, n = torch.float16, 1 if config is ONE else 19
    a = random_bsr((40, 445), (16, 16), seed=29, dtype=half)
    x, residual = normal(2, 445, n, seed=30, dtype=half), normal(2, 40, n, seed=32, dtype=half)
    bias = normal(40, seed=31, dtype=half)
    expected = matmul(a, x, bias=bias, residual=residual, impl="reference")
    table = build_row_table(a.pattern.indptr, a.pattern.indices, None)
    table = table._replace(records=guarded(table.records, side))
    out = guarded(nan_like(expected), side)
    views = Views(out, guarded(x, side), guarded(residual, side))
    launch_spmm_narrow(*(views, guarded(a.storage, side), table, guarded(bias, side), None, config))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("far", ["x", "out", "values"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_past_2_to_the_31(interpreted, far, dim):
    a = random_bsr((32, 32), (16, 16), seed=33, dtype=torch.float16, density=1.0, whole=True)
    x = normal(2, 32, 18, seed=34, dtype=torch.float16).round()
    tensors = {"x": x, "out": torch.zeros(2, 32, 18).half(), "values": a.storage}
    expected = matmul(a, x, impl="reference")
    like = tensors[far]
    strides = [1024, 32, 1]
    strides[dim] = 2**31 // (like.shape[dim] - 1) + 1
    tensors[far] = huge_zeros(like.shape, like.dtype, strides)
    tensors[far].copy_(like)
    table = build_row_table(a.pattern.indptr, a.pattern.indices, None)
    config = replace(SOME, tile_n=32)
    views = Views(tensors["out"], tensors["x"])
    launch_spmm_narrow(views, tensors["values"], table, None, None, config)
    assert torch.equal(tensors["out"], expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(SOME, tile_m=32), "tile_m=32 does not divide the block height 48"),
        (ONE, "tile_n=1 is less than n=3"),
        (replace(SOME, num_warps=16), "tile_k=128 is too short for 16 warps"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(device, config, message):
    a = random_bsr((48, 48), (48, 48), seed=36, dtype=torch.float16, device=device)
    x = operand_for(a, "A@X", 3, seed=37)[None]
    with pytest.raises(InvalidInput, match=message):
        launch(a, x, config)
    launch(a, x, SOME)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [("contiguous", True), ("transposed", True), ("spread rows", False), ("odd address", False)],
)
def test_only_whole_aligned_blocks_are_prefetched(monkeypatch, stored, expected):
    a = random_bsr((32, 64), (16, 32), seed=38, dtype=torch.float16, density=1.0)
    values = {
        "contiguous": a.storage,
        "transposed": a.storage.mT.contiguous().mT,
        "spread rows": a.storage.repeat(1, 1, 2)[..., :32],
        "odd address": torch.zeros(a.storage.numel() + 1).half()[1:].view(a.storage.shape),
    }[stored]
    asked = []
    monkeypatch.setattr(spmm_narrow, "launch", lambda kernel, grid, args, **_: asked.append(args))
    names = spmm_narrow._bsr_spmm_narrow_kernel.arg_names
    x = operand_for(a, "A@X", 1, seed=39)[None]
    table = build_row_table(a.pattern.indptr, a.pattern.indices, None)
    out = x.new_empty((1, 32, 1))
    config = replace(ONE, prefetch=True)
    launch_spmm_narrow(Views(out, x), values, table, None, None, config)
    assert asked[0][names.index("PREFETCH")] is expected
