"""(problem) -> tiles and order of the Hopper backward, and the reasons why it cannot run."""

from functools import lru_cache

from ..core.launch import cdiv
from ..kernels.attention.bwd_config_sm90 import (
    ORDERED_TILES,
    AttnBwdSm90Config,
    make_config,
)
from .attention_sm90 import attn_fwd_sm90_unsupported
from .problem_attention import AttnProblem

# Key blocks that a tile of 64 or 128 keys lies within.
KEY_BLOCKS = (64, 128, 256)
# Of the L2 of H100 and H200, what the planes of a section take.
SECTION_BYTES = 16 * 2**20
# Under a band, whose pieces are uneven: planes that run together at least, tiles of keys for each
# SM that they should have, and how many times more bytes they may take for that.
UNEVEN, UNEVEN_PIECES, UNEVEN_BYTES = 2, 2, 4
# Planes of one head that run together where tiles of keys are many, and in order.
LONG_PLANES = 8
# How many times more bytes of planes run together where dq is added up in order, and where
# turns are planned besides.
ORDERED, PLANNED = 3, 2
# Below this many queries a tile of 64 or 128 is mostly padding.
FEW_QUERIES = 32


def attn_bwd_sm90_unsupported(problem: AttnProblem) -> str | None:
    """Why the Hopper kernel cannot run this problem, or None."""
    if (reason := attn_fwd_sm90_unsupported(problem)) is not None:
        return reason
    if problem.varlen:
        return "packed sequences are not written yet"
    if problem.mask_block is not None and problem.mask_block[1] not in KEY_BLOCKS:
        return f"needs key blocks of 64, 128 or 256, got {problem.mask_block[1]}"
    return None


def attn_bwd_sm90_passed_over(problem: AttnProblem) -> str | None:
    """Why `auto` should not take the kernel where it could run, or None."""
    if problem.max_q < FEW_QUERIES:
        return f"{problem.max_q} queries fill too little of a tile"
    return None


def attn_bwd_sm90_apart(problem: AttnProblem) -> bool:
    """Whether queries have a kernel of their own: seven products instead of five, and no sums of dq
    in memory, which a tile of 64 keys needs as many of as one of 128.

    Time of one kernel over that of two, D128: 22 % of 16k tokens 1.10, 5 % of 64k tokens 1.17; D64:
    1.06, 1.08 by the halves. In order one kernel takes 1.44 and 1.30 times as long as in any.
    """
    return problem.mask_block is not None and problem.mask_block[1] == 64


@lru_cache(maxsize=1024)
def attn_bwd_sm90_config(problem: AttnProblem) -> AttnBwdSm90Config:
    """Tiles of a problem that `attn_bwd_sm90_unsupported` accepts."""
    # wide values leave no registers for the tall tiles of narrow keys
    tile_d = 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128
    tile_dv = 64 if problem.head_dim_v <= 64 else 128
    return make_config(tile_d, tile_dv, problem.mask_block, problem.deterministic)


def attn_bwd_sm90_section(problem: AttnProblem) -> int:
    """KV planes that run together: those whose queries, gradients and sums of dq stay in L2.

    More where a band makes pieces uneven, which fill the SMs while the longest end. us with a
    causal band by MiB of a plane and planes of a section: 16 MiB of 32 tiles, 1, 2, 4 and 8 planes
    900, 830, 601, 626; 32 MiB of 64, 2605, 2185, 2220, 2255; 64 MiB of 128, 9800, 9580, 9350, 9590;
    8 MiB of 64, 1200, 1133, 1098, 1096; 4 MiB of 32, 4, 8 and 16 planes 1230, 1208, 1201.
    In order, planes of several heads need as many pieces, whatever they take (in the order above,
    2, 4 and 8 planes 906, 729, 667; 2545, 2376, 2423; 9228, 10343, 9941), and those of one head few
    bytes: their tiles of keys begin one after the other, and the more planes the further apart (16
    MiB of 128, 1, 2, 4 and 8 planes 4774, 4705, 5323, 7266) until they all begin at the end (64 MiB
    of 512, 2 and 4 planes 19998, 18632). Without a band more, since only tiles
    of one plane wait for each other; under a mask heads of a plane are read one after the other
    (TFLOP/s: 16 MiB a head, 2 and 3 planes of one head 520, 504; 1 and 2 of four heads 467, 523).
    """
    group = problem.heads_q // problem.heads_kv
    masked, ordered = problem.mask_block is not None, problem.deterministic

    def within(times: int, heads: int = group) -> int:
        bytes_of_plane = _row_bytes(problem) * problem.max_q * heads
        return times * SECTION_BYTES // max(bytes_of_plane, 1)

    tiles = cdiv(max(problem.max_k, 1), attn_bwd_sm90_config(problem).tile_n)
    filling = max(round(UNEVEN_PIECES * problem.arch.num_sms / tiles), UNEVEN)
    if masked:
        section = within(PLANNED, heads=1) if ordered else within(1)
    elif not problem.banded:
        section = within(ORDERED if ordered else 1)
    elif not ordered:
        section = max(within(1), min(filling, within(UNEVEN_BYTES)), UNEVEN)
    elif group > 1:
        section = filling
    else:
        long = tiles > ORDERED_TILES * problem.arch.num_sms
        section = LONG_PLANES if long else within(1)
    return max(min(section, problem.batch * problem.heads_kv), 1)


def attn_bwd_sm90_front(problem: AttnProblem, section: int) -> int:
    """Parts of the queries that tiles of keys go through together, where turns are planned.

    TFLOP/s in order with 1 and 4 parts, blocks of 128: 22 % of 16k tokens, 16 MiB a head and two
    heads at a time 520, 483; 5 % of 64k tokens, 64 MiB a head 453, 498.
    """
    return 1 if section * _row_bytes(problem) * problem.max_q <= PLANNED * SECTION_BYTES else 4


def _row_bytes(problem: AttnProblem) -> int:
    """Of a query, its output gradient and its sum."""
    return (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + problem.head_dim * 4
