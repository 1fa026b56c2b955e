"""Which decode kernels can run a problem, and with which tiles. Pure functions; nothing is timed.

Decoding reads each key once, so it is bound by memory, and its speed depends on the bytes in
flight: stages times tile times programs on an SM. Tiles may depend neither on a length nor on the
placement of pages: a paged cache gives the same bits as a contiguous one.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch

from ..calls.decode import DecodeProblem
from ..core.compat import why_no_gluon
from ..dispatch.machine import why_no_kernels, why_not_portable
from ..launch.descriptors import SMEM_BYTES, accumulator_layout
from ..launch.launcher import cdiv
from .portable_tuning import INTERPRETED_PROGRAMS as INTERPRETED_PROGRAMS
from .portable_tuning import LARGEST_HEAD_DIM, why_not_head_dims, why_not_sizes
from .portable_tuning import LONGEST as LONGEST
from .portable_tuning import MOST_TILES as MOST_TILES
from .portable_tuning import SMALLEST_TILE as SMALLEST_TILE
from .portable_tuning import DecodeConfig as DecodeConfig
from .portable_tuning import attn_decode_config as attn_decode_config

FP8 = torch.float8_e4m3fn

# The portable kernel; its tiles are in `portable_tuning`.

MIN_SM_FP8 = 89


def cache_unsupported(problem: Any, largest: int) -> str | None:
    """Why portable kernels cannot read the cache of a problem with head dims up to `largest`."""
    if (reason := why_not_portable(problem.arch, problem.dtype)) is not None:
        return reason
    if problem.cache_dtype == FP8:
        if problem.dtype == torch.float32:
            return "needs float16 or bfloat16 queries for a float8 cache, got torch.float32"
        if problem.arch.sm < MIN_SM_FP8 and not problem.arch.interpreted:
            return f"needs sm_{MIN_SM_FP8} or newer for a float8 cache, got {problem.arch}"
    return why_not_head_dims(problem, largest)


def why_not_triton(problem: DecodeProblem) -> str | None:
    """Why the portable kernel cannot run this problem, or None when it can."""
    if (reason := cache_unsupported(problem, LARGEST_HEAD_DIM)) is not None:
        return reason
    return why_not_sizes(problem)


# The Hopper kernel.

HEAD_DIMS = (64, 128, 256)
# A latent cache of MLA with absorbed weights: 512 columns that serve as keys and values, and 64
# more key columns, which carry positions.
LATENT_DIMS = (576, 512)
LATENT_VALUES = 512
# The last program of a softmax combines its parts in rounds of this many rows and parts (see
# `device/partials.py`), each of which takes about 0.7 us; a separate launch takes 4 us.
ROWS_OF_ROUND, PARTS_OF_ROUND, FEW_ROUNDS = 4, 16, 6
# The fewest keys of one copy: a step of WGMMA.
STEP = 16
# Rows of a WGMMA.
WGMMA_ROWS = 64
# With more rows, scores leave too few registers for fp8 operands in registers.
MOST_FP8_ROWS = 16


def why_not_sm90(problem: DecodeProblem) -> str | None:
    """Why the Hopper kernel cannot run this problem, or None when it can."""
    return why_no_kernels(problem.arch) or attn_decode_sm90_unsupported(problem) or why_no_gluon()


def attn_decode_sm90_unsupported(problem: DecodeProblem) -> str | None:
    """`why_not_sm90` without the requirements that every kernel has of the machine."""
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} has no 16-bit WGMMA"
    if problem.alibi:
        return "has no code for ALiBi slopes"
    dims = (problem.head_dim, problem.head_dim_v)
    if problem.cache_dtype == FP8:
        # a thread holds words of four values, which span two WGMMAs with 64 rows each
        if dims != (128, 128):
            return f"needs head dimensions of 128 for a float8 cache, got {dims[0]} and {dims[1]}"
        if problem.rows > MOST_FP8_ROWS:
            return f"takes at most {MOST_FP8_ROWS} rows of a float8 cache, got {problem.rows}"
    elif problem.cache_dtype != problem.dtype:
        return f"needs a cache of {problem.dtype} or {FP8}, got {problem.cache_dtype}"
    if dims == LATENT_DIMS:
        if not problem.latent:
            return "needs values that are a view of the keys, v_cache = k_cache[..., :512]"
    elif any(dim not in HEAD_DIMS for dim in dims):
        return (
            f"needs head dimensions of 64, 128 or 256, or 576 and 512, got {dims[0]} and {dims[1]}"
        )
    for what, size in (("pages", problem.page_size), ("listed blocks", problem.block_size)):
        if size is not None and size % STEP:
            return f"{what} of {size} are not a multiple of {STEP}"
    if not problem.tma:
        return "TMA needs slots to copy, and addresses and strides that are multiples of 16 bytes"
    if problem.capacity > LONGEST:
        return f"needs caches of at most {LONGEST} tokens a sequence"
    softmaxes = problem.batch * problem.heads_kv * (problem.rows // 8 + 1)
    # the count allows a few more tiles for each softmax than it has
    if softmaxes * (problem.capacity // 64 + 3) > MOST_TILES:
        return f"needs at most {MOST_TILES} tiles over all sequences and heads"
    return None


class CopiedKeys:
    """How TMA copies tiles of keys out of a cache; for configurations with these fields."""

    TILE_N: int
    PAGE_SIZE: int | None
    BLOCK_KV: int | None

    @property
    def copy_keys(self) -> int:
        """Keys of one TMA copy: the most that never cross a page or a block."""
        return gcd(self.TILE_N, self.PAGE_SIZE or 0, self.BLOCK_KV or 0)

    @property
    def scattered(self) -> bool:
        """Whether a page table or block lists determine where keys lie."""
        return self.PAGE_SIZE is not None or self.BLOCK_KV is not None

    @property
    def noted_keys(self) -> int:
        """Keys of a tile whose positions the producer passes to the consumer."""
        return 1 if self.BLOCK_KV is None else self.TILE_N

    @property
    def copies(self) -> int:
        """Copies that fill one tile."""
        return self.TILE_N // self.copy_keys


@dataclass(frozen=True)
class DecodeSm90Config(CopiedKeys):
    """Everything the kernel is specialised on. Sizes in elements.

    ROWS queries of the heads that share a KV head are multiplied with tiles of TILE_N keys, of
    which STAGES are in flight. TILE_D and TILE_DV are the head dims. PAGE_SIZE is None for a
    contiguous cache, BLOCK_KV is None without lists of blocks. The kernel is compiled for
    MAX_REGISTERS per thread, of which the producer gives back all but PRODUCER_REGISTERS. WORDS: an
    fp8 cache, copied as words of four values. SINGLE: one sequence, whose time is mostly prologue
    and epilogue, so that the kernel uses programmatic dependent launch (PDL). COMBINED: parts of a
    softmax are combined by a separate launch (`combine.py`).
    """

    ROWS: int
    TILE_N: int
    TILE_D: int
    TILE_DV: int
    STAGES: int
    PAGE_SIZE: int | None
    BLOCK_KV: int | None
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int
    WORDS: bool
    SINGLE: bool
    COMBINED: bool = False

    def __post_init__(self) -> None:
        assert self.ROWS in (8, 16, 32, 64), f"{self.ROWS=}"
        assert self.TILE_N in (64, 128), f"{self.TILE_N=}"
        assert self.TILE_D in HEAD_DIMS and self.TILE_DV in HEAD_DIMS, f"{self=}"
        assert self.STAGES >= 2, f"{self.STAGES=}"
        assert self.copy_keys >= 16, f"{self.PAGE_SIZE=}"

    @property
    def pair(self) -> int:
        """Programs of a cluster that share copies."""
        return 1

    @property
    def placed(self) -> bool:
        """Whether copies go to addresses in shared memory, rather than through Gluon."""
        return False

    @property
    def packed(self) -> int:
        """Values of the cache in one copied element."""
        return 4 if self.WORDS else 1

    @property
    def k_column(self) -> int:
        """First column of a copy of keys."""
        return 0

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys."""
        return (1, 1, self.copy_keys, self.TILE_D // self.packed)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values."""
        return (1, 1, self.copy_keys, self.TILE_DV // self.packed)

    @property
    def swapped(self) -> bool:
        """Whether keys are the rows of the products, because there are too few queries to fill 64.

        Then the results of the products are [keys or dims, ROWS], otherwise [ROWS, keys or dims].
        """
        return self.ROWS < WGMMA_ROWS

    def scores_layout(self) -> object:
        """Register layout of scores."""
        return accumulator_layout(self.ROWS if self.swapped else self.TILE_N)

    def accumulator_layout(self) -> object:
        """Register layout of accumulators."""
        return accumulator_layout(self.ROWS if self.swapped else self.TILE_DV)


def make_config(
    rows: int,
    tile_d: int,
    tile_dv: int,
    page_size: int | None = None,
    block_kv: int | None = None,
    *,
    tile_n: int = 64,
    words: bool = False,
    single: bool = False,
    combined: bool = False,
) -> DecodeSm90Config:
    """The configuration for these packed rows, head dims, pages and listed blocks."""
    # Half the shared memory of an SM holds enough bytes in flight, and each further stage delays a
    # launch by the 120 cycles of its barriers. The accumulators of 64 rows need all registers, so
    # that one program has the SM and its shared memory to itself; so do keys or values of 256
    # columns, of which half an SM holds one stage.
    tall, wide = rows == WGMMA_ROWS, max(tile_d, tile_dv) > 128
    scattered = page_size is not None or block_kv is not None
    copies = tile_n // gcd(tile_n, page_size or 0, block_kv or 0)
    budget = SMEM_BYTES if tall or wide else SMEM_BYTES // 2
    # 2 KiB for barriers, positions for the consumer, and the 1 KiB reserved by the system
    ring = budget - 2048 - 2 * rows * (tile_d + tile_n)
    return DecodeSm90Config(
        ROWS=rows,
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        STAGES=ring // ((1 if words else 2) * tile_n * (tile_d + tile_dv)),
        PAGE_SIZE=page_size,
        BLOCK_KV=block_kv,
        # the coordinates of a tile's copies stay in registers while the producer waits for a stage
        PRODUCER_REGISTERS=(64 if copies <= 4 else 88) if scattered else 40,
        MAX_REGISTERS=168 if tall or wide else 128,
        WORDS=words,
        SINGLE=single,
        COMBINED=combined,
    )


class DecodeSm90Launch(NamedTuple):
    """How the Hopper kernel is launched."""

    config: DecodeSm90Config
    programs: int


def attn_decode_sm90_launch(problem: DecodeProblem) -> DecodeSm90Launch:
    """Tiles and programs of a problem that `attn_decode_sm90_unsupported` accepts."""
    is_fp8 = problem.cache_dtype == FP8
    softmaxes = problem.batch * problem.heads_kv
    return _launch(
        problem.arch.num_sms,
        softmaxes,
        problem.rows,
        problem.head_dim,
        problem.head_dim_v,
        problem.page_size,
        problem.block_size,
        is_fp8,
        problem.batch == 1,
    )


@lru_cache(maxsize=1024)
def _launch(
    sms: int,
    softmaxes: int,
    rows: int,
    dim: int,
    dim_v: int,
    page_size: int | None,
    block_kv: int | None,
    is_fp8: bool,
    single: bool,
) -> DecodeSm90Launch:
    packed = next((size for size in (8, 16, 32) if rows <= size), 64)
    if dim_v > 128:
        # accumulators of 64 rows leave no registers for scores
        packed = min(packed, 32)
    many = is_fp8 and softmaxes > sms // 4
    # tiles of as many bytes as at D128; with more rows, scores would take twice the registers
    short = dim == dim_v == 64 and packed <= 16
    programs = 2 * sms if is_fp8 else sms
    # H200, microseconds at (batch, keys) (1, 1k) / (1, 8k) / (16, 8k) / (1, 128k) / (64, 4k), and
    # (16, 8k) in pages of 64 and 16, without splits:
    #   64 keys, 3 stages, 1 program on an SM:  7.2 / 14.9 / 127.6 / 129.4 / 247.7, 127.7, 129.6
    #   64 keys, 5 stages, 1 program:           7.3 / 14.8 / 127.4 / 128.7 / 247.7, 129.7, -
    #   128 keys, 3 stages, 1 program:          7.3 / 14.5 / 126.9 / 128.4 / 248.5, 129.1, 137.2
    #   64 keys, 3 stages, 2 programs:            - /    - / 129.5 /     - /     -, 131.0, 133.4
    # One sequence, in the CUDA graphs of `bsk bench`: 7.4 / 16.1, with PDL 5.9 / 15.2.
    # 64:8 heads of D64, 8k keys, the same graphs, batch 1 / 4 / 32, and 16 in pages of 64 and 16:
    #   64 keys, 1 program on an SM:  10.3 / 24.4 / 130.8, 65.8, 69.5
    #   128 keys, 1 program:           9.7 / 23.5 / 126.8, 64.6, 71.0
    #   128 keys, 2 programs:         11.5 / 23.9 / 123.8, 69.3, 72.4
    # fp8 in the same graphs, (16, 8k) / (64, 4k) / (16, 8k) in pages of 64 / (1, 8k) with PDL:
    #   64 keys, 6 stages, 1 program on an SM:  87.8 /     - /    - /    -
    #   64 keys, 6 stages, 2 programs:          79.2 / 140.9 / 81.5 / 11.8
    #   128 keys, 6 stages, 1 program:          80.6 / 145.4 /    - /    -
    #   128 keys, 3 stages, 2 programs:         78.0 / 140.5 / 80.8 / 12.2
    config = make_config(
        packed, dim, dim_v, page_size, block_kv,
        tile_n=128 if many or short else 64, words=is_fp8, single=single,
        combined=_combined(min(rows, packed), programs, softmaxes * cdiv(rows, packed)),
    )  # fmt: skip
    return DecodeSm90Launch(config, programs)


def _combined(rows: int, programs: int, softmaxes: int) -> bool:
    """Whether the parts of softmaxes of `rows` rows are better combined by a separate launch."""
    parts = programs // softmaxes if softmaxes else 0
    rounds = cdiv(rows, ROWS_OF_ROUND) * cdiv(parts, PARTS_OF_ROUND)
    return parts > 1 and rounds > FEW_ROUNDS


# Latent caches: `sm90_latent.py`.


# Columns of a copy by address: 128 bytes, the span of the swizzle.
SLICE = 64
# Cache slots over all sequences from which programs work in pairs. H200, 128 heads, pages of 64,
# CUDA graphs, microseconds alone and paired, at (batch, keys):
#   (1, 8k) 26.8 and 28.1, (16, 8k) 95.4 and 105, (32, 8k) 167 and 173,
#   (16, 32k) 305 and 292, (32, 16k) 310 and 300, (64, 8k) 299 and 281,
#   (128, 8k) 664 and 596, (64, 32k) 1183 and 1039.
# Pairs lose up to 256k slots, gain 3 to 6 % with 512k, 10 % with 1M and 12 % with 2M.
PAIRED_SLOTS = 2**19
# Estimated microseconds of one sequence: per KV tile, and per MB of parts, written and read again.
TILE_US, PARTS_US = 1.5, 0.5


@dataclass(frozen=True)
class LatentConfig(CopiedKeys):
    """Everything `sm90_latent.py` is specialised on; names as in `DecodeSm90Config`.

    The halves of the values' columns, one for each consumer, have separate barriers, and are
    released and copied separately. PAIRED: the two programs of a cluster take two head tiles of the
    same keys, and each copies half of the columns of a tile to both. Their consumers take the order
    of `device/gluon/latent_pairs.py`: each multiplies the weights of its own tile first, then those
    of the other, and the first one starts the scores of the next even tile behind that product.
    """

    PAGE_SIZE: int | None
    BLOCK_KV: int | None
    PRODUCER_REGISTERS: int
    ROWS: int = 64
    TILE_N: int = 64
    TILE_DV: int = LATENT_VALUES
    rest: int = LATENT_DIMS[0] - LATENT_VALUES
    """Columns of the keys that are not values; they come last."""
    STAGES: int = 2
    CONSUMER_REGISTERS: int = 232
    COMBINED: bool = False
    PAIRED: bool = False

    def __post_init__(self) -> None:
        assert self.copy_keys >= 16, f"{self.PAGE_SIZE=} {self.BLOCK_KV=}"
        assert self.rest == SLICE, f"{self.rest=}"

    @property
    def GATHERED(self) -> bool:
        """Whether cp.async copies single keys; see `sparse_attention/sm90/latent.py`."""
        return False

    @property
    def GATE(self) -> bool:
        """Whether keys have factors; see `sparse_attention/sm90/latent.py`."""
        return False

    @property
    def pair(self) -> int:
        """Programs of a cluster that share copies."""
        return 2 if self.PAIRED else 1

    @property
    def SINGLE(self) -> bool:
        """Whether the producer waits for the kernel before this one: PDL gained nothing here."""
        return False

    @property
    def placed(self) -> bool:
        """Whether copies go to addresses in shared memory, rather than through Gluon."""
        return True

    @property
    def half(self) -> int:
        """Columns of the values that one consumer accumulates."""
        return self.TILE_DV // 2

    @property
    def k_column(self) -> int:
        """First column after the values; these columns are a separate slice."""
        return self.TILE_DV

    def block(self) -> tuple[int, int, int, int]:
        """Shape of a copy: a slice of the values, or the columns after them."""
        return (1, 1, self.copy_keys, SLICE)

    # Parts of a tile that have separate barriers. The last part also has the columns after the
    # values.

    @property
    def parts(self) -> int:
        """Parts of a tile: one for each consumer."""
        return 2

    @property
    def own_slices(self) -> int:
        """Slices of values in a part that each program of a pair copies."""
        return self.TILE_DV // SLICE // self.parts // self.pair

    def first_slice(self, part: int, i: int) -> int:
        """The `i`-th of them in the first program; in the second it is the next one."""
        return (part * self.own_slices + i) * self.pair

    def part_bytes(self, part: int) -> int:
        """Bytes that arrive at the barrier of a part."""
        columns = self.TILE_DV // self.parts + (self.rest if part == self.parts - 1 else 0)
        return 2 * self.TILE_N * columns

    def copied_tile(self, turn: int) -> int:
        """0 or 1: the tile of a pair of which a part is copied in this turn, of `2 * parts`."""
        return self._copied[turn][0]

    def copied_part(self, turn: int) -> int:
        """The part of that tile that is copied."""
        return self._copied[turn][1]

    @property
    def _copied(self) -> tuple[tuple[int, int], ...]:
        """Tile and part that each turn copies, in the order in which consumers release them.

        With PAIRED the first halves to be released are those that consumers multiply with their own
        weights: the left one of the even tile, the right one of the odd tile.
        """
        if self.PAIRED:
            return ((0, 0), (1, 1), (0, 1), (1, 0))
        return ((0, 0), (0, 1), (1, 0), (1, 1))

    def completes(self, turn: int) -> bool:
        """Whether a tile is complete with the part that is copied in this turn."""
        return self.copied_tile(turn) not in [tile for tile, _ in self._copied[turn + 1 :]]

    # Where allocations begin in shared memory, in bytes.

    @property
    def _places(self) -> dict[str, int]:
        """Triton lays out larger allocations first, and those of the same size in program order."""
        sizes = {
            "values": 2 * self.STAGES * self.TILE_N * self.TILE_DV,
            "queries": 2 * self.ROWS * self.TILE_DV,
            "rest": 2 * self.STAGES * self.TILE_N * self.rest,
            "rest of queries": 2 * self.ROWS * self.rest,
            "weights": 2 * self.ROWS * self.TILE_N,
            # PAIRED: several that are smaller than the barriers
            "states": 0 if self.PAIRED else 4 * self.ROWS * 3,
            "barriers": 8 * self.bars_room,
        }
        places, end = {}, 0
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            places[name] = end
            end += sizes[name]
        return places

    @property
    def bars_room(self) -> int:
        """Room for barriers: more bytes than any allocation that is not in `_places`.

        Those are states of rows, positions, and what Triton passes to the roles, up to 512 bytes.
        """
        return 80

    @property
    def values_offset(self) -> int:
        """Where the values of the first stage begin."""
        return self._places["values"]

    @property
    def rest_offset(self) -> int:
        """Where the columns after the values of the first stage begin."""
        return self._places["rest"]

    @property
    def bars_offset(self) -> int:
        """Where the barriers begin: of full parts of all stages, then of empty parts."""
        return self._places["barriers"]

    @property
    def first_empty(self) -> int:
        """Index of the first barrier of empty parts."""
        return self.STAGES * self.parts

    @property
    def releases(self) -> int:
        """Arrivals that release a part: of a consumer; PAIRED: of its warps in both programs."""
        return 4 * self.pair if self.PAIRED else 1

    def placed_barriers(self) -> list[tuple[int, int]]:
        """Offset in shared memory and arrivals of each barrier that is found by its address."""
        arrivals = [1] * self.first_empty + [self.releases] * self.first_empty
        return [(self.bars_offset + 8 * i, count) for i, count in enumerate(arrivals)]

    @property
    def parameter(self) -> str:
        """PTX name of the parameter with the cache descriptor, which follows out, lse and q."""
        return "_attn_decode_latent_kernel_param_3"

    def scores_layout(self) -> object:
        """Register layout of scores [ROWS, TILE_N]."""
        return accumulator_layout(self.TILE_N)

    def accumulator_layout(self) -> object:
        """Register layout of the accumulators of a consumer [ROWS, half]."""
        return accumulator_layout(self.half)


class LatentLaunch(NamedTuple):
    """How the kernel for latent caches is launched."""

    config: LatentConfig
    programs: int


@lru_cache(maxsize=1024)
def _splits_of_one(most: int, tiles: int, rows: int) -> int:
    """Parts of each softmax of one sequence, up to `most`; `rows` are those of all softmaxes.

    Fewer parts have more tiles each, but there is less to write and to combine.
    """

    def time(splits: int) -> float:
        megabytes = splits * rows * (LATENT_VALUES + 2) * 4e-6
        return cdiv(tiles, splits) * TILE_US + (megabytes * PARTS_US if splits > 1 else 0.0)

    return min(range(1, most + 1), key=time)


def latent_launch(problem: DecodeProblem) -> LatentLaunch:
    """Tiles and programs of a problem with a latent cache."""
    scattered = problem.page_size is not None or problem.block_size is not None
    registers = 64 if scattered else 40
    rows, programs = min(problem.rows, LatentConfig.ROWS), problem.arch.num_sms
    head_tiles = cdiv(problem.rows, LatentConfig.ROWS)
    softmaxes = problem.batch * problem.heads_kv * head_tiles
    if problem.batch == 1 and 0 < softmaxes <= programs:
        tiles = cdiv(problem.capacity, LatentConfig.TILE_N)
        programs = softmaxes * _splits_of_one(programs // softmaxes, tiles, softmaxes * rows)
    # both head tiles of a pair read the same keys, so they belong to one KV head
    slots = problem.batch * problem.heads_kv * problem.capacity
    paired = head_tiles % 2 == 0 and slots >= PAIRED_SLOTS
    config = LatentConfig(
        problem.page_size,
        problem.block_size,
        registers,
        COMBINED=_combined(rows, programs, softmaxes),
        PAIRED=paired,
    )
    return LatentLaunch(config, programs // config.pair * config.pair)
