"""Configuration of the Hopper attention backward: tiles, rings, and what follows from them."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, accumulator_layout

# Steps whose places are kept in shared memory: more than a producer is ever ahead of the writer.
INFO_DEPTH = 8
# What queries are padded to: the tallest tile.
QUERY_PADDING = 128
# Tiles of keys for each program up to which they begin one after the other where sums are in order:
# 32k tokens take 8.53 ms so and 9.27 side by side, 64k tokens 20.6 and 18.6.
ORDERED_TILES = 2
# How the sums of a [64, 64] tile of dq lie in memory: that many rows of one swizzle each.
SUM_ROWS, SUM_COLUMNS = 128, 32


@dataclass(frozen=True)
class AttnBwdSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    CONSUMERS warp groups keep 64 keys each and walk over the same tiles of TILE_M queries; one
    alone leaves out dq (`bwd_sm90_keys`). UNIT is the number of neighbouring queries a visit is
    made of, and that take turns together: the block of the mask; when dense TILE_M, or two of them
    in order. Smaller units are packed into one tile. BLOCK_KV is the other side of a block, 0 when
    dense. TILE_D and TILE_DV are the head dims in shared memory, beyond which TMA fills zeros.
    STAGES tiles of queries are in flight, DS_STAGES of the gradients of scores. ORDERED adds up dq
    in the same order in every run. The kernel is compiled for MAX_REGISTERS per thread; the roles
    then trade them.

    DK_REGISTERS multiplies ds for dk from registers. SPLIT_RING gives queries and output gradients
    barriers of their own: the latter are done with first.
    """

    CONSUMERS: int
    TILE_M: int
    TILE_D: int
    TILE_DV: int
    STAGES: int
    DS_STAGES: int
    ORDERED: bool
    UNIT: int
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
        assert self.UNIT % self.TILE_M == 0 or self.TILE_M == 2 * self.UNIT, f"{self.UNIT=}"

    @property
    def tile_n(self) -> int:
        """Keys of a piece of work."""
        return GROUP_ROWS * self.CONSUMERS

    @property
    def visits(self) -> int:
        """Visits that a tile of keys pays to a head of queries."""
        return 2 if self.ORDERED else 1

    @property
    def parts(self) -> int:
        """Copies that fill one tile of queries."""
        return max(1, self.TILE_M // self.UNIT)

    @property
    def last_in_unit(self) -> int:
        """The last tile of a unit, counted from 0."""
        return max(1, self.UNIT // self.TILE_M) - 1

    @property
    def part_rows(self) -> int:
        """Queries of one such copy."""
        return min(self.UNIT, self.TILE_M)

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
        """Shape of a copy of numbers that belong to queries."""
        return (1, self.part_rows)

    def dq_block(self) -> tuple[int, int, int]:
        """Shape of what a warp group adds to the gradients of queries."""
        return (1, SUM_ROWS, SUM_COLUMNS)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)


def make_config(
    tile_d: int, tile_dv: int, block_size: tuple[int, int] | None = None, ordered: bool = False
) -> AttnBwdSm90Config:
    """The configuration for these head dims; `block_size` is the mask's, None when dense."""
    tile_m = 64 if tile_d == 128 else 128
    # an addition in its turn takes as long as a step of 64 queries: two of them share one
    block_q, block_kv = block_size or (QUERY_PADDING if ordered else tile_m, 0)
    # under a mask a producer with 24 spills
    producer = 24 if block_size is None else 40
    return AttnBwdSm90Config(
        CONSUMERS=2,
        TILE_M=tile_m,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        STAGES=2,
        # with keys of their own, warp groups are up to a step apart
        DS_STAGES=3,
        ORDERED=ordered,
        UNIT=block_q,
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
