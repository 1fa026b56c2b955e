"""Configuration of the Hopper decode kernel: tiles, rings, and what follows from them."""

from dataclasses import dataclass
from math import gcd

from ..sm90 import SMEM_BYTES, accumulator_layout


@dataclass(frozen=True)
class DecodeSm90Config:
    """Everything the kernel is specialised on. Sizes in elements.

    ROWS queries of the heads that share a KV head meet tiles of TILE_N keys, STAGES of which are
    kept on their way. TILE_D and TILE_DV are the head dims. PAGE_SIZE is None for a contiguous
    cache, BLOCK_KV without lists of blocks. The kernel is compiled for MAX_REGISTERS per thread, of
    which the producer gives back all but PRODUCER_REGISTERS. WORDS are fp8 caches, copied as words
    of four values. SINGLE is for one sequence, whose time is that of what comes before and after
    its keys: the kernel starts while the one before it ends.
    """

    ROWS: int
    TILE_N: int
    TILE_D: int
    TILE_DV: int
    STAGES: int
    PAGE_SIZE: int | None
    BLOCK_KV: int | None
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int
    WORDS: bool
    SINGLE: bool

    def __post_init__(self) -> None:
        assert self.ROWS in (8, 16, 32, 64), f"{self.ROWS=}"
        assert self.TILE_N in (64, 128), f"{self.TILE_N=}"
        assert self.TILE_D in (64, 128) and self.TILE_DV in (64, 128), f"{self=}"
        assert self.STAGES >= 2, f"{self.STAGES=}"
        assert self.part_keys >= 16, f"{self.PAGE_SIZE=}"

    @property
    def part_keys(self) -> int:
        """Keys of one copy: the most that always lie in one page and one block."""
        return gcd(self.TILE_N, self.PAGE_SIZE or 0, self.BLOCK_KV or 0)

    @property
    def packed(self) -> int:
        """Values of the cache in one element that is copied."""
        return 4 if self.WORDS else 1

    @property
    def scattered(self) -> bool:
        """Whether tables or lists say where keys lie."""
        return self.PAGE_SIZE is not None or self.BLOCK_KV is not None

    @property
    def noted_keys(self) -> int:
        """Keys of a tile whose positions the producer notes down."""
        return 1 if self.BLOCK_KV is None else self.TILE_N

    @property
    def parts(self) -> int:
        """Copies that fill one tile."""
        return self.TILE_N // self.part_keys

    def k_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of keys."""
        return (1, 1, self.part_keys, self.TILE_D // self.packed)

    def v_block(self) -> tuple[int, int, int, int]:
        """Shape of a copy of values."""
        return (1, 1, self.part_keys, self.TILE_DV // self.packed)

    def accumulator_layout(self) -> object:
        """Register layout of products: [keys or dims, ROWS]."""
        return accumulator_layout(self.ROWS)


def make_config(
    rows: int,
    tile_d: int,
    tile_dv: int,
    page_size: int | None = None,
    block_kv: int | None = None,
    *,
    tile_n: int = 64,
    words: bool = False,
    single: bool = False,
) -> DecodeSm90Config:
    """The configuration for so many packed rows, head dims, pages, listed blocks."""
    # Half of an SM holds all that must be on its way, and each stage more delays a launch by the
    # 120 cycles of its barriers. The sums of 64 rows need all registers, and their stages are long.
    tall = rows == 64
    scattered = page_size is not None or block_kv is not None
    parts = tile_n // gcd(tile_n, page_size or 0, block_kv or 0)
    budget = SMEM_BYTES if tall else SMEM_BYTES // 2
    # barriers, notes and 1 KiB that the system takes
    ring = budget - 2048 - 2 * rows * (tile_d + tile_n)
    return DecodeSm90Config(
        ROWS=rows,
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_DV=tile_dv,
        STAGES=ring // ((1 if words else 2) * tile_n * (tile_d + tile_dv)),
        PAGE_SIZE=page_size,
        BLOCK_KV=block_kv,
        # places of a tile's parts are held while a stage is waited for
        PRODUCER_REGISTERS=(64 if parts <= 4 else 88) if scattered else 40,
        MAX_REGISTERS=168 if tall else 128,
        WORDS=words,
        SINGLE=single,
    )
