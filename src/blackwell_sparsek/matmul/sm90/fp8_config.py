"""The configuration of the Hopper product in fp8 with many tokens, `spmm_fp8.py`.

A compile-time constant of the kernel; `tuning.py` chooses it. Read without Triton.
"""

from dataclasses import dataclass

from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES, accumulator_layout
from .config import CONSUMERS

# Features of the widest tile, and channels of a step: those that share a scale of x.
WIDEST_FP8, DEEPEST_FP8 = 128, 128


@dataclass(frozen=True)
class SpmmFp8Config:
    """Everything `spmm_fp8.py` is specialised on. Sizes in elements, which are bytes.

    Rows of a work tile are features, and its columns tokens, as in `SpmmSm90Config`. Tokens are
    the rows of accumulators: a thread then has two scales for each 64 of them.

    Attributes
    ----------
    BLOCK_H, BLOCK_W : block of A, features by channels
    TILE_M : features of a work tile
    TILE_K : channels of a step, which share a scale in x and a block in A
    PARTS : 64 tokens each that one consumer accumulates
    STAGES : of the ring
    OUT_BYTES : size of an element of the result
    ACTIVATION : of the epilogue, or None
    CONSUMER_REGISTERS, PRODUCER_REGISTERS : per thread
    """

    BLOCK_H: int
    BLOCK_W: int
    TILE_M: int
    TILE_K: int
    PARTS: int
    STAGES: int
    OUT_BYTES: int = 2
    ACTIVATION: str | None = None
    CONSUMER_REGISTERS: int = 232
    PRODUCER_REGISTERS: int = 40

    def __post_init__(self) -> None:
        assert self.TILE_M in (32, 64, 128) and self.BLOCK_H % self.TILE_M == 0, f"{self=}"
        assert self.TILE_K in (32, 64, 128) and self.BLOCK_W % self.TILE_K == 0, f"{self=}"
        assert self.PARTS in (1, 2) and self.STAGES >= 2, f"{self=}"

    # What the producer of `spmm.py` asks for: blocks by rows, channels of x contiguous.
    A_TRANSPOSED = False
    X_TRANSPOSED = True
    WIDE = False
    PAIRED = False
    SCALED = True
    GROUP_N = 0
    a_copies = 1
    x_copies = 1

    @property
    def tile_m(self) -> int:
        """Features of a work tile."""
        return self.TILE_M

    @property
    def tile_n(self) -> int:
        """Tokens of a work tile."""
        return CONSUMERS * self.PARTS * GROUP_ROWS

    @property
    def row_tiles(self) -> int:
        """Work tiles along one block row."""
        return self.BLOCK_H // self.TILE_M

    @property
    def k_steps(self) -> int:
        """K steps in one block."""
        return self.BLOCK_W // self.TILE_K

    @property
    def out_chunks(self) -> int:
        """Parts of the features that a consumer stores one after the other."""
        return 2 if self.TILE_M == WIDEST_FP8 else 1

    @property
    def out_chunk(self) -> int:
        """Features that a consumer stores at a time."""
        return self.TILE_M // self.out_chunks

    def a_block(self) -> list[int]:
        """Shape of a copy of A."""
        return [self.TILE_M, self.TILE_K]

    def x_block(self) -> list[int]:
        """Shape of a copy of x [tokens, channels]."""
        return [self.tile_n, self.TILE_K]

    def x_tile(self) -> list[int]:
        """Shape of a tile of x that is multiplied at once."""
        return [GROUP_ROWS, self.TILE_K]

    def out_block(self) -> list[int]:
        """Shape of a copy of the result [tokens, features]."""
        return [GROUP_ROWS, self.out_chunk]

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator of operands in fp8."""
        return accumulator_layout(columns, 32)


def fp8_stages_that_fit(tile_m: int, tile_k: int, parts: int, out_bytes: int) -> int:
    """Ring stages of `SpmmFp8Config` that fit next to the output buffers; at most 8."""
    stage = tile_k * (tile_m + CONSUMERS * parts * GROUP_ROWS)
    chunk = tile_m // 2 if tile_m == WIDEST_FP8 else tile_m
    out = CONSUMERS * GROUP_ROWS * chunk * out_bytes
    return min(8, (SMEM_BYTES - out) // stage)
