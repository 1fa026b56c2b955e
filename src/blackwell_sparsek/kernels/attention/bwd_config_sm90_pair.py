"""Configurations of the Hopper backward in two kernels, for masks with key blocks of 64."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, accumulator_layout
from .bwd_config_sm90 import AttnBwdSm90Config


@dataclass(frozen=True)
class AttnBwdQueriesSm90Config:
    """Everything the kernel of the queries is specialised on. Sizes in elements.

    A warp group keeps 64 queries and walks over tiles of TILE_N keys; UNIT, a multiple of that, is
    the block of the mask. TILE_D and TILE_DV are the head dims in shared memory, beyond which TMA
    fills zeros. K_STAGES tiles of keys and V_STAGES of values are in flight: keys are needed for a
    step longer. The kernel is compiled for MAX_REGISTERS per thread; producer and scout leave all
    but PRODUCER_REGISTERS to the warp group that computes.
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
        """Queries of a piece of work."""
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


def make_queries_config(tile_d: int, tile_dv: int, block_kv: int) -> AttnBwdQueriesSm90Config:
    """The configuration of the kernel of queries for these head dims and key blocks."""
    return AttnBwdQueriesSm90Config(
        TILE_N=64,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        K_STAGES=3,
        V_STAGES=2,
        UNIT=block_kv,
        PRODUCER_REGISTERS=24,
        MAX_REGISTERS=128,
    )


def make_keys_config(tile_d: int, tile_dv: int, block_size: tuple[int, int]) -> AttnBwdSm90Config:
    """The configuration of the kernel of keys and values."""
    return AttnBwdSm90Config(
        CONSUMERS=1,
        # with 128 queries of 64 columns 419 TFLOP/s, with 64 523
        TILE_M=64,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        STAGES=2,
        DS_STAGES=0,
        ORDERED=False,
        UNIT=block_size[0],
        BLOCK_KV=block_size[1],
        CONSUMER_REGISTERS=232,
        PRODUCER_REGISTERS=24,
        MAX_REGISTERS=128,
        DK_REGISTERS=True,
        SPLIT_RING=False,
    )
