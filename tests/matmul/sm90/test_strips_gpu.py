"""Strips of blocks 16 columns wide with few columns, against the fp64 oracle and in graphs."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.core.compat import warps_may_part
from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.bsr_layers import check_chain_in_graph, check_layer, layer_weight

pytestmark = pytest.mark.sm90
needs_parting = pytest.mark.skipif(not warps_may_part(), reason="needs the Triton of strips")


@pytest.fixture
def strips(monkeypatch):
    """Configurations of the first launches of strips of narrow blocks."""
    from blackwell_sparsek.matmul.sm90 import spmm_launch

    launch, noted = spmm_launch.launch_spmm_strips, []

    def note(*args):
        noted.append(args[-1])
        launch(*args)

    monkeypatch.setattr(spmm_launch, "launch_spmm_strips", note)
    return noted


@needs_parting
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32])
@pytest.mark.parametrize(
    "shape, block",
    [
        ((72, 96), (16, 16)),
        ((4104, 2048), (16, 16)),
        ((5000, 3072), (16, 16)),
        ((40000, 256), (16, 16)),
        ((264, 192), (128, 16)),
        ((1000, 4096), (64, 16)),
    ],
)
def test_strips_keep_the_budget(n, shape, block, strips):
    torch.manual_seed(n)
    dtype = torch.float16 if n % 2 else torch.bfloat16
    a = layer_weight(*shape, block, dtype, density=0.3)
    x = torch.randn(n, shape[1], device="cuda", dtype=dtype)
    bias = torch.randn(shape[0], device="cuda", dtype=dtype)
    residual = torch.randn(n, shape[0], device="cuda", dtype=dtype)
    first = check_layer(a, x)
    assert all(torch.equal(matmul(x, a.T, impl="sm90"), first) for _ in range(5))
    check_layer(a, x, bias=bias, activation="silu", residual=residual)
    assert check_layer(a, x, activation="gelu", out_dtype=torch.float32).dtype == torch.float32
    assert bool(strips) == (block[0] == 16 or n <= 16)


@needs_parting
@pytest.mark.parametrize("tile_n", [8, 16, 32])
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("k_tiles", [1, 2])
def test_integers_are_exact_in_every_shape_of_strips(tile_n, warps, k_tiles):
    """Rows of x that no block meets are NaN, and so is what is behind the columns."""
    from blackwell_sparsek.matmul.sm90.config import StripsConfig
    from blackwell_sparsek.matmul.sm90.row_schedule import build_row_table
    from blackwell_sparsek.matmul.sm90.strips import launch_spmm_strips

    torch.manual_seed(0)
    for rows, cols, height in ((200, 640, 16), (300, 2048, 32), (16, 16, 16)):
        keep = torch.rand(-(-rows // height), cols // 16, device="cuda") < 0.3
        keep[0], keep[:, 0] = True, False
        keep[0, 0] = cols == 16
        dense = torch.randint(-2, 3, (rows, cols), device="cuda").bfloat16()
        a = BSRMatrix.from_mask(dense, keep, (height, 16))
        table = build_row_table(a.indptr, a.indices, None)
        for n in (1, tile_n - 1, tile_n):
            x = torch.full((n + 1, cols), float("nan"), device="cuda", dtype=torch.bfloat16)
            x[:n] = torch.randint(-2, 3, (n, cols), device="cuda").bfloat16()
            expected = (x[:n].float() @ a.to_dense().float().T).bfloat16()
            x[:, :16] = x[:, :16] if cols == 16 else float("nan")
            out = torch.full((n, rows), float("nan"), device="cuda", dtype=torch.bfloat16)
            config = StripsConfig(height, tile_n, warps, k_tiles)
            launch_spmm_strips(out.mT, a.storage, table, x[:n].mT, None, None, config)
            assert torch.equal(out, expected), (rows, cols, n)


@needs_parting
@pytest.mark.parametrize("n", [1, 16, 32])
def test_strips_that_need_each_other_in_a_graph(n, strips):
    check_chain_in_graph((16, 16), n)
    assert strips


def test_uneven_strips_are_left_to_others(strips):
    torch.manual_seed(0)
    keep = torch.zeros(64, 2048, dtype=torch.bool, device="cuda")
    keep[3], keep[:, 0] = True, True
    dense = torch.randn(64 * 16, 2048 * 16, device="cuda", dtype=torch.bfloat16)
    a = BSRMatrix.from_mask(dense, keep, (16, 16))
    check_layer(a, torch.randn(16, 2048 * 16, device="cuda", dtype=torch.bfloat16))
    assert not strips
