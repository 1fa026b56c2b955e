"""Configurations of the Hopper backward in two kernels, for masks with key blocks of 64."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, accumulator_layout
from .bwd_config_sm90 import AttnBwdSm90Config


@dataclass(frozen=True)
class AttnBwdQueriesSm90Config:
    """Everything the kernel of the queries is specialised on. Sizes in elements."""

    TILE_N: int
    TILE_D: int
    TILE_DV: int
    K_STAGES: int
    V_STAGES: int
    UNIT: int
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int
    Q_REGISTERS: bool = True
    DOUT_REGISTERS: bool = True
    LATE: bool = True
    DQ_TILE: bool = False

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


def make_queries_config(tile_d, tile_dv, block_kv, **changes):
    """The configuration for these head dims and key blocks."""
    import os

    kind = os.environ.get("BSK_DQ", "")
    late = "l" in kind
    return AttnBwdQueriesSm90Config(
        TILE_N=64,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        K_STAGES=3 if late else 2,
        V_STAGES=2,
        UNIT=block_kv,
        PRODUCER_REGISTERS=40 if "p" in kind else 24,
        MAX_REGISTERS=128,
        Q_REGISTERS="q" not in kind,
        DOUT_REGISTERS="d" not in kind,
        LATE=late,
        DQ_TILE=not late,
    )


def make_keys_config(tile_d: int, tile_dv: int, block_size: tuple[int, int]) -> AttnBwdSm90Config:
    """The configuration of the kernel of the keys."""
    import os

    kind = os.environ.get("BSK_DKDV", "")
    return AttnBwdSm90Config(
        CONSUMERS=1,
        TILE_M=64 if tile_d == 128 or "n" in kind else 128,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        STAGES=2,
        DS_STAGES=1 if 'e' in kind else 0,
        SHARED_KEYS=False,
        ORDERED=False,
        UNIT=block_size[0],
        BLOCK_KV=block_size[1],
        CONSUMER_REGISTERS=216 if "p" in kind else 232,
        PRODUCER_REGISTERS=40 if "p" in kind else 24,
        MAX_REGISTERS=128,
        DK_REGISTERS=True,
        SPLIT_RING="s" in kind,
    )
