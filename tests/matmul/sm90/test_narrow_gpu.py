"""Hopper's product with few columns against the fp64 oracle, and in graphs."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek import explain
from blackwell_sparsek.core.compat import warps_may_part
from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.matmul.sm90 import spmm_launch as bsr_sm90
from blackwell_sparsek.matmul.sm90.config import NarrowSm90Config, narrow_stages_that_fit
from blackwell_sparsek.matmul.sm90.row_schedule import TileHeader, build_row_schedule
from blackwell_sparsek.matmul.sm90.tuning import narrow_sm90_config
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.bsr_layers import check_chain_in_graph, check_layer, layer_weight
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.sm90
SPLIT = TileHeader._fields.index("split")
pairs_only = pytest.mark.skipif(not warps_may_part(), reason="this Triton splits no tiles")


@pytest.fixture
def launched(monkeypatch):
    """Schedules and configurations of the first launches of products with few columns."""
    from blackwell_sparsek.matmul.sm90 import spmm_launch

    launch = spmm_launch.launch_spmm_narrow_sm90
    noted = []

    def note(out, values, schedule, x, bias, residual, config):
        noted.append((schedule, config))
        launch(out, values, schedule, x, bias, residual, config)

    monkeypatch.setattr(spmm_launch, "launch_spmm_narrow_sm90", note)
    return noted


def _split_in_two(problem):
    """What tuning says, but for two programs that share the longest tiles."""
    config = narrow_sm90_config(problem)
    sizes = (config.TILE_M, config.TILE_N, config.TILE_K * config.STAGE_BLOCKS)
    stages = narrow_stages_that_fit(*sizes, problem.out_dtype == torch.float32, split_k=2)
    return replace(config, STAGES=stages, SPLIT_K=2)


def _assert_cut_and_whole(launched):
    """All launches were for clusters of two, with tiles that are split beside others."""
    assert launched
    for schedule, config in launched:
        first = schedule.records[:, 0].cpu()
        split = first[first[:, 0] > 0, SPLIT]
        assert config.SPLIT_K == 2 and split.any() and not split.all()


def _skewed(rows, cols, block, dtype):
    """One row has half of the blocks, the next one none, and the others a tenth."""
    keep = torch.rand(-(-rows // block[0]), -(-cols // block[1])) < 0.1
    keep[1], keep[2] = torch.arange(keep.shape[1]) % 2 == 0, False
    dense = torch.randn(rows, cols, device="cuda", dtype=dtype)
    return BSRMatrix.from_mask(dense, keep.cuda(), block)


@pytest.mark.parametrize("n", [1, 2, 8, 15, 16, 17, 33, 63, 64, 65, 100, 128])
@pytest.mark.parametrize(
    "shape, block",
    [
        ((280, 520), (128, 128)),
        ((200, 328), (64, 32)),
        ((520, 776), (256, 256)),
        ((136, 200), (32, 32)),
        ((72, 88), (16, 16)),
        ((264, 184), (128, 16)),
        ((200, 280), (64, 48)),
    ],
)
def test_products_keep_the_budget(n, shape, block):
    torch.manual_seed(n)
    dtype = torch.float16 if n % 2 else torch.bfloat16
    a = layer_weight(*shape, block, dtype)
    x = torch.randn(n, shape[1], device="cuda", dtype=dtype)
    bias = torch.randn(shape[0], device="cuda", dtype=dtype)
    residual = torch.randn(n, shape[0], device="cuda", dtype=dtype)
    check_layer(a, x)
    check_layer(a, x, bias=bias, activation="silu", residual=residual)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("extra", ["", "bias", "residual"])
def test_every_epilogue(activation, extra):
    torch.manual_seed(0)
    a = layer_weight(256, 384, (64, 64))
    x = torch.randn(20, 384, device="cuda", dtype=torch.bfloat16)
    shape = {"bias": (256,), "residual": (20, 256)}.get(extra)
    options = {extra: torch.randn(shape, device="cuda", dtype=torch.bfloat16)} if extra else {}
    check_layer(a, x, activation=activation, **options)
    got = check_layer(a, x, activation=activation, out_dtype=torch.float32, **options)
    assert got.dtype == torch.float32


def test_views_and_batches():
    torch.manual_seed(0)
    a = layer_weight(256, 384, (64, 64))
    wide = torch.randn(3, 40, 512, device="cuda", dtype=torch.bfloat16)
    for x in (
        wide[0, ::2, :384],
        wide[:, :5, 64:448],
        wide[:2, :16, :384].contiguous(),
        wide[:, :7, :384].transpose(0, 1),
        wide[:1, :3, :384],
        # one row has no distance to the next, whatever its stride says
        torch.randn(2, 385, device="cuda", dtype=torch.bfloat16)[:1, :384],
    ):
        assert explain(matmul, x, a.T, impl="sm90").chosen == "sm90"
        check_layer(a, x)
        residual = torch.randn(*x.shape[:-1], 256, device="cuda", dtype=torch.bfloat16)
        check_layer(a, x, residual=residual)


def test_integers_are_exact_and_bits_do_not_depend_on_who_computes_a_tile():
    from blackwell_sparsek.matmul.sm90.narrow import launch_spmm_narrow_sm90

    torch.manual_seed(0)
    a = layer_weight(1024, 5120, (128, 128))
    whole = a.with_data(torch.randint(-2, 3, a.data.shape, device="cuda").bfloat16())
    for n, tile_m, tile_n, tile_k, split_k in (
        (40, 64, 64, 128, 1),
        (16, 32, 16, 128, 1),
        (33, 16, 64, 64, 1),
        (100, 64, 32, 128, 1),
        (128, 64, 128, 128, 1),
        (64, 64, 64, 128, 2),
        (17, 64, 32, 64, 2),
        (5, 64, 16, 128, 2),
    ):
        if split_k == 2 and not warps_may_part():
            continue
        x = torch.randint(-2, 3, (n, 5120), device="cuda").bfloat16()
        expected = (x.float() @ whole.to_dense().float().T).bfloat16()
        stages = narrow_stages_that_fit(tile_m, tile_n, tile_k, False, split_k)
        config = NarrowSm90Config(128, 128, tile_m, tile_n, tile_k, 1, stages, SPLIT_K=split_k)
        for programs in (1, 7, 132, 10**6):
            schedule = build_row_schedule(a.indptr, a.indices, config, n, programs)
            split = bool(schedule.records[..., SPLIT].any())
            assert split == (split_k == 2 and programs >= 132)
            torch.cuda.synchronize()
            for prefetch in (0, 1, 4, 32):
                schedule = schedule._replace(prefetch=prefetch)
                out = torch.full((n, 1024), float("nan"), device="cuda", dtype=torch.bfloat16)
                launch_spmm_narrow_sm90(out.mT, whole.storage, schedule, x.mT, None, None, config)
                assert torch.equal(out, expected), (config, programs, prefetch)


@pairs_only
@pytest.mark.parametrize("n", [2, 15, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(
    "shape, block, density",
    [
        ((6144, 4096), (128, 128), 0.22),
        ((6144, 4096), (64, 64), 0.22),
        ((6144, 4096), (64, 32), 0.22),
        ((6144, 4096), (256, 256), 0.28),
        ((4096, 14336), (128, 128), 0.25),
        ((4096, 14336), (128, 32), 0.25),
    ],
)
def test_layers_that_tuning_cuts(n, shape, block, density, launched):
    torch.manual_seed(n)
    keep = torch.rand(shape[0] // block[0], shape[1] // block[1]) < density
    keep[0] = False
    # the longest row, by far
    keep[1] = torch.arange(keep.shape[1]) % 5 < 3
    dtype = torch.float16 if n % 2 else torch.bfloat16
    a = BSRMatrix.from_mask(torch.randn(shape, device="cuda", dtype=dtype), keep.cuda(), block)
    x = torch.randn(n, shape[1], device="cuda", dtype=dtype)
    check_layer(a, x)
    _assert_cut_and_whole(launched)


@pairs_only
@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 57, 63, 64])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (64, 32), (128, 16), (64, 48)])
def test_rows_split_in_two(n, block, launched, monkeypatch):
    monkeypatch.setattr(bsr_sm90, "narrow_sm90_config", _split_in_two)
    torch.manual_seed(n)
    dtype = torch.float16 if n % 2 else torch.bfloat16
    a = _skewed(600, 3000, block, dtype)
    x = torch.randn(n, 3000, device="cuda", dtype=dtype)
    bias = torch.randn(600, device="cuda", dtype=dtype)
    residual = torch.randn(n, 600, device="cuda", dtype=dtype)
    first = check_layer(a, x)
    # one behind the other: a program may still wait for its partner when the next one starts
    again = [matmul(x, a.T, impl="sm90") for _ in range(50)]
    assert all(torch.equal(out, first) for out in again)
    check_layer(a, x, bias=bias, activation="silu", residual=residual)
    _assert_cut_and_whole(launched)


@pairs_only
@pytest.mark.parametrize("n", [16, 20, 64])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("extra", ["", "bias", "residual"])
def test_every_epilogue_of_split_tiles(n, activation, extra, launched, monkeypatch):
    monkeypatch.setattr(bsr_sm90, "narrow_sm90_config", _split_in_two)
    torch.manual_seed(0)
    a = _skewed(600, 3000, (64, 64), torch.bfloat16)
    x = torch.randn(n, 3000, device="cuda", dtype=torch.bfloat16)
    shape = {"bias": (600,), "residual": (n, 600)}.get(extra)
    options = {extra: torch.randn(shape, device="cuda", dtype=torch.bfloat16)} if extra else {}
    check_layer(a, x, activation=activation, **options)
    got = check_layer(a, x, activation=activation, out_dtype=torch.float32, **options)
    assert got.dtype == torch.float32
    _assert_cut_and_whole(launched)


@pytest.mark.parametrize("n", [1, 16, 64])
@pytest.mark.parametrize("split_k", [1, pytest.param(2, marks=pairs_only)])
def test_calls_that_need_each_other_in_a_graph(n, split_k, launched, monkeypatch):
    if split_k == 2:
        monkeypatch.setattr(bsr_sm90, "narrow_sm90_config", _split_in_two)
    check_chain_in_graph((128, 64), n)
    if split_k == 2:
        _assert_cut_and_whole(launched)
    assert {config.SPLIT_K for _, config in launched} == {split_k}


def test_captured_without_a_schedule(monkeypatch):
    torch.manual_seed(0)
    a, other = layer_weight(512, 512, (64, 64)), layer_weight(512, 512, (64, 64))
    x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    # the kernel for many columns, compiled and loaded before the capture that has to take it
    with monkeypatch.context() as patch:
        patch.setattr(bsr_sm90, "narrow_sm90_config", lambda problem: None)
        matmul(x, other.T, impl="sm90")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = matmul(x, a.T, impl="sm90")
    graph.replay()
    dense = a.to_dense()
    assert_within_budget(got, x.double() @ dense.double().T, x @ dense.T)


def test_uneven_rows_are_split():
    torch.manual_seed(0)
    keep = torch.zeros(64, 2048, dtype=torch.bool, device="cuda")
    keep[3], keep[:, 0] = True, True
    a = BSRMatrix.from_mask(
        torch.randn(64 * 64, 2048 * 16, device="cuda", dtype=torch.bfloat16), keep, (64, 16)
    )
    x = torch.randn(16, 2048 * 16, device="cuda", dtype=torch.bfloat16)
    check_layer(a, x)


def test_auto_takes_it_and_compiles_without_breaks():
    torch.manual_seed(0)
    a = layer_weight(1024, 1024, (128, 128), density=0.2)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    assert explain(matmul, x, a.T).chosen == "sm90"
    run = torch.compile(lambda x: matmul(x, a.T, activation="relu") * 2, fullgraph=True)
    assert torch.equal(run(x), matmul(x, a.T, activation="relu", impl="sm90") * 2)
