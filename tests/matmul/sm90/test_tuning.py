from dataclasses import replace

import pytest
import torch

from blackwell_sparsek.calls.matmul import BsrProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.compat import WARPS_TRITON
from blackwell_sparsek.launch.descriptors import SMEM_BYTES
from blackwell_sparsek.matmul import estimate as bsr_estimate
from blackwell_sparsek.matmul.estimate import dense_seconds, sparse_seconds
from blackwell_sparsek.matmul.sm90 import tuning as bsr_sm90
from blackwell_sparsek.matmul.sm90.config import narrow_stages_that_fit
from blackwell_sparsek.matmul.sm90.tuning import (
    narrow_sm90_config,
    spmm_sm90_config,
    spmm_sm90_paired,
    spmm_sm90_passed_over,
    spmm_sm90_unsupported,
)
from blackwell_sparsek.matmul.triton.tuning import narrow_is_even

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
# one that does not let warps part
OTHER_TRITON = (3, 99)


@pytest.fixture(autouse=True)
def parting_triton(choosing_with):
    """As with a release that lets warps part, whichever is installed."""
    choosing_with(WARPS_TRITON[-1])


@pytest.mark.parametrize("n, tile_n", [(1, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 64)])
def test_columns_of_a_tile(n, tile_n):
    config = narrow_sm90_config(replace(LAYER, n=n))
    assert config.x_block() == [tile_n, 128]


@pytest.mark.parametrize(
    "rows, block, n, tile_n",
    [
        # 64 tiles of rows for 132 SMs, 256, 896: the more, the less others are to share
        (4096, 128, 128, 64),
        (16384, 128, 128, 64),
        (57344, 128, 128, 128),
        (4096, 128, 256, 128),
        (16384, 128, 256, None),
        # low tiles are the second operand and x the first, of 64 columns
        (57344, 32, 128, 64),
        (4096, 32, 256, None),
        (4096, 16, 65, None),
    ],
)
def test_more_columns_in_several_tiles(rows, block, n, tile_n):
    layer = replace(LAYER, shape=(4096, rows), block_shape=(block, block), n=n)
    config = narrow_sm90_config(layer)
    assert (config and config.TILE_N) == tile_n


@pytest.mark.parametrize(
    "block, n, columns",
    [
        ((128, 128), 128, 128),
        ((64, 64), 128, 128),
        ((128, 128), 136, 256),
        ((64, 64), 136, 256),
        ((64, 64), 256, 256),
        ((64, 64), 257, 512),
    ],
)
def test_panels_are_no_wider_than_the_columns(block, n, columns):
    tall = replace(
        *(LAYER,), shape=(57344, 8192), block_shape=block, n=n, dense_left=False, transposed=False
    )
    assert spmm_sm90_config(tall, x_transposed=False).tile_n == columns


@pytest.mark.parametrize(
    "block, tile_m, tile_k, stage_blocks",
    [
        ((128, 128), 64, 128, 1),
        ((256, 256), 64, 128, 1),
        ((128, 64), 64, 64, 2),
        ((64, 32), 64, 32, 4),
        ((32, 32), 32, 32, 4),
        ((16, 16), 16, 16, 4),
    ],
)
def test_tiles_fit_the_blocks(block, tile_m, tile_k, stage_blocks):
    config = narrow_sm90_config(replace(LAYER, block_shape=block[::-1]))
    assert config.a_block() == [tile_m, tile_k]
    assert stage_blocks == config.STAGE_BLOCKS


@pytest.mark.parametrize(
    "change",
    [
        {"n": 257},
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


def test_few_columns_of_the_other_orders_are_refused():
    assert spmm_sm90_unsupported(LAYER) is None
    reason = spmm_sm90_unsupported(replace(LAYER, dense_left=False, transposed=False))
    assert reason == (
        "with 16 columns needs x @ A.T, a contiguous last dimension of x and at least one block"
    )


def test_what_auto_leaves_to_the_portable_kernels():
    # 16 rows; those 16 columns wide are made in strips
    low = replace(LAYER, block_shape=(32, 16))
    assert spmm_sm90_passed_over(replace(low, block_shape=(16, 16))) is None
    assert spmm_sm90_passed_over(replace(LAYER, n=1)) == (
        "one column is left to the portable kernels"
    )
    assert spmm_sm90_passed_over(low) == (
        "16 columns and blocks of height 16 are left to the portable kernels"
    )
    for taken in (
        *(replace(LAYER, n=n) for n in (2, 16, 17, 64, 65, 8192)),
        *(replace(LAYER, n=1, batch=2), replace(LAYER, block_shape=(32, 32))),
        replace(LAYER, n=1, shape=(4096, 28672)),
        *(replace(low, n=17), replace(low, n=4, batch=8), replace(low, n=8192)),
    ):
        assert spmm_sm90_passed_over(taken) is None, taken


def test_without_strips_auto_leaves_the_lowest_blocks_to_the_portable_kernels(choosing_with):
    choosing_with(OTHER_TRITON)
    lowest = replace(LAYER, block_shape=(16, 16))
    assert spmm_sm90_passed_over(lowest) == (
        "16 columns and blocks of height 16 are left to the portable kernels"
    )
    assert spmm_sm90_passed_over(replace(lowest, n=17)) is None


@pytest.mark.parametrize("tile_m", [16, 32, 64])
@pytest.mark.parametrize("tile_n", [16, 32, 64])
@pytest.mark.parametrize("tile_k", [64, 128])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("split_k", [1, 2])
def test_programs_fit_an_sm(tile_m, tile_n, tile_k, wide, split_k):
    stages = narrow_stages_that_fit(tile_m, tile_n, tile_k, wide, split_k)
    x_rows = tile_n if tile_m == 64 else 64
    # what the compiler takes to change the layout of sums, and the system for each program
    ring, relayout = 2 * stages * tile_k * (tile_m + x_rows), (16 if wide else 4) * 1024
    # half of the sums in float32 and a barrier, in whole tiles of blocks
    tile = 2 * tile_m * tile_k
    exchange = -(-(4 * 64 * tile_n // 2 + 8) // tile) * tile if split_k == 2 else 0
    assert stages >= 2
    assert ring + relayout + exchange + 1024 <= SMEM_BYTES


@pytest.fixture
def split_of(monkeypatch):
    """Parts of a tile of A [rows, cols] in 22 % of its blocks, whatever Triton is installed."""

    def split(rows, cols, block=128, known=True, **change):
        monkeypatch.setattr(bsr_sm90, "warps_may_part", lambda: known)
        narrow_sm90_config.cache_clear()
        blocks = round(0.22 * (rows // block) * (cols // block))
        sizes = {"shape": (cols, rows), "block_shape": (block, block), "nnz_blocks": blocks}
        return narrow_sm90_config(replace(LAYER, **sizes | change)).SPLIT_K

    yield split
    narrow_sm90_config.cache_clear()


@pytest.mark.parametrize("n", [2, 16, 64])
@pytest.mark.parametrize(
    "rows, cols, blocks, split",
    [
        (6144, 4096, (64, 128), 2),
        (4096, 14336, (64, 128), 2),
        (8192, 28672, (128,), 2),
        # rows are short, and more or fewer than half to three quarters of the SMs have tiles
        (4096, 4096, (64, 128), 1),
        (8192, 8192, (128,), 1),
        # no SM is idle
        (28672, 4096, (64, 128), 1),
        (10240, 8192, (128,), 1),
        (57344, 8192, (128,), 1),
        # not measured: low tiles
        (4096, 14336, (32, 16), 1),
    ],
)
def test_tiles_are_split_where_that_was_faster(rows, cols, blocks, split, n, split_of):
    for block in blocks:
        assert split_of(rows, cols, block, n=n) == split
        assert split_of(rows, cols, block, n=n, known=False) == 1


def test_where_tiles_begin_to_be_split(split_of):
    # 99 and 100 tiles for 132 SMs in blocks of 64, 66 and 67
    tiles = {count: split_of(64 * count, 4096, 64) for count in (66, 67, 99, 100)}
    assert tiles == {66: 1, 67: 2, 99: 2, 100: 1}
    long = {count: split_of(64 * count, 14336, 64) for count in (1, 131, 132)}
    assert long == {1: 2, 131: 2, 132: 1}
    # rows of 768 and of 3072 elements in the mean, and one block less in all
    for rows, least in ((6144, 288), (4096, 768)):
        assert split_of(rows, 14336, nnz_blocks=least) == 2
        assert split_of(rows, 14336, nnz_blocks=least - 1) == 1
    # one column, and columns in several tiles, as before
    assert [split_of(6144, 4096, n=n) for n in (1, 2, 64, 65)] == [1, 2, 2, 1]


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


# layers of an 8B model in 22 % of the blocks: microseconds for 16 and 64 columns
@pytest.mark.parametrize(
    "rows, cols, few_us, many_us",
    [
        (4096, 4096, 4.4, 4.7),
        (6144, 4096, 5.4, 5.7),
        (4096, 14336, 9.9, 10.6),
        (28672, 4096, 17.4, 17.9),
    ],
)
def test_estimates_are_near_what_was_measured(rows, cols, few_us, many_us):
    blocks = round(0.22 * rows * cols / 128**2)
    layer = replace(LAYER, shape=(cols, rows), nnz_blocks=blocks)
    for n, measured in ((16, few_us), (64, many_us)):
        estimate = sparse_seconds(replace(layer, n=n), "sm90")
        assert estimate * 1e6 == pytest.approx(measured, rel=0.1)
        assert estimate < sparse_seconds(replace(layer, n=n), "triton")
        assert estimate < dense_seconds(replace(layer, n=n))


@pytest.mark.parametrize("block, longest", [((128, 128), 37), ((64, 64), 68)])
def test_half_as_many_tiles_as_sms_are_even_enough(block, longest):
    """4096 x 14336 in 22 % of the blocks: an SM takes in its long rows while others have none."""
    blocks = round(0.22 * 4096 * 14336 / block[0] ** 2)
    down = replace(LAYER, shape=(14336, 4096), block_shape=block, nnz_blocks=blocks)
    config = narrow_sm90_config(down)
    assert narrow_is_even(down, config, longest)
    assert not narrow_is_even(down, config, 2 * longest)


def test_low_blocks_are_bound_by_their_number(monkeypatch):
    monkeypatch.setattr(bsr_estimate, "strips_config", lambda problem: None)
    low = replace(LAYER, shape=(4096, 4096), block_shape=(16, 16), nnz_blocks=14418)
    assert sparse_seconds(low, "sm90") * 1e6 == pytest.approx(7.8, rel=0.1)


def test_estimates_take_a_batch_for_more_columns():
    batched = replace(LAYER, n=4, batch=4)
    assert sparse_seconds(batched, "sm90") == sparse_seconds(LAYER, "sm90")
    assert sparse_seconds(replace(LAYER, n=4, batch=64), "sm90") > sparse_seconds(LAYER, "sm90")


def square(block, n=8192, **changes):
    blocks = round(0.22 * 8192**2 / (block[0] * block[1]))
    shape = {"shape": (8192, 8192), "block_shape": block, "nnz_blocks": blocks, "n": n}
    return replace(LAYER, **shape, **changes)


@pytest.mark.parametrize("block", [(64, 64), (64, 16), (32, 32), (16, 16)])
@pytest.mark.parametrize("x_transposed", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_rows_of_64_are_paired_where_columns_are_many(block, x_transposed, out_dtype):
    problem = square(block, out_dtype=out_dtype)
    alone = spmm_sm90_config(problem, x_transposed)
    paired = spmm_sm90_paired(problem, alone)
    assert paired.PAIRED and out_dtype.itemsize == paired.OUT_BYTES
    assert paired.STAGES >= alone.STAGES - 1
    # each consumer's columns are fetched by one program of the two
    assert paired.x_copies == 2
    columns = [paired.x_slabs * side for side in paired.x_block()]
    assert 256 in columns or paired.x_block()[0] * 64 == 256


@pytest.mark.parametrize(
    ("block", "n"), [((128, 128), 8192), ((48, 192), 8192), ((64, 64), 128), ((64, 256), 8192)]
)
def test_other_rows_are_not_paired(block, n):
    problem = square(block, n)
    assert spmm_sm90_paired(problem, spmm_sm90_config(problem, False)) is None


def test_pairs_need_the_triton_that_they_were_read_in(choosing_with):
    problem = square((64, 64))
    config = spmm_sm90_config(problem, False)
    assert spmm_sm90_paired(problem, config) is not None
    choosing_with(OTHER_TRITON)
    assert spmm_sm90_paired(problem, config) is None
