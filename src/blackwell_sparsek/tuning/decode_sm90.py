"""(problem) -> tiles and programs of the Hopper decode kernel, and the reasons why it cannot run.

Tiles may not depend on a length, nor on where pages lie: pages give the bits of a contiguous cache.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from ..kernels.attention.config_decode_sm90 import DecodeSm90Config, make_config
from .attention_sm90 import LONGEST
from .problem_decode import DecodeProblem

FP8 = torch.float8_e4m3fn
HEAD_DIMS = (64, 128)
# Keys that one copy must hold at the least: a step of WGMMA.
STEP = 16
# Rows whose scores leave registers for operands.
MOST_FP8_ROWS = 16
# Tiles of all sequences and heads lie in one row that int32 counts.
MOST_TILES = 2**31 - 1


class DecodeSm90Launch(NamedTuple):
    """What a launch is made of, besides its tensors."""

    config: DecodeSm90Config
    programs: int


def attn_decode_sm90_unsupported(problem: DecodeProblem) -> str | None:
    """Why the Hopper kernel cannot run this problem, or None."""
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} has no 16-bit WGMMA"
    dims = (problem.head_dim, problem.head_dim_v)
    if problem.cache_dtype == FP8:
        # what a thread has of two WGMMAs of 64 rows is a word of four values
        if dims != (128, 128):
            return f"needs head dimensions of 128 for a float8 cache, got {dims[0]} and {dims[1]}"
        if problem.rows > MOST_FP8_ROWS:
            return f"takes at most {MOST_FP8_ROWS} rows of a float8 cache, got {problem.rows}"
    elif problem.cache_dtype != problem.dtype:
        return f"needs a cache of {problem.dtype} or {FP8}, got {problem.cache_dtype}"
    if any(dim not in HEAD_DIMS for dim in dims):
        return f"needs head dimensions of 64 or 128, got {dims[0]} and {dims[1]}"
    for what, size in (("pages", problem.page_size), ("listed blocks", problem.block_size)):
        if size is not None and size % STEP:
            return f"{what} of {size} are not a multiple of {STEP}"
    if not problem.tma:
        return "TMA needs slots to copy, and addresses and strides that are multiples of 16 bytes"
    if problem.capacity > LONGEST:
        return f"needs caches of at most {LONGEST} tokens a sequence"
    planes = problem.batch * problem.heads_kv * (problem.rows // 8 + 1)
    # each plane costs as much as a few tiles more
    if planes * (problem.capacity // 64 + 3) > MOST_TILES:
        return f"needs at most {MOST_TILES} tiles over all sequences and heads"
    return None


def attn_decode_sm90_launch(problem: DecodeProblem) -> DecodeSm90Launch:
    """Tiles and programs of a problem that `attn_decode_sm90_unsupported` accepts."""
    is_fp8 = problem.cache_dtype == FP8
    return _launch(
        problem.arch.num_sms,
        problem.rows,
        problem.head_dim,
        problem.head_dim_v,
        problem.page_size,
        problem.block_size,
        is_fp8,
        problem.batch == 1,
        is_fp8 and problem.batch * problem.heads_kv > problem.arch.num_sms // 4,
    )


@lru_cache(maxsize=1024)
def _launch(
    sms: int,
    rows: int,
    dim: int,
    dim_v: int,
    page_size: int | None,
    block_kv: int | None,
    is_fp8: bool,
    single: bool,
    many: bool,
) -> DecodeSm90Launch:
    packed = next((size for size in (8, 16, 32) if rows <= size), 64)
    # H200, microseconds at (batch, keys) (1, 1k) / (1, 8k) / (16, 8k) / (1, 128k) / (64, 4k), and
    # (16, 8k) in pages of 64 and 16, planes left whole:
    #   64 keys, 3 stages, 1 program on an SM:  7.2 / 14.9 / 127.6 / 129.4 / 247.7, 127.7, 129.6
    #   64 keys, 5 stages, 1 program:           7.3 / 14.8 / 127.4 / 128.7 / 247.7, 129.7, -
    #   128 keys, 3 stages, 1 program:          7.3 / 14.5 / 126.9 / 128.4 / 248.5, 129.1, 137.2
    #   64 keys, 3 stages, 2 programs:            - /    - / 129.5 /     - /     -, 131.0, 133.4
    # One sequence, in the graphs of `bsk bench`: 7.4 / 16.1, started early 5.9 / 15.2.
    # fp8 there, (16, 8k) / (64, 4k) / (16, 8k) in pages of 64 / (1, 8k) started early:
    #   64 keys, 6 stages, 1 program on an SM:  87.8 /     - /    - /    -
    #   64 keys, 6 stages, 2 programs:          79.2 / 140.9 / 81.5 / 11.8
    #   128 keys, 6 stages, 1 program:          80.6 / 145.4 /    - /    -
    #   128 keys, 3 stages, 2 programs:         78.0 / 140.5 / 80.8 / 12.2
    config = make_config(
        packed, dim, dim_v, page_size, block_kv,
        tile_n=128 if many else 64, words=is_fp8, single=single,
    )  # fmt: skip
    return DecodeSm90Launch(config, 2 * sms if is_fp8 else sms)
