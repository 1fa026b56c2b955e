"""Tiles of the portable decode kernel, and the sizes that it takes. Needs no framework.

Decoding reads each key once, so it is bound by memory, and its speed depends on the bytes in
flight: stages times tile times programs on an SM. Tiles may depend neither on a length nor on the
placement of pages: a paged cache gives the same bits as a contiguous one.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..attention.triton.tuning import LARGE_SMEM, PRECISIONS

if TYPE_CHECKING:
    from ..calls.decode import DecodeProblem

# Keys of latent caches (MLA) have 576 columns.
LARGEST_HEAD_DIM = 576
# Positions and band limits are int32 in kernels.
LONGEST = 2**30 - 1
# Kernels number the KV tiles of all sequences and heads in int32.
MOST_TILES = 2**31 - 1
SMALLEST_TILE = 16
# A GPU has many SMs, the interpreter one: a few programs exercise every way to split the work.
INTERPRETED_PROGRAMS = 6


def why_not_head_dims(problem: Any, largest: int) -> str | None:
    """Why portable kernels cannot read a cache with these head dims, or None."""
    dims = (problem.head_dim, problem.head_dim_v)
    if not 1 <= min(dims) <= max(dims) <= largest:
        return f"needs head dimensions of 1 to {largest}, got {dims[0]} and {dims[1]}"
    return None


def why_not_sizes(problem: "DecodeProblem") -> str | None:
    """Why the portable kernel cannot run these sizes, whatever the machine, or None."""
    if problem.capacity > LONGEST:
        return f"needs caches of at most {LONGEST} tokens a sequence"
    softmaxes = problem.batch * problem.heads_kv * -(-problem.rows // SMALLEST_TILE)
    if softmaxes * (problem.capacity // SMALLEST_TILE + 1) > MOST_TILES:
        return f"needs at most {MOST_TILES} tiles over all sequences and heads"
    return None


@dataclass(frozen=True)
class SplitKeysConfig:
    """Tiles and launch options of a portable kernel whose programs split the keys of a cache.

    Parameters
    ----------
    tile_m : rows of one tile: queries of all heads that share a KV head
    tile_n : keys of one tile; both are powers of two, at least 16
    num_warps, num_stages : launch options of Triton
    programs : how many programs split the keys of all sequences and heads
    precision : of fp32 products: "ieee" or "tf32"; ignored for 16-bit inputs
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    programs: int
    precision: str = "ieee"

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n"):
            side = getattr(self, name)
            if side < 16 or side & (side - 1):
                raise ValueError(f"{name} is {side}; expected a power of two from 16 on")
        if self.programs < 1:
            raise ValueError(f"programs is {self.programs}; expected at least 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; expected one of {PRECISIONS}")


@dataclass(frozen=True)
class DecodeConfig(SplitKeysConfig):
    """Tiles and launch options of the portable decode kernel, and what it adds.

    Parameters
    ----------
    across : keys are the rows of products and queries the columns, for tensor cores that need 64
        rows
    words : read fp8 caches as words of four values, if their strides allow it
    registers : limit of registers per thread
    """

    across: bool = False
    words: bool = False
    registers: int | None = None


def attn_decode_config(problem: "DecodeProblem", precision: str) -> DecodeConfig:
    """Tiles and programs; `precision` applies to fp32 products."""
    dim = max(problem.head_dim, problem.head_dim_v)
    sms = INTERPRETED_PROGRAMS if problem.arch.interpreted else problem.arch.num_sms
    itemsize = problem.cache_dtype.itemsize
    # products with keys as rows have no code for slopes
    if (
        problem.arch.sm == 90
        and itemsize < 4
        and dim <= 128
        and problem.rows <= 16
        and (not problem.alibi)
    ):
        return _hopper_config(sms, itemsize, problem.batch * problem.heads_kv)
    return _config(problem.arch.sm, sms, itemsize, dim, problem.rows, precision)


@lru_cache(maxsize=1024)
def _config(sm: int, sms: int, itemsize: int, dim: int, rows: int, precision: str) -> DecodeConfig:
    tile_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    # 99 KiB of shared memory hold only one program, whose stages take 64 KiB or more
    programs = 2 * sms if sm in LARGE_SMEM else sms
    if itemsize == 4:
        # full fp32 products run on the CUDA cores, with operands in registers
        tile_n = 32 if dim <= 128 else 16
        stages = 2 if dim <= 256 else 1
        return DecodeConfig(min(tile_m, 16), tile_n, 8, stages, programs, precision)
    if dim > 256:
        # tiles of keys are 1024 columns wide: two stages of 16 keys fill 99 KiB of shared memory
        return DecodeConfig(16, 16, 8, 2, sms, precision)
    if dim > 128:
        return DecodeConfig(min(tile_m, 32), 32, 4, 3, programs, precision)
    # H200, microseconds at (batch, keys) (1, 8k) / (16, 8k) / (1, 128k) / (64, 4k), measured when
    # splits were still combined with barriers:
    #   64 keys, 4 warps, 3 stages, 2 programs on an SM: 22.8 / 137 / 143 / 255
    #   128 keys, 8 warps, 3 stages, 1 program:          26.9 / 137 / 146 / 259
    #   32 keys, 4 warps, 5 stages, 2 programs:          25.0 / 139 / 146 / 256
    # A third program on an SM does not fit the register file and runs after the others:
    # 33.2 / 158 / 163 / 301. 64 rows spill from the registers of 4 warps.
    return DecodeConfig(tile_m, 64, 8 if tile_m > 32 else 4, 3, programs, precision)


@lru_cache(maxsize=1024)
def _hopper_config(sms: int, itemsize: int, kv_heads: int) -> DecodeConfig:
    """Keys as rows of the products: `wgmma` takes 64 of them, from shared memory if 16-bit.

    H200, microseconds at (batch, keys) (1, 1k) / (1, 8k) / (16, 8k) / (1, 128k) / (64, 4k):
      bf16, queries as rows, 3 stages, 2 programs per SM: 8.3 / 17.1 / 132.6 / 134.2 / 250.2
      keys as rows, 3 stages, 2 programs:                 8.1 / 16.8 / 130.5 / 132.8 / 248.4
      the same, 256 programs instead of 264:              7.7 / 16.5 / 129.8 / 130.1
      keys as rows, 2 stages, 3 programs:                 8.2 / 19.4 / 131.3 / 133.7 / 251.9
      keys as rows, 6 stages, 1 program:                  7.8 / 18.4 / 132.4 / 138.0 / 252.6
      keys as rows, 128 keys, 2 stages, 1 program:        8.3 / 18.8 / 150.5 / 150.8 / 290.8
    and in fp8, with 8 KV heads:
      queries as rows, 3 stages, 2 programs:              8.3 / 15.8 / 117.0 /       / 224.7
      keys as rows, words, 3 stages, 2 programs:          7.8 / 14.1 /  85.9 /  87.6 / 160.9
      keys as rows, words, 4 stages, 3 programs:          7.9 / 17.7 /  79.4 /  82.9 / 144.7
      keys as rows, words, 3 stages, 4 programs:          8.0 / 17.8 /  80.4 /  86.7 / 142.9
    A third program on an SM cuts each softmax into more splits. If there are few softmaxes
    (`kv_heads` over the whole batch), combining the splits takes longer than the program saves,
    unless sequences are very long.
    """
    if itemsize == 1 and kv_heads > sms // 4:
        return DecodeConfig(16, 64, 4, 4, 3 * sms, across=True, words=True, registers=168)
    # slightly fewer programs than fit were faster at every size
    programs = max(2 * sms // 32 * 32, 1)
    return DecodeConfig(16, 64, 4, 3, programs, across=True, words=itemsize == 1)
