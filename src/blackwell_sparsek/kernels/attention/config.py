"""What a launch of an attention kernel is made of, besides its tensors."""

from dataclasses import dataclass

PRECISIONS = ("ieee", "tf32")


@dataclass(frozen=True)
class AttnFwdConfig:
    """Tiles and launch options of the forward kernel.

    Parameters
    ----------
    tile_m, tile_n : queries and keys of one tile; powers of two, at least 16
    num_warps, num_stages : launch options of Triton
    precision : how fp32 products are taken: "ieee" or "tf32"; 16-bit inputs do not look at it
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n"):
            side = getattr(self, name)
            if side < 16 or side & (side - 1):
                raise ValueError(f"{name} is {side}; expected a power of two from 16 on")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; expected one of {PRECISIONS}")


class AttnBwdConfig(AttnFwdConfig):
    """The same for one kernel of the backward pass."""
