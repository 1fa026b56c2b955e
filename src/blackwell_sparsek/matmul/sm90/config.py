"""Configurations of the Hopper product kernels: tiles, rings, and what follows from them.

`SpmmSm90Config` is for many columns (`spmm.py`), `NarrowSm90Config` for few (`narrow.py`),
`StripsConfig` for few columns and blocks 16 wide (`strips.py`), `WarpRowsConfig` for many columns
and blocks 16 high (`warps.py`). Each is a compile-time constant of its kernel; `tuning.py` chooses
them. Read without Triton, which is imported where a layout is asked for. Sampled products have
`sddmm_config.py`, products in fp8 `fp8_config.py`.
"""

from dataclasses import dataclass

from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES, accumulator_layout, warp_rows_layout

CONSUMERS = 2
# Programs of a cluster, where rows are paired.
PAIR = 2
# Bytes of shared memory that a program may have, and that a paired one keeps for its barriers.
MOST_SHARED, PAIRED_SPARE = 227 * 1024, 1024
# A slab: the columns of X in one 128-byte row of swizzled shared memory, and so in one TMA copy.
SLAB_COLUMNS = 64
KIB = 1024


@dataclass(frozen=True)
class SpmmSm90Config:
    """Everything `spmm.py` is specialised on. Sizes in elements.

    Attributes
    ----------
    BLOCK_H, BLOCK_W : block of A as the product reads it, after a transpose by metadata
    GROUP_N : columns that one consumer accumulates
    TILE_K : columns of A in one K step, a divisor of BLOCK_W
    STAGES : of the ring
    SPLIT_N : the two consumers share 64 rows and take neighbouring columns; otherwise they share
        columns and take neighbouring 64 rows
    OUT_CHUNKS : column chunks in which a consumer stores its accumulator
    A_TRANSPOSED : stored blocks are [BLOCK_W, BLOCK_H]
    X_TRANSPOSED : X lies in memory as [N, K]
    WIDE : one copy takes all columns of a step, through a descriptor of X as [N / 64, K, 64],
        instead of one copy per slab; N must be a multiple of 64
    OUT_TRANSPOSED : the result lies in memory as [N, M]
    ACTIVATION : of the epilogue, or None
    PAIRED : two programs of a cluster with a row each share X; a copy of X is then that of one
        consumer
    OUT_BYTES : size of an element of the result; read only where PAIRED
    CONSUMER_REGISTERS, PRODUCER_REGISTERS : per thread
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
    def SCALED(self) -> bool:
        """Whether the consumers look up scales."""
        return False

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
        """Rows of a work tile."""
        return GROUP_ROWS * self.a_tiles

    @property
    def tile_n(self) -> int:
        """Columns of a work tile."""
        return self.GROUP_N * self.x_tiles

    @property
    def row_tiles(self) -> int:
        """Work tiles along one block row."""
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
        """Copies that fetch the A tiles of a step."""
        return self.a_tiles if self.A_TRANSPOSED else 1

    @property
    def x_copies(self) -> int:
        """Copies that fetch the X tiles of a step."""
        return 1 if self.WIDE and not self.PAIRED else self.x_tiles

    @property
    def x_slabs(self) -> int:
        """TMA instructions that copy the columns of one consumer, where PAIRED."""
        return 1 if self.WIDE or self.X_TRANSPOSED else self.GROUP_N // SLAB_COLUMNS

    @property
    def a_tile_bytes(self) -> int:
        """Bytes of an A tile."""
        return 2 * self.TILE_K * GROUP_ROWS

    @property
    def x_tile_bytes(self) -> int:
        """Bytes of an X tile."""
        return 2 * self.TILE_K * self.GROUP_N

    @property
    def stage_bytes(self) -> int:
        """Bytes of all tiles of a stage."""
        return self.a_tiles * self.a_tile_bytes + self.x_tiles * self.x_tile_bytes

    # Shared memory of a paired program: A, X and output buffers, the largest first, and barriers.

    @property
    def _paired_places(self) -> dict[str, int]:
        """Where allocations begin, in bytes: Triton lays out larger ones first.

        Those of the same size are in program order; `barriers`, the smallest, come last.
        """
        sizes = {
            "a": self.STAGES * self.a_tiles * self.a_tile_bytes,
            "x": self.STAGES * self.x_tiles * self.x_tile_bytes,
            "out": CONSUMERS * GROUP_ROWS * self.out_chunk * self.OUT_BYTES,
            "barriers": KIB,
        }
        places, end = {}, 0
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            places[name] = end
            end += sizes[name]
        return places

    @property
    def a_offset(self) -> int:
        """Where the A tiles begin, in bytes."""
        return self._paired_places["a"]

    @property
    def x_offset(self) -> int:
        """Where the X tiles begin, in bytes."""
        return self._paired_places["x"]

    @property
    def bars_offset(self) -> int:
        """Where the barriers begin, in bytes: STAGES full, STAGES empty, `sent`, `read`."""
        return self._paired_places["barriers"]

    @property
    def bars_room(self) -> int:
        """Barriers that are allocated; the number of a work tile follows those in use."""
        return KIB // 8

    @property
    def sent_bar(self) -> int:
        """Index of the barrier that says that the number of the next work tile has arrived."""
        return 2 * self.STAGES

    @property
    def read_bar(self) -> int:
        """Index of the barrier that says that both producers have read it."""
        return 2 * self.STAGES + 1

    def placed_barriers(self) -> list[tuple[int, int]]:
        """Offset in shared memory and arrivals of each barrier that is found by its address."""
        if not self.PAIRED:
            return []
        # each warp of the two consumers of each program
        arrivals = [1] * self.STAGES + [4 * CONSUMERS * PAIR] * self.STAGES + [1, PAIR]
        return [(self.bars_offset + 8 * i, count) for i, count in enumerate(arrivals)]

    @property
    def number_offset(self) -> int:
        """Where the number of the next work tile arrives, in bytes: after the barriers."""
        return self.bars_offset + 8 * (2 * self.STAGES + 2)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a paired program, with 1 KiB for what the compiler adds."""
        return self.bars_offset + 2 * KIB

    @property
    def a_parameter(self) -> str:
        """PTX name of the descriptor of A, the first parameter of the kernel."""
        return "_spmm_sm90_kernel_param_0"

    @property
    def x_parameter(self) -> str:
        """PTX name of the descriptor of X; that of A, with sizes and strides, takes five."""
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
    """Ring stages that fit next to the output buffers and `spare` bytes."""
    a_tiles, x_tiles = (1, CONSUMERS) if split_n else (CONSUMERS, 1)
    stage = 2 * tile_k * (a_tiles * GROUP_ROWS + x_tiles * group_n)
    out = CONSUMERS * GROUP_ROWS * (group_n // chunks) * out_bytes
    return (SMEM_BYTES - out - spare) // stage


# Few columns: `narrow.py`.

# Columns of the widest tile.
MOST_COLUMNS = 128
# More stages than this hide no more latency: ten of 16 KB are 160 KB in flight.
MOST_STAGES = 10
# Scales of x in fp8 that a warp loads at once, those of several blocks.
BATCH_SCALES = 256


@dataclass(frozen=True)
class NarrowSm90Config:
    """Everything `narrow.py` is specialised on. Sizes in elements.

    Tiles of 64 rows are the first operand of WGMMA. Lower ones swap places with x (`swapped`),
    whose tile is then padded to 64 columns; the padding is neither fetched nor stored.

    Attributes
    ----------
    BLOCK_H, BLOCK_W : block of A as stored
    TILE_M : rows of a work tile, a divisor of BLOCK_H
    TILE_N : columns of a work tile
    TILE_K : columns of a block in one K step
    STAGE_BLOCKS : K blocks per stage; a stage holds a K step of each
    STAGES : of the ring
    ACTIVATION : of the epilogue, or None
    SPLIT_K : programs that may split the K blocks of a tile. With 2, programs form clusters of two,
        which exchange halves of their sums through distributed shared memory, after the ring
    ITEM_BYTES : size of an element of A and x; 1 for e4m3 with scales
    """

    BLOCK_H: int
    BLOCK_W: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    STAGE_BLOCKS: int
    STAGES: int
    ACTIVATION: str | None = None
    SPLIT_K: int = 1
    ITEM_BYTES: int = 2

    def __post_init__(self) -> None:
        assert self.TILE_M in (16, 32, 64) and self.BLOCK_H % self.TILE_M == 0, f"{self=}"
        most = GROUP_ROWS if self.swapped else MOST_COLUMNS
        assert self.TILE_N in (16, 32, 64, 128) and most >= self.TILE_N, f"{self.TILE_N=}"
        assert self.TILE_K in (16, 32, 64, 128) and self.BLOCK_W % self.TILE_K == 0, f"{self=}"
        # the producer finds the blocks of a stage among the 32 that its lanes have looked up
        assert self.STAGE_BLOCKS in (1, 2, 4) and self.STAGES >= 2, f"{self=}"
        assert self.SPLIT_K == 1 or (self.SPLIT_K == 2 and not self.swapped), f"{self=}"

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return self.TILE_M

    @property
    def SCALED(self) -> bool:
        """Whether operands are in fp8 with scales."""
        return self.ITEM_BYTES == 1

    @property
    def max_registers(self) -> int:
        """Registers of a thread: for sums and their addresses, besides those of the producer."""
        if self.SCALED:
            # besides the sums, those of two blocks and their factors
            return 152
        return 96 if self.sums_width <= GROUP_ROWS else 128

    @property
    def PRODUCER_REGISTERS(self) -> int:
        """Registers of a thread of the warps that load: those of scales have many loads pending."""
        return 80 if self.SCALED else 40

    @property
    def factor_steps(self) -> int:
        """Steps whose scales are loaded at once."""
        return max(1, min(8, BATCH_SCALES // self.x_rows) // self.STAGE_BLOCKS)

    @property
    def factor_rows(self) -> int:
        """Rows of factors, one for each block in the ring."""
        return self.STAGES * self.STAGE_BLOCKS if self.SCALED else 1

    @property
    def swapped(self) -> bool:
        """Whether x is the first operand."""
        return self.TILE_M < GROUP_ROWS

    @property
    def sums_width(self) -> int:
        """Columns of the accumulators [64, columns]: of the result, or its rows where swapped."""
        return self.TILE_M if self.swapped else self.TILE_N

    @property
    def x_rows(self) -> int:
        """Columns of x that a stage has room for."""
        return GROUP_ROWS if self.swapped else self.TILE_N

    @property
    def row_tiles(self) -> int:
        """Work tiles along one block row."""
        return self.BLOCK_H // self.TILE_M

    @property
    def k_steps(self) -> int:
        """K steps in one block."""
        return self.BLOCK_W // self.TILE_K

    @property
    def exchange_offset(self) -> int:
        """Where the partner's sums arrive in shared memory, in bytes: after the ring of blocks."""
        tile = self.ITEM_BYTES * self.TILE_M * self.TILE_K
        return self.STAGES * self.STAGE_BLOCKS * tile

    @property
    def exchange_bytes(self) -> int:
        """Bytes of half of the sums, in float32; the barrier of the exchange follows them."""
        return _exchange_bytes(self.TILE_N)

    @property
    def exchange_tiles(self) -> int:
        """Tiles of blocks whose memory the exchange and its barrier take."""
        if self.SPLIT_K == 1:
            return 0
        return _exchange_tiles(self.TILE_M, self.TILE_N, self.TILE_K, self.ITEM_BYTES)

    def a_block(self) -> list[int]:
        """Shape of a copy of a block."""
        return [self.TILE_M, self.TILE_K]

    def x_block(self) -> list[int]:
        """Shape of a copy of x, whose columns are contiguous."""
        return [self.TILE_N, self.TILE_K]

    def accumulator_layout(self) -> object:
        """Register layout of the sums."""
        return accumulator_layout(self.sums_width, 32 // self.ITEM_BYTES)

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


def _exchange_bytes(tile_n: int) -> int:
    return 4 * GROUP_ROWS * tile_n // 2


def _exchange_tiles(tile_m: int, tile_n: int, tile_k: int, item_bytes: int) -> int:
    return -(-(_exchange_bytes(tile_n) + 8) // (item_bytes * tile_m * tile_k))


def narrow_stages_that_fit(
    tile_m: int, tile_n: int, stage_k: int, wide: bool, split_k: int = 1, item_bytes: int = 2
) -> int:
    """Ring stages of `stage_k` columns of A that fit into an SM; `wide` for results in float32."""
    x_rows = GROUP_ROWS if tile_m < GROUP_ROWS else tile_n
    # sums change their layout through shared memory; the system takes 1 KiB, barriers less
    relayout = (16 if wide else 4) * KIB
    # the exchange takes whole tiles; a stage may have several, so this is the most that it takes
    tiles = _exchange_tiles(tile_m, tile_n, stage_k, item_bytes) if split_k > 1 else 0
    exchange = item_bytes * tile_m * stage_k * tiles
    budget = SMEM_BYTES - relayout - exchange - 2 * KIB
    # as many bytes in flight as with stages of 128 columns in 16 bits
    most = MOST_STAGES if item_bytes == 2 else MOST_STAGES * 256 // stage_k
    # a block has at least 32 columns in fp8, and a factor for each column of x
    factors = 4 * x_rows * max(1, stage_k // 32) if item_bytes == 1 else 0
    return min(most, budget // (item_bytes * stage_k * (tile_m + x_rows) + factors))


# Few columns and blocks 16 columns wide: `strips.py`.

# Rows of a strip, the M of one `mma.sync`.
STRIP_ROWS = 16
# Columns of a block, the only width that the kernel takes.
STRIP_BLOCK = 16
# Neighbours along K that a thread holds of either operand, and so loads at a time: 16 bytes.
LOADED = 8
# Blocks of a K tile: `mma.sync` takes K from four threads, twice, so a K tile is 64.
K_TILE_BLOCKS = 4 * 2 * LOADED // STRIP_BLOCK


@dataclass(frozen=True)
class StripsConfig:
    """Everything `strips.py` is specialised on.

    Attributes
    ----------
    BLOCK_H : rows of a block
    TILE_N : columns of a program, at least those of x
    WARPS : of a program; they split the blocks of its strip among them
    K_TILES : of four blocks each, that a warp multiplies in a step
    ACTIVATION : of the epilogue, or None
    """

    BLOCK_H: int
    TILE_N: int
    WARPS: int
    K_TILES: int
    ACTIVATION: str | None = None

    def __post_init__(self) -> None:
        assert self.BLOCK_H % STRIP_ROWS == 0, f"{self.BLOCK_H=}"
        assert self.TILE_N in (8, 16, 32), f"{self.TILE_N=}"
        # each lane of a warp holds where one of its blocks of a step is
        assert self.K_TILES * K_TILE_BLOCKS <= 32, f"{self.K_TILES=}"

    @property
    def max_registers(self) -> int | None:
        """Limit of registers of a thread; without one, ptxas of CUDA 12 spills to get below 96."""
        return 168 if self.TILE_N == 16 and self.K_TILES == 2 else None

    @property
    def tile_m(self) -> int:
        """Rows of a program."""
        return STRIP_ROWS

    @property
    def strips(self) -> int:
        """Strips of a block row, one program each."""
        return self.BLOCK_H // STRIP_ROWS

    @property
    def warp_blocks(self) -> int:
        """Blocks that a warp multiplies in a step."""
        return self.K_TILES * K_TILE_BLOCKS

    @property
    def step_blocks(self) -> int:
        """Blocks that all warps multiply in a step."""
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
        """Register layout of a strip in which a thread stores 16 bytes of neighbouring rows."""
        from triton.experimental.gluon import language as gl

        return gl.BlockedLayout([8, 1], [2, 16], [1, self.WARPS], [0, 1])


# Many columns and blocks 16 rows high, one block row per warp: `warps.py`.

# Rows of a block row, and so of a warp: the M of one `mma.sync`.
WARP_ROWS = 16
# Columns of X in one row of a 128-byte swizzled tile; a warp accumulates two tiles side by side.
HALF_COLUMNS = 64


@dataclass(frozen=True)
class WarpRowsConfig:
    """Everything `warps.py` is specialised on.

    Attributes
    ----------
    CHUNK : rows of X in a stage of the ring, by `tile_n` columns
    STAGES : of the ring
    WARPS : consumers, with a block row each
    AHEAD : blocks of A that a warp loads before it multiplies the first of them
    OUT_TRANSPOSED : the result lies in memory as [N, M]
    ACTIVATION : of the epilogue, or None
    PRODUCER_REGISTERS : per thread
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
        # a warp keeps the columns of 32 blocks, one in each lane
        assert 32 % self.AHEAD == 0, f"{self.AHEAD=}"

    @property
    def tile_m(self) -> int:
        """Rows of a work tile."""
        return WARP_ROWS * self.WARPS

    @property
    def tile_n(self) -> int:
        """Columns of a work tile."""
        return 2 * HALF_COLUMNS

    @property
    def chunk_tiles(self) -> int:
        """[16, 64] tiles in one half of a chunk, one above the other."""
        return self.CHUNK // WARP_ROWS

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a ring stage."""
        return self.CHUNK * self.tile_n * 2

    def placed_barriers(self) -> list[tuple[int, int]]:
        """Offset in shared memory and arrivals of each barrier, all of them after the ring."""
        arrivals = [1] * self.STAGES + [self.WARPS] * self.STAGES
        first = self.STAGES * self.chunk_bytes
        return [(first + 8 * i, count) for i, count in enumerate(arrivals)]

    def x_block(self) -> list[int]:
        """Shape of one copy of X."""
        return [self.CHUNK, HALF_COLUMNS]

    def accumulator_layout(self) -> object:
        """Register layout of [tile_m, HALF_COLUMNS] sums: 16 rows to a warp."""
        return warp_rows_layout(self.WARPS)
