"""(problem) -> tiles and order of the Hopper backward, and the reasons why it cannot run."""

from functools import lru_cache

from ..kernels.attention.bwd_config_sm90 import AttnBwdSm90Config, make_config
from .attention_sm90 import SECTION_BYTES, attn_fwd_sm90_unsupported
from .problem_attention import AttnProblem

# Key blocks that a tile of 64 or 128 keys lies within.
KEY_BLOCKS = (64, 128, 256)
# How many times more planes run together under a band.
UNEVEN = 4
# What must divide the number of queries where two blocks of them share a tile. A block that is
# missing is fetched from the end of the queries, and the copy of their lse must begin at a multiple
# of 16 bytes: the innermost coordinate of a TMA copy anywhere else is an illegal instruction.
QUERIES_TOGETHER = 4
# Below this many queries a tile of 64 or 128 is mostly padding.
FEW_QUERIES = 32


def attn_bwd_sm90_unsupported(problem: AttnProblem) -> str | None:
    """Why the Hopper kernel cannot run this problem, or None."""
    if (reason := attn_fwd_sm90_unsupported(problem)) is not None:
        return reason
    if problem.varlen:
        return "packed sequences are not written yet"
    if problem.deterministic:
        return "adds up dq in no fixed order"
    if problem.mask_block is not None and problem.mask_block[1] not in KEY_BLOCKS:
        return f"needs key blocks of 64, 128 or 256, got {problem.mask_block[1]}"
    if problem.mask_block is not None and problem.max_q % QUERIES_TOGETHER:
        config = attn_bwd_sm90_config(problem)
        if config.parts > 1:
            return (
                f"packs query blocks of {problem.mask_block[0]} only where {QUERIES_TOGETHER} "
                f"divides the number of queries, got {problem.max_q}"
            )
    return None


def attn_bwd_sm90_passed_over(problem: AttnProblem) -> str | None:
    """Why `auto` should not take the kernel where it could run, or None."""
    if problem.max_q < FEW_QUERIES:
        return f"{problem.max_q} queries fill too little of a tile"
    return None


@lru_cache(maxsize=1024)
def attn_bwd_sm90_config(problem: AttnProblem) -> AttnBwdSm90Config:
    """Tiles of a problem that `attn_bwd_sm90_unsupported` accepts."""
    # wide values leave no registers for the tall tiles of narrow keys
    tile_d = 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128
    tile_dv = 64 if problem.head_dim_v <= 64 else 128
    return make_config(tile_d, tile_dv, problem.mask_block)


def attn_bwd_sm90_section(problem: AttnProblem) -> int:
    """KV planes that run together: those whose queries, gradients and sums of dq stay in L2.

    Four times as many where a band makes pieces uneven: what it takes to fill the SMs at the end
    of the last section costs more than what misses the L2 (7.04 against 6.59 ms at 16k tokens).
    """
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    row_bytes += problem.head_dim * 4
    group = problem.heads_q // problem.heads_kv
    planes = problem.batch * problem.heads_kv
    section = max(SECTION_BYTES // max(row_bytes * problem.max_q * group, 1), 1)
    if problem.banded and problem.mask_block is None:
        section *= UNEVEN
    return min(section, max(planes, 1))
