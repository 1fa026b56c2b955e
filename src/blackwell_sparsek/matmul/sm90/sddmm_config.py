"""The configuration of sampled products on Hopper: tiles, rings, and what follows from them.

A compile-time constant of `sddmm.py`; `tuning.py` chooses it. Read without Triton, which is
imported where a layout is asked for.
"""

from dataclasses import dataclass

from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES, accumulator_layout
from .config import CONSUMERS

# Bytes of a row of shared memory that TMA swizzles; wider tiles are stored slab after slab.
SWIZZLED_BYTES = 128


@dataclass(frozen=True)
class SddmmSm90Config:
    """Everything `sddmm.py` is specialised on. Sizes in elements.

    A work tile is TILE_M rows of one block row and, for each consumer, GROUP_N columns that belong
    to SLOTS pieces of stored blocks. A piece is a block, or a part of one that is wider than PIECE.

    Attributes
    ----------
    BLOCK_H, BLOCK_W : stored block
    TILE_M : rows of a work tile, 64 or 128: a divisor of BLOCK_H, or a multiple where block rows
        are grouped
    GROUP_N : columns that one consumer accumulates
    PIECE : columns of a piece, a power of two that divides BLOCK_W
    TILE_K : steps of the sum in one stage
    STAGES : of the ring
    OUT_CHUNKS : column chunks in which a consumer stores its accumulator
    OUT_BYTES : size of an element of the result
    A_TRANSPOSED : a lies in memory as [K, M]
    B_TRANSPOSED : b lies in memory as [N, K]
    CONSUMER_REGISTERS, PRODUCER_REGISTERS : per thread
    """

    BLOCK_H: int
    BLOCK_W: int
    TILE_M: int
    GROUP_N: int
    PIECE: int
    TILE_K: int
    STAGES: int
    OUT_CHUNKS: int
    OUT_BYTES: int = 2
    A_TRANSPOSED: bool = False
    B_TRANSPOSED: bool = False
    CONSUMER_REGISTERS: int = 232
    PRODUCER_REGISTERS: int = 40

    def __post_init__(self) -> None:
        assert self.TILE_M in (GROUP_ROWS, 2 * GROUP_ROWS), f"{self.TILE_M=}"
        fits = self.BLOCK_H % self.TILE_M == 0 or self.TILE_M % self.BLOCK_H == 0
        assert fits and self.BLOCK_H >= 16, f"{self.BLOCK_H=} {self.TILE_M=}"
        assert self.TILE_M * self.GROUP_N <= GROUP_ROWS * 256, f"{self=}"
        assert self.PIECE in (16, 32, 64, 128, 256) and self.BLOCK_W % self.PIECE == 0, f"{self=}"
        assert self.GROUP_N % self.PIECE == 0, f"{self.GROUP_N=} {self.PIECE=}"
        assert self.TILE_K in (16, 32, 64) and self.STAGES >= 2, f"{self=}"
        assert self.OUT_CHUNKS in (2, 4) and self.OUT_BYTES in (2, 4), f"{self=}"

    @property
    def slots(self) -> int:
        """Pieces of a consumer."""
        return self.GROUP_N // self.PIECE

    @property
    def tile_pieces(self) -> int:
        """Pieces of a work tile."""
        return CONSUMERS * self.slots

    @property
    def block_pieces(self) -> int:
        """Pieces of a block."""
        return self.BLOCK_W // self.PIECE

    @property
    def grouped_rows(self) -> int:
        """Block rows that make up a work tile; 1 where a block has enough rows."""
        return max(1, self.TILE_M // self.BLOCK_H)

    @property
    def row_tiles(self) -> int:
        """Work tiles along one block row."""
        return max(1, self.BLOCK_H // self.TILE_M)

    @property
    def tile_rows(self) -> int:
        """Rows of `a` from one block row, or group of block rows, to the next."""
        return max(self.BLOCK_H, self.TILE_M)

    @property
    def stage_bytes(self) -> int:
        """Bytes of all tiles of a stage."""
        return 2 * self.TILE_K * (self.TILE_M + CONSUMERS * self.GROUP_N)

    @property
    def out_chunk(self) -> int:
        """Columns a consumer stores at a time."""
        return self.GROUP_N // self.OUT_CHUNKS

    @property
    def store_rows(self) -> int:
        """Rows of one copy of the result."""
        return min(self.BLOCK_H, self.TILE_M)

    @property
    def store_columns(self) -> int:
        """Columns of one copy of the result: those of one slab of shared memory."""
        return min(self.PIECE, self.out_chunk, SWIZZLED_BYTES // self.OUT_BYTES)

    @property
    def out_copies(self) -> int:
        """Copies that store a chunk of the result."""
        return self.out_chunk // self.store_columns * self.grouped_rows

    def a_block(self) -> list[int]:
        """Shape of a copy of `a` [batch, rows, columns] as it lies in memory."""
        return [1, *self.a_tile()]

    def a_tile(self) -> list[int]:
        """Shape of an A tile in memory."""
        shape = [self.TILE_M, self.TILE_K]
        return shape[::-1] if self.A_TRANSPOSED else shape

    def b_block(self) -> list[int]:
        """Shape of a copy of `b` [batch, rows, columns] as it lies in memory: one piece."""
        return [1, *self.b_piece()]

    def b_piece(self) -> list[int]:
        """Shape of a piece of B in memory."""
        shape = [self.TILE_K, self.PIECE]
        return shape[::-1] if self.B_TRANSPOSED else shape

    def b_tile(self) -> list[int]:
        """Shape of the B tile of one consumer in memory: pieces side by side or stacked."""
        shape = [self.TILE_K, self.GROUP_N]
        return shape[::-1] if self.B_TRANSPOSED else shape

    def out_block(self) -> list[int]:
        """Shape of one copy of the result."""
        return [self.store_rows, self.store_columns]

    def b_layout(self) -> object:
        """Shared layout of the B tile of one consumer, in which each piece is contiguous."""
        width = self.TILE_K if self.B_TRANSPOSED else self.PIECE
        return _slab_layout(2 * width, 16)

    def out_layout(self) -> object:
        """Shared layout of a chunk of the result, in which each slab is contiguous."""
        return _slab_layout(self.OUT_BYTES * self.store_columns, 8 * self.OUT_BYTES)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a WGMMA accumulator."""
        return accumulator_layout(columns)


def _slab_layout(row_bytes: int, bits: int) -> object:
    """Shared layout of a matrix stored in slabs with rows of up to `row_bytes`."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(min(SWIZZLED_BYTES, row_bytes), bits, rank=2)


def sddmm_stages_that_fit(tile_m: int, group_n: int, tile_k: int, chunk_bytes: int) -> int:
    """Ring stages that fit next to a chunk of the result, of `chunk_bytes` a row, per consumer."""
    stage = 2 * tile_k * (tile_m + CONSUMERS * group_n)
    return (SMEM_BYTES - CONSUMERS * tile_m * chunk_bytes) // stage
