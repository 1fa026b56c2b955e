import itertools
from dataclasses import replace

import pytest
import torch

from blackwell_sparsek.calls.matmul import BsrProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.matmul.triton.tuning import (
    PairConfig,
    SddmmConfig,
    SpmmConfig,
    largest_tile,
    narrow_config,
    narrow_is_even,
    pair_config,
    sddmm_config,
    spmm_chunk,
    spmm_config,
    triton_stages,
)
from blackwell_sparsek.matmul.triton.tuning import spmm_sizes as sizes_of

ARCHS = {
    80: Arch("cuda", 80, 108, 166912, False),
    89: Arch("cuda", 89, 128, 101376, False),
    90: Arch("cuda", 90, 132, 232448, False),
    100: Arch("cuda", 100, 148, 232448, False),
    120: Arch("cuda", 120, 170, 101376, False),
    0: Arch("cpu", 0, 1, 0, True),
}
SIDES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 240, 256)


def problem(kind="matmul", sm=90, dtype=torch.float16, block=(128, 128), n=8192, **kwargs):
    nnzb = (8192 // block[0]) * (8192 // block[1]) * 22 // 100
    other = block[::-1]
    return BsrProblem(
        *(kind, ARCHS[sm], dtype, dtype, (8192, 8192), block, nnzb, n),
        **{"other_block_shape": other, **kwargs},
    )


@pytest.mark.parametrize("sm", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_configs_fit_blocks_and_shared_memory(sm, dtype):
    limit = ARCHS[sm].smem_bytes or 99 * 1024
    precisions = ("ieee", "tf32") if dtype == torch.float32 else ("ieee",)
    for bh, bw, precision in itertools.product(SIDES, SIDES, precisions):
        for n, left in itertools.product((1, 16, 17, 64, 65, 8192), (False, True)):
            p = problem(sm=sm, dtype=dtype, block=(bh, bw), n=n, dense_left=left)
            config = spmm_config(p, precision)
            config.check_blocks((bw, bh) if left else (bh, bw))
            assert config.smem_bytes(dtype.itemsize) <= limit
            assert config.input_precision == precision
        p = problem("sddmm", sm=sm, dtype=dtype, block=(bh, bw))
        config = sddmm_config(p, precision)
        config.check_blocks((bh, bw))
        assert config.smem_bytes(dtype.itemsize) <= limit
        p = problem("pairs", sm=sm, dtype=dtype, block=(bh, bw))
        config = pair_config(p, precision)
        config.check_blocks((bh, bh), bw)
        assert config.smem_bytes(dtype.itemsize) <= limit


def test_few_columns_never_pad_to_a_wide_tile():
    assert spmm_config(problem(n=1), "ieee").tile_n == 16
    assert spmm_config(problem(n=33), "ieee").tile_n == 64
    assert spmm_config(problem(n=8192), "ieee").tile_n == 256


def test_few_columns_are_cut_into_enough_programs():
    config = spmm_config(problem(n=1), "ieee")
    assert 64 * 128 // config.tile_m >= 3 * ARCHS[90].num_sms


def test_even_patterns_are_not_cut_and_skewed_ones_are():
    p = problem()
    row = 64 * 22 // 100
    assert spmm_config(p, "ieee").chunk > 2 * row
    one_panel = replace(p, n=256)
    sizes = sizes_of(one_panel)
    assert spmm_chunk(p.arch, sizes, 128, 256) < 64
    # a power of two: few plans for each pattern
    chunks = {spmm_config(replace(p, n=n), "ieee").chunk for n in range(1, 20000, 97)}
    assert all(c & (c - 1) == 0 for c in chunks) and len(chunks) < 12


def test_few_blocks_share_the_sum():
    many, few = problem("sddmm"), replace(problem("sddmm"), nnz_blocks=10)
    assert sddmm_config(many, "ieee").split_k == 1
    assert sddmm_config(few, "ieee").split_k > 4
    assert sddmm_config(replace(few, n=64), "ieee").split_k == 1


def test_largest_tile():
    assert [largest_tile(n, 128) for n in (16, 48, 96, 112, 128, 256)] == [16, 16, 32, 16, 128, 128]
    assert largest_tile(256, 100) == 64


def test_stages():
    assert [triton_stages(b, 0) for b in (1, 2, 3)] == [1, 2, 3]
    assert [triton_stages(b, 1) for b in (1, 2, 3, 4)] == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SpmmConfig(24, 16, 16, 4, 2, "ieee", 1), "tile_m must be a power of two"),
        (lambda: SpmmConfig(16, 8, 16, 4, 2, "ieee", 1), "tile_n must be a power of two"),
        (lambda: SpmmConfig(16, 16, 16, 3, 2, "ieee", 1), "num_warps is 3"),
        (lambda: SpmmConfig(16, 16, 16, 4, 0, "ieee", 1), "num_stages is 0"),
        (lambda: SpmmConfig(16, 16, 16, 4, 2, "bf16", 1), "input_precision is bf16"),
        (lambda: SpmmConfig(16, 16, 16, 4, 2, "ieee", 0), "chunk must be at least 1; got 0"),
        (lambda: SddmmConfig(16, 16, 16, 4, 2, "ieee", 0), "split_k must be at least 1; got 0"),
        (lambda: PairConfig(16, 16, 4, 4, 2, "ieee"), "tile_k must be a power of two"),
    ],
)
def test_configs_check_themselves(make, match):
    with pytest.raises(InvalidInput, match=match):
        make()


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_narrow_configs_fit_blocks_and_columns(sm):
    for bh, bw, n in itertools.product(SIDES, SIDES, (1, 2, 16)):
        for left, transposed in itertools.product((False, True), (False, True)):
            p = problem(sm=sm, block=(bh, bw), n=n, dense_left=left, transposed=transposed)
            config = narrow_config(replace(p, shape=(4096, 4096)))
            config.check((bw, bh) if left else (bh, bw), n)
            assert config.pdl == (sm >= 90)
            # a step goes through shared memory on its way to the tensor cores
            tiles = 2 * config.tile_k * (config.tile_m + config.tile_n)
            assert config.tile_n == 1 or tiles <= 99 * 1024


@pytest.mark.parametrize(
    "change",
    [
        {"n": 17},
        {"n": 0},
        {"dtype": torch.float32},
        {"sm": 0},
        {"n": 8192},
        {"shape": (8449, 8192)},
    ],
)
def test_other_products_take_the_general_kernel(change):
    p = problem(n=16)
    assert narrow_config(p) is not None
    change = {"arch": ARCHS[change["sm"]]} if "sm" in change else change
    assert narrow_config(replace(p, **change)) is None


def test_only_small_products_are_prefetched():
    p = problem(n=1)
    assert not narrow_config(p).prefetch
    assert narrow_config(replace(p, nnz_blocks=384)).prefetch
    assert not narrow_config(replace(p, nnz_blocks=385)).prefetch
    assert not narrow_config(replace(p, nnz_blocks=1, arch=ARCHS[80])).prefetch


def test_a_single_column_goes_without_tensor_cores_unless_blocks_lie_by_columns():
    assert narrow_config(problem(n=1)).tile_n == 1
    assert narrow_config(problem(n=1, dense_left=True, transposed=True)).tile_n == 1
    assert narrow_config(problem(n=1, transposed=True)).tile_n == 16
    assert narrow_config(problem(n=1, dense_left=True)).tile_n == 16


def test_a_row_may_be_longer_than_others_but_not_than_the_product():
    p = problem(n=1)
    config = narrow_config(p)
    # all 64 blocks of a row of 8192 columns are half of what a small product reads
    assert narrow_is_even(p, config, 64)
    huge = replace(p, shape=(8192, 2**20), nnz_blocks=8192)
    assert not narrow_is_even(huge, config, 8192)
    assert narrow_is_even(huge, config, 128)
    assert narrow_is_even(replace(huge, nnz_blocks=64 * 8192), config, 1000)
