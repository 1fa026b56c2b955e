"""Which problems the portable kernels take, and their tiles."""

from dataclasses import dataclass

from ...calls.sparse_attention import SparseAttnProblem
from ...dispatch.machine import why_not_portable

LARGEST_HEAD_DIM = 256
LONGEST = 2**30 - 1
# Programs of one grid axis.
MOST_PROGRAMS = 2**31 - 1
# Rows of a tile, queries times heads; fewer if there are fewer queries.
MOST_ROWS = 64
# Keys of one step. Entries of 128 keys take two steps.
MOST_KEYS = 64


@dataclass(frozen=True)
class SparseAttnConfig:
    """Tiles of one launch."""

    pack: int
    """Query heads in a tile: they share a KV head and a list."""
    tile_m: int
    """Rows of a tile, `tile_m // pack` queries times `pack` heads."""
    tile_n: int
    precision: str
    num_warps: int
    num_stages: int


def heads_per_tile(problem: SparseAttnProblem) -> int:
    """The most query heads, up to MOST_ROWS, that share a KV head and a list, in equal parts."""
    if not problem.heads_q:
        return 1
    shared = min(problem.heads_q // problem.heads_kv, problem.heads_q // problem.lists)
    return max(n for n in range(1, min(shared, MOST_ROWS) + 1) if shared % n == 0)


def sparse_attn_config(problem: SparseAttnProblem, precision: str) -> SparseAttnConfig:
    """Tiles for a problem.

    Entries of 1 and 4 keys are gathered for one query at a time: lists of neighbouring queries
    differ too much at that size. Larger ones are walked for as many queries as fill the rows.
    """
    pack = heads_per_tile(problem)
    gathered = problem.granularity < 16
    queries = 1 if gathered else max(1, min(MOST_ROWS // pack, problem.max_q))
    tile_m = max(16, 1 << (queries * pack - 1).bit_length())
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    # Two tiles of 32 keys with D 256 in fp32 fill the shared memory of sm_89. dk and dv of 64 keys
    # with D 128 spill 884 bytes on sm_90; 32 keys spill 156 with 4 warps.
    few = wide or (problem.backward and max(problem.head_dim, problem.head_dim_v) > 64)
    tile_n = 32 if gathered else min(problem.granularity, 32 if few else MOST_KEYS)
    if problem.backward and gathered:
        tile_n = 16
    if problem.backward and wide:
        tile_m = min(tile_m, max(16, 1 << (pack - 1).bit_length()))
    warps = 8 if problem.backward and few and not gathered else 4
    return SparseAttnConfig(pack, tile_m, tile_n, precision, warps, 1 if wide else 2)


def why_not(problem: SparseAttnProblem) -> str | None:
    """Why the kernels cannot run this problem, or None when they can."""
    if (reason := why_not_portable(problem.arch, problem.dtype)) is not None:
        return reason
    dims = (problem.head_dim, problem.head_dim_v)
    if not 1 <= min(dims) <= max(dims) <= LARGEST_HEAD_DIM:
        return f"needs head dimensions of 1 to {LARGEST_HEAD_DIM}, got {dims[0]} and {dims[1]}"
    if max(problem.max_q, problem.max_k) > LONGEST:
        return f"needs sequences of at most {LONGEST} tokens"
    if problem.backward and problem.page_size is not None:
        return "keys in pages have no gradients"
    blocks = -(-problem.max_k // min(problem.granularity, 16))
    if problem.batch * problem.heads_q * max(problem.max_q, blocks) > MOST_PROGRAMS:
        return f"needs at most {MOST_PROGRAMS} queries or entries over batch and heads"
    return None
