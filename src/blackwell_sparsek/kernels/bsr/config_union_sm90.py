"""Configuration of the Hopper product that loads the union of three block rows' columns."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, SMEM_BYTES, accumulator_layout

# Block rows of 64 that share what is fetched of the dense operand: one consumer for each.
MEMBERS = 3
# Columns of a tile, in two parts because tiles are powers of two: a consumer holds 64 x 192 sums in
# 96 registers. More do not fit: ptxas compiles for what each of 512 threads gets, which is 128.
WIDE_N, SLIM_N = 128, 64


@dataclass(frozen=True)
class UnionSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    BLOCK_W is the width of a block as the product reads it, TILE_K what one stage holds of it.
    """

    BLOCK_W: int
    TILE_K: int
    STAGES: int
    A_TRANSPOSED: bool = False
    X_TRANSPOSED: bool = False
    OUT_TRANSPOSED: bool = False
    ACTIVATION: str | None = None
    # three consumers and the producer take all registers of an SM
    CONSUMER_REGISTERS: int = 160
    PRODUCER_REGISTERS: int = 32
    MAX_REGISTERS: int = 128

    def __post_init__(self) -> None:
        assert self.BLOCK_W % self.TILE_K == 0, f"{self.BLOCK_W=} {self.TILE_K=}"
        assert self.TILE_K in (16, 32, 64), f"{self.TILE_K=}"
        assert self.STAGES >= 2, f"{self.STAGES=}"

    @property
    def BLOCK_H(self) -> int:
        """Rows of a piece of work."""
        return MEMBERS * GROUP_ROWS

    @property
    def row_tiles(self) -> int:
        """Pieces of work along one row of the plan."""
        return 1

    @property
    def tile_m(self) -> int:
        """Rows of a piece of work."""
        return self.BLOCK_H

    @property
    def tile_n(self) -> int:
        """Columns of a piece of work."""
        return WIDE_N + SLIM_N

    @property
    def k_steps(self) -> int:
        """Stages that one block goes through."""
        return self.BLOCK_W // self.TILE_K

    @property
    def OUT_CHUNKS(self) -> int:
        """Chunks in which the wide part is stored; the slim one is one more."""
        return WIDE_N // SLIM_N

    @property
    def out_chunk(self) -> int:
        """Columns a consumer stores at a time."""
        return SLIM_N

    def a_block(self) -> list[int]:
        """Shape of an A tile in memory."""
        shape = [GROUP_ROWS, self.TILE_K]
        return shape[::-1] if self.A_TRANSPOSED else shape

    def x_block(self, columns: int = WIDE_N) -> list[int]:
        """Shape of an X tile of so many columns in memory."""
        shape = [self.TILE_K, columns]
        return shape[::-1] if self.X_TRANSPOSED else shape

    def out_block(self) -> list[int]:
        """Shape of an output chunk in memory."""
        shape = [GROUP_ROWS, self.out_chunk]
        return shape[::-1] if self.OUT_TRANSPOSED else shape

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)


def union_stages_that_fit(tile_k: int, out_bytes: int) -> int:
    """Ring stages that fit beside the output buffers."""
    stage = 2 * tile_k * (MEMBERS * GROUP_ROWS + WIDE_N + SLIM_N)
    out = MEMBERS * GROUP_ROWS * SLIM_N * out_bytes
    return (SMEM_BYTES - out) // stage
