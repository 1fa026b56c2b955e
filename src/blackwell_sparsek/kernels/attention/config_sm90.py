"""Configuration of the Hopper attention forward: tiles, rings, and what follows from them."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, SMEM_BYTES, accumulator_layout

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
    leaves out the second 64 keys of a piece's first tile where its queries see none of them, as in
    every second piece where queries see up to themselves. PARTS adds up weights in parts, and takes
    maxima in short chains. SLACK lets scores pass the maximum that a row keeps by a factor of up to
    2**SLACK before its sums are scaled. The kernel is compiled for MAX_REGISTERS per thread; the roles then trade them:
    CONSUMER_REGISTERS for a warp group, PRODUCER_REGISTERS for the producer.
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
    PARTS: bool = False
    SOFT_PIN: bool = False
    SLACK: int = 0
    EARLY_CLAIM: bool = False
    SKIP_TILES: bool = False
    WARP_ARRIVALS: bool = False
    FREE_LATE: bool = False
    DIRECT_OUT: bool = False
    MIX: int = 0
    OVERLAP: bool = False
    PLAN_AHEAD: bool = False
    LOOK_AHEAD: bool = False
    SHARED_TAIL: bool = False

    def __post_init__(self) -> None:
        assert self.CONSUMERS in (1, 2, 3), f"{self.CONSUMERS=}"
        assert self.TILE_N in (64, 128), f"{self.TILE_N=}"
        assert self.TILE_D in (64, 128) and self.TILE_DV in (64, 128), f"{self=}"
        assert self.UNIT % self.TILE_N == 0 or self.TILE_N % self.UNIT == 0, f"{self.UNIT=}"
        assert self.STAGES >= 2, f"{self.STAGES=}"
        assert not self.HALF_TILES or self.TILE_N == self.UNIT == 128, f"{self=}"
        assert self.Q_STAGES in (1, 2), f"{self.Q_STAGES=}"

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
        """Arrivals that free a stage."""
        return self.CONSUMERS * (4 if self.WARP_ARRIVALS else 1)

    @property
    def barrier_room(self) -> int:
        """Barriers that each array of those of K and V has room for.

        Triton lays out larger allocations first. With so much room these come right behind the
        tiles, in the order of the program: full K, free K, full V, free V.
        """
        return 64 if self.WARP_ARRIVALS else self.STAGES

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles, which is where the barriers begin."""
        rows = GROUP_ROWS * self.CONSUMERS
        queries = rows * (self.Q_STAGES * self.TILE_D + self.TILE_DV)
        return 2 * (queries + self.STAGES * self.TILE_N * (self.TILE_D + self.TILE_DV))

    def barrier_at(self, array: int) -> int:
        """Byte of shared memory at which an array of barriers begins, 0 if nobody needs to know."""
        return self.tile_bytes + array * self.barrier_room * 8 if self.WARP_ARRIVALS else 0

    @property
    def parts(self) -> int:
        """Copies that fill one KV tile."""
        return max(1, self.TILE_N // self.UNIT)

    @property
    def part_rows(self) -> int:
        """Keys of one such copy."""
        return min(self.UNIT, self.TILE_N)

    def shared_tail(self, pieces: int, programs: int, kv_tiles: int) -> tuple[int, int]:
        """Pieces of work that programs take whole, and how many KV tiles each has of the others.

        The last pieces of `kv_tiles` each may be too few for all programs, which then share their
        tiles. No tiles where that saves nothing.
        """
        whole = pieces - pieces % programs
        share = -(-(pieces - whole) * kv_tiles // programs)
        worth = self.SHARED_TAIL and whole > 0 and kv_tiles - share >= MEETING_TILES
        return (whole, share) if worth and share > 0 else (pieces, 0)

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


def make_config(
    consumers: int,
    tile_d: int,
    tile_dv: int,
    block_kv: int | None = None,
    packed: bool = False,
    banded: bool = False,
) -> AttnFwdSm90Config:
    """The configuration with so many consumers; `block_kv` is the mask's, None without one."""
    # one consumer shares its SM: 128 keys of 128 dims for each of two programs do not fit
    tile_n = 64 if consumers == 1 and (block_kv is not None or max(tile_d, tile_dv) > 64) else 128
    # Finding blocks or sequences takes the producer more registers than counting tiles; they come
    # from the consumers. Three consumers need few: their head dims are 64 at the most.
    searches = block_kv is not None or packed
    producer = 32 if consumers == 3 else 40 if searches or consumers == 1 else 24
    stages = stages_that_fit(consumers, tile_n, tile_d, tile_dv)
    # A second buffer of queries where it costs no keys, which is but for one consumer of 128 dims.
    # Rows of a mask are long, and their consumers have no register left.
    ahead = stages_that_fit(consumers, tile_n, tile_d, tile_dv, q_stages=2) == stages
    ahead = ahead and block_kv is None
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
        # tried with dense batches alone; two and three consumers had a compiler's error there
        HALF_TILES=banded and consumers == 1 and tile_n == 128 and not packed,
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
