"""Configuration of the Hopper attention forward: tiles, rings, and what follows from them."""

from dataclasses import dataclass

from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES, accumulator_layout

# More stages than this hide nothing further: a producer is never that far ahead.
MOST_STAGES = 4
# What it takes to put together parts of a softmax that programs share, in KV tiles.
MEETING_TILES = 2


@dataclass(frozen=True)
class AttnFwdSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    CONSUMERS warp groups take 64 queries each and read the same KV tiles of TILE_N keys. UNIT is
    the number of neighbouring keys a visit is made of: TILE_N when dense, else the block of the
    mask; smaller units are packed into one tile. TILE_D and TILE_DV are the head dims in shared
    memory, beyond which TMA fills zeros. Q_STAGES of 2 fetches the queries of the next piece of
    work, and with them its first keys, while this one is still being computed. HALF_TILES
    leaves out 64 keys of a piece's first and last tile where its queries see none of them, as in
    every second piece where queries see up to themselves. With SHARED_TAIL programs share the tiles
    of the last pieces, if those are too few for all. OVERLAP starts before the kernel in front has
    ended. With TURNS one consumer after the other issues its products. AHEAD claims and announces a
    piece while the one before is fetched, which costs balance where pieces differ. ABSENT lets
    consumers without queries pass a piece by. With a SCOUT a warp of its own looks up pieces of
    work, and keys are fetched before the values of the tile before. With Q_REGISTERS consumers keep
    their queries in registers.

    The kernel is compiled for MAX_REGISTERS per thread; the roles then trade them:
    CONSUMER_REGISTERS for a warp group, PRODUCER_REGISTERS for producer and scout.
    """

    CONSUMERS: int
    TILE_N: int
    TILE_D: int
    TILE_DV: int
    STAGES: int
    UNIT: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int
    Q_STAGES: int = 1
    HALF_TILES: bool = False
    SHARED_TAIL: bool = False
    OVERLAP: bool = False
    TURNS: bool = False
    AHEAD: bool = False
    ABSENT: bool = False
    SCOUT: bool = False
    Q_REGISTERS: bool = False

    def __post_init__(self) -> None:
        assert self.CONSUMERS in (1, 2, 3), f"{self.CONSUMERS=}"
        assert self.TILE_N in (64, 128), f"{self.TILE_N=}"
        assert self.TILE_D in (64, 128) and self.TILE_DV in (64, 128), f"{self=}"
        assert self.UNIT % self.TILE_N == 0 or self.TILE_N % self.UNIT == 0, f"{self.UNIT=}"
        assert self.STAGES >= 2, f"{self.STAGES=}"
        assert not self.HALF_TILES or self.TILE_N == self.UNIT == 128, f"{self=}"
        assert not (self.HALF_TILES and self.SHARED_TAIL), f"{self=}"
        assert self.Q_STAGES in (1, 2), f"{self.Q_STAGES=}"
        assert not self.AHEAD or (self.Q_STAGES == 2 and not self.SHARED_TAIL), f"{self=}"
        # a scout finds no shares of pieces, and does not wait for the kernel in front
        alone = self.CONSUMERS < 3 and not (self.SHARED_TAIL or self.OVERLAP or self.AHEAD)
        assert not self.SCOUT or alone, f"{self=}"

    @property
    def tile_m(self) -> int:
        """Queries of a piece of work."""
        return GROUP_ROWS * self.CONSUMERS

    @property
    def programs_per_sm(self) -> int:
        """One consumer leaves half of an SM to another program."""
        return 2 if self.CONSUMERS == 1 else 1

    @property
    def arrivals(self) -> int:
        """Arrivals that free a stage: one of each warp."""
        return 4 * self.CONSUMERS

    @property
    def barrier_room(self) -> int:
        """Barriers that each array of those of K and V has room for.

        Triton lays out larger allocations first. With so much room these come right behind the
        tiles, in the order of the program: full K, free K, full V, free V.
        """
        return 64

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles, which is where the barriers begin."""
        queries = self.tile_m * (self.Q_STAGES * self.TILE_D + self.TILE_DV)
        return 2 * (queries + self.STAGES * self.TILE_N * (self.TILE_D + self.TILE_DV))

    def barrier_at(self, array: int) -> int:
        """Where an array of barriers begins, in bytes behind the first."""
        return 8 * array * self.barrier_room

    @property
    def spare_at(self) -> int:
        """Bytes behind the first barrier that nobody reads."""
        return 8 * (self.barrier_room - 1)

    @property
    def parts(self) -> int:
        """Copies that fill one KV tile."""
        return max(1, self.TILE_N // self.UNIT)

    @property
    def part_rows(self) -> int:
        """Keys of one such copy."""
        return min(self.UNIT, self.TILE_N)

    def shared_tail(self, pieces: int, programs: int, kv_tiles: int) -> int:
        """KV tiles that each program has of the last pieces of work, 0 if they are not shared.

        Those are the pieces, of `kv_tiles` each, that are left over when all programs took as many.
        """
        rounds, left_over = divmod(pieces, programs)
        share = -(-left_over * kv_tiles // programs)
        worth = self.SHARED_TAIL and rounds > 0 and kv_tiles - share >= MEETING_TILES
        return share if worth else 0

    def q_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of queries."""
        return (1, 1, GROUP_ROWS, self.TILE_D)

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys."""
        return (1, 1, self.part_rows, self.TILE_D)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values."""
        return (1, 1, self.part_rows, self.TILE_DV)

    def out_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of outputs."""
        return (1, 1, GROUP_ROWS, self.TILE_DV)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)


def make_forward_config(
    consumers: int,
    tile_d: int,
    tile_dv: int,
    block_kv: int | None = None,
    packed: bool = False,
    banded: bool = False,
    long: bool = False,
) -> AttnFwdSm90Config:
    """The configuration with so many consumers; `block_kv` is the mask's, None without one.

    `banded`: a band cuts off keys. `long`: pieces of work are long enough to share them, and for
    consumers without queries to pass them by.
    """
    dense = block_kv is None and not packed
    masked = block_kv is not None and not packed
    # one consumer shares its SM: 128 keys of 128 dims for each of two programs do not fit
    tile_n = 64 if consumers == 1 and (block_kv is not None or max(tile_d, tile_dv) > 64) else 128
    # at 64 dims the code for it takes registers that the loop needs
    wide = max(tile_d, tile_dv) > 64
    shared_tail = dense and long and wide and not banded and consumers == 2
    # Finding blocks, sequences or shares takes the producer more registers than counting tiles;
    # they come from the consumers. Three consumers need few: their head dims are 64 at the most.
    searches = not dense or shared_tail
    producer = 32 if consumers == 3 else 40 if searches or consumers == 1 else 24
    stages = stages_that_fit(consumers, tile_n, tile_d, tile_dv)
    # A second buffer of queries where it costs no keys, which is but for one consumer of 128 dims.
    # Units that share a tile leave consumers no register for it.
    ahead = stages_that_fit(consumers, tile_n, tile_d, tile_dv, q_stages=2) == stages
    ahead = ahead and (block_kv is None or block_kv >= tile_n)
    return AttnFwdSm90Config(
        CONSUMERS=consumers,
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        STAGES=stages,
        UNIT=tile_n if block_kv is None else block_kv,
        CONSUMER_REGISTERS=160 if consumers == 3 else 232 if producer == 40 else 240,
        PRODUCER_REGISTERS=producer,
        MAX_REGISTERS=168 if consumers == 2 else 128,
        Q_STAGES=2 if ahead else 1,
        # packed sequences were not tried
        HALF_TILES=dense and banded and tile_n == 128,
        SHARED_TAIL=shared_tail,
        # small problems, whose start is much of their time
        OVERLAP=consumers == 1 and block_kv is None,
        TURNS=consumers == 3,
        AHEAD=dense and ahead and not shared_tail and banded == (consumers == 1) and consumers < 3,
        ABSENT=consumers == 3 and (banded or packed or long),
        SCOUT=masked,
        # two consumers with mask code have no registers for them
        Q_REGISTERS=masked and consumers == 1 and min(tile_d, tile_dv) > 64,
    )


def stages_that_fit(
    consumers: int, tile_n: int, tile_d: int, tile_dv: int, q_stages: int = 1
) -> int:
    """Stages of the K and V rings that fit beside queries and outputs."""
    budget = SMEM_BYTES
    if consumers == 1:
        # each of two programs has barriers and 1 KiB that the system takes
        budget = SMEM_BYTES // 2 - 2048
    elements = budget // 2 - consumers * GROUP_ROWS * (q_stages * tile_d + tile_dv)
    return min(MOST_STAGES, elements // (tile_n * (tile_d + tile_dv)))


# The backward: tiles, rings, and what follows from them.

# Steps whose descriptions are kept in shared memory: a producer is never that far ahead of the
# writer.
INFO_DEPTH = 8
# What queries are padded to: the tallest tile.
QUERY_PADDING = 128
# KV tiles for each program up to which they begin one after the other with ordered accumulation:
# 32k tokens take 8.53 ms so and 9.27 side by side, 64k tokens 20.6 and 18.6.
ORDERED_TILES = 2
# How the sums of a [64, 64] tile of dq lie in memory: that many rows of one swizzle each.
SUM_ROWS, SUM_COLUMNS = 128, 32


@dataclass(frozen=True)
class AttnBwdSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    CONSUMERS warp groups keep 64 keys each and walk over the same tiles of TILE_M queries; a single
    one leaves out dq (`backward_split`). BLOCK_Q neighbouring queries are visited together and have
    one semaphore: the query block of the mask; when dense TILE_M, or 128 queries with ORDERED.
    Blocks smaller than a tile are packed into one. BLOCK_KV is the key block of the mask, 0 when
    dense. TILE_D and TILE_DV are the head dims in shared memory, beyond which TMA fills zeros.
    STAGES query tiles are in flight, and DS_STAGES of the gradients of scores. ORDERED accumulates
    dq in the same order in every run. The kernel is compiled for MAX_REGISTERS per thread; the
    roles then trade them.

    DK_REGISTERS reads ds for dk from registers. SPLIT_RING gives queries and output gradients
    barriers of their own: the latter are free first.
    """

    CONSUMERS: int
    TILE_M: int
    TILE_D: int
    TILE_DV: int
    STAGES: int
    DS_STAGES: int
    ORDERED: bool
    BLOCK_Q: int
    BLOCK_KV: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int
    DK_REGISTERS: bool
    SPLIT_RING: bool

    def __post_init__(self) -> None:
        assert self.CONSUMERS in (1, 2), f"{self.CONSUMERS=}"
        tile_m = 64 if self.TILE_D == 128 else 128
        assert self.CONSUMERS == 1 or tile_m == self.TILE_M, f"{self=}"
        assert self.TILE_D in (64, 128), f"{self=}"
        assert self.TILE_DV in (64, 128), f"{self.TILE_DV=}"
        assert self.BLOCK_Q % self.TILE_M == 0 or self.TILE_M == 2 * self.BLOCK_Q, f"{self=}"

    @property
    def tile_n(self) -> int:
        """Keys of a work tile."""
        return GROUP_ROWS * self.CONSUMERS

    @property
    def visits_per_head(self) -> int:
        """Visits that a KV tile pays to a head: ordered, edges on either side are one each."""
        return 2 if self.ORDERED else 1

    @property
    def parts(self) -> int:
        """Copies that fill one tile of queries."""
        return max(1, self.TILE_M // self.BLOCK_Q)

    @property
    def last_in_block(self) -> int:
        """The last tile of a query block, counted from 0."""
        return max(1, self.BLOCK_Q // self.TILE_M) - 1

    @property
    def part_rows(self) -> int:
        """Queries of one such copy."""
        return min(self.BLOCK_Q, self.TILE_M)

    @property
    def halves(self) -> bool:
        """Whether a band may hide a whole tile of queries from the keys of one warp group."""
        return not self.BLOCK_KV and self.TILE_M == GROUP_ROWS

    @property
    def dq_by_rows(self) -> bool:
        """Whether a warp group adds up 64 rows of dq; otherwise 64 columns."""
        return self.TILE_M == 2 * GROUP_ROWS

    def q_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of queries."""
        return (1, 1, self.part_rows, self.TILE_D)

    def dout_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of output gradients."""
        return (1, 1, self.part_rows, self.TILE_DV)

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys, or of their gradients."""
        return (1, 1, GROUP_ROWS, self.TILE_D)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values, or of their gradients."""
        return (1, 1, GROUP_ROWS, self.TILE_DV)

    def row_block(self) -> tuple[int, int]:
        """Shape of a copy of lse or delta, one number for each query."""
        return (1, self.part_rows)

    def dq_block(self) -> tuple[int, int, int]:
        """Shape of what a warp group adds to the gradients of queries."""
        return (1, SUM_ROWS, SUM_COLUMNS)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)


def make_backward_config(
    tile_d: int, tile_dv: int, block_size: tuple[int, int] | None = None, ordered: bool = False
) -> AttnBwdSm90Config:
    """The configuration for these head dims; `block_size` is the mask's, None when dense."""
    tile_m = 64 if tile_d == 128 else 128
    # an ordered addition takes as long as a step of 64 queries: two steps share one
    block_q, block_kv = block_size or (QUERY_PADDING if ordered else tile_m, 0)
    # under a mask a producer with 24 spills
    producer = 24 if block_size is None else 40
    return AttnBwdSm90Config(
        CONSUMERS=2,
        TILE_M=tile_m,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        STAGES=2,
        # each warp group owns its keys, so they drift up to a step apart
        DS_STAGES=3,
        ORDERED=ordered,
        BLOCK_Q=block_q,
        BLOCK_KV=block_kv,
        CONSUMER_REGISTERS=232 if producer == 40 else 240,
        PRODUCER_REGISTERS=producer,
        MAX_REGISTERS=168,
        # 16k tokens: 655 against 628 TFLOP/s; under a mask bits need these registers (620 without,
        # 615 with them)
        DK_REGISTERS=block_size is None,
        # 583 against 572 TFLOP/s; with D = 128 595 against 625
        SPLIT_RING=block_size is None and tile_d == 64,
    )


# The split backward, dk and dv by one kernel and dq by another: for masks with key blocks of 64.


@dataclass(frozen=True)
class AttnBwdDqSm90Config:
    """Everything the dq kernel of the split backward is specialised on. Sizes in elements.

    A warp group keeps 64 queries and walks over tiles of TILE_N keys; UNIT, a multiple of that, is
    the block of the mask. TILE_D and TILE_DV are the head dims in shared memory, beyond which TMA
    fills zeros. K_STAGES tiles of keys and V_STAGES of values are in flight: keys are needed for a
    step longer. The kernel is compiled for MAX_REGISTERS per thread; producer and scheduler warp
    leave all but PRODUCER_REGISTERS to the warp group that computes.
    """

    TILE_N: int
    TILE_D: int
    TILE_DV: int
    K_STAGES: int
    V_STAGES: int
    UNIT: int
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int

    @property
    def tile_m(self) -> int:
        """Queries of a work tile."""
        return GROUP_ROWS

    @property
    def parts(self) -> int:
        """Copies that fill one tile of keys."""
        return 1

    @property
    def part_rows(self) -> int:
        """Keys of one such copy."""
        return self.TILE_N

    def q_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of queries, or of their gradients."""
        return (1, 1, GROUP_ROWS, self.TILE_D)

    def dout_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of output gradients."""
        return (1, 1, GROUP_ROWS, self.TILE_DV)

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys."""
        return (1, 1, self.TILE_N, self.TILE_D)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values."""
        return (1, 1, self.TILE_N, self.TILE_DV)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)


def make_dq_config(tile_d: int, tile_dv: int, block_kv: int) -> AttnBwdDqSm90Config:
    """The configuration of the split dq kernel for these head dims and key blocks."""
    return AttnBwdDqSm90Config(
        TILE_N=64,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        K_STAGES=3,
        V_STAGES=2,
        UNIT=block_kv,
        PRODUCER_REGISTERS=24,
        MAX_REGISTERS=128,
    )


def make_dkdv_config(tile_d: int, tile_dv: int, block_size: tuple[int, int]) -> AttnBwdSm90Config:
    """The configuration of the split dk/dv kernel."""
    return AttnBwdSm90Config(
        CONSUMERS=1,
        # with 128 queries of 64 columns 419 TFLOP/s, with 64 523
        TILE_M=64,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        STAGES=2,
        DS_STAGES=0,
        ORDERED=False,
        BLOCK_Q=block_size[0],
        BLOCK_KV=block_size[1],
        CONSUMER_REGISTERS=232,
        PRODUCER_REGISTERS=24,
        MAX_REGISTERS=128,
        DK_REGISTERS=True,
        SPLIT_RING=False,
    )
