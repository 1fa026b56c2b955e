"""(architecture, problem) -> tiles of the decode kernel. Pure functions; nothing is timed.

Decoding reads each key once, so its time is that of the memory. What counts is how many bytes are
on their way: stages times tile times programs of an SM. Tiles may not depend on a length.
"""

from functools import lru_cache

from ..kernels.attention.config_decode import DecodeConfig
from .attention import LARGE_SMEM
from .problem_decode import DecodeProblem

# SMs of the interpreter's machine are not many: a few programs show every way to cut the work.
INTERPRETED_PROGRAMS = 6


def attn_decode_config(problem: DecodeProblem, precision: str) -> DecodeConfig:
    """Tiles and programs; `precision` is what fp32 operands are multiplied in."""
    dim = max(problem.head_dim, problem.head_dim_v)
    sms = INTERPRETED_PROGRAMS if problem.arch.interpreted else problem.arch.num_sms
    itemsize = problem.cache_dtype.itemsize
    if problem.arch.sm == 90 and itemsize < 4 and dim <= 128 and problem.rows <= 16:
        return _hopper_config(sms, itemsize, problem.batch * problem.heads_kv)
    return _config(problem.arch.sm, sms, itemsize, dim, problem.rows, precision)


@lru_cache(maxsize=1024)
def _config(sm: int, sms: int, itemsize: int, dim: int, rows: int, precision: str) -> DecodeConfig:
    tile_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    # one stage of 64 KiB and more is all that 99 KiB hold
    programs = 2 * sms if sm in LARGE_SMEM else sms
    if itemsize == 4:
        # full fp32 products run on the CUDA cores, with operands in registers
        tile_n = 32 if dim <= 128 else 16
        return DecodeConfig(min(tile_m, 16), tile_n, 8, 2, programs, precision)
    if dim > 128:
        return DecodeConfig(min(tile_m, 32), 32, 4, 3, programs, precision)
    # H200, microseconds at (batch, keys) (1, 8k) / (16, 8k) / (1, 128k) / (64, 4k), parts still
    # merged with barriers:
    #   64 keys, 4 warps, 3 stages, 2 programs on an SM: 22.8 / 137 / 143 / 255
    #   128 keys, 8 warps, 3 stages, 1 program:          26.9 / 137 / 146 / 259
    #   32 keys, 4 warps, 5 stages, 2 programs:          25.0 / 139 / 146 / 256
    # A third program finds no registers and runs after the others: 33.2 / 158 / 163 / 301.
    # 64 rows spill from the registers of 4 warps.
    return DecodeConfig(tile_m, 64, 8 if tile_m > 32 else 4, 3, programs, precision)


@lru_cache(maxsize=1024)
def _hopper_config(sms: int, itemsize: int, planes: int) -> DecodeConfig:
    """Keys down and rows across: `wgmma` reads 64 keys, from shared memory if they are 16-bit.

    H200, microseconds at (batch, keys) (1, 1k) / (1, 8k) / (16, 8k) / (1, 128k) / (64, 4k):
      bf16, rows down, 3 stages, 2 programs on an SM: 8.3 / 17.1 / 132.6 / 134.2 / 250.2
      rows across, 3 stages, 2 programs:              8.1 / 16.8 / 130.5 / 132.8 / 248.4
      the same, 256 programs instead of 264:          7.7 / 16.5 / 129.8 / 130.1
      rows across, 2 stages, 3 programs:              8.2 / 19.4 / 131.3 / 133.7 / 251.9
      rows across, 6 stages, 1 program:               7.8 / 18.4 / 132.4 / 138.0 / 252.6
      rows across, 128 keys, 2 stages, 1 program:     8.3 / 18.8 / 150.5 / 150.8 / 290.8
    and in fp8, with 8 KV heads:
      rows down, 3 stages, 2 programs:                8.3 / 15.8 / 117.0 /       / 224.7
      rows across, words, 3 stages, 2 programs:       7.8 / 14.1 /  85.9 /  87.6 / 160.9
      rows across, words, 4 stages, 3 programs:       7.9 / 17.7 /  79.4 /  82.9 / 144.7
      rows across, words, 3 stages, 4 programs:       8.0 / 17.8 /  80.4 /  86.7 / 142.9
    The third program makes more parts of each softmax. With few of them, `planes`, merging the
    parts takes longer than the program saves, unless sequences are very long.
    """
    if itemsize == 1 and planes > sms // 4:
        return DecodeConfig(16, 64, 4, 4, 3 * sms, across=True, words=True, registers=168)
    # a few fewer than fit were faster at every size
    programs = max(2 * sms // 32 * 32, 1)
    return DecodeConfig(16, 64, 4, 3, programs, across=True, words=itemsize == 1)
