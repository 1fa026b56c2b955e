"""Hopper's product with few columns against the fp64 oracle, and in graphs."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.formats.bsr import BSRMatrix
from blackwell_sparsek.functional.bsr import matmul
from blackwell_sparsek.kernels.bsr.config_narrow_sm90 import NarrowSm90Config, stages_that_fit
from blackwell_sparsek.kernels.bsr.row_table import build_row_table
from blackwell_sparsek.testing.tolerance import assert_within_budget

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs sm_90")]


def _weight(rows, cols, block, dtype=torch.bfloat16, density=0.4):
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    keep = torch.rand(grid, device="cuda") < density
    keep[0], keep[-1] = False, True
    return BSRMatrix.from_mask(torch.randn(rows, cols, device="cuda", dtype=dtype), keep, block)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 63, 64])
@pytest.mark.parametrize("shape, block", [((280, 520), (128, 128)), ((200, 328), (64, 32))])
def test_products_keep_the_budget(n, shape, block):
    torch.manual_seed(n)
    a = _weight(*shape, block)
    x = torch.randn(n, shape[1], device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(n, shape[0], device="cuda", dtype=torch.bfloat16)
    dense = a.to_dense()
    for options in ({}, {"bias": bias, "activation": "silu", "residual": residual}):
        got = matmul(x, a.T, impl="sm90", **options)
        exact, plain = x.double() @ dense.double().T, x @ dense.T
        if options:
            silu = torch.nn.functional.silu
            exact = silu(exact + bias.double()) + residual.double()
            plain = silu(plain + bias) + residual
        assert_within_budget(got, exact, plain)


@pytest.mark.parametrize("tile_m, splits", [(64, 1), (64, 2), (64, 4), (32, 1), (32, 3), (16, 1)])
@pytest.mark.parametrize("prefetch", [False, True])
def test_every_cut_gives_the_same_bits_each_time(tile_m, splits, prefetch):
    from blackwell_sparsek.kernels.bsr.spmm_narrow_sm90 import launch_spmm_narrow_sm90

    torch.manual_seed(0)
    a = _weight(512, 1024, (128, 128))
    x = torch.randn(40, 1024, device="cuda", dtype=torch.bfloat16)
    stages = stages_that_fit(tile_m, 64, 64, 2)
    config = NarrowSm90Config(
        128, 128, tile_m, 64, 64, stages, splits, OVERLAP=True, PREFETCH=prefetch
    )
    table = build_row_table(a.indptr, a.indices, None)
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        out = torch.full((40, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
        launch_spmm_narrow_sm90(out.mT, a.storage, table, x.mT, None, None, config)
        outs.append(out)
    dense = a.to_dense()
    assert_within_budget(outs[0], x.double() @ dense.double().T, x @ dense.T)
    assert all(torch.equal(outs[0], out) for out in outs)


def test_calls_that_need_each_other_in_a_graph():
    torch.manual_seed(0)
    a = _weight(1024, 1024, (128, 128))
    a = a.with_data(a.data * 0.05)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)

    def chain():
        y = x
        for _ in range(10):
            y = matmul(y, a.T, impl="sm90")
        return y

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(10):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)


def test_uneven_rows_are_cut():
    torch.manual_seed(0)
    keep = torch.zeros(64, 2048, dtype=torch.bool, device="cuda")
    keep[3], keep[:, 0] = True, True
    a = BSRMatrix.from_mask(
        torch.randn(64 * 64, 2048 * 16, device="cuda", dtype=torch.bfloat16), keep, (64, 16)
    )
    x = torch.randn(16, 2048 * 16, device="cuda", dtype=torch.bfloat16)
    dense = a.to_dense()
    got = matmul(x, a.T, impl="sm90")
    assert_within_budget(got, x.double() @ dense.double().T, x @ dense.T)
