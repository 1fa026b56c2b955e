"""Whether the portable kernel can run packed queries over a cache, and with which tiles.

Pure functions; nothing is timed. Under `batch_invariant` tiles depend only on dtypes and head dims.
"""

from dataclasses import dataclass

from ..attention.triton.tuning import LARGE_SMEM, PRECISIONS
from ..calls.ragged import RaggedProblem
from ..decode.tuning import (
    INTERPRETED_PROGRAMS,
    LONGEST,
    MOST_TILES,
    SMALLEST_TILE,
    cache_unsupported,
)

LARGEST_HEAD_DIM = 256


def why_not_triton(problem: RaggedProblem) -> str | None:
    """Why the portable kernel cannot run this problem, or None when it can."""
    if (reason := cache_unsupported(problem, LARGEST_HEAD_DIM)) is not None:
        return reason
    if problem.capacity > LONGEST or problem.tokens * problem.group > LONGEST:
        return f"needs at most {LONGEST} keys a sequence, and rows of all sequences"
    softmaxes = query_tiles(problem, SMALLEST_TILE) * problem.heads_kv
    if softmaxes * (problem.capacity // SMALLEST_TILE + 1) > MOST_TILES:
        return f"needs at most {MOST_TILES} tiles over all sequences and heads"
    return None


def query_tiles(problem: RaggedProblem, tile_m: int) -> int:
    """At least as many tiles of `tile_m` rows as the sequences have, padding included."""
    return problem.tokens * problem.group // tile_m + problem.batch + 1


@dataclass(frozen=True)
class RaggedConfig:
    """Tiles and launch options of the portable kernel.

    Parameters
    ----------
    tile_m : rows of one tile: queries of all heads that share a KV head
    tile_n : keys of one tile; both are powers of two, at least 16
    num_warps, num_stages : launch options of Triton
    programs : how many programs split the keys of all query tiles and heads
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


def ragged_config(problem: RaggedProblem, precision: str) -> RaggedConfig:
    """Tiles and programs; `precision` is that of fp32 products."""
    dim = max(problem.head_dim, problem.head_dim_v)
    arch = problem.arch
    sms = INTERPRETED_PROGRAMS if arch.interpreted else arch.num_sms
    # as for decoding: 99 KiB of shared memory hold one program, 227 KiB two
    programs = 2 * sms if arch.sm in LARGE_SMEM else sms
    if problem.cache_dtype.itemsize == 4:
        # full fp32 products run on the CUDA cores, with operands in registers
        return RaggedConfig(16, 32 if dim <= 128 else 16, 8, 2, programs, precision)
    rows = problem.max_q * problem.group
    if rows <= 16 and not problem.batch_invariant:
        # every sequence decodes: as in `decode.tuning`
        return RaggedConfig(16, 64 if dim <= 128 else 32, 4, 3, programs, precision)
    if dim > 128:
        # with 4 warps, 32 rows spill
        return RaggedConfig(32, 32, 8, 3, programs, precision)
    # 64 rows spill from the registers of 4 warps
    return RaggedConfig(64, 64, 8, 3, programs, precision)
