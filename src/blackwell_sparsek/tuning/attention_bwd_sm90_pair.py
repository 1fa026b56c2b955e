"""(problem) -> tiles and order of the Hopper backward in two kernels."""

from functools import lru_cache

from ..kernels.attention.bwd_config_sm90 import AttnBwdSm90Config
from ..kernels.attention.bwd_config_sm90_pair import (
    AttnBwdQueriesSm90Config,
    make_keys_config,
    make_queries_config,
)
from .problem_attention import AttnProblem

# Of the L2 of H100 and H200, what queries and output gradients of a section take.
SECTION_BYTES = 16 * 2**20


@lru_cache(maxsize=1024)
def attn_bwd_keys_config(problem: AttnProblem) -> AttnBwdSm90Config:
    """Tiles of the kernel of keys and values."""
    assert problem.mask_block is not None
    return make_keys_config(*_tiles(problem), problem.mask_block)


@lru_cache(maxsize=1024)
def attn_bwd_queries_config(problem: AttnProblem) -> AttnBwdQueriesSm90Config:
    """Tiles of the kernel of queries."""
    assert problem.mask_block is not None
    return make_queries_config(*_tiles(problem), problem.mask_block[1])


def _tiles(problem: AttnProblem) -> tuple[int, int]:
    return 64 if problem.head_dim <= 64 else 128, 64 if problem.head_dim_v <= 64 else 128


def attn_bwd_keys_section(problem: AttnProblem) -> int:
    """KV planes that run together: those whose queries and output gradients stay in L2."""
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    group = problem.heads_q // problem.heads_kv
    planes = problem.batch * problem.heads_kv
    section = SECTION_BYTES // max(row_bytes * problem.max_q * group, 1)
    return min(max(section, 1), max(planes, 1))
