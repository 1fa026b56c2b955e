"""Configuration of the product in which every warp has its own block row of 16 or 32 rows."""

from dataclasses import dataclass

# Rows of one `mma.sync`, and of the blocks that warps multiply: one or two of those.
MMA_ROWS = 16
WARP_ROWS = (16, 32)
# Columns of X in one row of a 128-byte swizzled tile; a warp accumulates two tiles side by side.
HALF_COLUMNS = 64


@dataclass(frozen=True)
class WarpRowsConfig:
    """Everything the kernel is specialised on.

    BLOCK_H rows are a warp's, and WARPS of them work side by side. X passes through a ring of
    STAGES chunks, each CHUNK of its rows by 128 columns. A warp asks for 16 columns of its blocks
    AHEAD steps before it multiplies them.
    """

    BLOCK_H: int = 16
    WARPS: int = 16
    CHUNK: int = 128
    STAGES: int = 6
    AHEAD: int = 4
    OUT_TRANSPOSED: bool = False
    ACTIVATION: str | None = None
    PRODUCER_REGISTERS: int = 24

    def __post_init__(self) -> None:
        assert self.BLOCK_H in WARP_ROWS, f"{self.BLOCK_H=}"
        assert self.CHUNK % MMA_ROWS == 0, f"{self.CHUNK=}"
        # columns are kept for 32 blocks, one to a thread
        assert 32 % self.AHEAD == 0, f"{self.AHEAD=}"

    @property
    def parts(self) -> int:
        """Of a block row, one above the other: one `mma.sync` each."""
        return self.BLOCK_H // MMA_ROWS

    @property
    def sum_rows(self) -> int:
        """Rows of sums that lie in one tensor: those of one part, for all warps."""
        return MMA_ROWS * self.WARPS

    @property
    def tile_m(self) -> int:
        """Rows of a piece of work."""
        return self.BLOCK_H * self.WARPS

    @property
    def max_registers(self) -> int:
        """Per thread, as compiled; the producer leaves most of its own to the rest."""
        return 96 if self.WARPS == 16 else 168

    @property
    def tile_n(self) -> int:
        """Columns of a piece of work."""
        return 2 * HALF_COLUMNS

    @property
    def slabs(self) -> int:
        """Steps of 16 rows in one half of a chunk."""
        return self.CHUNK // MMA_ROWS

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a ring stage."""
        return self.CHUNK * self.tile_n * 2

    def x_block(self) -> list[int]:
        """Shape of one copy of X."""
        return [self.CHUNK, HALF_COLUMNS]

    def accumulator_layout(self) -> object:
        """Register layout of [sum_rows, HALF_COLUMNS] sums: 16 rows to a warp."""
        from triton.experimental.gluon import language as gl

        return gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[self.WARPS, 1], instr_shape=[16, 8]
        )
