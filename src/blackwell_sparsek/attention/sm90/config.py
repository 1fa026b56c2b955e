"""Configurations of the Hopper attention kernels: tiles, rings, and derived sizes."""

from dataclasses import dataclass
from functools import lru_cache

from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES, accumulator_layout

# More stages hide no more latency: a producer is never that far ahead.
MOST_STAGES = 4
# Head dims in shared memory: tiles are as wide as the narrowest of these that holds a head.
TILE_WIDTHS = (64, 128, 192, 256)
# Cost of combining a softmax that programs share, in KV tiles.
COMBINE_TILES = 2


@dataclass(frozen=True)
class AttnFwdSm90Config:
    """Everything the kernel is specialised on; sizes in elements.

    The kernel is compiled for MAX_REGISTERS per thread; the roles then redistribute them.
    """

    CONSUMERS: int
    """Warp groups with 64 queries each that read the same KV tiles."""
    TILE_N: int
    """Keys of a KV tile."""
    TILE_D: int
    """Head dim of queries and keys in shared memory, beyond which TMA fills zeros."""
    TILE_DV: int
    """The same of values."""
    SLICE_D: int
    """Columns of a slice of queries and keys; heads wider than a slice lie in several of them."""
    SLICE_DV: int
    """The same of values, of accumulators, and of copies of outputs."""
    STAGES: int
    """KV tiles in flight."""
    BLOCK_KV: int
    """Keys of a block of the mask (small blocks share a KV tile); TILE_N without a mask."""
    CONSUMER_REGISTERS: int
    """Registers per thread of a consumer."""
    PRODUCER_REGISTERS: int
    """Registers per thread of the producer and of the scheduler warp."""
    MAX_REGISTERS: int
    """Registers that every thread starts with."""
    Q_STAGES: int = 1
    """2 fetches the queries and first keys of the next work tile while this one is computed."""
    HALF_TILES: bool = False
    """Skip 64 keys of a work tile's first or last KV tile if its queries see none of them, as in
    every second work tile under causal."""
    SPLIT_TAIL: bool = False
    """All programs share the KV tiles of the last work tiles, if those are fewer than programs."""
    PDL: bool = False
    """Programmatic dependent launch: start before the previous kernel has ended."""
    PING_PONG: bool = False
    """Consumers alternate: one issues its products while the others compute their softmax."""
    CLAIM_AHEAD: bool = False
    """Claim and announce a work tile while the previous one is fetched; this costs load balance if
    work tiles differ in length."""
    SKIP_ABSENT: bool = False
    """Consumers that have no queries in a work tile skip its KV tiles."""
    SCHEDULER_WARP: bool = False
    """A separate warp looks up work tiles, and the keys of a KV tile are fetched before the values
    of the previous one."""
    Q_REGISTERS: bool = False
    """Consumers keep their queries in registers."""
    GATED: bool = False
    """Keys have a gate, whose scores the producer copies with the keys; only under a mask."""
    FP8: bool = False
    """Queries, keys and values are e4m3, and values are transposed, with the keys of a channel
    contiguous: WGMMA sums 8-bit operands only along a contiguous dimension (`forward_fp8`)."""
    K_BLOCKS: bool = False
    """In fp8: one scale for every 128 keys, instead of one for all keys of a head."""
    PRODUCTS_FIRST: bool = False
    """In fp8: multiply the weights of a tile with its values before the scores of the next tile
    take registers, so that two slices of products fit beside wide outputs."""

    def __post_init__(self) -> None:
        plain = not (self.HALF_TILES or self.SPLIT_TAIL or self.PDL)
        plain = plain and not (self.SKIP_ABSENT or self.PING_PONG or self.Q_REGISTERS)
        plain = plain and not self.GATED
        assert not self.GATED or (self.SCHEDULER_WARP and not self.HALF_TILES), f"{self=}"
        assert not self.FP8 or (plain and self.BLOCK_KV % self.TILE_N == 0), f"{self=}"
        # a lone consumer comes with a scheduler warp
        assert not self.FP8 or self.CONSUMERS > 1 or self.SCHEDULER_WARP, f"{self=}"
        assert self.FP8 or not self.PRODUCTS_FIRST, f"{self=}"
        assert not self.FP8 or self.PRODUCTS_FIRST or self.dv_slices <= 2, f"{self=}"
        assert self.CONSUMERS in (1, 2, 3), f"{self.CONSUMERS=}"
        assert self.TILE_N in (64, 128), f"{self.TILE_N=}"
        assert self.TILE_D in TILE_WIDTHS and self.TILE_DV in TILE_WIDTHS, f"{self=}"
        assert self.SLICE_D in (64, 128) and self.TILE_D % self.SLICE_D == 0, f"{self=}"
        assert self.SLICE_DV in (64, 128) and self.TILE_DV % self.SLICE_DV == 0, f"{self=}"
        assert self.BLOCK_KV % self.TILE_N == 0 or self.TILE_N % self.BLOCK_KV == 0, (
            f"{self.BLOCK_KV=}"
        )
        assert self.STAGES >= 1, f"{self.STAGES=}"
        assert not self.HALF_TILES or self.TILE_N == self.BLOCK_KV == 128, f"{self=}"
        assert not (self.HALF_TILES and self.SPLIT_TAIL), f"{self=}"
        assert self.Q_STAGES in (1, 2), f"{self.Q_STAGES=}"
        assert not self.CLAIM_AHEAD or (self.Q_STAGES == 2 and not self.SPLIT_TAIL), f"{self=}"
        # a scheduler warp supports neither a split tail nor PDL
        alone = self.CONSUMERS < 3 and not (self.SPLIT_TAIL or self.PDL or self.CLAIM_AHEAD)
        assert not self.SCHEDULER_WARP or alone, f"{self=}"

    @property
    def tile_m(self) -> int:
        """Queries of a work tile."""
        return GROUP_ROWS * self.CONSUMERS

    @property
    def d_slices(self) -> int:
        """Slices of queries and keys."""
        return self.TILE_D // self.SLICE_D

    @property
    def dv_slices(self) -> int:
        """Slices of values and outputs."""
        return self.TILE_DV // self.SLICE_DV

    @property
    def programs_per_sm(self) -> int:
        """One consumer leaves half of an SM to another program."""
        return 2 if self.CONSUMERS == 1 else 1

    @property
    def arrivals(self) -> int:
        """Arrivals that free a stage: one by each warp of the consumers."""
        return 4 * self.CONSUMERS

    @property
    def barrier_room(self) -> int:
        """Barriers allocated for each barrier array of K and V.

        Triton lays out larger allocations first. Padded to this size, the arrays come right after
        the tiles, in program order: full K, free K, full V, free V.
        """
        return 64

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles, which is where the barriers begin."""
        queries = self.tile_m * self.Q_STAGES * self.TILE_D
        keys = self.STAGES * self.TILE_N * (self.TILE_D + self.TILE_DV)
        tiles = self.element_bytes * (queries + keys) + 2 * self.tile_m * self.SLICE_DV
        # gate scores come last: they are the smallest allocation except for the barriers
        return tiles + self.gate_bytes

    @property
    def gate_stages(self) -> int:
        """Stages of gate scores; see `forward_producer.copy_keys`."""
        return 2 * self.STAGES

    @property
    def gate_bytes(self) -> int:
        """Shared memory of the gate scores."""
        return 4 * self.gate_stages * self.TILE_N if self.GATED else 0

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of queries, keys and values; outputs have 2."""
        return 1 if self.FP8 else 2

    def barrier_at(self, array: int) -> int:
        """Offset of an array of barriers from the first one, in bytes."""
        return 8 * array * self.barrier_room

    def placed_barriers(self) -> list[tuple[int, int]]:
        """Offset in shared memory and arrivals of each barrier that warps find by its address."""
        return [
            (
                self.tile_bytes + self.barrier_at(array) + 8 * stage,
                self.arrivals if array % 2 else 1,
            )
            for array in range(4)
            for stage in range(self.STAGES)
        ]

    @property
    def spare_at(self) -> int:
        """Offset from the first barrier, in bytes, of a word that is never read."""
        return 8 * (self.barrier_room - 1)

    @property
    def parts(self) -> int:
        """Copies that fill one KV tile."""
        return max(1, self.TILE_N // self.BLOCK_KV)

    @property
    def part_rows(self) -> int:
        """Keys of one such copy."""
        return min(self.BLOCK_KV, self.TILE_N)

    def tail_share(self, work_tiles: int, programs: int, kv_tiles: int) -> int:
        """KV tiles of the split tail that each program takes; 0 if the tail is not split.

        The tail is the work tiles, of `kv_tiles` each, that remain after the last round in which
        every program has one.
        """
        rounds, left_over = divmod(work_tiles, programs)
        share = -(-left_over * kv_tiles // programs)
        worth = self.SPLIT_TAIL and rounds > 0 and kv_tiles - share >= COMBINE_TILES
        return share if worth else 0

    def q_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of queries."""
        return (1, 1, GROUP_ROWS, self.SLICE_D)

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys."""
        return (1, 1, self.part_rows, self.SLICE_D)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values."""
        if self.FP8:
            return (1, 1, self.SLICE_DV, self.TILE_N)
        return (1, 1, self.part_rows, self.SLICE_DV)

    def out_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of outputs."""
        return (1, 1, GROUP_ROWS, self.SLICE_DV)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns, 32 // self.element_bytes)


@lru_cache(maxsize=256)
def make_forward_config(
    consumers: int,
    tile_d: int,
    tile_dv: int,
    block_kv: int | None = None,
    packed: bool = False,
    banded: bool = False,
    long: bool = False,
) -> AttnFwdSm90Config:
    """The configuration with this many consumers; `block_kv` is the mask's, None without one.

    `banded`: a band cuts off keys. `long`: work tiles are long enough that it pays to split
    the tail, and to let consumers without queries skip.
    """
    dense = block_kv is None and not packed
    masked = block_kv is not None and not packed
    slice_dv = slice_width(tile_dv)
    if max(tile_d, tile_dv) > 128 and not (consumers == 2 and tile_dv == 256):
        # outputs leave through a buffer of one slice; what a narrow one leaves holds keys
        slice_dv = 64
    # one consumer shares its SM, and 128 keys of 128 dims do not fit twice
    tile_n = 64 if consumers == 1 and (block_kv is not None or max(tile_d, tile_dv) > 64) else 128
    # accumulators of more than 128 columns leave no registers for the scores of 128 keys
    if tile_dv > 128 or stages_that_fit(consumers, tile_n, tile_d, tile_dv, slice_dv) < 2:
        tile_n = 64
    # at 64 dims the code of a split tail takes registers that the loop needs
    wide = max(tile_d, tile_dv) > 64
    split_tail = dense and long and wide and not banded and consumers == 2
    # A producer needs more registers to find blocks, sequences or shares than to count tiles; the
    # consumers give them up. Three consumers need few, because their head dims are at most 64.
    searches = not dense or split_tail
    producer = 32 if consumers == 3 else 40 if searches or consumers == 1 else 24
    stages = stages_that_fit(consumers, tile_n, tile_d, tile_dv, slice_dv)
    # A second buffer of queries if it costs no stage of keys, which holds except for one consumer
    # with 128 dims. With blocks that share a tile, consumers have no registers for it.
    ahead = stages_that_fit(consumers, tile_n, tile_d, tile_dv, slice_dv, q_stages=2) == stages
    ahead = ahead and (block_kv is None or block_kv >= tile_n)
    claim_ahead = dense and ahead and not split_tail and consumers < 3
    claim_ahead = claim_ahead and banded == (consumers == 1)
    return AttnFwdSm90Config(
        CONSUMERS=consumers,
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SLICE_D=slice_width(tile_d),
        SLICE_DV=slice_dv,
        STAGES=stages,
        BLOCK_KV=tile_n if block_kv is None else block_kv,
        CONSUMER_REGISTERS=160 if consumers == 3 else 232 if producer == 40 else 240,
        PRODUCER_REGISTERS=producer,
        MAX_REGISTERS=168 if consumers == 2 else 128,
        Q_STAGES=2 if ahead else 1,
        # not tried for packed sequences
        HALF_TILES=dense and banded and tile_n == 128,
        SPLIT_TAIL=split_tail,
        # for small problems, where the launch is a large part of the time
        PDL=consumers == 1 and block_kv is None,
        PING_PONG=consumers == 3,
        CLAIM_AHEAD=claim_ahead,
        SKIP_ABSENT=consumers == 3 and (banded or packed or long),
        SCHEDULER_WARP=masked,
        # two consumers with mask code have too few registers, and so have wide outputs
        Q_REGISTERS=masked and consumers == 1 and tile_d == tile_dv == 128,
    )


@lru_cache(maxsize=256)
def make_fp8_config(
    consumers: int, tile_d: int, tile_dv: int, block_kv: int | None, k_blocks: bool
) -> AttnFwdSm90Config:
    """The configuration of the forward in fp8; `block_kv` is the mask's, None without one.

    The product of a tile with the values has registers of its own (see `forward_fp8`), 32 in each
    slice of 64 columns. Up to 128 columns there are enough of them beside the scores.
    """
    # a KV tile stays within 128 keys that share a scale, and within a block of the mask
    tile_n = 64 if tile_dv > 128 or (block_kv or 128) % 128 else 128
    slice_dv = 64
    room = SMEM_BYTES if consumers > 1 else SMEM_BYTES // 2 - 2048
    # a second buffer of queries costs no stage of keys
    q_stages = 2
    consumer, producer = (240, 24) if block_kv is None else (232, 40)
    if consumers == 3:
        consumer, producer = 160, 32
    room -= consumers * GROUP_ROWS * (q_stages * tile_d + 2 * slice_dv)
    return AttnFwdSm90Config(
        CONSUMERS=consumers,
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SLICE_D=slice_width(tile_d),
        SLICE_DV=slice_dv,
        STAGES=min(MOST_STAGES, room // (tile_n * (tile_d + tile_dv))),
        BLOCK_KV=tile_n if block_kv is None else block_kv,
        CONSUMER_REGISTERS=consumer,
        PRODUCER_REGISTERS=producer,
        MAX_REGISTERS=168 if consumers == 2 else 128,
        Q_STAGES=q_stages,
        SCHEDULER_WARP=block_kv is not None,
        FP8=True,
        K_BLOCKS=k_blocks,
        PRODUCTS_FIRST=tile_dv > 128,
    )


def tile_width(head_dim: int) -> int:
    """Columns of a tile for this head dim; TMA fills what a head does not have with zeros."""
    return next(width for width in TILE_WIDTHS if head_dim <= width)


def score_width(head_dim: int, tile: int) -> int:
    """Columns of a tile that scores sum over: without the last 32 of 128 if they are zeros."""
    return 96 if tile == 128 and head_dim <= 96 else tile


def slice_width(tile: int) -> int:
    """The widest slice that a tile consists of; shared memory and registers have powers of two."""
    return 64 if tile % 128 else 128


def stages_that_fit(
    consumers: int, tile_n: int, tile_d: int, tile_dv: int, out_width: int, q_stages: int = 1
) -> int:
    """Stages of the K and V rings that fit beside queries and outputs."""
    budget = SMEM_BYTES
    if consumers == 1:
        # each of two programs needs room for barriers and 1 KiB reserved by the system
        budget = SMEM_BYTES // 2 - 2048
    elements = budget // 2 - consumers * GROUP_ROWS * (q_stages * tile_d + out_width)
    return min(MOST_STAGES, elements // (tile_n * (tile_d + tile_dv)))


# The backward.

# Step descriptions kept in shared memory: a producer is never this far ahead of the writer.
INFO_DEPTH = 8
# Queries, and keys whose gradients are summed in memory, are padded to a multiple of this, the
# tallest tile.
ROW_PADDING = 128
# With ordered accumulation and at most this many KV tiles for each program, each KV tile begins at
# its own first query; with more, all begin at the last: 32k tokens 8.53 and 9.27 ms, 64k 20.6 and
# 18.6.
ORDERED_TILES = 2
# Layout in memory of the sums of a [64, 64] tile of dq: rows of one swizzle each.
SUM_ROWS, SUM_COLUMNS = 128, 32


class SlicedHeads:
    """The slices in which backward kernels hold head dims; for configurations with these fields."""

    TILE_D: int
    TILE_DV: int

    @property
    def slice_d(self) -> int:
        """Columns of a slice of queries and keys; up to 128 they are whole."""
        return slice_width(self.TILE_D)

    @property
    def slice_dv(self) -> int:
        """The same of values and output gradients."""
        return slice_width(self.TILE_DV)

    @property
    def d_slices(self) -> int:
        """Slices of queries and keys."""
        return self.TILE_D // self.slice_d

    @property
    def dv_slices(self) -> int:
        """Slices of values and output gradients."""
        return self.TILE_DV // self.slice_dv


@dataclass(frozen=True)
class AttnBwdSm90Config(SlicedHeads):
    """Everything the kernel is specialised on. Sizes in elements.

    CONSUMERS warp groups keep 64 keys each and walk over the same tiles of TILE_M queries; a single
    warp group leaves out dq (`backward_split`). BLOCK_Q neighbouring queries are visited together
    and share a semaphore: the query block of the mask, or without a mask TILE_M (128 if ORDERED).
    Blocks smaller than a tile are packed into one. BLOCK_KV is the key block of the mask, 0 when
    dense. TILE_D and TILE_DV are the head dims in shared memory, beyond which TMA fills zeros;
    scores and their gradients sum over SCORE_D and SCORE_DV columns of these. STAGES tiles of
    queries and DS_STAGES tiles of score gradients are in flight. ORDERED accumulates dq in the same
    order in every run. The kernel is compiled for MAX_REGISTERS per thread; the roles then
    redistribute them.

    DK_REGISTERS reads ds for dk from registers. SPLIT_RING gives queries and output gradients
    separate barriers, because the latter are free first; DOUT_STAGES of these are in flight.

    SHARED_KEYS, for wide heads: both warp groups work on the same 64 keys, one on dk, the other on
    dv (`backward_wide`). Tiles then lie in shared memory as slices of columns. ONE_WAY, of these:
    dk and dv alone; DS_STAGES tiles of weights go from one warp group to the other. Wide heads
    without SHARED_KEYS: dk and dv alone, by tiles of 32 queries.

    SPLIT_HEADS: several work tiles share the query heads of a KV head, and dk and dv are added up
    in memory, in fp32, as dq is. If ORDERED, each work tile stores sums of its own instead.
    """

    CONSUMERS: int
    TILE_M: int
    TILE_D: int
    TILE_DV: int
    SCORE_D: int
    SCORE_DV: int
    STAGES: int
    DOUT_STAGES: int
    DS_STAGES: int
    ORDERED: bool
    BLOCK_Q: int
    BLOCK_KV: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int
    DK_REGISTERS: bool
    SPLIT_RING: bool
    SHARED_KEYS: bool = False
    SPLIT_HEADS: bool = False
    ONE_WAY: bool = False

    def __post_init__(self) -> None:
        assert self.CONSUMERS in (1, 2), f"{self.CONSUMERS=}"
        wide = max(self.TILE_D, self.TILE_DV) > 128
        short = self.ONE_WAY or (self.TILE_D == 128 and not self.SHARED_KEYS)
        tile_m = GROUP_ROWS if short else 2 * GROUP_ROWS
        own_keys = wide and not self.SHARED_KEYS
        assert self.CONSUMERS == 1 or (32 if own_keys else tile_m) == self.TILE_M, f"{self=}"
        assert self.TILE_D in TILE_WIDTHS and self.TILE_DV in TILE_WIDTHS, f"{self=}"
        assert wide or not self.SHARED_KEYS, f"{self=}"
        assert self.SPLIT_RING or not wide, f"{self=}"
        assert self.SPLIT_RING or self.DOUT_STAGES == self.STAGES, f"{self=}"
        for score, tile in ((self.SCORE_D, self.TILE_D), (self.SCORE_DV, self.TILE_DV)):
            assert score == tile or (score == 96 and tile == 128 and not wide), f"{self=}"
        assert self.SHARED_KEYS or not self.ONE_WAY, f"{self=}"
        assert not (self.ORDERED and (self.ONE_WAY or own_keys)), f"{self=}"
        whole = wide or self.BLOCK_KV or self.CONSUMERS == 1
        assert not (self.SPLIT_HEADS and whole), f"{self=}"
        assert self.BLOCK_Q % self.TILE_M == 0 or self.TILE_M == 2 * self.BLOCK_Q, f"{self=}"

    @property
    def tile_n(self) -> int:
        """Keys of a work tile."""
        return GROUP_ROWS if self.SHARED_KEYS else GROUP_ROWS * self.CONSUMERS

    @property
    def scored_queries(self) -> int:
        """Queries of a tile that a warp group scores."""
        halved = self.SHARED_KEYS and not self.ONE_WAY
        return self.TILE_M // 2 if halved else self.TILE_M

    @property
    def dp_products(self) -> int:
        """Products that make dp: one for each slice, or one of 64 and one of 32 columns."""
        return self.dv_slices if self.SCORE_DV == self.TILE_DV else 2

    @property
    def visits_per_head(self) -> int:
        """Visits of a KV tile to a head; if ordered, the edges on either side are a visit each."""
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
        return (1, 1, self.part_rows, self.slice_d)

    def dout_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of output gradients."""
        return (1, 1, self.part_rows, self.slice_dv)

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys, or of their gradients."""
        return (1, 1, GROUP_ROWS, self.slice_d)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values, or of their gradients."""
        return (1, 1, GROUP_ROWS, self.slice_dv)

    def row_block(self) -> tuple[int, int]:
        """Shape of a copy of lse or delta, one number for each query."""
        return (1, self.part_rows)

    def sums_block(self) -> tuple[int, int, int]:
        """Shape of what a warp group adds at a time to sums of gradients in memory."""
        return (1, SUM_ROWS, SUM_COLUMNS)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)


@lru_cache(maxsize=256)
def make_backward_config(
    tile_d: int,
    tile_dv: int,
    block_size: tuple[int, int] | None = None,
    ordered: bool = False,
    split_heads: bool = False,
    head_dims: tuple[int, int] | None = None,
) -> AttnBwdSm90Config:
    """The configuration for these tiles; `block_size` is the mask's, None when dense.

    Wide heads, masks and packed sequences are never split. `head_dims` are those of the tensors; by
    default scores sum over whole tiles.
    """
    if max(tile_d, tile_dv) > 128:
        return _make_wide_backward_config(tile_d, tile_dv, block_size, ordered)
    tile_m = 64 if tile_d == 128 else 128
    # an ordered addition takes as long as a step of 64 queries, so two steps share one
    block_q, block_kv = block_size or (ROW_PADDING if ordered else tile_m, 0)
    # under a mask, a producer with 24 registers spills
    producer = 24 if block_size is None else 40
    head_dim, head_dim_v = head_dims or (tile_d, tile_dv)
    return AttnBwdSm90Config(
        CONSUMERS=2,
        TILE_M=tile_m,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SCORE_D=score_width(head_dim, tile_d),
        SCORE_DV=score_width(head_dim_v, tile_dv),
        STAGES=2,
        DOUT_STAGES=2,
        # warp groups own different keys, so one may be up to a step ahead of the other
        DS_STAGES=3,
        ORDERED=ordered,
        BLOCK_Q=block_q,
        BLOCK_KV=block_kv,
        CONSUMER_REGISTERS=232 if producer == 40 else 240,
        PRODUCER_REGISTERS=producer,
        MAX_REGISTERS=168,
        # 16k tokens: 655 against 628 TFLOP/s; under a mask its bits need these registers (615
        # against 620)
        DK_REGISTERS=block_size is None,
        # D = 64: 583 against 572 TFLOP/s; D = 128: 595 against 625
        SPLIT_RING=block_size is None and tile_d == 64,
        SPLIT_HEADS=split_heads,
    )


def _make_wide_backward_config(
    tile_d: int, tile_dv: int, block_size: tuple[int, int] | None, ordered: bool
) -> AttnBwdSm90Config:
    """The configuration for heads whose gradients do not fit in one warp group's registers."""
    block_q, block_kv = block_size or (ROW_PADDING, 0)
    tile_m = 2 * GROUP_ROWS
    # beside keys, values, and p and ds of both warp groups
    room = SMEM_BYTES // 2 - GROUP_ROWS * (tile_d + tile_dv) - 2 * GROUP_ROWS * tile_m
    # queries are needed for longer than output gradients, so they get the second stage
    stages = 2 if room >= tile_m * (2 * tile_d + tile_dv) else 1
    dout_stages = 2 if room >= tile_m * (stages * tile_d + 2 * tile_dv) else 1
    return AttnBwdSm90Config(
        CONSUMERS=2,
        TILE_M=tile_m,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SCORE_D=tile_d,
        SCORE_DV=tile_dv,
        STAGES=stages,
        DOUT_STAGES=dout_stages,
        DS_STAGES=1,
        ORDERED=ordered,
        BLOCK_Q=block_q,
        BLOCK_KV=block_kv,
        CONSUMER_REGISTERS=232,
        PRODUCER_REGISTERS=40,
        MAX_REGISTERS=168,
        DK_REGISTERS=False,
        SPLIT_RING=True,
        SHARED_KEYS=True,
    )
