"""Configuration of the Hopper attention forward: tiles, rings, and what follows from them."""

from dataclasses import dataclass

from ..sm90 import GROUP_ROWS, accumulator_layout


@dataclass(frozen=True)
class AttnFwdSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    CONSUMERS warp groups take 64 queries each and read the same KV tiles of TILE_N keys. UNIT is
    the number of neighbouring keys a visit is made of: TILE_N when dense, else the block of the
    mask; smaller units are packed into one tile. TILE_D and TILE_DV are the head dims in shared
    memory, beyond which TMA fills zeros.
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

    def __post_init__(self) -> None:
        assert self.CONSUMERS in (1, 2, 3), f"{self.CONSUMERS=}"
        assert self.TILE_N in (64, 128), f"{self.TILE_N=}"
        assert self.TILE_D in (64, 128) and self.TILE_DV in (64, 128), f"{self=}"
        assert self.UNIT % self.TILE_N == 0 or self.TILE_N % self.UNIT == 0, f"{self.UNIT=}"

    @property
    def tile_m(self) -> int:
        """Queries of a piece of work."""
        return GROUP_ROWS * self.CONSUMERS

    @property
    def parts(self) -> int:
        """Copies that fill one KV tile."""
        return max(1, self.TILE_N // self.UNIT)

    @property
    def part_rows(self) -> int:
        """Keys of one such copy."""
        return min(self.UNIT, self.TILE_N)

    def accumulator_layout(self, columns: int) -> object:
        """Register layout of a [64, columns] WGMMA accumulator."""
        return accumulator_layout(columns)
