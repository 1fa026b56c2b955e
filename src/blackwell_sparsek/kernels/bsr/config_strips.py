"""Configuration of the Hopper product of blocks 16 columns wide with few columns of x."""

from dataclasses import dataclass

from ..sm90 import warp_rows_layout

# Rows of a program and sides of what one `mma.sync` takes of a block.
STRIP_ROWS = 16
# Columns of a block, the only width that the kernel knows.
STRIP_BLOCK = 16
# Neighbours along K that a thread holds of either operand, and so loads at a time: 16 bytes.
LOADED = 8
# Blocks that are multiplied at a time: `mma.sync` takes K from four threads, twice.
UNIT_BLOCKS = 4 * 2 * LOADED // STRIP_BLOCK


@dataclass(frozen=True)
class StripsConfig:
    """Everything the kernel is specialised on.

    A program has 16 rows of blocks BLOCK_H high, and TILE_N columns. WARPS share out its blocks,
    UNITS of four to each at a time.
    """

    BLOCK_H: int
    TILE_N: int
    WARPS: int
    UNITS: int
    ACTIVATION: str | None = None

    def __post_init__(self) -> None:
        assert self.BLOCK_H % STRIP_ROWS == 0, f"{self.BLOCK_H=}"
        assert self.TILE_N in (8, 16, 32), f"{self.TILE_N=}"
        # lanes of a warp hold where its blocks of a step are
        assert self.UNITS * UNIT_BLOCKS <= 32, f"{self.UNITS=}"

    @property
    def tile_m(self) -> int:
        """Rows of a program."""
        return STRIP_ROWS

    @property
    def strips(self) -> int:
        """Programs that share a block row."""
        return self.BLOCK_H // STRIP_ROWS

    @property
    def warp_blocks(self) -> int:
        """Blocks that a warp multiplies in a step."""
        return self.UNITS * UNIT_BLOCKS

    @property
    def step_blocks(self) -> int:
        """Blocks of a step."""
        return self.WARPS * self.warp_blocks

    @property
    def block_size(self) -> int:
        """Elements of a block."""
        return self.BLOCK_H * STRIP_BLOCK

    @property
    def all_rows(self) -> int:
        """Rows of the sums of all warps."""
        return STRIP_ROWS * self.WARPS

    def sums_layout(self) -> object:
        """Register layout of the sums of all warps, 16 rows to each."""
        return warp_rows_layout(self.WARPS)

    def store_layout(self) -> object:
        """Register layout of a strip: 16-bit rows that lie in one piece are stored 16 bytes at a
        time."""
        from triton.experimental.gluon import language as gl

        return gl.BlockedLayout([8, 1], [2, 16], [1, self.WARPS], [0, 1])
