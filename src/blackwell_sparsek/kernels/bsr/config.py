"""How the BSR kernels are cut into tiles. Choices are made in `tuning.bsr`; these only check."""

from dataclasses import dataclass

from ...core.errors import InvalidInput

# The smallest tile side that `tl.dot` multiplies on every architecture.
MIN_TILE = 16


def largest_tile(size: int, limit: int) -> int:
    """The largest power of two that divides `size` and is at most `limit`."""
    return min(size & -size, 1 << (limit.bit_length() - 1))


def triton_stages(buffers: int, index_loads: int) -> int:
    """Stages to ask of Triton for this many buffers of operand tiles.

    Triton spreads the stages over the loads that depend on each other, `index_loads` before that
    of a tile, and gives buffers only to the tiles.
    """
    return (buffers - 1) * (index_loads + 1) + 1


@dataclass(frozen=True)
class _TileConfig:
    # num_stages: buffers of operand tiles
    # input_precision: what the product may do with fp32 operands; 16-bit operands have no choice
    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    input_precision: str

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k"):
            tile = getattr(self, name)
            if tile < MIN_TILE or tile & (tile - 1):
                raise InvalidInput(
                    f"{type(self).__name__}: {name} must be a power of two of at least "
                    f"{MIN_TILE}; got {tile}"
                )
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise InvalidInput(f"{type(self).__name__}: num_warps is {self.num_warps}")
        if not 1 <= self.num_stages <= 8:
            raise InvalidInput(f"{type(self).__name__}: num_stages is {self.num_stages}")
        if self.input_precision not in ("ieee", "tf32"):
            raise InvalidInput(f"{type(self).__name__}: input_precision is {self.input_precision}")

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory that the pipelined operand tiles take."""
        stage = self.tile_k * (self.tile_m + self.tile_n) * itemsize
        return self.num_stages * stage

    def _check_divides(self, tile: str, size: int, what: str) -> None:
        if size % getattr(self, tile):
            raise InvalidInput(
                f"{type(self).__name__}: {tile}={getattr(self, tile)} does not divide the {what} "
                f"{size}"
            )


@dataclass(frozen=True)
class SpmmConfig(_TileConfig):
    """Tiles of BSR @ dense: tile_m rows of a block row, tile_n columns, steps of tile_k.

    Steps that do not divide the width of a block take pieces of several blocks at once. `chunk` is
    how many blocks one program visits at most; longer rows are cut (see `plan`).
    """

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise InvalidInput(f"SpmmConfig: chunk must be at least 1; got {self.chunk}")

    def check_blocks(self, block_shape: tuple[int, int]) -> None:
        """Raise unless the tiles fit into blocks of this shape."""
        self._check_divides("tile_m", block_shape[0], "block height")


@dataclass(frozen=True)
class SddmmConfig(_TileConfig):
    """Tiles of a sampled product: tile_m by tile_n pieces of a block, tile_k steps of the sum.

    `split_k` programs share the sum of each piece and leave fp32 partial sums.
    """

    split_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_k < 1:
            raise InvalidInput(f"SddmmConfig: split_k must be at least 1; got {self.split_k}")

    def check_blocks(self, block_shape: tuple[int, int]) -> None:
        """Raise unless the tiles fit into blocks of this shape."""
        self._check_divides("tile_m", block_shape[0], "block height")
        self._check_divides("tile_n", block_shape[1], "block width")


@dataclass(frozen=True)
class PairConfig(_TileConfig):
    """Tiles of BSR @ BSR: tile_m by tile_n pieces of a block, tile_k steps of the inner side."""

    def check_blocks(self, block_shape: tuple[int, int], inner: int) -> None:
        """Raise unless the tiles fit into result blocks of this shape and this inner side."""
        self._check_divides("tile_m", block_shape[0], "block height")
        self._check_divides("tile_n", block_shape[1], "block width")
        self._check_divides("tile_k", inner, "inner block side")


@dataclass(frozen=True)
class NarrowConfig:
    """Tiles of BSR @ few columns: tile_m rows of a block row, all columns, steps of tile_k.

    tile_n is 1 for a single column, multiplied without tensor cores, or at least 16. `overlap`
    starts the kernel before the one in front of it has finished, `prefetch` asks for all blocks
    at once; both need sm_90.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    overlap: bool = False
    prefetch: bool = False

    def check(self, block_shape: tuple[int, int], n: int) -> None:
        """Raise unless the tiles fit to blocks of this shape and to n columns."""
        if block_shape[0] % self.tile_m:
            raise InvalidInput(
                f"NarrowConfig: tile_m={self.tile_m} does not divide the block height "
                f"{block_shape[0]}"
            )
        if n > self.tile_n:
            raise InvalidInput(f"NarrowConfig: tile_n={self.tile_n} is less than n={n}")
        # a warp multiplies at least 16 steps of the sum, and prefetches 16 bytes a thread
        if self.tile_k % (MIN_TILE * self.num_warps) or self.tile_m * self.tile_k < (
            256 * self.num_warps
        ):
            raise InvalidInput(
                f"NarrowConfig: tile_k={self.tile_k} is too short for {self.num_warps} warps"
            )
