from dataclasses import replace

import pytest
import torch

from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.kernels.bsr.config_narrow_sm90 import stages_that_fit
from blackwell_sparsek.kernels.sm90 import SMEM_BYTES
from blackwell_sparsek.tuning.bsr_sm90 import (
    narrow_sm90_config,
    spmm_sm90_config,
    spmm_sm90_passed_over,
    spmm_sm90_unsupported,
)
from blackwell_sparsek.tuning.problem_bsr import BsrProblem

HOPPER = Arch(kind="cuda", sm=90, num_sms=132, smem_bytes=227 * 1024, interpreted=False)
# x [n, 4096] @ A.T for A [6144, 4096] in blocks of 128
LAYER = BsrProblem(
    kind="matmul",
    arch=HOPPER,
    dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    shape=(4096, 6144),
    block_shape=(128, 128),
    nnz_blocks=338,
    n=16,
    dense_left=True,
    transposed=True,
    tma=True,
)


@pytest.mark.parametrize("n, tile_n", [(1, 16), (16, 16), (17, 32), (33, 64), (64, 64)])
def test_columns_of_a_tile(n, tile_n):
    config = narrow_sm90_config(replace(LAYER, n=n))
    assert config.x_block() == [tile_n, 64]


@pytest.mark.parametrize("rows, tile_m", [(4096, 32), (8448, 64), (28672, 64)])
def test_tall_tiles_only_where_they_fill_the_gpu(rows, tile_m):
    config = narrow_sm90_config(replace(LAYER, shape=(4096, rows)))
    assert config.tile_m == tile_m


@pytest.mark.parametrize(
    "change",
    [
        {"n": 65},
        {"n": 0},
        {"nnz_blocks": 0},
        {"transposed": False},
        {"dense_left": False, "transposed": False},
        {"row_major": False},
    ],
)
def test_what_the_narrow_kernel_does_not_take(change):
    assert narrow_sm90_config(LAYER) is not None
    assert narrow_sm90_config(replace(LAYER, **change)) is None


def test_few_columns_run_when_asked_for_and_auto_leaves_them():
    assert spmm_sm90_unsupported(LAYER) is None
    assert "16 columns are left" in spmm_sm90_passed_over(LAYER)
    assert spmm_sm90_passed_over(replace(LAYER, n=65)) is None
    reason = spmm_sm90_unsupported(replace(LAYER, dense_left=False, transposed=False))
    assert reason == (
        "with 16 columns needs x @ A.T, a contiguous last dimension of x and at least one block"
    )


@pytest.mark.parametrize("tile_m", [16, 32, 64])
@pytest.mark.parametrize("tile_n", [16, 32, 64])
@pytest.mark.parametrize("tile_k", [16, 64, 128])
@pytest.mark.parametrize("programs", [1, 2])
def test_programs_fit_an_sm(tile_m, tile_n, tile_k, programs):
    stages = stages_that_fit(tile_m, tile_n, tile_k, programs)
    x_rows = tile_n if tile_m == 64 else 64
    ring, exchange = 2 * stages * tile_k * (tile_m + x_rows), 16 * 1024
    assert stages >= 2
    assert programs * (ring + exchange + 1024) <= SMEM_BYTES


@pytest.mark.parametrize("block", [(128, 128), (128, 16), (64, 64), (32, 32)])
def test_a_step_of_a_wide_product_is_two_copies(block):
    wide = replace(LAYER, block_shape=block, n=8192, dense_left=False, transposed=False)
    config = spmm_sm90_config(wide, x_transposed=False)
    assert (config.WIDE, config.a_copies, config.x_copies) == (True, 1, 1)
    slabs, rows, columns = config.x_block()
    assert (slabs * columns, rows) == (config.tile_n, config.TILE_K)
    assert config.a_block() == [config.tile_m, config.TILE_K]
    # 1000 columns are no whole number of slabs
    for other in (
        spmm_sm90_config(replace(wide, n=1000), x_transposed=False),
        spmm_sm90_config(wide, x_transposed=True),
    ):
        assert not other.WIDE and other.x_block() == other.x_tile()
