"""Configuration of the Hopper product kernel: tiles, ring, and what follows from them."""

from dataclasses import dataclass

from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES, accumulator_layout, warp_rows_layout

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


# Configuration of the Hopper product with few columns: tiles, ring, and what follows from them.

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


def narrow_stages_that_fit(
    tile_m: int, tile_n: int, stage_k: int, wide: bool, parts: int = 1
) -> int:
    """Ring stages of `stage_k` steps that fit into an SM; `wide` for results in float32."""
    x_rows = GROUP_ROWS if tile_m < GROUP_ROWS else tile_n
    # sums change their place before they are stored; the system takes 1 KB, barriers less
    exchange = (16 if wide else 4) * 1024
    # parts meet in a mailbox, whose barrier takes a page
    mail = _mail_bytes(tile_n) + 1024 if parts > 1 else 0
    budget = SMEM_BYTES - exchange - mail - 2 * 1024
    return min(MOST_STAGES, budget // (2 * stage_k * (tile_m + x_rows)))


# Configuration of the Hopper product of blocks 16 columns wide with few columns of x.

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


# Configuration of the product in which every warp has its own block row of 16 rows.

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
