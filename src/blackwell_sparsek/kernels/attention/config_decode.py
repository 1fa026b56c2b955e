"""What a launch of the decode kernel is made of, besides its tensors."""

from dataclasses import dataclass

from .config import PRECISIONS


@dataclass(frozen=True)
class DecodeConfig:
    """Tiles and launch options of the decode kernel.

    Parameters
    ----------
    tile_m : rows of one tile: queries of all heads that share a KV head
    tile_n : keys of one tile; both are powers of two, at least 16
    num_warps, num_stages : launch options of Triton
    programs : how many programs share the keys of all sequences and heads
    across : keys down and rows across in products, for tensor cores that want 64 rows
    words : read fp8 caches as words of four, where their strides allow it
    registers : most registers of a thread
    precision : how fp32 products are taken: "ieee" or "tf32"; 16-bit inputs do not look at it
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    programs: int
    precision: str = "ieee"
    across: bool = False
    words: bool = False
    registers: int | None = None

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n"):
            side = getattr(self, name)
            if side < 16 or side & (side - 1):
                raise ValueError(f"{name} is {side}; expected a power of two from 16 on")
        if self.programs < 1:
            raise ValueError(f"programs is {self.programs}; expected at least 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; expected one of {PRECISIONS}")
