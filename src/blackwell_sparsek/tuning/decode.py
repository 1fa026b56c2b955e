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
    return _config(problem.arch.sm, sms, problem.cache_dtype.itemsize, dim, problem.rows, precision)


@lru_cache(maxsize=1024)
def _config(sm: int, sms: int, itemsize: int, dim: int, rows: int, precision: str) -> DecodeConfig:
    tile_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if itemsize == 4:
        # full fp32 products run on the CUDA cores, with operands in registers
        return DecodeConfig(min(tile_m, 32), 32 if dim <= 128 else 16, 4, 2, 2 * sms, 0, precision)
    if dim > 128:
        return DecodeConfig(tile_m, 32, 4, 3, 2 * sms, 0, precision)
    stages = 3 if sm in LARGE_SMEM else 2
    return DecodeConfig(tile_m, 64, 4, stages, 2 * sms, 0, precision)
