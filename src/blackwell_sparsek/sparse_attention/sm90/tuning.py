"""Which problems the Hopper forward takes, and its tiles."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...attention.sm90.config import AttnFwdSm90Config
from ...calls.sparse_attention import SparseAttnProblem
from ...core.compat import why_no_gluon
from ...dispatch.machine import why_no_kernels
from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES
from ..triton.tuning import LONGEST, MOST_PROGRAMS, heads_per_tile
from .latent_tuning import is_latent, unsupported_latent

CONSUMERS = 2
GRANULARITIES = (64, 128)
LARGEST_HEAD_DIM = 256


@dataclass(frozen=True)
class SparseAttnSm90Config(AttnFwdSm90Config):
    """The configuration of the dense forward, and what sparse attention adds; BLOCK_KV is the
    granularity."""

    PACK: int = 1
    """Query heads in a tile: they share a KV head and a list."""
    HEAD_DIM: int = 128
    HEAD_DIM_V: int = 128
    GATE: bool = False

    @property
    def tile_t(self) -> int:
        """Queries of a tile."""
        return self.tile_m // self.PACK

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles, and of a weight for each row and stage."""
        keys = self.STAGES * self.TILE_N * (self.TILE_D + self.TILE_DV)
        return 2 * (self.tile_m * self.TILE_D + keys) + 4 * self.STAGES * self.tile_m


def why_not(problem: SparseAttnProblem) -> str | None:
    """Why the kernel cannot run this problem, or None when it can."""
    return why_no_kernels(problem.arch) or unsupported(problem) or why_no_gluon()


def unsupported(problem: SparseAttnProblem) -> str | None:
    """`why_not` without the requirements that every kernel has of the machine."""
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} has no 16-bit WGMMA"
    if max(problem.max_q, problem.max_k) > LONGEST:
        return f"needs sequences of at most {LONGEST} tokens"
    if problem.batch * problem.heads_q * problem.max_q > MOST_PROGRAMS:
        return f"needs at most {MOST_PROGRAMS} queries over batch and heads"
    if is_latent(problem):
        return unsupported_latent(problem)
    if problem.granularity not in GRANULARITIES:
        return f"needs entries of 64 or 128 keys, got {problem.granularity}"
    dims = (problem.head_dim, problem.head_dim_v)
    if not 1 <= min(dims) <= max(dims) <= LARGEST_HEAD_DIM or any(dim % 8 for dim in dims):
        return (
            f"needs head dimensions up to {LARGEST_HEAD_DIM} in steps of 8, "
            f"got {dims[0]} and {dims[1]}"
        )
    if problem.page_size is not None:
        return "has no code for keys in pages"
    if not problem.tma:
        return "TMA needs keys to copy, and addresses and strides that are multiples of 16 bytes"
    return None


def sparse_attn_sm90_config(problem: SparseAttnProblem) -> SparseAttnSm90Config:
    """Tiles for a problem that `unsupported` accepts."""
    return _config(
        heads_per_tile(problem, GROUP_ROWS * CONSUMERS),
        problem.head_dim,
        problem.head_dim_v,
        problem.granularity,
        problem.gate,
    )


@lru_cache(maxsize=256)
def _config(
    pack: int, head_dim: int, head_dim_v: int, granularity: int, gate: bool
) -> SparseAttnSm90Config:
    tile_d, tile_dv = (-(-dim // 64) * 64 for dim in (head_dim, head_dim_v))
    wide = max(tile_d, tile_dv) > 128
    # sums of 256 columns take 128 registers, which leaves room for the scores of 64 keys
    tile_n = 64 if wide else granularity
    # 2 KiB for barriers behind the tiles
    room = SMEM_BYTES - 2048 - 2 * CONSUMERS * GROUP_ROWS * tile_d
    stage = 2 * tile_n * (tile_d + tile_dv) + 4 * CONSUMERS * GROUP_ROWS
    return SparseAttnSm90Config(
        CONSUMERS=CONSUMERS,
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SLICE_D=128 if tile_d % 128 == 0 else 64,
        SLICE_DV=128 if tile_dv % 128 == 0 else 64,
        STAGES=min(4, room // stage),
        BLOCK_KV=granularity,
        # The producer merges the lists of 128 rows, four in each thread. With 208 registers,
        # consumers of 128 columns spill 32 bytes.
        CONSUMER_REGISTERS=224,
        PRODUCER_REGISTERS=56,
        MAX_REGISTERS=168,
        PACK=pack,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        GATE=gate,
    )
