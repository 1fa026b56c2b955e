"""Which problems the Hopper kernels take, and their tiles."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...attention.sm90.config import AttnFwdSm90Config
from ...calls.sparse_attention import SparseAttnProblem
from ...core.compat import why_no_gluon
from ...dispatch.machine import why_no_kernels
from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES, accumulator_layout
from ..triton.tuning import LONGEST, MOST_PROGRAMS, heads_per_tile
from .gathered_tuning import is_gathered, unsupported_gathered
from .latent_tuning import is_latent, unsupported_latent

CONSUMERS = 2
GRANULARITIES = (64, 128)
LARGEST_HEAD_DIM = 256
# Of the backward: dk and dv of 64 keys take 128 registers of a thread at 128 columns.
LARGEST_HEAD_DIM_BACKWARD = 128
# Columns of a copy of query rows: 128 bytes, over which shared memory is swizzled.
COPY_COLUMNS = 64
# Query heads of a copy: eight rows are what the swizzle repeats after.
FEWEST_HEADS = 8


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
    def GATHERED(self) -> bool:
        """Keys and values are copied by TMA, not by cp.async."""
        return False

    @property
    def tile_t(self) -> int:
        """Queries of a tile."""
        return self.tile_m // self.PACK

    @property
    def group_t(self) -> None:
        """Rows of a query may go on in the next consumer."""
        return None

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles, and of a weight for each row and stage."""
        keys = self.STAGES * self.TILE_N * (self.TILE_D + self.TILE_DV)
        return 2 * (self.tile_m * self.TILE_D + keys) + 4 * self.STAGES * self.tile_m


@dataclass(frozen=True)
class SparseDqSm90Config(SparseAttnSm90Config):
    """The same for gradients of queries, whose rows have output gradients beside the queries."""

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles, and of a weight (and a cursor) for each row and stage."""
        rows = self.tile_m * (self.TILE_D + self.TILE_DV)
        keys = self.STAGES * self.TILE_N * (self.TILE_D + self.TILE_DV)
        return 2 * (rows + keys) + (8 if self.GATE else 4) * self.STAGES * self.tile_m


@dataclass(frozen=True)
class SparseDkdvSm90Config:
    """Everything the kernel of dk and dv is specialised on; sizes in elements.

    A program owns 64 keys, and its consumer takes tiles of 64 rows: PACK query heads of some
    queries, which need not be neighbours. Two programs share an SM. BLOCK_KV is the granularity.
    """

    PACK: int
    TILE_D: int
    TILE_DV: int
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_KV: int
    STAGES: int
    """Tiles of rows in flight."""
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int
    """Registers that every thread starts with."""

    @property
    def TILE_M(self) -> int:
        """Rows of a tile, by the name that the dense kernels give it."""
        return GROUP_ROWS

    @property
    def tokens(self) -> int:
        """Queries of a tile of rows."""
        return GROUP_ROWS // self.PACK

    @property
    def smem_bytes(self) -> int:
        """Shared memory of all tiles, and of three numbers for each row and stage."""
        width = self.TILE_D + self.TILE_DV
        return GROUP_ROWS * (2 * width * (1 + self.STAGES) + 12 * self.STAGES)

    def row_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of queries or output gradients: 64 columns of the heads of a token."""
        return (1, 1, self.PACK, COPY_COLUMNS)

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of the copy of keys."""
        return (1, 1, GROUP_ROWS, self.TILE_D)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of the copy of values."""
        return (1, 1, GROUP_ROWS, self.TILE_DV)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)


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
        no_gradients = "has no code for gradients of latent heads" if problem.backward else None
        return no_gradients or unsupported_latent(problem)
    if is_gathered(problem):
        return unsupported_gathered(problem)
    if problem.granularity not in GRANULARITIES:
        return f"needs entries of up to 128 keys, got {problem.granularity}"
    dims = (problem.head_dim, problem.head_dim_v)
    largest = LARGEST_HEAD_DIM_BACKWARD if problem.backward else LARGEST_HEAD_DIM
    if not 1 <= min(dims) <= max(dims) <= largest or any(dim % 8 for dim in dims):
        return f"needs head dimensions up to {largest} in steps of 8, got {dims[0]} and {dims[1]}"
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


def sparse_dq_sm90_config(problem: SparseAttnProblem) -> SparseDqSm90Config:
    """Tiles of the kernel of dq."""
    tile_d, tile_dv = _tile_widths(problem)
    rows = CONSUMERS * GROUP_ROWS
    stage = 2 * GROUP_ROWS * (tile_d + tile_dv) + 8 * rows
    return SparseDqSm90Config(
        CONSUMERS=CONSUMERS,
        # scores, their gradients and dq leave no registers for those of 128 keys
        TILE_N=GROUP_ROWS,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SLICE_D=tile_d,
        SLICE_DV=tile_dv,
        STAGES=min(4, (SMEM_BYTES - 2048 - 2 * rows * (tile_d + tile_dv)) // stage),
        BLOCK_KV=problem.granularity,
        # nothing spills without gates; with gates and a cap, what does is outside of the products
        CONSUMER_REGISTERS=232 if problem.gate else 224,
        PRODUCER_REGISTERS=40 if problem.gate else 56,
        MAX_REGISTERS=168,
        PACK=heads_per_tile(problem, rows),
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        GATE=problem.gate,
    )


def heads_of_copy(problem: SparseAttnProblem) -> int:
    """Query heads of a token that the kernel of dk and dv copies at a time: a power of two."""
    if not problem.heads_q:
        return 1
    shared = min(problem.heads_q // problem.heads_kv, problem.heads_q // problem.lists)
    return min(shared & -shared, GROUP_ROWS)


def sparse_dkdv_sm90_config(problem: SparseAttnProblem) -> SparseDkdvSm90Config | None:
    """Tiles of the kernel of dk and dv; None where few query heads share a KV head and a list."""
    pack = heads_of_copy(problem)
    if pack < FEWEST_HEADS:
        return None
    tile_d, tile_dv = _tile_widths(problem)
    return SparseDkdvSm90Config(
        PACK=pack,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_KV=problem.granularity,
        STAGES=2 if tile_d + tile_dv > 128 else 4,
        PRODUCER_REGISTERS=24,
        MAX_REGISTERS=128,
    )


def _tile_widths(problem: SparseAttnProblem) -> tuple[int, int]:
    tile_d, tile_dv = (-(-dim // 64) * 64 for dim in (problem.head_dim, problem.head_dim_v))
    return tile_d, tile_dv
