"""Configurations of the split Hopper backward: one kernel for dk and dv, another for dq.

For masks with key blocks of 64, and for wide heads without a mask.
"""

from dataclasses import dataclass
from functools import lru_cache

from ...launch.descriptors import GROUP_ROWS, SMEM_BYTES, accumulator_layout
from .config import AttnBwdSm90Config, SlicedHeads


@dataclass(frozen=True)
class AttnBwdDqSm90Config(SlicedHeads):
    """Everything the dq kernel of the split backward is specialised on. Sizes in elements.

    Each of CONSUMERS warp groups keeps 64 queries, and all walk over the same tiles of TILE_N keys;
    BLOCK_KV, a multiple of that, is the key block of the mask, TILE_N without one. TILE_D and
    TILE_DV are the head dims in shared memory, beyond which TMA fills zeros; those above 128 lie
    there as slices of columns. K_STAGES tiles of keys and V_STAGES of values are in flight: keys
    are needed for a step longer. The kernel is compiled for MAX_REGISTERS per thread; producer and
    scheduler warp give all but PRODUCER_REGISTERS to the consumers, a second one of which has
    CONSUMER_REGISTERS. DP_AHEAD: registers are left to start dp together with s and dq of the tile
    before.
    """

    TILE_N: int
    TILE_D: int
    TILE_DV: int
    K_STAGES: int
    V_STAGES: int
    BLOCK_KV: int
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int
    CONSUMERS: int = 1
    CONSUMER_REGISTERS: int = 0
    DP_AHEAD: bool = True

    @property
    def tile_m(self) -> int:
        """Queries of a work tile."""
        return GROUP_ROWS * self.CONSUMERS

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
        return (1, 1, GROUP_ROWS, self.slice_d)

    def dout_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of output gradients."""
        return (1, 1, GROUP_ROWS, self.slice_dv)

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys."""
        return (1, 1, self.TILE_N, self.slice_d)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values."""
        return (1, 1, self.TILE_N, self.slice_dv)

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
        BLOCK_KV=block_kv,
        PRODUCER_REGISTERS=24,
        MAX_REGISTERS=128,
    )


def make_dkdv_config(tile_d: int, tile_dv: int, block_size: tuple[int, int]) -> AttnBwdSm90Config:
    """The configuration of the split dk/dv kernel."""
    return AttnBwdSm90Config(
        CONSUMERS=1,
        # at 64 columns: 128 queries 419 TFLOP/s, 64 queries 523
        TILE_M=64,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SCORE_D=tile_d,
        SCORE_DV=tile_dv,
        STAGES=2,
        DOUT_STAGES=2,
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


@dataclass(frozen=True)
class WideSplit:
    """How the backward of wide heads without a mask is split into two kernels.

    WEIGHT_STAGES tiles of weights are in flight in the kernel of dk and dv, up to MOST_STAGES tiles
    of queries. NARROW_TILES: where a warp group has registers for dk and dv of 64 keys, it keeps
    keys of its own and walks over tiles of 32 queries.
    """

    WEIGHT_STAGES: int = 2
    MOST_STAGES: int = 3
    NARROW_TILES: bool = False


# Columns of dk and dv of 64 keys that leave a warp group registers for scores of 32 queries.
MOST_OWN_COLUMNS = 320


@lru_cache(maxsize=256)
def make_wide_dkdv_config(tile_d: int, tile_dv: int, split: WideSplit) -> AttnBwdSm90Config:
    """The configuration of the split dk/dv kernel for wide heads."""
    own_keys = split.NARROW_TILES and tile_d + tile_dv <= MOST_OWN_COLUMNS
    tile_m, tile_n = (32, 2 * GROUP_ROWS) if own_keys else (GROUP_ROWS, GROUP_ROWS)
    # fp32 weights of 64 keys and queries; sizes in bytes
    weights = 0 if own_keys else split.WEIGHT_STAGES * 4 * GROUP_ROWS * GROUP_ROWS
    row = 2 * (tile_d + tile_dv)
    # one more of half the queries
    most = split.MOST_STAGES + own_keys
    stages = min(most, (SMEM_BYTES - weights - tile_n * row) // (tile_m * row))
    return AttnBwdSm90Config(
        CONSUMERS=2,
        TILE_M=tile_m,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        SCORE_D=tile_d,
        SCORE_DV=tile_dv,
        STAGES=stages,
        DOUT_STAGES=stages,
        DS_STAGES=0 if own_keys else split.WEIGHT_STAGES,
        ORDERED=False,
        BLOCK_Q=tile_m,
        BLOCK_KV=0,
        CONSUMER_REGISTERS=232,
        PRODUCER_REGISTERS=40,
        MAX_REGISTERS=168,
        DK_REGISTERS=True,
        SPLIT_RING=True,
        SHARED_KEYS=not own_keys,
        ONE_WAY=not own_keys,
    )


@lru_cache(maxsize=256)
def make_wide_dq_config(tile_d: int, tile_dv: int) -> AttnBwdDqSm90Config:
    """The configuration of the split dq kernel for wide heads."""
    consumers, tile_n = 2, GROUP_ROWS
    # beside queries and output gradients; a tile of keys more than of values
    room = SMEM_BYTES // 2 - (consumers * GROUP_ROWS + tile_n) * (tile_d + tile_dv)
    k_stages, v_stages = 1, 1
    for grow_values in (False, True, False):
        width = tile_dv if grow_values else tile_d
        if room < tile_n * width:
            break
        room -= tile_n * width
        k_stages, v_stages = k_stages + (not grow_values), v_stages + grow_values
    return AttnBwdDqSm90Config(
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        K_STAGES=k_stages,
        V_STAGES=v_stages,
        BLOCK_KV=tile_n,
        PRODUCER_REGISTERS=40,
        MAX_REGISTERS=168,
        CONSUMERS=consumers,
        CONSUMER_REGISTERS=232,
        # beside dq of 256 columns, ds, s and dp: 2200 bytes of spills instead of 252
        DP_AHEAD=tile_d < 256,
    )
