"""(problem) -> configuration of each Hopper product kernel, and the reasons why none can run.

Pure functions of the problem; the figures beside the thresholds were measured on an H200.
"""

from dataclasses import replace
from functools import lru_cache

import torch

from ...calls.matmul import BsrProblem
from ...core.arch import Arch
from ...core.compat import warps_may_part, why_no_gluon
from ...dispatch.machine import why_no_kernels
from ...launch.descriptors import GROUP_ROWS
from ...launch.launcher import cdiv
from ..triton.tuning import NARROW, SpmmSizes, largest_tile, spmm_chunk, spmm_sizes
from .config import (
    MOST_COLUMNS,
    PAIRED_SPARE,
    SLAB_COLUMNS,
    STRIP_BLOCK,
    STRIP_ROWS,
    NarrowSm90Config,
    SpmmSm90Config,
    StripsConfig,
    narrow_stages_that_fit,
    stages_that_fit,
)
from .fp8_config import DEEPEST_FP8, WIDEST_FP8, SpmmFp8Config, fp8_stages_that_fit
from .sddmm_config import SddmmSm90Config, sddmm_stages_that_fit

# A single column is left to the portable kernel, unless there are more row tiles than this per SM:
# 3.9 us there and 4.9 here (4096 x 4096 in 22 % of blocks of 128, H200), 9.6 and 10.3
# (4096 x 14336), but 20.7 and 17.9 (28672 x 4096).
ONE_COLUMN_TILES = 2
# A TMA copy of blocks lower than this is so small that the portable kernel is no slower as long as
# its tiles hold all columns: 7.8 us both at 16 x 16.
FLAT_HEIGHT, FLAT_COLUMNS = 32, 16
# Up to this many columns the kernel for few columns takes matrices with at most one row tile per
# SM: 12.4 us against 13.7 for 256 columns and 4096 x 4096 in 22 % of the blocks.
MANY_COLUMNS = 256
# Two programs split the longest tiles of few columns where some SMs are idle and rows are at least
# this long, in elements. Microseconds whole and split (16 / 64 columns, blocks of 128, H200):
# 4096 x 14336, 64 row tiles for 132 SMs, 25 blocks each: 10.4 / 11.5 and 9.9 / 10.6;
# 8192 x 28672, 128 tiles of 49: 33.6 / 36.5 and 32.2 / 34.1.
# With shorter rows 8192 x 8192, 128 tiles of 14, gains nothing: 10.9 / 11.6 and 10.9 / 11.5; 4096 x
# 4096, 64 tiles of 7, loses: 4.5 / 4.9 and 4.6 / 5.0.
LONG_ROW = 3072
# The same where half to three quarters of the SMs have tiles: 6144 x 4096, 96 tiles of 7 blocks,
# 6.1 / 6.3 and 5.4 / 5.7.
SPLIT_ROW = 768
# Rows are split where one has more than this many times the blocks that a part would have. A second
# pass takes 10 us: 4096 x 4096 times 1024 columns took 38 us with rows of 9 to 14 blocks split at
# 8, and 24 unsplit.
BEARABLE_CHUNKS = 3
# A part of a split row has at least this many columns of A.
LEAST_STEPS = 1024
# Columns per consumer from which rows are paired: products that give every SM much to do.
PAIRED_COLUMNS = 256


def spmm_sm90_unsupported(problem: BsrProblem) -> str | None:
    """Why the Hopper kernel cannot run this product, or None."""
    sizes = spmm_sizes(problem)
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} has no 16-bit WGMMA"
    if problem.out_dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"no output in {problem.out_dtype}"
    if sizes.block_h % GROUP_ROWS and sizes.block_h not in (16, 32):
        return f"block height {sizes.block_h} is neither 16, 32 nor a multiple of 64"
    if sizes.block_w % 16:
        return f"block width {sizes.block_w} is not a multiple of 16"
    if not problem.tma:
        return "TMA needs addresses and strides that are multiples of 16 bytes"
    if sizes.n <= NARROW and narrow_sm90_config(problem) is None:
        return (
            f"with {sizes.n} columns needs x @ A.T, a contiguous last dimension of x and at least "
            "one block"
        )
    return None


def spmm_sm90_passed_over(problem: BsrProblem) -> str | None:
    """Why `auto` should not take the kernels where they could run, or None."""
    # the rows of all batch entries are rows of one matrix
    columns = problem.n * problem.batch
    sizes = spmm_sizes(problem)
    height = sizes.block_h
    tiles = cdiv(sizes.rows_b * height, GROUP_ROWS)
    if columns < 2 and tiles <= ONE_COLUMN_TILES * problem.arch.num_sms:
        return "one column is left to the portable kernels"
    flat = columns <= FLAT_COLUMNS and height < FLAT_HEIGHT
    if flat and strips_config(problem.merged) is None:
        return f"{columns} columns and blocks of height {height} are left to the portable kernels"
    return None


@lru_cache(maxsize=1024)
def narrow_sm90_config(problem: BsrProblem) -> NarrowSm90Config | None:
    """Tiles of a product with few columns; None where its kernel cannot run it."""
    sizes = spmm_sizes(problem)
    by_rows = problem.dense_left and problem.transposed and problem.row_major
    tile_m = largest_tile(sizes.block_h, GROUP_ROWS)
    row_tiles = sizes.rows_b * (sizes.block_h // tile_m)
    if not (1 <= sizes.n <= _most_columns(problem, tile_m, row_tiles)):
        return None
    if not (by_rows and sizes.nnz_blocks):
        return None
    tile_n = _narrow_columns(sizes, tile_m, row_tiles, problem.arch.num_sms)
    tile_k = next(tile for tile in (128, 64, 32, 16) if sizes.block_w % tile == 0)
    # several narrow blocks make one stage of the ring
    stage_blocks = min(4, max(1, 128 // sizes.block_w))
    wide = problem.out_dtype == torch.float32
    split_k = _narrow_split(sizes, tile_m, row_tiles, problem.arch.num_sms)
    return NarrowSm90Config(
        BLOCK_H=sizes.block_h,
        BLOCK_W=sizes.block_w,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        STAGE_BLOCKS=stage_blocks,
        STAGES=narrow_stages_that_fit(tile_m, tile_n, tile_k * stage_blocks, wide, split_k),
        ACTIVATION=problem.activation,
        SPLIT_K=split_k,
    )


def narrow_fp8_config(problem: BsrProblem) -> NarrowSm90Config | None:
    """Tiles of a product in fp8 with few tokens, those of 16 bits; None where it has many."""
    config = narrow_sm90_config(problem) if problem.n <= NARROW else None
    if config is None or config.TILE_K < 32:
        return None
    # a stage has as many bytes as one of 16 bits, and two products under way
    stage_blocks = min(4, 2 * config.STAGE_BLOCKS)
    stage_k, wide = config.TILE_K * stage_blocks, problem.out_dtype == torch.float32
    tiles = (config.TILE_M, config.TILE_N, stage_k)
    stages = narrow_stages_that_fit(*tiles, wide, config.SPLIT_K, item_bytes=1)
    return replace(config, STAGE_BLOCKS=stage_blocks, STAGES=stages, ITEM_BYTES=1)


@lru_cache(maxsize=1024)
def spmm_fp8_sm90_config(problem: BsrProblem) -> SpmmFp8Config:
    """Tiles of a product in fp8 with many tokens.

    256 tokens by 128 features read 24 KB for each 128 cubed, 128 tokens 32 KB: at the 9.2 TB/s from
    L2 to shared memory that is enough for 1570 and 1180 TFLOP/s.
    """
    sizes = spmm_sizes(problem)
    tile_m = largest_tile(sizes.block_h, WIDEST_FP8)
    tile_k = largest_tile(sizes.block_w, DEEPEST_FP8)
    row_tiles = sizes.rows_b * (sizes.block_h // tile_m)
    parts = 2 if row_tiles * cdiv(sizes.n, 256) >= problem.arch.num_sms else 1
    out_bytes = problem.out_dtype.itemsize
    return SpmmFp8Config(
        BLOCK_H=sizes.block_h,
        BLOCK_W=sizes.block_w,
        TILE_M=tile_m,
        TILE_K=tile_k,
        PARTS=parts,
        STAGES=fp8_stages_that_fit(tile_m, tile_k, parts, out_bytes),
        OUT_BYTES=out_bytes,
        ACTIVATION=problem.activation,
    )


def spmm_fp8_sm90_unsupported(problem: BsrProblem) -> str | None:
    """Why the Hopper kernels cannot run this product in fp8, or None."""
    sizes = spmm_sizes(problem)
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if not problem.transposed:
        return "needs x @ A.T: WGMMA takes blocks in fp8 only with contiguous channels"
    if sizes.block_h % 32:
        return f"block height {sizes.block_h} is not a multiple of 32"
    if sizes.block_w not in (32, 64) and sizes.block_w % DEEPEST_FP8:
        return f"block width {sizes.block_w} is neither 32, 64 nor a multiple of 128"
    if problem.out_dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"no output in {problem.out_dtype}"
    if not problem.tma:
        return "TMA needs addresses and strides that are multiples of 16 bytes"
    if problem.nnz_blocks == 0:
        return "needs at least one block"
    return None


def why_not_fp8_sm90(problem: BsrProblem) -> str | None:
    """Why no Hopper kernel can run this product in fp8, or None when one can."""
    machine = why_no_kernels(problem.arch)
    return machine or spmm_fp8_sm90_unsupported(problem) or why_no_gluon()


def _most_columns(problem: BsrProblem, tile_m: int, row_tiles: int) -> int:
    """Up to how many columns the kernel for few columns is the faster one."""
    if tile_m == 16:
        return NARROW
    wide = tile_m == GROUP_ROWS and row_tiles <= problem.arch.num_sms
    return MANY_COLUMNS if wide else MOST_COLUMNS


def _narrow_columns(sizes: SpmmSizes, tile_m: int, row_tiles: int, num_sms: int) -> int:
    """Columns of a tile: all of them, unless several programs are to share the columns."""
    if sizes.n <= NARROW:
        return next(tile for tile in (16, 32, 64) if sizes.n <= tile)
    # half the columns for 128: 18.1 us instead of 21.2 with 64 row tiles (4096 x 14336), 22.5
    # instead of 23.4 with 160; but 83 instead of 74 with 896
    halved = row_tiles <= 2 * num_sms and sizes.n <= MOST_COLUMNS
    return NARROW if halved or tile_m < GROUP_ROWS else MOST_COLUMNS


def _narrow_split(sizes: SpmmSizes, tile_m: int, row_tiles: int, num_sms: int) -> int:
    """How many programs split a long tile."""
    # low tiles, and columns in more than one tile, were not tried; one column was not measured
    if tile_m < GROUP_ROWS or not (1 < sizes.n <= NARROW) or not warps_may_part():
        return 1
    mean_row = sizes.nnz_blocks * sizes.block_w // sizes.rows_b
    halfway = num_sms < 2 * row_tiles and 4 * row_tiles <= 3 * num_sms
    least = SPLIT_ROW if halfway else LONG_ROW
    return 2 if row_tiles < num_sms and mean_row >= least else 1


def spmm_sm90_chunk(arch: Arch, sizes: SpmmSizes, config: SpmmSm90Config) -> int:
    """The most blocks in a part of a row, if rows are split."""
    chunk = spmm_chunk(arch, sizes, config.tile_m, config.tile_n)
    return max(chunk, LEAST_STEPS // sizes.block_w)


def spmm_sm90_config(problem: BsrProblem, x_transposed: bool) -> SpmmSm90Config:
    """Tiles of a product that `spmm_sm90_unsupported` accepts."""
    sizes = spmm_sizes(problem)
    packed = sizes.block_h < GROUP_ROWS
    block_h = GROUP_ROWS if packed else sizes.block_h
    # a block row of 64 is for both consumers, side by side, so that X is fetched once for both
    split_n = block_h % (2 * GROUP_ROWS) != 0
    group_n = _group_columns(problem, sizes, split_n)
    tile_k = _k_tile(sizes.block_w)
    if split_n and group_n == 256:
        # X takes twice the bytes of a stage; K steps of 32 keep five stages in flight
        tile_k = min(tile_k, 32)
    # smaller chunks where elements have four bytes, or where the epilogue takes many registers
    wide = problem.out_dtype == torch.float32 or problem.residual or problem.activation == "gelu"
    chunks = 4 if wide else 2
    stages = stages_that_fit(group_n, tile_k, split_n, problem.out_dtype.itemsize, chunks)
    return SpmmSm90Config(
        BLOCK_H=block_h,
        BLOCK_W=sizes.block_w,
        GROUP_N=group_n,
        TILE_K=tile_k,
        STAGES=stages,
        SPLIT_N=split_n,
        OUT_CHUNKS=chunks,
        # packing also transposes blocks
        A_TRANSPOSED=not packed and problem.transposed != problem.dense_left,
        X_TRANSPOSED=x_transposed,
        WIDE=not x_transposed and sizes.n % SLAB_COLUMNS == 0,
        OUT_TRANSPOSED=problem.dense_left,
        ACTIVATION=problem.activation,
    )


def spmm_sm90_paired(problem: BsrProblem, config: SpmmSm90Config) -> SpmmSm90Config | None:
    """The configuration with paired rows that share X, or None where pairing does not apply.

    8192^3 in 22 % of blocks of 64 takes 428 us instead of 484, blocks of 32 737 instead of 853.
    Tiles of 128 rows gain nothing: 366 instead of 364.
    """
    if not warps_may_part() or not config.SPLIT_N or config.row_tiles != 1:
        return None
    if config.GROUP_N < PAIRED_COLUMNS:
        return None
    item = problem.out_dtype.itemsize
    stages = stages_that_fit(
        *(config.GROUP_N, config.TILE_K, True, item, config.OUT_CHUNKS), spare=PAIRED_SPARE
    )
    return replace(config, STAGES=stages, PAIRED=True, OUT_BYTES=item)


def _k_tile(block_w: int) -> int:
    return next(tile for tile in (64, 32, 16) if block_w % tile == 0)


def _group_columns(problem: BsrProblem, sizes: SpmmSizes, split_n: bool) -> int:
    """The widest accumulator that the columns fill and that still gives every SM work."""
    groups = 2 if split_n else 1
    m_tiles = cdiv(sizes.rows_b * sizes.block_h, 2 * GROUP_ROWS // groups)
    for group_n in (256, 128):
        n_tiles = cdiv(sizes.n, group_n * groups)
        filled = sizes.n > group_n * groups // 2
        if filled and m_tiles * n_tiles >= problem.arch.num_sms:
            return group_n
    return 64


# Few columns and blocks 16 columns wide: strips of 16 rows (`strips.py`).

# Columns up to which strips are the faster kernel: for blocks of 16 rows, and for taller ones, of
# which TMA copies more at a time. us for 28672 x 4096 in 22 % of 16 x 16 blocks on an H200, strips
# and the best of the others: 1 column 18.3, 22.8; 16 columns 23.1, 38.1; 32 columns 35.6, 49.2; 64
# columns 61.0, 69.9, but 12.9, 11.5 for 4096 x 4096. 128 x 16 and 16 columns 23.0, 24.0; 6.1, 8.1.
MOST_STRIP_COLUMNS, MOST_STRIP_COLUMNS_TALL = 32, 16
# Warps per SM, shared by its strips. With 13.6 strips per SM 1, 2, 4 and 8 warps a strip take 23.1,
# 25.1, 25.3 and 41.6 us; with 3.9 strips 69.5, 45.5, 40.1 and 43.5; with 1.9 strips of 197 blocks
# 33.3, 19.8, 16.2 and 13.7.
SM_WARPS, MOST_WARPS = 16, 8
# Rows of fewer blocks take only a step or two: 4 warps with two K tiles each take 6.2 us where 8
# with one take 6.9 (56 blocks, 1.9 strips per SM), 7.0 where 4 with one take 8.6 (2.9 strips).
SHORT_ROW, SHORT_ROW_WARPS = 128, 4


@lru_cache(maxsize=1024)
def strips_config(problem: BsrProblem) -> StripsConfig | None:
    """Configuration of strips for this product of one matrix; None where they do not apply."""
    sizes = spmm_sizes(problem)
    by_rows = problem.dense_left and problem.transposed and problem.row_major and problem.tma
    most = MOST_STRIP_COLUMNS if sizes.block_h == STRIP_ROWS else MOST_STRIP_COLUMNS_TALL
    fits = (
        problem.arch.sm == 90
        and problem.dtype in (torch.float16, torch.bfloat16)
        and sizes.block_w == STRIP_BLOCK
        and sizes.block_h % STRIP_ROWS == 0
        and problem.shape[0] % STRIP_BLOCK == 0
        and 1 <= sizes.n <= most
        and sizes.nnz_blocks > 0
    )
    if not (by_rows and fits and warps_may_part()):
        return None
    tile_n = next(tile for tile in (8, 16, 32) if sizes.n <= tile)
    strips = sizes.rows_b * (sizes.block_h // STRIP_ROWS)
    warps = max(1, min(SM_WARPS * problem.arch.num_sms // strips, MOST_WARPS))
    warps = 1 << (warps.bit_length() - 1)
    # wide tiles have no registers for two K tiles, and one warp would have too little in flight
    k_tiles = 2 if tile_n == 8 else 1
    if tile_n == MOST_STRIP_COLUMNS:
        warps = max(warps, 2)
    elif warps >= SHORT_ROW_WARPS and sizes.nnz_blocks < SHORT_ROW * sizes.rows_b:
        warps, k_tiles = SHORT_ROW_WARPS, 2
    return StripsConfig(sizes.block_h, tile_n, warps, k_tiles, problem.activation)


# Sampled products (`sddmm.py`).

# Steps of the sum that a share has at least: fewer would not repay writing and adding its sums.
LEAST_SHARE_STEPS = 32
MOST_SHARES = 8
# Seconds of a share besides its products, and bytes per second in which sums are written, read and
# added: estimates that await a measurement.
SHARE_S, SHARE_BYTES_S = 3e-6, 3e12
# Rate of a sampled product on one SM, for choosing shares only.
SDDMM_FLOPS_SM = 4.5e12


def sddmm_sm90_unsupported(problem: BsrProblem) -> str | None:
    """Why the Hopper kernel cannot run this sampled product, or None."""
    block_h, block_w = problem.block_shape
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} has no 16-bit WGMMA"
    if problem.out_dtype not in (problem.dtype, torch.float32):
        return f"no output in {problem.out_dtype}"
    if block_h % GROUP_ROWS and block_h not in (16, 32):
        return f"block height {block_h} is neither 16, 32 nor a multiple of 64"
    # other widths would need divisions for each piece, and registers that the producer lacks
    if block_w not in (16, 32, 64, 128, 256):
        return f"block width {block_w} is not 16, 32, 64, 128 or 256"
    if not problem.tma:
        return "TMA needs addresses and strides that are multiples of 16 bytes"
    return None


def why_not_sddmm_sm90(problem: BsrProblem) -> str | None:
    """Why no Hopper kernel can run this sampled product, or None when one can."""
    return why_no_kernels(problem.arch) or sddmm_sm90_unsupported(problem) or why_no_gluon()


@lru_cache(maxsize=1024)
def sddmm_sm90_config(
    problem: BsrProblem, a_transposed: bool, b_transposed: bool, partial: bool = False
) -> SddmmSm90Config:
    """Tiles of a sampled product that `sddmm_sm90_unsupported` accepts.

    `partial` is for sums in float32 that are added later, whatever the dtype of the result.
    """
    block_h, block_w = problem.block_shape
    out_bytes = 4 if partial else problem.out_dtype.itemsize
    # 128 rows read the least for each product; both consumers share them
    tile_m = 2 * GROUP_ROWS if block_h % (2 * GROUP_ROWS) == 0 else GROUP_ROWS
    group_n = 128 if tile_m > GROUP_ROWS else 256
    if block_w % 32:
        # pieces of 16 columns are copied one by one: fewer of them, and longer ones
        group_n = 128
    tile_k = 32 if group_n == 256 else 64
    chunks = out_bytes
    return SddmmSm90Config(
        BLOCK_H=block_h,
        BLOCK_W=block_w,
        TILE_M=tile_m,
        GROUP_N=group_n,
        PIECE=largest_tile(block_w, group_n),
        TILE_K=tile_k,
        STAGES=sddmm_stages_that_fit(tile_m, group_n, tile_k, group_n // chunks * out_bytes),
        OUT_CHUNKS=chunks,
        OUT_BYTES=out_bytes,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
    )


def sddmm_sm90_shares(
    problem: BsrProblem, config: SddmmSm90Config, work_tiles: int, steps: int
) -> int:
    """How many programs share the sum of a work tile: where rounds of tiles leave SMs idle."""
    tile_flops = 2.0 * config.TILE_M * 2 * config.GROUP_N * config.TILE_K * steps
    block_h, block_w = problem.block_shape
    sums_bytes = 4 * problem.nnz_blocks * block_h * block_w

    def seconds(shares: int) -> float:
        rounds = cdiv(work_tiles * shares, problem.arch.num_sms)
        busy = rounds * tile_flops / shares / SDDMM_FLOPS_SM
        added = 0.0 if shares == 1 else SHARE_S + 2 * shares * sums_bytes / SHARE_BYTES_S
        return busy + added

    most = max(1, min(MOST_SHARES, steps // LEAST_SHARE_STEPS))
    return min(range(1, most + 1), key=seconds)


def why_not_sm90(problem: BsrProblem) -> str | None:
    """Why no Hopper kernel can run this product, or None when one can."""
    return why_no_kernels(problem.arch) or spmm_sm90_unsupported(problem) or why_no_gluon()
