"""Configuration of the Hopper product with few columns: tiles, ring, and what follows from them."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, SMEM_BYTES, accumulator_layout

# Columns of the widest tile.
MOST_COLUMNS = 128
# More stages than this hide nothing further: pieces of 16 KB from as many are 160 KB.
MOST_STAGES = 10


@dataclass(frozen=True)
class NarrowSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    A tile of the result is TILE_M rows of a block row of [BLOCK_H, BLOCK_W] blocks by TILE_N
    columns. A stage of the ring holds steps of TILE_K from each of UNITS blocks. Tiles of 64
    rows are the first operand of WGMMA; lower ones change places with x, whose tile is then padded
    to 64 columns that nobody fetches or looks at.

    With PARTS = 2 programs come in pairs, and both of a pair may share a tile, each with its part
    of the blocks. Sums for the other one come to a mailbox in shared memory, behind the blocks.
    """

    BLOCK_H: int
    BLOCK_W: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    UNITS: int
    STAGES: int
    ACTIVATION: str | None = None
    PARTS: int = 1

    def __post_init__(self) -> None:
        assert self.TILE_M in (16, 32, 64) and self.BLOCK_H % self.TILE_M == 0, f"{self=}"
        most = GROUP_ROWS if self.swapped else MOST_COLUMNS
        assert self.TILE_N in (16, 32, 64, 128) and most >= self.TILE_N, f"{self.TILE_N=}"
        assert self.TILE_K in (16, 32, 64, 128) and self.BLOCK_W % self.TILE_K == 0, f"{self=}"
        # a warp finds the blocks of a stage among the 32 that it has looked up
        assert self.UNITS in (1, 2, 4) and self.STAGES >= 2, f"{self=}"
        assert self.PARTS == 1 or (self.PARTS == 2 and not self.swapped), f"{self=}"

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return self.TILE_M

    @property
    def max_registers(self) -> int:
        """Of a thread: its sums and their addresses beside what the producer is given."""
        return 96 if self.sums_width <= GROUP_ROWS else 128

    @property
    def swapped(self) -> bool:
        """Whether x is the first operand."""
        return self.TILE_M < GROUP_ROWS

    @property
    def sums_width(self) -> int:
        """Columns of the accumulators [64, columns]: those of the result, or rows where swapped."""
        return self.TILE_M if self.swapped else self.TILE_N

    @property
    def x_rows(self) -> int:
        """Columns of x that a stage has room for."""
        return GROUP_ROWS if self.swapped else self.TILE_N

    @property
    def row_tiles(self) -> int:
        """Tiles along one block row."""
        return self.BLOCK_H // self.TILE_M

    @property
    def k_steps(self) -> int:
        """Steps in one block."""
        return self.BLOCK_W // self.TILE_K

    @property
    def mail_offset(self) -> int:
        """Where the mailbox begins, in bytes."""
        return 2 * self.STAGES * self.UNITS * self.TILE_M * self.TILE_K

    @property
    def mail_bytes(self) -> int:
        """Of half of the sums, in float32; the mailbox's barrier is behind them."""
        return _mail_bytes(self.TILE_N)

    @property
    def pages(self) -> int:
        """KB of blocks and mailbox together."""
        return (self.mail_offset + self.mail_bytes) // 1024 + 1

    def a_block(self) -> list[int]:
        """Shape of a copy of a block."""
        return [self.TILE_M, self.TILE_K]

    def x_block(self) -> list[int]:
        """Shape of a copy of x, whose columns are contiguous."""
        return [self.TILE_N, self.TILE_K]

    def accumulator_layout(self) -> object:
        """Register layout of the sums."""
        return accumulator_layout(self.sums_width)

    def half_layout(self) -> object:
        """Register layout of the half of the sums that one of two programs finishes."""
        return accumulator_layout(self.sums_width // 2)

    def store_layout(self) -> object:
        """Register layout in which 16 bytes of neighbouring rows lie in one thread."""
        from triton.experimental.gluon import language as gl

        if not self.swapped:
            return gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        across = self.TILE_M // 8
        return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


def _mail_bytes(tile_n: int) -> int:
    return 4 * GROUP_ROWS * tile_n // 2


def stages_that_fit(tile_m: int, tile_n: int, stage_k: int, wide: bool, parts: int = 1) -> int:
    """Ring stages of `stage_k` steps that fit into an SM; `wide` for results in float32."""
    x_rows = GROUP_ROWS if tile_m < GROUP_ROWS else tile_n
    # sums change their place before they are stored; the system takes 1 KB, barriers less
    exchange = (16 if wide else 4) * 1024
    # parts meet in a mailbox, whose barrier takes a page
    mail = _mail_bytes(tile_n) + 1024 if parts > 1 else 0
    budget = SMEM_BYTES - exchange - mail - 2 * 1024
    return min(MOST_STAGES, budget // (2 * stage_k * (tile_m + x_rows)))
