"""(architecture, problem) -> tiles of the portable BSR kernels. Pure functions; nothing is timed.

Sizes are those of the result: a block row of `block_h` rows meets `n` columns.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import torch

from ..core.arch import Arch
from ..core.launch import cdiv
from ..kernels.bsr.config import (
    MIN_TILE,
    NarrowConfig,
    PairConfig,
    SddmmConfig,
    SpmmConfig,
    largest_tile,
)
from ..kernels.bsr.config_narrow_sm90 import NarrowSm90Config
from ..kernels.bsr.config_strips import StripsConfig
from .problem_bsr import BsrProblem
from .tuned import Tile, tuned_tile

# Shared memory of the smallest supported GPU (sm_86, sm_89, sm_120): also where it is unknown.
SMALLEST_SMEM = 99 * 1024
# Triton needs a little for itself: barriers, and the exchange of layouts in the epilogue.
RESERVED_SMEM = 2 * 1024
# Stored values up to which they are asked for before the kernel before has ended.
PREFETCH_BYTES = 12 * 2**20
# Up to this many columns a product is bound by reading the blocks, not by arithmetic.
NARROW = 64
# Programs per SM that keep the memory system busy while blocks are only read.
PROGRAMS_PER_SM = 4
# What one SM reads in the time that a small product takes anyway: two or three microseconds.
SMALL_SHARE = 256 * 1024
# Shares of the memory's rate that one SM of an H200 can take in by TMA, 64 bytes a cycle: a tile
# that is no longer than this takes no longer than the product.
TMA_ALONE = 3.4


class _Tile(NamedTuple):
    """Upper bounds of a tile and how it is run."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


class SpmmSizes(NamedTuple):
    """A product as the kernel sees it: rows of the result are block rows of the operand."""

    block_h: int
    block_w: int
    rows_b: int
    n: int
    batch: int
    nnz_blocks: int


def spmm_sizes(problem: BsrProblem) -> SpmmSizes:
    """Turn `dense @ op(A)` into `op(A)^T @ dense^T`."""
    block_h, block_w = problem.block_shape[::-1] if problem.dense_left else problem.block_shape
    rows = problem.shape[1] if problem.dense_left else problem.shape[0]
    return SpmmSizes(
        block_h, block_w, cdiv(rows, block_h), problem.n, problem.batch, problem.nnz_blocks
    )


@lru_cache(maxsize=1024)
def spmm_config(problem: BsrProblem, precision: str) -> SpmmConfig:
    """Tiles of `bsr_matmul`; `precision` is what fp32 operands are multiplied in."""
    sizes = spmm_sizes(problem)
    if sizes.n <= NARROW:
        tile = _narrow_tile(problem, sizes, precision)
    elif (found := tuned_tile("bsr_spmm", spmm_facts(problem, precision))) is not None:
        return spmm_config_of(problem, precision, found)
    else:
        tile = _wide_tile(problem, sizes, precision)
    tile = _fit_smem(tile, problem.arch, problem.dtype.itemsize)
    return SpmmConfig(*tile, precision, spmm_chunk(problem.arch, sizes, tile.m, tile.n))


def spmm_facts(problem: BsrProblem, precision: str) -> tuple[Hashable, ...]:
    """What the best tile of a product with many columns depends on."""
    sizes = spmm_sizes(problem)
    itemsize = problem.dtype.itemsize
    return problem.arch.sm, itemsize, sizes.block_h, sizes.block_w, precision


def spmm_config_of(problem: BsrProblem, precision: str, found: Tile) -> SpmmConfig:
    """A product with many columns in tiles of these columns, steps, warps and stages."""
    sizes = spmm_sizes(problem)
    tile = _Tile(_wide_tile(problem, sizes, precision).m, *found)
    tile = _narrowed(tile, problem.arch, sizes)
    return SpmmConfig(*tile, precision, spmm_chunk(problem.arch, sizes, tile.m, tile.n))


def spmm_chunk(arch: Arch, sizes: SpmmSizes, tile_m: int, tile_n: int) -> int:
    """How many blocks one program may visit before a row is cut.

    Half of what a multiprocessor has to do in all: a longer item could be the last one running.
    A power of two, so that few plans exist for each pattern.
    """
    panels = cdiv(max(sizes.n, 1), tile_n) * max(sizes.batch, 1) * (sizes.block_h // tile_m)
    share = cdiv(sizes.nnz_blocks * panels, 2 * arch.num_sms)
    # below 512 steps of the sum, the second pass costs more than the cut saves
    least = max(1, 512 // sizes.block_w)
    return _power_of_two_above(max(share, least))


def _narrow_tile(problem: BsrProblem, sizes: SpmmSizes, precision: str) -> _Tile:
    """Few columns: every block is read once, so only the number of loads in flight counts."""
    tile_n = max(MIN_TILE, _power_of_two_above(sizes.n))
    tile_m = largest_tile(sizes.block_h, 64)
    if _is_fma(problem.dtype, precision):
        # without tensor cores the operands sit in registers: short steps
        return _Tile(min(tile_m, 32), tile_n, 32, 4, 3)
    panels = sizes.rows_b * max(sizes.batch, 1)
    while (
        tile_m > MIN_TILE
        and panels * (sizes.block_h // tile_m) < PROGRAMS_PER_SM * problem.arch.num_sms
    ):
        tile_m //= 2
    # long steps: 128 two-byte elements of a row are two full cache lines
    return _Tile(tile_m, tile_n, 256 // problem.dtype.itemsize, 4, 4)


@lru_cache(maxsize=1024)
def narrow_config(problem: BsrProblem) -> NarrowConfig | None:
    """Tiles of a product that only reads blocks; None where the general kernel must do it."""
    sizes, sm = spmm_sizes(problem), problem.arch.sm
    # from 17 columns on, x from L2 costs more than the blocks: 20 us against 11 on an H200
    if not (1 <= sizes.n <= 16 and problem.dtype.itemsize == 2 and sm >= 80):
        return None
    overlap = sm >= 90
    # blocks asked for ahead of their use are evicted again where they are many: 4.3 us instead of
    # 5.1 at 7 MB, 12.6 instead of 10.5 at 26 MB
    value_bytes = sizes.nnz_blocks * sizes.block_h * sizes.block_w * problem.dtype.itemsize
    prefetch = overlap and value_bytes <= PREFETCH_BYTES
    if problem.transposed != problem.dense_left:
        # blocks are stored by columns: 32 rows of one are 64 bytes
        return NarrowConfig(largest_tile(sizes.block_h, 32), 16, 256, 4, overlap, prefetch)
    if sizes.n == 1:
        # 256 values for each warp: no thread shares the entry of its chunk with another warp
        return NarrowConfig(8, 1, 1024, 4, overlap, prefetch)
    if sizes.rows_b * sizes.block_h > 64 * problem.arch.num_sms:
        # more than four programs an SM: taller tiles read x less often (13.4 us against 16.8)
        return None
    return NarrowConfig(16, 16, 512, 4, overlap, prefetch)


def narrow_is_even(
    problem: BsrProblem, config: NarrowConfig | NarrowSm90Config | StripsConfig, longest_row: int
) -> bool:
    """Whether no program is much longer than the product, given the blocks of the longest row."""
    sizes = spmm_sizes(problem)
    row_bytes = sizes.block_w * problem.dtype.itemsize
    longest = longest_row * config.tile_m * row_bytes
    share = sizes.nnz_blocks * sizes.block_h * row_bytes // problem.arch.num_sms
    alone = TMA_ALONE if isinstance(config, NarrowSm90Config) else 2
    return longest <= max(SMALL_SHARE, alone * share * max(sizes.batch, 1))


def _wide_tile(problem: BsrProblem, sizes: SpmmSizes, precision: str) -> _Tile:
    """Many columns: tall blocks are bound by arithmetic, flat ones by reading x."""
    sm = problem.arch.sm
    tile_m = largest_tile(sizes.block_h, 128)
    if _is_fma(problem.dtype, precision):
        tile_m = min(tile_m, 64)
        return _Tile(tile_m, 64, 16, 4, 3)
    if problem.dtype == torch.float32:
        # tf32: as many bytes as 16-bit tiles with half the steps
        return _Tile(tile_m, 128, 32, 8 if tile_m == 128 else 4, 3)
    if sm in (90, 100, 103):
        # accumulators of 128x256 take half the registers of 8 warps; wgmma and tcgen05 read
        # both operands from shared memory, and x from L2 is what limits: wide panels
        wide = _Tile(tile_m, 256, 64, 8 if tile_m == 128 else 4, 4)
        if sm >= 100 and problem.activation is not None:
            # all accumulators leave tensor memory at once: 256 columns would spill beside an erf
            wide = wide._replace(n=128)
    else:
        # mma.sync needs operand registers beside the accumulators
        wide = _Tile(tile_m, 128, 32, 8 if tile_m == 128 else 4, 4)
    return _narrowed(wide, problem.arch, sizes)


def _narrowed(tile: _Tile, arch: Arch, sizes: SpmmSizes) -> _Tile:
    """Halve the columns of a tile while the result has fewer tiles than there are SMs."""
    rows = sizes.rows_b * max(sizes.batch, 1) * (sizes.block_h // tile.m)
    n = min(tile.n, _power_of_two_above(sizes.n))
    while n > NARROW and rows * cdiv(sizes.n, n) < arch.num_sms:
        n //= 2
    # with half the columns, half the warps keep each warp's share of the accumulators
    warps = tile.warps if n > 64 else min(tile.warps, 4)
    return tile._replace(n=n, warps=warps)


@lru_cache(maxsize=1024)
def sddmm_config(problem: BsrProblem, precision: str) -> SddmmConfig:
    """Tiles of `bsr_sddmm`, whose sum runs over `problem.n` and the batch."""
    block_h, block_w = problem.block_shape
    tile = _square_tile(problem.dtype, block_h, block_w, precision)
    tile_k = 16 if _is_fma(problem.dtype, precision) else 128 // problem.dtype.itemsize
    tile = _fit_smem(tile._replace(k=tile_k), problem.arch, problem.dtype.itemsize)
    programs = problem.nnz_blocks * (block_h // tile.m) * (block_w // tile.n)
    steps = cdiv(problem.n, tile.k) * max(problem.batch, 1)
    # too few pieces to fill the GPU: share out the sum, at least 16 steps to each
    split_k = max(1, min(2 * problem.arch.num_sms // max(programs, 1), steps // 16))
    return SddmmConfig(*tile, precision, split_k)


@lru_cache(maxsize=1024)
def pair_config(problem: BsrProblem, precision: str) -> PairConfig:
    """Tiles of `bsr_pair_products`, whose sum runs over the inner block side."""
    (block_h, inner), (_, block_w) = problem.block_shape, problem.other_block_shape
    limit = MIN_TILE if _is_fma(problem.dtype, precision) else 128 // problem.dtype.itemsize
    tile = _square_tile(problem.dtype, block_h, block_w, precision)
    tile = tile._replace(k=largest_tile(inner, limit))
    return PairConfig(*_fit_smem(tile, problem.arch, problem.dtype.itemsize), precision)


def _square_tile(dtype: torch.dtype, block_h: int, block_w: int, precision: str) -> _Tile:
    """A piece of a block, as large as the accumulators allow."""
    limit = 64 if _is_fma(dtype, precision) else 128
    tile_m, tile_n = largest_tile(block_h, limit), largest_tile(block_w, limit)
    area = tile_m * tile_n
    # 64 accumulators a thread at the most; small pieces are latency bound and want few warps
    warps = 8 if area >= 128 * 128 else 4 if area >= 32 * 32 else 2
    return _Tile(tile_m, tile_n, MIN_TILE, warps, 3)


def _fit_smem(tile: _Tile, arch: Arch, itemsize: int) -> _Tile:
    """Give up stages, then steps, then columns, until the operand tiles fit."""
    limit = (arch.smem_bytes or SMALLEST_SMEM) - RESERVED_SMEM
    while tile.stages * tile.k * (tile.m + tile.n) * itemsize > limit:
        if tile.stages > 2:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.k > MIN_TILE:
            tile = tile._replace(k=tile.k // 2)
        else:
            tile = tile._replace(n=tile.n // 2)
    return tile


def _is_fma(dtype: torch.dtype, precision: str) -> bool:
    """Whether the product runs without tensor cores."""
    return dtype == torch.float32 and precision == "ieee"


def _power_of_two_above(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
