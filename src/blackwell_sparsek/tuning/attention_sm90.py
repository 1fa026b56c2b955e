"""(problem) -> tiles and order of the Hopper forward, and the reasons why it cannot run.

Lengths choose among at most three heights of tiles, and whether programs share the last ones, so
that a model whose lengths vary compiles a handful of variants once.
"""

from functools import lru_cache

import torch

from ..core.launch import cdiv
from ..formats.band import EVERYTHING, Band
from ..kernels.attention.config_sm90 import AttnFwdSm90Config, make_config
from ..kernels.sm90 import GROUP_ROWS
from .problem_attention import AttnProblem

LARGEST_HEAD_DIM = 128
# Positions and band limits are int32 in the kernel, and so is the number of pieces of work.
LONGEST = 2**30 - 1
MOST_PIECES = 2**31 - 1
# Tokens of packed sequences are coordinates of a TMA dimension of this size.
MOST_TOKENS = 2**31 - 2**16 - 1
# Fewer queries than half of a warp group's rows: the portable kernel has smaller tiles for them.
FEW_QUERIES = 32
SHORT_KEYS = 512
# Keys from which on three consumers pay, by whether a band cuts tiles. TFLOP/s of D64 causal with
# one and three: 354 327 at 1k, 429 438 at 2k.
LONG_FULL, LONG_BANDED = 1024, 2048
# Half of the L2 of H100 and H200; queries, outputs and the next section need the other half. With
# less the forward is faster: 642, 635 and 618 TFLOP/s for 16, 32 and 64 MiB (D128 causal, 4k);
# three consumers like 32 better than 16: 438 422, 492 479, 527 521, 559 559 (D64, 2k to 16k).
SECTION_BYTES = 25 * 2**20
FORWARD_SECTION_BYTES = 16 * 2**20
THREE_SECTION_BYTES = 32 * 2**20
# Queries of a head that run at a time under a window, about.
RUNNING_QUERIES = 4096
# Keys from which on programs share the last pieces of work. TFLOP/s of D128 without and with that:
# 596 571 at 1k, 659 654 at 2k, 697 703 at 4k, 724 739 at 16k.
LONG_SHARED = 4096
# TFLOP/s of an H200 with its SMs full, by (widest head dim, consumers): with one program on each
# SM, and with two where they fit. A lone warp group waits for its own softmax.
PACE = {
    (64, 1): (280.0, 400.0),
    (64, 2): (430.0,),
    (64, 3): (515.0,),
    (128, 1): (330.0, 457.0),
    (128, 2): (640.0,),
}


def attn_fwd_sm90_unsupported(problem: AttnProblem) -> str | None:
    """Why the Hopper kernel cannot run this problem, or None."""
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} has no 16-bit WGMMA"
    dims = (problem.head_dim, problem.head_dim_v)
    if max(dims) > LARGEST_HEAD_DIM or any(dim % 8 for dim in dims):
        return (
            f"needs head dimensions up to {LARGEST_HEAD_DIM} in steps of 8, "
            f"got {dims[0]} and {dims[1]}"
        )
    if not problem.positive:
        return "needs a scale above zero"
    if problem.max_k == 0 or (problem.tokens is not None and problem.tokens[1] == 0):
        return "TMA cannot describe zero keys"
    return _sizes_unsupported(problem)


def _sizes_unsupported(problem: AttnProblem) -> str | None:
    if problem.mask_block is not None:
        block_q, block_kv = problem.mask_block
        if block_q % GROUP_ROWS:
            return f"query blocks of {block_q} are not a multiple of {GROUP_ROWS}"
        if block_kv < 16:
            return f"key blocks of {block_kv} are narrower than a 16-key step of WGMMA"
    if not problem.tma:
        return "TMA needs addresses and strides that are multiples of 16 bytes"
    if max(problem.max_q, problem.max_k) > LONGEST:
        return f"needs sequences of at most {LONGEST} tokens"
    if problem.tokens is not None and max(problem.tokens) > MOST_TOKENS:
        return f"needs at most {MOST_TOKENS} tokens in all"
    # an order of mask rows may count whole blocks of 256 queries
    tiles = problem.batch * (cdiv(problem.max_q, GROUP_ROWS) + 3)
    if problem.tokens is not None:
        tiles = problem.tokens[0] // GROUP_ROWS + problem.batch
    if tiles * problem.heads_q > MOST_PIECES:
        return f"needs at most {MOST_PIECES} query tiles over batch and heads"
    return None


def attn_fwd_sm90_passed_over(problem: AttnProblem) -> str | None:
    """Why `auto` should not take the kernel where it could run, or None."""
    if problem.max_q < FEW_QUERIES:
        return f"{problem.max_q} queries fill too little of a tile of {GROUP_ROWS}"
    return None


@lru_cache(maxsize=1024)
def attn_fwd_sm90_config(problem: AttnProblem) -> AttnFwdSm90Config:
    """Tiles of a problem that `attn_fwd_sm90_unsupported` accepts."""
    tile_d, tile_dv = (64 if dim <= 64 else 128 for dim in (problem.head_dim, problem.head_dim_v))
    block_q, block_kv = problem.mask_block or (None, None)
    if block_q is not None:
        # a piece of work stays within one row of the mask, and rows of 64 are for one consumer
        consumers = min(block_q // GROUP_ROWS, 2)
        return make_config(consumers, tile_d, tile_dv, block_kv, problem.varlen)
    dim = max(tile_d, tile_dv)
    # Registers hold three consumers only where the sums are 64 wide, and no tanh comes between.
    # TFLOP/s of D64 with one, two and three at 1k, 2k, 4k, 16k tokens, those of one with half
    # tiles: full 410 420 435 at 1k; causal 321 310 264, 385 366 365, - 407 420, - 435 490.
    long_enough = _keys(problem) >= (LONG_BANDED if problem.banded else LONG_FULL)
    three = dim == 64 and not problem.softcap and long_enough
    choices = (3, 2, 1) if three else (2, 1)
    consumers = min(choices, key=lambda count: _time(problem, dim, count))
    return make_config(
        consumers,
        tile_d,
        tile_dv,
        packed=problem.varlen,
        banded=problem.banded,
        long=problem.max_k >= LONG_SHARED,
    )


def _keys(problem: AttnProblem) -> int:
    """Keys that a query meets; on average, where packed sequences differ."""
    if problem.tokens is None:
        return problem.max_k
    return cdiv(problem.tokens[1], max(problem.batch, 1))


def _pieces(problem: AttnProblem, rows: int) -> int:
    """Pieces of work of `rows` queries; packed sequences fill half of their last ones."""
    if problem.tokens is None:
        return problem.batch * problem.heads_q * cdiv(problem.max_q, rows)
    half_filled = cdiv(problem.tokens[0] + problem.batch * rows // 2, rows)
    return problem.heads_q * max(half_filled, problem.batch)


def _time(problem: AttnProblem, dim: int, consumers: int) -> float:
    """Relative time without a mask: rounds of pieces on all SMs, each at the pace measured.

    Tall tiles run faster, but small problems leave SMs idle with them, and rows past the last
    query cost as much as others.
    """
    rows = consumers * GROUP_ROWS
    pieces = _pieces(problem, rows)
    sms = problem.arch.num_sms
    pace = PACE[dim, consumers]
    beside = min(len(pace), max(1, cdiv(pieces, sms)))
    rounds = cdiv(pieces, sms * beside) * beside
    return rounds * rows / (pace[beside - 1] * _lead(problem, dim, consumers))


def _lead(problem: AttnProblem, dim: int, consumers: int) -> float:
    """What one consumer gains on its pace with long pieces of work."""
    if consumers > 1:
        return 1.0
    # two programs on an SM overlap the ends of their pieces, which are much of a short one:
    # 8.9 us against 10.1 for 32 heads of 512 tokens
    if _keys(problem) <= SHORT_KEYS:
        return 1.18
    # with half tiles, see `attn_fwd_sm90_config`
    halved = dim == 64 and problem.banded and not problem.varlen
    return 1.12 if halved and _keys(problem) < LONG_BANDED else 1.0


def attn_fwd_sm90_section(problem: AttnProblem, band: Band = EVERYTHING) -> int:
    """Planes that run together, whole groups of heads that share keys.

    Where pieces of work are equal, or come in the order of a mask, those of one KV head run
    together: SMs that read the same keys at the same time are faster than those whose keys only
    stay in L2. Under a band the longest pieces come first, of as many heads as stay in L2.
    """
    group = problem.heads_q // problem.heads_kv
    planes = max(problem.batch * problem.heads_q, 1)
    if not problem.banded or problem.mask_block is not None:
        return min(group, planes)
    if problem.varlen:
        # no limit: the kernel knows how long sequences are
        return planes
    tokens = problem.max_k
    if band.left is not None and band.right is not None:
        tokens = min(tokens, band.left + band.right + RUNNING_QUERIES)
    kv_bytes = tokens * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    three = attn_fwd_sm90_config(problem).CONSUMERS == 3
    room = THREE_SECTION_BYTES if three else FORWARD_SECTION_BYTES
    heads = max(room // max(kv_bytes, 1), 1)
    if band.left is not None and band.right is not None:
        # equal sections: the short pieces at the end of each fill the gaps before the next
        heads = cdiv(planes // group, cdiv(planes // group, heads))
    return min(heads * group, planes)
