"""(architecture, problem) -> tiles of the attention kernels. Pure functions; nothing is timed.

Tiles may not depend on a length, a window or the content of a mask: changing those must compile
nothing. Each choice is the largest tile that compiles without spills; `testing.compile_only` shows
registers and shared memory.
"""

from functools import lru_cache
from typing import NamedTuple

from ..kernels.attention.config import AttnFwdConfig
from .problem_attention import AttnProblem
from .tuned import tuned_tile

# GPUs whose programs get 160 KiB of shared memory and more; all others have 99 KiB.
LARGE_SMEM = (80, 87, 90, 100, 101, 103, 110)
# Blackwell and Hopper of data centres: products are issued by warp groups of 128 threads.
WARP_GROUP_MMA = (90, 100, 101, 103, 110)


class _Tile(NamedTuple):
    m: int
    n: int
    warps: int
    stages: int


def attn_fwd_config(problem: AttnProblem, precision: str) -> AttnFwdConfig:
    """Tiles of the forward kernel; `precision` is what fp32 operands are multiplied in."""
    dim = max(problem.head_dim, problem.head_dim_v)
    block_q = None if problem.mask_block is None else problem.mask_block[0]
    facts = (problem.arch.sm, problem.dtype.itemsize, dim, block_q, precision)
    tile = tuned_tile("attn_fwd", facts) or _tile(*facts)
    return AttnFwdConfig(*tile, precision)


@lru_cache(maxsize=1024)
def _tile(sm: int, itemsize: int, dim: int, block_q: int | None, precision: str) -> _Tile:
    if itemsize == 4:
        tile = _tile_fp32(sm, dim, precision)
    elif sm in WARP_GROUP_MMA:
        tile = _tile_warp_group(dim, masked=block_q is not None)
    else:
        tile = _tile_warp(sm, dim, masked=block_q is not None)
    return tile if block_q is None or block_q >= tile.m else _cut(tile, block_q, dim)


def _tile_warp_group(dim: int, masked: bool) -> _Tile:
    if dim <= 64:
        # wide tiles spread the cost of a softmax step; the bits of a mask take those registers
        return _Tile(128, 64, 8, 3) if masked else _Tile(128, 128, 8, 3)
    if dim <= 128:
        # 128 x 128 leaves room for only two stages and spills with a mask
        return _Tile(128, 64, 8, 3)
    # 128 rows of 256 columns of fp32 sums fill the registers of 8 warps by themselves
    return _Tile(64, 64, 8, 2)


def _tile_warp(sm: int, dim: int, masked: bool) -> _Tile:
    if dim <= 64:
        return _Tile(128, 32 if masked else 64, 8, 3)
    if dim <= 128:
        # 96 KiB with three stages, and 64 KiB with two, which 99 KiB hold with room to spare
        return _Tile(128, 64, 8, 3 if sm in LARGE_SMEM and not masked else 2)
    return _Tile(64, 64 if sm in LARGE_SMEM and not masked else 32, 8, 2)


def _tile_fp32(sm: int, dim: int, precision: str) -> _Tile:
    if precision == "tf32":
        if dim <= 64:
            return _Tile(64, 32, 4, 2)
        if dim <= 128:
            return _Tile(64, 32, 8, 2)
        return _Tile(32, 32 if sm in LARGE_SMEM else 16, 8, 2)
    # products on the CUDA cores: operands live in registers, so tiles are small
    if dim <= 64:
        return _Tile(32, 32, 4, 2)
    if dim <= 128:
        return _Tile(32, 32, 8, 1)
    return _Tile(16, 16, 8, 1)


def _cut(tile: _Tile, block_q: int, dim: int) -> _Tile:
    """A tile within one query block: four warps hold its columns; 16 rows give work for two."""
    warps = (4 if dim > 128 else 2) if block_q < 32 else 8 if dim > 128 and block_q > 32 else 4
    return _Tile(block_q, min(tile.n, 64), warps, 2 if block_q < 64 else tile.stages)
