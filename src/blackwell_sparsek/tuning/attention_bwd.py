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
    sm, itemsize, dim = _facts(problem)
    tile = _dq_tile(sm, itemsize, dim, problem.mask_block is not None, precision)
    if problem.mask_block is not None and problem.mask_block[0] < tile.m:
        rows = problem.mask_block[0]
        tile = tile._replace(m=rows, warps=2 if rows < 32 and dim <= 128 else 4)
    return AttnBwdConfig(*tile, precision)


def attn_dkdv_config(problem: AttnProblem, precision: str) -> AttnBwdConfig:
    """Tiles of the dK/dV kernel."""
    sm, itemsize, dim = _facts(problem)
    tile = _dkdv_tile(sm, itemsize, dim, precision)
    if problem.mask_block is not None and problem.mask_block[1] < tile.n:
        # with two warps, two sums of 16 rows and 128 columns spill; few keys leave registers for
        # more queries
        keys = problem.mask_block[1]
        queries = 64 if keys <= 32 and dim <= 128 and itemsize == 2 else tile.m
        tile = tile._replace(m=queries, n=keys, warps=4)
    return AttnBwdConfig(*tile, precision)


def _facts(problem: AttnProblem) -> tuple[int, int, int]:
    return problem.arch.sm, problem.dtype.itemsize, max(problem.head_dim, problem.head_dim_v)


@lru_cache(maxsize=1024)
def _dq_tile(sm: int, itemsize: int, dim: int, masked: bool, precision: str) -> _Tile:
    if itemsize == 4:
        return _tile_fp32(sm, dim, precision)
    if dim <= 64:
        if sm == 90:
            # measured: four warps 628 TFLOP/s, eight 440; the bits of a mask take those registers
            return _Tile(128, 64, 8 if masked else 4, 3)
        return _Tile(128, 64, 8, 2)
    if dim <= 128:
        # measured: three stages 604 TFLOP/s, two 461
        if sm == 90:
            return _Tile(128, 64, 8, 3)
        # Q and dO stay in shared memory beside two stages of K and V: 128 KiB, or 80 KiB
        return _Tile(128, 64 if sm in LARGE_SMEM else 32, 8, 2)
    return _Tile(64 if sm in LARGE_SMEM else 32, 32, 8, 2)


@lru_cache(maxsize=1024)
def _dkdv_tile(sm: int, itemsize: int, dim: int, precision: str) -> _Tile:
    if itemsize == 4:
        tile = _tile_fp32(sm, dim, precision)
        return _Tile(tile.n, tile.m, tile.warps, tile.stages)
    if sm == 90:
        return _dkdv_tile_hopper(dim)
    if sm in WARP_GROUP_MMA:
        # sums in tensor memory; two stages make the compiler take them through registers
        return _Tile(64, 128 if dim <= 128 else 64, 8, 1)
    if dim <= 64:
        return _Tile(32, 128, 8, 2)
    if dim <= 128:
        return _Tile(64, 64, 8, 2)
    # 64 keys spill, and need more than 99 KiB
    return _Tile(32, 32, 8, 2)


def _dkdv_tile_hopper(dim: int) -> _Tile:
    # measured: one warp group of 64 keys per program, two programs on an SM, is faster than tiles
    # that do not spill (525 TFLOP/s at 128 columns, where 32 x 128 gives 331 to 482 and 64 x 128
    # 496); what spills is mostly outside of the loop without mask code
    if dim <= 64:
        return _Tile(64, 64, 4, 3)
    if dim <= 128:
        return _Tile(64, 64, 4, 2)
    return _Tile(32, 64, 8, 2)


def _tile_fp32(sm: int, dim: int, precision: str) -> _Tile:
    if precision == "tf32":
        if dim <= 128:
            return _Tile(32, 32, 4 if dim <= 64 else 8, 2)
        return _Tile(32 if sm in LARGE_SMEM else 16, 16, 8, 1)
    # products on the CUDA cores: operands live in registers, so tiles are small
    if dim <= 64:
        return _Tile(32, 32, 4, 1)
    if dim <= 128:
        return _Tile(32 if sm in LARGE_SMEM else 16, 32, 8, 1)
    return _Tile(16, 16, 8, 1)
