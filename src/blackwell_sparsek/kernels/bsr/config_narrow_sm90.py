"""Configuration of the Hopper product with few columns: tiles, ring, and what follows from them."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, SMEM_BYTES, accumulator_layout

# More stages than this hide nothing further: 16 KB pieces of blocks from as many are 128 KB.
MOST_STAGES = 10


@dataclass(frozen=True)
class NarrowSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    A program computes TILE_M rows of a block row of [BLOCK_H, BLOCK_W] blocks for TILE_N columns,
    one of COL_TILES such tiles, in steps of TILE_K from each of UNITS blocks. Tiles of 64 rows
    are the first operand of WGMMA; lower ones change places with x, whose tile is then padded to
    64 columns that nobody fetches or looks at. PROGRAMS share an SM.
    """

    BLOCK_H: int
    BLOCK_W: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    STAGES: int
    PROGRAMS: int
    UNITS: int = 1
    COL_TILES: int = 1
    ACTIVATION: str | None = None
    WARM: bool = False
    FETCH: int = 0

    def __post_init__(self) -> None:
        assert self.TILE_M in (16, 32, 64, 128) and self.BLOCK_H % self.TILE_M == 0, f"{self=}"
        assert self.TILE_N in (16, 32, 64), f"{self.TILE_N=}"
        assert self.TILE_K in (16, 32, 64, 128) and self.BLOCK_W % self.TILE_K == 0, f"{self=}"
        assert self.STAGES >= 2 and self.PROGRAMS in (1, 2, 3, 4), f"{self=}"

    @property
    def tile_m(self) -> int:
        """Rows of a program."""
        return self.TILE_M

    @property
    def max_registers(self) -> int:
        """Registers per thread of a program of eight warps, four of which are given most."""
        return {1: 96, 2: 96, 3: 80, 4: 64}[self.PROGRAMS]

    @property
    def swapped(self) -> bool:
        """Whether x is the first operand."""
        return self.TILE_M < GROUP_ROWS

    @property
    def sums_shape(self) -> list[int]:
        """Shape of the accumulators: [rows, columns], or [columns, rows] where swapped."""
        return [GROUP_ROWS, self.TILE_M] if self.swapped else [self.TILE_M, self.TILE_N]

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

    def a_block(self) -> list[int]:
        """Shape of a copy of a block."""
        return [self.TILE_M, self.TILE_K]

    def x_block(self) -> list[int]:
        """Shape of a copy of x, whose columns are contiguous."""
        return [self.TILE_N, self.TILE_K]

    def accumulator_layout(self) -> object:
        """Register layout of the sums."""
        return accumulator_layout(self.sums_shape[1])

    def store_layout(self) -> object:
        """Register layout in which 16 bytes of neighbouring rows lie in one thread."""
        from triton.experimental.gluon import language as gl

        if not self.swapped:
            return gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        across = self.TILE_M // 8
        return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


def stages_that_fit(
    tile_m: int, tile_n: int, tile_k: int, programs_per_sm: int, wide: bool = False
) -> int:
    """Ring stages that fit where so many programs share an SM; `wide` for results in float32."""
    x_rows = GROUP_ROWS if tile_m < GROUP_ROWS else tile_n
    # sums change their place before they are stored; the system takes 1 KB of each program
    exchange = (16 if wide else 4) * 1024 + 2 * 1024
    budget = SMEM_BYTES // programs_per_sm - exchange
    return min(MOST_STAGES, budget // (2 * tile_k * (tile_m + x_rows)))
