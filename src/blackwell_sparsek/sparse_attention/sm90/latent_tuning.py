"""Which problems with latent keys the Hopper kernel takes, and its configuration."""

from dataclasses import dataclass
from functools import lru_cache

from ...calls.sparse_attention import SparseAttnProblem
from ...decode.tuning import LATENT_DIMS, LatentConfig
from ...launch.descriptors import GROUP_ROWS
from ..triton.tuning import heads_per_tile

# Threads of the producer: each of them reports its copies to the barriers of a stage.
COPIERS = 128


@dataclass(frozen=True)
class SparseLatentConfig(LatentConfig):
    """The configuration of decoding over latent caches, and what chosen keys add.

    Its page and block sizes are those of TMA copies, which there are none of here.
    """

    PAGE_SIZE: int | None = None
    BLOCK_KV: int | None = None
    # three warp groups share 504 registers; with 56, the producer of pairs spills 16 words
    PRODUCER_REGISTERS: int = 72
    CONSUMER_REGISTERS: int = 216
    MAX_REGISTERS: int = 168
    PACK: int = GROUP_ROWS
    """Query heads in a tile: they share a KV head and a list."""
    ENTRY_KEYS: int = 1
    """Keys of an entry: the granularity."""
    GATE: bool = False

    @property
    def _copied(self) -> tuple[tuple[int, int], ...]:
        return ((0, 0), (1, 1), (0, 1), (1, 0))

    @property
    def GATHERED(self) -> bool:
        """Whether cp.async copies single keys."""
        return True

    def placed_barriers(self) -> list[tuple[int, int]]:
        """No barrier is found by its address."""
        return []

    def fills(self, part: int) -> int:
        """Arrivals that fill a part of a tile: of all copies, and once for the notes on its keys.

        The notes belong to the first part.
        """
        return COPIERS + (1 if part == 0 else 0)

    def copy_layout(self) -> object:
        """Layout of a tile of keys that is copied: 8 threads have 128 bytes of a key."""
        from triton.experimental.gluon import language as gl

        return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    def words_layout(self) -> object:
        """Layout of a word that every thread of four warps has."""
        from triton.experimental.gluon import language as gl

        return gl.BlockedLayout([1], [32], [4], [0])


def is_latent(problem: SparseAttnProblem) -> bool:
    """Whether the heads are those of latent attention."""
    return (problem.head_dim, problem.head_dim_v) == LATENT_DIMS


def unsupported_latent(problem: SparseAttnProblem) -> str | None:
    """Why the kernel cannot run a 16-bit problem with latent heads, or None."""
    if not problem.latent:
        return f"needs values that are a view of the first {LATENT_DIMS[1]} columns of the keys"
    if not problem.tma:
        return "needs keys to copy, and addresses and strides that are multiples of 16 bytes"
    return None


def sparse_latent_config(problem: SparseAttnProblem) -> SparseLatentConfig:
    """The configuration for a problem that `unsupported_latent` accepts."""
    pack = heads_per_tile(problem, GROUP_ROWS)
    return _config(pack, problem.granularity, problem.gate)


@lru_cache(maxsize=256)
def _config(pack: int, entry_keys: int, gate: bool) -> SparseLatentConfig:
    return SparseLatentConfig(PACK=pack, ENTRY_KEYS=entry_keys, GATE=gate)
