"""Which kernels can run packed queries over a cache, and with which tiles.

Pure functions; nothing is timed. Under `batch_invariant` tiles depend only on dtypes and head dims.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..attention.sm90.config import AttnFwdSm90Config
from ..attention.triton.tuning import LARGE_SMEM
from ..calls.ragged import RaggedProblem
from ..core.compat import why_no_gluon
from ..decode.portable_tuning import SplitKeysConfig
from ..decode.tuning import (
    INTERPRETED_PROGRAMS,
    LONGEST,
    MOST_TILES,
    SMALLEST_TILE,
    STEP,
    CopiedKeys,
    attn_decode_sm90_launch,
    attn_decode_sm90_unsupported,
    cache_unsupported,
)
from ..dispatch.machine import why_no_kernels
from ..launch.descriptors import GROUP_ROWS, SMEM_BYTES

LARGEST_HEAD_DIM = 256
# KV tiles in whose time a softmax begins and ends. Without them, the program that gets the short
# softmaxes at the beginning of a causal prompt takes twice as long as the others.
SOFTMAX_COST = 3
# Work is divided in units of time: those of a KV tile, and of one for which a single consumer of
# the Hopper kernel has rows. Beside prompts, a decoding step hardly waits for memory. Its tile then
# takes the products and softmax of one consumer, an estimated 1 us, and that of a prompt 1.6 us.
TILE_UNITS, LIGHT_UNITS = 3, 2
# Tiles whose units are int32.
MOST = MOST_TILES // TILE_UNITS


def why_not_triton(problem: RaggedProblem) -> str | None:
    """Why the portable kernel cannot run this problem, or None when it can."""
    if (reason := cache_unsupported(problem, LARGEST_HEAD_DIM)) is not None:
        return reason
    if problem.capacity > LONGEST or problem.tokens * problem.group > LONGEST:
        return f"needs at most {LONGEST} keys a sequence, and rows of all sequences"
    softmaxes = query_tiles(problem, SMALLEST_TILE) * problem.heads_kv
    if softmaxes * (problem.capacity // SMALLEST_TILE + 1 + SOFTMAX_COST) > MOST:
        return f"needs at most {MOST} tiles over all sequences and heads"
    return None


def query_tiles(problem: RaggedProblem, tile_m: int) -> int:
    """At least as many tiles of `tile_m` rows as the sequences have, padding included."""
    return problem.tokens * problem.group // tile_m + problem.batch + 1


@dataclass(frozen=True)
class RaggedConfig(SplitKeysConfig):
    """Tiles and launch options of the portable kernel."""


def ragged_config(problem: RaggedProblem, precision: str) -> RaggedConfig:
    """Tiles and programs; `precision` applies to fp32 products."""
    dim = max(problem.head_dim, problem.head_dim_v)
    arch = problem.arch
    sms = INTERPRETED_PROGRAMS if arch.interpreted else arch.num_sms
    # as for decoding: 99 KiB of shared memory hold one program, 227 KiB two
    programs = 2 * sms if arch.sm in LARGE_SMEM else sms
    if problem.cache_dtype.itemsize == 4:
        # full fp32 products run on the CUDA cores, with operands in registers
        return RaggedConfig(16, 32 if dim <= 128 else 16, 8, 2, programs, precision)
    rows = problem.max_q * problem.group
    if rows <= 16 and not problem.batch_invariant:
        # every sequence decodes: as in `decode.tuning`
        return RaggedConfig(16, 64 if dim <= 128 else 32, 4, 3, programs, precision)
    if dim > 128:
        # with 4 warps, 32 rows spill
        return RaggedConfig(32, 32, 8, 3, programs, precision)
    # 64 rows spill from the registers of 4 warps
    return RaggedConfig(64, 64, 8, 3, programs, precision)


# The Hopper kernel.

# Rows of a query tile: two consumers that read the same keys.
CONSUMERS = 2
SM90_HEAD_DIM = 128


def why_not_sm90(problem: RaggedProblem) -> str | None:
    """Why no Hopper kernel can run this problem, or None when one can."""
    reason = None if takes_steps(problem) else ragged_sm90_unsupported(problem)
    return why_no_kernels(problem.arch) or reason or why_no_gluon()


def takes_steps(problem: RaggedProblem) -> bool:
    """Whether the Hopper kernel of decoding runs this problem (`steps.py`)."""
    # without sequences there are no tables, of which a row without a sequence looks at the first
    if not problem.steps or problem.batch == 0:
        return False
    if attn_decode_sm90_unsupported(problem.decoding) is not None:
        return False
    # the launch that combines many parts knows no queries without a sequence
    return not attn_decode_sm90_launch(problem.decoding).config.COMBINED


def ragged_sm90_unsupported(problem: RaggedProblem) -> str | None:
    """`why_not_sm90` without the requirements that every kernel has of the machine."""
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} has no 16-bit WGMMA"
    if problem.cache_dtype != problem.dtype:
        return f"needs a cache of {problem.dtype}, got {problem.cache_dtype}"
    dims = (problem.head_dim, problem.head_dim_v)
    if not 1 <= min(dims) <= max(dims) <= SM90_HEAD_DIM or any(dim % 8 for dim in dims):
        return (
            f"needs head dimensions up to {SM90_HEAD_DIM} in steps of 8, "
            f"got {dims[0]} and {dims[1]}"
        )
    if problem.packed:
        return "has no code for packed keys with options of caches"
    if problem.block_size is not None:
        return "has no code for listed blocks"
    if problem.alibi:
        return "has no code for ALiBi slopes"
    if problem.page_size is not None and problem.page_size % STEP:
        return f"pages of {problem.page_size} are not a multiple of {STEP}"
    if not problem.tma:
        return "TMA needs slots to copy, and addresses and strides that are multiples of 16 bytes"
    if problem.capacity > LONGEST or problem.tokens * problem.group > LONGEST:
        return f"needs at most {LONGEST} keys a sequence, and rows of all sequences"
    softmaxes = query_tiles(problem, CONSUMERS * GROUP_ROWS) * problem.heads_kv
    if softmaxes * (problem.capacity // GROUP_ROWS + 1 + SOFTMAX_COST) > MOST:
        return f"needs at most {MOST} tiles over all sequences and heads"
    return None


@dataclass(frozen=True)
class CacheCopies(CopiedKeys):
    """How tiles of keys are copied; there are no lists of blocks."""

    TILE_N: int
    PAGE_SIZE: int | None
    BLOCK_KV: int | None = None


@dataclass(frozen=True)
class RaggedSm90Config(AttnFwdSm90Config):
    """The configuration of the forward, whose consumers go through the keys, and of the cache."""

    PAGE_SIZE: int | None = None
    HEAD_DIM: int = 128
    HEAD_DIM_V: int = 128
    TOP_LEFT: bool = False
    WHOLE: bool = False
    """Softmaxes are not split."""
    HEADS: int = 0
    """Query heads that share a KV head, if TMA copies tiles of their queries; 0 if consumers load
    them."""
    DYNAMIC: bool = False
    """Programs take whole softmaxes as they get free where these are short (`order.py`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # a second tile of queries would take the third stage of keys
        assert self.Q_STAGES == 1, f"{self.Q_STAGES=}"

    @property
    def barrier_room(self) -> int:
        """As that of the forward; arrays must be larger than what the roles are handed, too."""
        return 68

    @property
    def cache(self) -> CacheCopies:
        """How tiles of keys are copied."""
        return CacheCopies(self.TILE_N, self.PAGE_SIZE)

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles."""
        keys = self.STAGES * self.TILE_N * (self.TILE_D + self.TILE_DV)
        return 2 * (self.tile_m * self.TILE_D + keys)

    def q_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of the queries of a consumer: of [token, KV head, head of it, dim]."""
        return (GROUP_ROWS // self.HEADS, 1, self.HEADS, self.TILE_D)

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys."""
        return (1, 1, self.cache.copy_keys, self.TILE_D)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values."""
        return (1, 1, self.cache.copy_keys, self.TILE_DV)


def ragged_sm90_config(problem: RaggedProblem, top_left: bool) -> RaggedSm90Config:
    """Tiles for a problem that `ragged_sm90_unsupported` accepts."""
    return _sm90_config(
        problem.page_size,
        problem.head_dim,
        problem.head_dim_v,
        top_left,
        problem.batch_invariant,
        problem.group if copies_queries(problem) else 0,
        problem.max_q * problem.group > GROUP_ROWS,
    )


def copies_queries(problem: RaggedProblem) -> bool:
    """Whether a consumer's 64 rows are one tile of q for TMA, and scores take them as they are.

    Rows are the heads of one query after the other, so a tile has whole queries.
    """
    return problem.tma_q and problem.positive and GROUP_ROWS % max(problem.group, 1) == 0


@lru_cache(maxsize=256)
def _sm90_config(
    page_size: int | None,
    head_dim: int,
    head_dim_v: int,
    top_left: bool,
    whole: bool,
    heads: int,
    prompts: bool,
) -> RaggedSm90Config:
    tile_d, tile_dv = (64 if dim <= 64 else 128 for dim in (head_dim, head_dim_v))
    tile_n = 128
    # 2 KiB for barriers, which begin behind the tiles
    room = SMEM_BYTES - 2048 - 2 * CONSUMERS * GROUP_ROWS * tile_d
    stages = min(4, room // (2 * tile_n * (tile_d + tile_dv)))
    copies = CacheCopies(tile_n, page_size).copies
    return RaggedSm90Config(
        CONSUMERS=CONSUMERS,
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SLICE_D=tile_d,
        SLICE_DV=tile_dv,
        STAGES=stages,
        BLOCK_KV=tile_n,
        # the coordinates of a tile's copies stay in registers while the producer waits for a stage
        CONSUMER_REGISTERS=208 if copies > 4 else 216 if copies > 1 else 224,
        PRODUCER_REGISTERS=88 if copies > 4 else 72 if copies > 1 else 56,
        MAX_REGISTERS=168,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        TOP_LEFT=top_left,
        WHOLE=whole,
        HEADS=heads,
        DYNAMIC=prompts,
        PDL=True,
    )
