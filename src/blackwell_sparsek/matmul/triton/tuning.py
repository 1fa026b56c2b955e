"""Tiles of the portable BSR kernels by architecture and problem, and what they cannot run.

Pure functions; nothing is timed. Sizes are those of the result: a block row of `block_h` rows meets
`n` columns.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import InvalidInput
from ...core.sizes import SCALE_CHANNELS, cdiv
from ...core.target import Arch
from ...dispatch.tuned import Tile, tuned_tile

if TYPE_CHECKING:
    from ...calls.matmul import BsrProblem
    from ..sm90.config import NarrowSm90Config, StripsConfig

# Sides of blocks: tensor cores take 16; larger blocks than 256 gain nothing over several smaller
# ones.
SIDE_STEP, LARGEST_SIDE = 16, 256
# The smallest tile side that `tl.dot` multiplies on every architecture.
MIN_TILE = 16


def why_not_triton(problem: "BsrProblem") -> str | None:
    """Why the portable kernels cannot run this problem, or None when they can."""
    # asks torch, which programs that only plan launches need not have
    from ...dispatch.machine import why_not_portable

    reason = why_not_portable(problem.arch, problem.dtype, problem.out_dtype)
    return reason or why_not_blocks(problem)


def why_not_blocks(problem: "BsrProblem") -> str | None:
    """Why the portable kernels cannot run blocks of this shape, or None when they can."""
    shapes = [problem.block_shape]
    shapes += [problem.other_block_shape] if problem.kind == "pairs" else []
    for block_shape in shapes:
        if any(side % SIDE_STEP or side > LARGEST_SIDE for side in block_shape):
            return (
                f"needs block sides that are multiples of {SIDE_STEP} up to {LARGEST_SIDE}, "
                f"got {block_shape}"
            )
    return None


def largest_tile(size: int, limit: int) -> int:
    """The largest power of two that divides `size` and is at most `limit`."""
    return min(size & -size, 1 << (limit.bit_length() - 1))


def triton_stages(buffers: int, index_loads: int) -> int:
    """Stages to ask of Triton for this many buffers of operand tiles.

    Triton spreads the stages over the loads that depend on each other, `index_loads` before that
    of a tile, and gives buffers only to the tiles.
    """
    return (buffers - 1) * (index_loads + 1) + 1


@dataclass(frozen=True)
class _TileConfig:
    # num_stages: buffers of operand tiles
    # input_precision: what the product may do with fp32 operands; 16-bit operands have no choice
    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    input_precision: str

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k"):
            tile = getattr(self, name)
            if tile < MIN_TILE or tile & (tile - 1):
                raise InvalidInput(
                    f"{type(self).__name__}: {name} must be a power of two of at least "
                    f"{MIN_TILE}; got {tile}"
                )
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise InvalidInput(f"{type(self).__name__}: num_warps is {self.num_warps}")
        if not 1 <= self.num_stages <= 8:
            raise InvalidInput(f"{type(self).__name__}: num_stages is {self.num_stages}")
        if self.input_precision not in ("ieee", "tf32"):
            raise InvalidInput(f"{type(self).__name__}: input_precision is {self.input_precision}")

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory that the pipelined operand tiles take."""
        stage = self.tile_k * (self.tile_m + self.tile_n) * itemsize
        return self.num_stages * stage

    def _check_divides(self, tile: str, size: int, what: str) -> None:
        if size % getattr(self, tile):
            raise InvalidInput(
                f"{type(self).__name__}: {tile}={getattr(self, tile)} does not divide the {what} "
                f"{size}"
            )


@dataclass(frozen=True)
class SpmmConfig(_TileConfig):
    """Tiles of BSR @ dense: tile_m rows of a block row, tile_n columns, steps of tile_k.

    Steps that do not divide the width of a block take columns of several blocks at once. `chunk` is
    how many blocks one program visits at most; longer rows are cut (see `plan`).
    """

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise InvalidInput(f"SpmmConfig: chunk must be at least 1; got {self.chunk}")

    def check_blocks(self, block_shape: tuple[int, int]) -> None:
        """Raise unless the tiles fit into blocks of this shape."""
        self._check_divides("tile_m", block_shape[0], "block height")


@dataclass(frozen=True)
class SddmmConfig(_TileConfig):
    """Tiles of a sampled product: tile_m by tile_n of a block, tile_k steps of the sum.

    `split_k` programs share the sum of each tile and leave fp32 partial sums.
    """

    split_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_k < 1:
            raise InvalidInput(f"SddmmConfig: split_k must be at least 1; got {self.split_k}")

    def check_blocks(self, block_shape: tuple[int, int]) -> None:
        """Raise unless the tiles fit into blocks of this shape."""
        self._check_divides("tile_m", block_shape[0], "block height")
        self._check_divides("tile_n", block_shape[1], "block width")


@dataclass(frozen=True)
class PairConfig(_TileConfig):
    """Tiles of BSR @ BSR: tile_m by tile_n of a block, tile_k steps of the inner side."""

    def check_blocks(self, block_shape: tuple[int, int], inner: int) -> None:
        """Raise unless the tiles fit into result blocks of this shape and this inner side."""
        self._check_divides("tile_m", block_shape[0], "block height")
        self._check_divides("tile_n", block_shape[1], "block width")
        self._check_divides("tile_k", inner, "inner block side")


@dataclass(frozen=True)
class NarrowConfig:
    """Tiles of BSR @ few columns: tile_m rows of a block row, all columns, steps of tile_k.

    tile_n is 1 for a single column, multiplied without tensor cores, or at least 16. `pdl`
    (programmatic dependent launch) starts the kernel before the previous one has finished,
    `prefetch` prefetches all blocks to L2 at once; both need sm_90.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    pdl: bool = False
    prefetch: bool = False

    def check(self, block_shape: tuple[int, int], n: int) -> None:
        """Raise unless the tiles fit to blocks of this shape and to n columns."""
        if block_shape[0] % self.tile_m:
            raise InvalidInput(
                f"NarrowConfig: tile_m={self.tile_m} does not divide the block height "
                f"{block_shape[0]}"
            )
        if n > self.tile_n:
            raise InvalidInput(f"NarrowConfig: tile_n={self.tile_n} is less than n={n}")
        # a warp multiplies at least 16 steps of the sum, and prefetches 16 bytes a thread
        if self.tile_k % (MIN_TILE * self.num_warps) or self.tile_m * self.tile_k < (
            256 * self.num_warps
        ):
            raise InvalidInput(
                f"NarrowConfig: tile_k={self.tile_k} is too short for {self.num_warps} warps"
            )


# From here on GPUs have an instruction that converts e4m3.
MIN_SM_CONVERTS_FP8 = 89
# Shared memory of the smallest supported GPU (sm_86, sm_89, sm_120): also where it is unknown.
SMALLEST_SMEM = 99 * 1024
# Triton needs a little for itself: barriers, and the exchange of layouts in the epilogue.
RESERVED_SMEM = 2 * 1024
# Bytes of stored values up to which they are prefetched before the previous kernel has ended.
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


def spmm_sizes(problem: "BsrProblem") -> SpmmSizes:
    """Turn `dense @ op(A)` into `op(A)^T @ dense^T`."""
    block_h, block_w = problem.block_shape[::-1] if problem.dense_left else problem.block_shape
    rows = problem.shape[1] if problem.dense_left else problem.shape[0]
    return SpmmSizes(
        block_h, block_w, cdiv(rows, block_h), problem.n, problem.batch, problem.nnz_blocks
    )


@lru_cache(maxsize=1024)
def spmm_config(problem: "BsrProblem", precision: str) -> SpmmConfig:
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


@lru_cache(maxsize=1024)
def spmm_fp8_config(problem: "BsrProblem") -> SpmmConfig:
    """Tiles of `bsr_matmul_fp8`: steps lie within a block and within channels that share a scale.

    The sum of a step needs registers besides those of the result: 128 columns at most.
    """
    sizes = spmm_sizes(problem)
    if sizes.n <= NARROW:
        tile = _narrow_tile(problem, sizes, "ieee")
    else:
        tile_m = largest_tile(sizes.block_h, 128)
        # longer steps of 128 rows spill: their operands are converted in registers
        tile = _Tile(tile_m, 128, 32 if tile_m == 128 else 64, 8 if tile_m == 128 else 4, 3)
        tile = _narrowed(tile, problem.arch, sizes)
    tile = tile._replace(k=largest_tile(sizes.block_w, min(tile.k, SCALE_CHANNELS)))
    # operands lie in shared memory as fp16 after their conversion
    tile = _fit_smem(tile, problem.arch, 2)
    return SpmmConfig(*tile, "ieee", spmm_chunk(problem.arch, sizes, tile.m, tile.n))


def spmm_facts(problem: "BsrProblem", precision: str) -> tuple[Hashable, ...]:
    """The properties that the best tile of a product with many columns depends on."""
    sizes = spmm_sizes(problem)
    itemsize = problem.dtype.itemsize
    return problem.arch.sm, itemsize, sizes.block_h, sizes.block_w, precision


def spmm_config_of(problem: "BsrProblem", precision: str, found: Tile) -> SpmmConfig:
    """A product with many columns in tiles of these columns, steps, warps and stages."""
    sizes = spmm_sizes(problem)
    tile = _Tile(_wide_tile(problem, sizes, precision).m, *found)
    tile = _narrowed(tile, problem.arch, sizes)
    return SpmmConfig(*tile, precision, spmm_chunk(problem.arch, sizes, tile.m, tile.n))


def spmm_chunk(arch: Arch, sizes: SpmmSizes, tile_m: int, tile_n: int) -> int:
    """How many blocks one program may visit before a row is split.

    Half of what a multiprocessor has to do in all: a longer item could be the last one running.
    A power of two, so that few plans exist for each pattern.
    """
    panels = cdiv(max(sizes.n, 1), tile_n) * max(sizes.batch, 1) * (sizes.block_h // tile_m)
    share = cdiv(sizes.nnz_blocks * panels, 2 * arch.num_sms)
    # below 512 elements of the sum, the second pass costs more than the split saves
    least = max(1, 512 // sizes.block_w)
    return _power_of_two_above(max(share, least))


def _narrow_tile(problem: "BsrProblem", sizes: SpmmSizes, precision: str) -> _Tile:
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
def narrow_config(problem: "BsrProblem") -> NarrowConfig | None:
    """Tiles of a product that only reads blocks; None where the general kernel must do it."""
    sizes, sm = spmm_sizes(problem), problem.arch.sm
    # from 17 columns on, x from L2 costs more than the blocks: 20 us against 11 on an H200
    if not (1 <= sizes.n <= 16 and problem.dtype.itemsize == 2 and sm >= 80):
        return None
    pdl = sm >= 90
    # if there are many, prefetched blocks are evicted before their use: 4.3 us instead of 5.1 at
    # 7 MB, 12.6 instead of 10.5 at 26 MB
    value_bytes = sizes.nnz_blocks * sizes.block_h * sizes.block_w * problem.dtype.itemsize
    prefetch = pdl and value_bytes <= PREFETCH_BYTES
    if problem.transposed != problem.dense_left:
        # blocks are stored by columns: 32 rows of one are 64 bytes
        return NarrowConfig(largest_tile(sizes.block_h, 32), 16, 256, 4, pdl, prefetch)
    if sizes.n == 1:
        # 256 values for each warp: no thread shares the entry of its chunk with another warp
        return NarrowConfig(8, 1, 1024, 4, pdl, prefetch)
    if sizes.rows_b * sizes.block_h > 64 * problem.arch.num_sms:
        # more than four programs an SM: taller tiles read x less often (13.4 us against 16.8)
        return None
    return NarrowConfig(16, 16, 512, 4, pdl, prefetch)


def narrow_is_even(
    problem: "BsrProblem",
    config: "NarrowConfig | NarrowSm90Config | StripsConfig",
    longest_row: int,
) -> bool:
    """Whether no program is much longer than the product, given the blocks of the longest row."""
    from ..sm90.config import NarrowSm90Config

    sizes = spmm_sizes(problem)
    row_bytes = sizes.block_w * problem.dtype.itemsize
    longest = longest_row * config.tile_m * row_bytes
    share = sizes.nnz_blocks * sizes.block_h * row_bytes // problem.arch.num_sms
    alone = TMA_ALONE if isinstance(config, NarrowSm90Config) else 2
    return longest <= max(SMALL_SHARE, alone * share * max(sizes.batch, 1))


def _wide_tile(problem: "BsrProblem", sizes: SpmmSizes, precision: str) -> _Tile:
    """Many columns: tall blocks are bound by arithmetic, flat ones by reading x."""
    sm = problem.arch.sm
    tile_m = largest_tile(sizes.block_h, 128)
    if _is_fma(problem.dtype, precision):
        tile_m = min(tile_m, 64)
        return _Tile(tile_m, 64, 16, 4, 3)
    if problem.dtype.itemsize == 4:
        # tf32: as many bytes as 16-bit tiles with half the steps
        return _Tile(tile_m, 128, 32, 8 if tile_m == 128 else 4, 3)
    if sm in (90, 100, 103):
        # accumulators of 128x256 take half the registers of 8 warps; wgmma and tcgen05 read
        # both operands from shared memory, and x from L2 is what limits: wide panels
        wide = _Tile(tile_m, 256, 64, 8 if tile_m == 128 else 4, 4)
        if sm >= 100 and problem.activation is not None:
            # all accumulators leave tensor memory at once: with an erf, 256 columns would spill
            wide = wide._replace(n=128)
    else:
        # mma.sync needs operand registers besides the accumulators
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
def sddmm_config(problem: "BsrProblem", precision: str) -> SddmmConfig:
    """Tiles of `bsr_sddmm`, whose sum runs over `problem.n` and the batch."""
    block_h, block_w = problem.block_shape
    tile = _square_tile(problem.dtype, block_h, block_w, precision)
    tile_k = 16 if _is_fma(problem.dtype, precision) else 128 // problem.dtype.itemsize
    tile = _fit_smem(tile._replace(k=tile_k), problem.arch, problem.dtype.itemsize)
    programs = problem.nnz_blocks * (block_h // tile.m) * (block_w // tile.n)
    steps = cdiv(problem.n, tile.k) * max(problem.batch, 1)
    # too few tiles to fill the GPU: split the sum, with at least 16 steps in each share
    split_k = max(1, min(2 * problem.arch.num_sms // max(programs, 1), steps // 16))
    return SddmmConfig(*tile, precision, split_k)


@lru_cache(maxsize=1024)
def pair_config(problem: "BsrProblem", precision: str) -> PairConfig:
    """Tiles of `bsr_pair_products`, whose sum runs over the inner block side."""
    (block_h, inner), (_, block_w) = problem.block_shape, problem.other_block_shape
    limit = MIN_TILE if _is_fma(problem.dtype, precision) else 128 // problem.dtype.itemsize
    tile = _square_tile(problem.dtype, block_h, block_w, precision)
    tile = tile._replace(k=largest_tile(inner, limit))
    return PairConfig(*_fit_smem(tile, problem.arch, problem.dtype.itemsize), precision)


def _square_tile(dtype: Any, block_h: int, block_w: int, precision: str) -> _Tile:
    """A tile of a block, as large as the accumulators allow."""
    limit = 64 if _is_fma(dtype, precision) else 128
    tile_m, tile_n = largest_tile(block_h, limit), largest_tile(block_w, limit)
    area = tile_m * tile_n
    # 64 accumulators a thread at the most; small tiles are latency bound and want few warps
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


def _is_fma(dtype: Any, precision: str) -> bool:
    """Whether the product runs without tensor cores."""
    return dtype.itemsize == 4 and precision == "ieee"


def _power_of_two_above(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
