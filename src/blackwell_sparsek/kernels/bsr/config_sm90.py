"""Configuration of the Hopper product kernel: tiles, ring, and what follows from them."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, SMEM_BYTES, accumulator_layout

CONSUMERS = 2
# Programs of a cluster, where rows are paired.
PAIR = 2
# Bytes of shared memory that a program may have, and that one with a partner keeps for barriers.
MOST_SHARED, PAIRED_SPARE = 227 * 1024, 1024
# Columns of X that lie together in shared memory: 128 bytes.
SLAB_COLUMNS = 64


@dataclass(frozen=True)
class SpmmSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    BLOCK_H x BLOCK_W is the block of A as the product reads it (after a transpose by metadata).
    GROUP_N is the width one consumer accumulates; with SPLIT_N the two consumers share rows and
    take neighbouring columns, otherwise they share columns and take neighbouring 64 rows.
    WIDE takes all columns of a step with one copy, instead of one for each 64: their number must
    be a multiple of 64. PAIRED makes two programs with a row each share X; then its copies are
    those of one consumer, and OUT_BYTES is the size of an element of the result.
    """

    BLOCK_H: int
    BLOCK_W: int
    GROUP_N: int
    TILE_K: int
    STAGES: int
    SPLIT_N: bool
    OUT_CHUNKS: int
    A_TRANSPOSED: bool = False
    X_TRANSPOSED: bool = False
    WIDE: bool = False
    OUT_TRANSPOSED: bool = False
    ACTIVATION: str | None = None
    PAIRED: bool = False
    OUT_BYTES: int = 2
    CONSUMER_REGISTERS: int = 232
    PRODUCER_REGISTERS: int = 40

    def __post_init__(self) -> None:
        assert self.BLOCK_H % self.tile_m == 0, f"{self.BLOCK_H=} {self.tile_m=}"
        assert self.BLOCK_W % self.TILE_K == 0, f"{self.BLOCK_W=} {self.TILE_K=}"
        assert self.TILE_K in (16, 32, 64), f"{self.TILE_K=}"
        assert self.GROUP_N in (64, 128, 256), f"{self.GROUP_N=}"
        assert self.OUT_CHUNKS in (1, 2, 4), f"{self.OUT_CHUNKS=}"
        assert self.STAGES >= 2, f"{self.STAGES=}"
        assert not (self.WIDE and self.X_TRANSPOSED), "columns of X are in one copy already"
        if self.PAIRED:
            assert self.SPLIT_N and self.row_tiles == 1, f"{self=}"
            assert self.shared_bytes <= MOST_SHARED, f"{self.shared_bytes=}"

    @property
    def a_tiles(self) -> int:
        """A tiles in a stage: one per consumer, or one that both read."""
        return 1 if self.SPLIT_N else CONSUMERS

    @property
    def x_tiles(self) -> int:
        """X tiles in a stage."""
        return CONSUMERS if self.SPLIT_N else 1

    @property
    def tile_m(self) -> int:
        """Rows of a piece of work."""
        return GROUP_ROWS * self.a_tiles

    @property
    def tile_n(self) -> int:
        """Columns of a piece of work."""
        return self.GROUP_N * self.x_tiles

    @property
    def row_tiles(self) -> int:
        """Pieces of work along one block row."""
        return self.BLOCK_H // self.tile_m

    @property
    def k_steps(self) -> int:
        """K steps in one block."""
        return self.BLOCK_W // self.TILE_K

    @property
    def out_chunk(self) -> int:
        """Columns a consumer stores at a time."""
        return self.GROUP_N // self.OUT_CHUNKS

    @property
    def a_copies(self) -> int:
        """Copies that bring the A tiles of a step."""
        return self.a_tiles if self.A_TRANSPOSED else 1

    @property
    def x_copies(self) -> int:
        """Copies that bring the X tiles of a step."""
        return 1 if self.WIDE and not self.PAIRED else self.x_tiles

    @property
    def x_slabs(self) -> int:
        """Copies of the hardware that bring the columns of one consumer."""
        return 1 if self.WIDE or self.X_TRANSPOSED else self.GROUP_N // SLAB_COLUMNS

    @property
    def a_tile_bytes(self) -> int:
        """Of an A tile."""
        return 2 * self.TILE_K * GROUP_ROWS

    @property
    def x_tile_bytes(self) -> int:
        """Of an X tile."""
        return 2 * self.TILE_K * self.GROUP_N

    @property
    def stage_bytes(self) -> int:
        """Of all tiles of a stage."""
        return self.a_tiles * self.a_tile_bytes + self.x_tiles * self.x_tile_bytes

    @property
    def x_page(self) -> int:
        """Where X begins in the shared memory of a paired program, in KB; A begins at 0."""
        return self.STAGES * self.a_tiles * self.a_tile_bytes // 1024

    @property
    def out_page(self) -> int:
        """Where the output buffers begin."""
        return self.STAGES * self.stage_bytes // 1024

    @property
    def bars_page(self) -> int:
        """Where the barriers begin: all behind them fits into one KB."""
        out = CONSUMERS * GROUP_ROWS * self.out_chunk * self.OUT_BYTES
        return self.out_page + out // 1024

    @property
    def bars_offset(self) -> int:
        """The same in bytes."""
        return 1024 * self.bars_page

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a paired program, with 1 KB for what the compiler adds."""
        return self.bars_offset + 2 * 1024

    @property
    def a_parameter(self) -> str:
        """What PTX calls the descriptor of A, the first parameter of the kernel."""
        return "_spmm_sm90_kernel_param_0"

    @property
    def x_parameter(self) -> str:
        """What PTX calls the descriptor of X: behind that of a matrix, its sizes and strides."""
        return "_spmm_sm90_kernel_param_5"

    def a_block(self) -> list[int]:
        """Shape of a copy of A."""
        return [self.TILE_K, GROUP_ROWS] if self.A_TRANSPOSED else [self.tile_m, self.TILE_K]

    def a_tile(self) -> list[int]:
        """Shape of an A tile in memory."""
        return [self.TILE_K, GROUP_ROWS] if self.A_TRANSPOSED else [GROUP_ROWS, self.TILE_K]

    def x_block(self) -> list[int]:
        """Shape of a copy of X; WIDE: of X as [N / 64, K, 64]."""
        if self.WIDE:
            width = self.tile_n // self.x_copies
            return [width // SLAB_COLUMNS, self.TILE_K, SLAB_COLUMNS]
        return self.x_tile()

    def x_tile(self) -> list[int]:
        """Shape of an X tile in memory."""
        shape = [self.TILE_K, self.GROUP_N]
        return shape[::-1] if self.X_TRANSPOSED else shape

    def out_block(self) -> list[int]:
        """Shape of an output chunk in memory."""
        shape = [GROUP_ROWS, self.out_chunk]
        return shape[::-1] if self.OUT_TRANSPOSED else shape

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)


def stages_that_fit(
    group_n: int, tile_k: int, split_n: bool, out_bytes: int, chunks: int, spare: int = 0
) -> int:
    """Ring stages that fit beside the output buffers and `spare` bytes."""
    a_tiles, x_tiles = (1, CONSUMERS) if split_n else (CONSUMERS, 1)
    stage = 2 * tile_k * (a_tiles * GROUP_ROWS + x_tiles * group_n)
    out = CONSUMERS * GROUP_ROWS * (group_n // chunks) * out_bytes
    return (SMEM_BYTES - out - spare) // stage
