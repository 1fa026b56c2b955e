"""Which problems the portable kernels take, and their tiles."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...attention.triton.tuning import LARGE_SMEM
from ...calls.sparse_attention import SparseAttnProblem
from ...dispatch.machine import why_not_portable

LARGEST_HEAD_DIM = 256
# Of latent attention, 16-bit and forward only: dk and dv would fill the registers twice.
LARGEST_LATENT = (576, 512)
LONGEST = 2**30 - 1
# Programs of one grid axis.
MOST_PROGRAMS = 2**31 - 1


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


class _Tile(NamedTuple):
    """The most rows (queries times heads), the most keys of one step, and launch options."""

    rows: int
    keys: int
    warps: int
    stages: int


def sparse_attn_config(problem: SparseAttnProblem, precision: str) -> SparseAttnConfig:
    """Tiles for a problem, forward or backward.

    Entries of 1 and 4 keys are gathered for one query at a time: lists of neighbouring queries
    differ too much at that size. Larger ones are walked for as many queries as fill the rows.
    """
    gathered = problem.granularity < 16
    if max(problem.head_dim, problem.head_dim_v) > LARGEST_HEAD_DIM:
        tile = _latent_tile(problem)
    else:
        tile = _gathered_tile(problem) if gathered else _walked_tile(problem)
    pack = heads_per_tile(problem, tile.rows)
    queries = 1 if gathered else max(1, min(tile.rows // pack, problem.max_q))
    tile_m = max(16, 1 << (queries * pack - 1).bit_length())
    tile_n = tile.keys if gathered else min(problem.granularity, tile.keys)
    return SparseAttnConfig(pack, tile_m, tile_n, precision, tile.warps, tile.stages)


def heads_per_tile(problem: SparseAttnProblem, rows: int) -> int:
    """The most query heads, up to `rows`, that share a KV head and a list, in equal parts."""
    if not problem.heads_q:
        return 1
    shared = min(problem.heads_q // problem.heads_kv, problem.heads_q // problem.lists)
    return max(n for n in range(1, min(shared, rows) + 1) if shared % n == 0)


def _latent_tile(problem: SparseAttnProblem) -> _Tile:
    """Sums of 512 columns take 64 registers of 8 warps with 32 rows; 64 rows spill 2.4 KiB."""
    if problem.arch.sm in LARGE_SMEM:
        return _Tile(32, 32, 8, 1)
    # queries, keys and values of 16 rows take 88 of 99 KiB
    return _Tile(16, 32, 4, 1)


def _gathered_tile(problem: SparseAttnProblem) -> _Tile:
    dim = max(problem.head_dim, problem.head_dim_v)
    if problem.dtype == torch.float32 and not problem.arch.interpreted:
        return _fp32_tile(dim)
    stages = 1 if dim > 128 else 2
    # dk and dv of gated entries spill 32 bytes with 4 warps
    return _Tile(64, 16, 8, stages) if problem.backward else _Tile(64, 32, 4, stages)


def _walked_tile(problem: SparseAttnProblem) -> _Tile:
    """The largest tiles that compile without spills, 16-bit ones when interpreted."""
    dim = max(problem.head_dim, problem.head_dim_v)
    if problem.dtype == torch.float32 and not problem.arch.interpreted:
        return _fp32_tile(dim)
    if problem.backward:
        if dim <= 128:
            return _Tile(64, 32, 4 if dim <= 64 else 8, 2)
        # 64 rows need 131072 bytes of shared memory; sm_89 and sm_120 have 101376
        return _Tile(32, 32, 8, 1)
    if dim <= 128:
        # without the matrix instructions of sm_90 and sm_100, operands fill registers as well
        few = dim > 64 and problem.arch.sm // 10 not in (9, 10)
        return _Tile(64, 32 if few else 64, 4, 2)
    return _Tile(32, 32, 4, 1)


def _fp32_tile(dim: int) -> _Tile:
    # Products run on the CUDA cores, with operands in registers, unless the user allows tf32. 16 x
    # 32 spill 6060 bytes, and more rows need more shared memory than sm_89 and sm_120 have.
    return _Tile(16, 16, 4 if dim <= 64 else 8, 1)


def _is_latent(problem: SparseAttnProblem) -> bool:
    largest, largest_v = LARGEST_LATENT
    return 1 <= problem.head_dim <= largest and 1 <= problem.head_dim_v <= largest_v


def why_not(problem: SparseAttnProblem) -> str | None:
    """Why the kernels cannot run this problem, or None when they can."""
    if (reason := why_not_portable(problem.arch, problem.dtype)) is not None:
        return reason
    dims = (problem.head_dim, problem.head_dim_v)
    if max(dims) > LARGEST_HEAD_DIM and _is_latent(problem):
        if problem.dtype == torch.float32:
            return f"needs 16-bit tensors for head dimensions above {LARGEST_HEAD_DIM}"
        if problem.backward:
            return f"has no gradients for head dimensions above {LARGEST_HEAD_DIM}"
    elif not 1 <= min(dims) <= max(dims) <= LARGEST_HEAD_DIM:
        largest = f"{LARGEST_HEAD_DIM}, or {LARGEST_LATENT[0]} and {LARGEST_LATENT[1]} in 16 bits"
        return f"needs head dimensions of 1 to {largest}, got {dims[0]} and {dims[1]}"
    if max(problem.max_q, problem.max_k) > LONGEST:
        return f"needs sequences of at most {LONGEST} tokens"
    if problem.backward and problem.page_size is not None:
        return "keys in pages have no gradients"
    blocks = -(-problem.max_k // min(problem.granularity, 16))
    if problem.batch * problem.heads_q * max(problem.max_q, blocks) > MOST_PROGRAMS:
        return f"needs at most {MOST_PROGRAMS} queries or entries over batch and heads"
    return None
