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
    groups : warps that each take their own keys of a tile, all of the warps; 1: they share all keys
    parts : parts of a softmax that are read at a time when it is put together
    least : tiles that are worth a program of their own
    prefetch : tiles that the L2 is asked for before the queries are read
    hint : eviction policy of the caches
    words : read values of an fp8 cache as words of four; offsets must be multiples of four
    single : do not scan the lengths of one sequence
    pdl : launch while the kernel before still runs
    ablate : what is left out, for measurements: "", "merge", "scan", "q" (results are wrong)
    precision : how fp32 products are taken: "ieee" or "tf32"; 16-bit inputs do not look at it
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    programs: int
    precision: str = "ieee"
    groups: int = 1
    parts: int = 16
    least: int = 1
    prefetch: int = 0
    hint: str = ""
    words: bool = False
    single: bool = False
    pdl: bool = False
    ablate: str = ""

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n"):
            side = getattr(self, name)
            if side < 16 or side & (side - 1):
                raise ValueError(f"{name} is {side}; expected a power of two from 16 on")
        if self.programs < 1:
            raise ValueError(f"programs is {self.programs}; expected at least 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; expected one of {PRECISIONS}")
