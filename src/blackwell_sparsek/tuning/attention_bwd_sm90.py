"""(problem) -> tiles and order of the Hopper backward, and the reasons why it cannot run."""

from functools import lru_cache

from ..kernels.attention.bwd_config_sm90 import AttnBwdSm90Config, make_config
from .attention_sm90 import attn_fwd_sm90_unsupported
from .problem_attention import AttnProblem

# Key blocks that a tile of 64 or 128 keys lies within.
KEY_BLOCKS = (64, 128, 256)
# Of the L2 of H100 and H200, what the planes of a section take.
SECTION_BYTES = 16 * 2**20
# Planes that run together at least under a band.
UNEVEN = 2
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

    At least two where a band makes pieces uneven, which fill the SMs while the longest end. TFLOP/s
    with a band, by MiB of a plane and planes of a section: 4 MiB, 6, 12 and 24 planes 564, 558,
    539; 2 MiB, 12, 24 and 48 planes 500, 491, 449; 32 MiB, 1, 2, 4 and 8 planes 533, 625, 610, 602;
    without a band, 8 MiB, 1, 2, 3 and 6 planes 568, 571, 555, 553.
    In order not with a band (32 MiB, 1 and 2 planes 501, 496; 128 MiB 475, 380). Else more, since
    only tiles of one plane wait for each other; under a mask heads of a plane are read one after
    the other (16 MiB a head, 2 and 3 planes of one head 520, 504; 1 and 2 of four heads 467, 523).
    """
    row_bytes = _row_bytes(problem)
    group = problem.heads_q // problem.heads_kv
    planes = problem.batch * problem.heads_kv
    masked, room = problem.mask_block is not None, SECTION_BYTES
    if problem.deterministic and masked:
        group, room = 1, PLANNED * SECTION_BYTES
    elif problem.deterministic and not problem.banded:
        room = ORDERED * SECTION_BYTES
    section = max(room // max(row_bytes * problem.max_q * group, 1), 1)
    if problem.banded and not masked and not problem.deterministic:
        section = max(section, UNEVEN)
    return min(section, max(planes, 1))


def attn_bwd_sm90_front(problem: AttnProblem, section: int) -> int:
    """Parts of the queries that tiles of keys go through together, where turns are planned.

    TFLOP/s in order with 1 and 4 parts, blocks of 128: 22 % of 16k tokens, 16 MiB a head and two
    heads at a time 520, 483; 5 % of 64k tokens, 64 MiB a head 453, 498.
    """
    return 1 if section * _row_bytes(problem) * problem.max_q <= PLANNED * SECTION_BYTES else 4


def _row_bytes(problem: AttnProblem) -> int:
    """Of a query, its output gradient and its sum."""
    return (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + problem.head_dim * 4
