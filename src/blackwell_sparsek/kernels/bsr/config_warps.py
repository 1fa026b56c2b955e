"""Configuration of the product in which every warp has its own block row of 16 rows."""

from dataclasses import dataclass

from ..sm90 import warp_rows_layout

# Rows of a block row, and so of a warp: one `mma.sync`.
WARP_ROWS = 16
# Columns of X in one row of a 128-byte swizzled tile; a warp accumulates two tiles side by side.
HALF_COLUMNS = 64


@dataclass(frozen=True)
class WarpRowsConfig:
    """Everything the kernel is specialised on.

    X passes through a ring of STAGES chunks, each CHUNK of its rows by 128 columns. A warp asks for
    the blocks of A AHEAD blocks before it multiplies them.
    """

    CHUNK: int = 128
    STAGES: int = 6
    WARPS: int = 16
    AHEAD: int = 4
    OUT_TRANSPOSED: bool = False
    ACTIVATION: str | None = None
    PRODUCER_REGISTERS: int = 24

    def __post_init__(self) -> None:
        assert self.CHUNK % WARP_ROWS == 0, f"{self.CHUNK=}"
        # columns are kept for 32 blocks, one to a thread
        assert 32 % self.AHEAD == 0, f"{self.AHEAD=}"

    @property
    def tile_m(self) -> int:
        """Rows of a piece of work."""
        return WARP_ROWS * self.WARPS

    @property
    def tile_n(self) -> int:
        """Columns of a piece of work."""
        return 2 * HALF_COLUMNS

    @property
    def slabs(self) -> int:
        """Blocks that one half of a chunk is high."""
        return self.CHUNK // WARP_ROWS

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a ring stage."""
        return self.CHUNK * self.tile_n * 2

    def x_block(self) -> list[int]:
        """Shape of one copy of X."""
        return [self.CHUNK, HALF_COLUMNS]

    def accumulator_layout(self) -> object:
        """Register layout of [tile_m, HALF_COLUMNS] sums: 16 rows to a warp."""
        return warp_rows_layout(self.WARPS)
