"""(architecture, problem) -> tiles of the portable backward kernels of attention.

Tiles may not depend on a length, a window or the content of a mask, as in `attention.py`. The dQ
kernel keeps one sum of TILE_M rows, the dK/dV kernel two of TILE_N rows, which fill half of the
registers by themselves; `testing.compile_only` shows registers and spills.
"""

from functools import lru_cache
from typing import NamedTuple

from ..kernels.attention.config import AttnBwdConfig
from .attention import LARGE_SMEM, WARP_GROUP_MMA
from .problem_attention import AttnProblem


class _Tile(NamedTuple):
    m: int
    n: int
    warps: int
    stages: int


def attn_dq_config(problem: AttnProblem, precision: str) -> AttnBwdConfig:
    """Tiles of the dQ kernel; `precision` is what fp32 operands are multiplied in."""
    tile = _dq_tile(*_facts(problem), precision)
    if problem.mask_block is not None and problem.mask_block[0] < tile.m:
        tile = tile._replace(m=problem.mask_block[0], warps=_warps(problem.mask_block[0]))
    return AttnBwdConfig(*tile, precision)


def attn_dkdv_config(problem: AttnProblem, precision: str) -> AttnBwdConfig:
    """Tiles of the dK/dV kernel."""
    tile = _dkdv_tile(*_facts(problem), precision)
    if problem.mask_block is not None and problem.mask_block[1] < tile.n:
        tile = tile._replace(n=problem.mask_block[1], warps=_warps(problem.mask_block[1]))
    return AttnBwdConfig(*tile, precision)


def _facts(problem: AttnProblem) -> tuple[int, int, int]:
    return problem.arch.sm, problem.dtype.itemsize, max(problem.head_dim, problem.head_dim_v)


def _warps(rows: int) -> int:
    """Rows of a tile within one block: 16 give work for two warps."""
    return 2 if rows < 32 else 4


@lru_cache(maxsize=1024)
def _dq_tile(sm: int, itemsize: int, dim: int, precision: str) -> _Tile:
    if itemsize == 4:
        return _tile_fp32(sm, dim, precision)
    if dim <= 128:
        # K and V of two stages, Q and dO take 128 KiB at 128 columns
        return _Tile(128, 64, 8, 2) if sm in LARGE_SMEM or dim <= 64 else _Tile(64, 64, 4, 2)
    return _Tile(64, 32, 8, 2) if sm in LARGE_SMEM else _Tile(32, 32, 4, 1)


@lru_cache(maxsize=1024)
def _dkdv_tile(sm: int, itemsize: int, dim: int, precision: str) -> _Tile:
    if itemsize == 4:
        tile = _tile_fp32(sm, dim, precision)
        return _Tile(tile.n, tile.m, tile.warps, tile.stages)
    if dim <= 64:
        return _Tile(64, 128, 8, 3) if sm in WARP_GROUP_MMA else _Tile(32, 128, 8, 2)
    if dim <= 128:
        return _Tile(32, 128, 8, 2) if sm in WARP_GROUP_MMA else _Tile(64, 64, 8, 2)
    return _Tile(32, 64, 8, 1)


def _tile_fp32(sm: int, dim: int, precision: str) -> _Tile:
    if precision == "tf32":
        return _Tile(32, 32, 4 if dim <= 64 else 8, 2 if dim <= 128 else 1)
    # products on the CUDA cores: operands live in registers, so tiles are small
    if dim <= 64:
        return _Tile(32, 32, 4, 1)
    if dim <= 128:
        return _Tile(32, 32, 8, 1)
    return _Tile(16, 16, 8, 1)
