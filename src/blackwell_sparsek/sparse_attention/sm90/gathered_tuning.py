"""Which problems with small entries the Hopper kernel takes, and its configuration."""

from dataclasses import dataclass
from functools import lru_cache

from ...attention.sm90.config import AttnFwdSm90Config
from ...calls.sparse_attention import SparseAttnProblem
from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES
from ..triton.tuning import heads_per_tile
from .latent_tuning import COPIERS

CONSUMERS = 2
# Keys of an entry; larger ones are copied by TMA (`forward.py`).
GRANULARITIES = (1, 4, 16, 32)
HEAD_DIMS = (64, 128, 256)
# Queries of a consumer, at most: words have a bit for each query of a tile, and longer unions of
# lists that differ are not worth the rows that heads without a group would fill.
MOST_QUERIES = 16


@dataclass(frozen=True)
class SparseGatheredConfig(AttnFwdSm90Config):
    """The configuration of the dense forward, and what gathered keys add; BLOCK_KV is the
    granularity."""

    PACK: int = 1
    """Query heads in a tile: they share a KV head and a list."""
    QUERIES: int = 1
    """Queries of a consumer: it has PACK rows for each of them."""
    LOCAL: bool = False
    """Whether there are keys near the queries."""
    PAGED: bool = False

    @property
    def GATHERED(self) -> bool:
        """Keys and values are copied by cp.async."""
        return True

    @property
    def group_t(self) -> int | None:
        """Queries of a consumer."""
        return self.QUERIES

    @property
    def tile_t(self) -> int:
        """Queries of a tile."""
        return self.CONSUMERS * self.QUERIES

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles, and of a word for each key of a stage."""
        keys = self.STAGES * self.TILE_N * (self.TILE_D + self.TILE_DV)
        return 2 * (self.tile_m * self.TILE_D + keys) + 4 * self.STAGES * self.TILE_N

    def fills(self, array: int) -> int:
        """Arrivals that fill a stage of keys (array 0) or values: of all copies, and of words."""
        return COPIERS + (1 if array == 0 else 0)

    def placed_barriers(self) -> list[tuple[int, int]]:
        """Offset in shared memory and arrivals of each barrier that warps find by its address."""
        return [
            (
                self.tile_bytes + self.barrier_at(array) + 8 * stage,
                self.arrivals if array % 2 else self.fills(array),
            )
            for array in range(4)
            for stage in range(self.STAGES)
        ]

    def copy_layout(self) -> object:
        """Layout of a tile of keys that is copied: 8 threads have 128 bytes of a key."""
        from triton.experimental.gluon import language as gl

        return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    def words_layout(self) -> object:
        """Layout of a word that every thread of four warps has."""
        from triton.experimental.gluon import language as gl

        return gl.BlockedLayout([1], [32], [4], [0])


def is_gathered(problem: SparseAttnProblem) -> bool:
    """Whether entries are smaller than a tile of keys."""
    return problem.granularity in GRANULARITIES


def unsupported_gathered(problem: SparseAttnProblem) -> str | None:
    """Why the kernel cannot run a 16-bit forward with small entries, or None."""
    if problem.backward:
        return f"has no gradients for entries of {problem.granularity} keys, only of 64 or 128"
    if problem.head_dim not in HEAD_DIMS or problem.head_dim_v != problem.head_dim:
        dims = f"{problem.head_dim} and {problem.head_dim_v}"
        return f"needs equal head dimensions of 64, 128 or 256 for small entries, got {dims}"
    if problem.gate:
        return f"has no code for gates of entries of {problem.granularity} keys"
    if not problem.tma:
        return "needs keys to copy, and addresses and strides that are multiples of 16 bytes"
    return None


def sparse_gathered_config(problem: SparseAttnProblem) -> SparseGatheredConfig:
    """The configuration for a problem that `unsupported_gathered` accepts."""
    pack = heads_per_tile(problem, GROUP_ROWS)
    paged = problem.page_size is not None
    return _config(pack, problem.head_dim, problem.granularity, problem.local, paged)


@lru_cache(maxsize=256)
def _config(
    pack: int, head_dim: int, granularity: int, local: bool, paged: bool
) -> SparseGatheredConfig:
    # sums of 256 columns take 128 registers, which leaves room for the scores of 64 keys, and the
    # producer has pointers to four keys and values in each thread
    tile_n = GROUP_ROWS
    # 2 KiB for barriers behind the tiles
    room = SMEM_BYTES - 2048 - 2 * CONSUMERS * GROUP_ROWS * head_dim
    width = min(head_dim, 128)
    return SparseGatheredConfig(
        CONSUMERS=CONSUMERS,
        TILE_N=tile_n,
        TILE_D=head_dim,
        TILE_DV=head_dim,
        SLICE_D=width,
        SLICE_DV=width,
        STAGES=min(4, room // (4 * tile_n * (head_dim + 1))),
        BLOCK_KV=granularity,
        CONSUMER_REGISTERS=224,
        PRODUCER_REGISTERS=56,
        MAX_REGISTERS=168,
        PACK=pack,
        QUERIES=min(GROUP_ROWS // pack, MOST_QUERIES),
        LOCAL=local,
        PAGED=paged,
    )
