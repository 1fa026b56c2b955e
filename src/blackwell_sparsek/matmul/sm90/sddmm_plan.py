"""Which programs of a sampled product compute which blocks, in which order.

All work tiles take the same time, so what matters is what they read. All programs go through the
sum at the same pace, and so read each step of `a` and `b` from memory once for all tiles that run
together: the rows and columns of blocks that they span. The plan therefore takes RASTER_ROWS rows
of the matrix at a time, column by column, which keeps the tiles of a round in a region that is
about as wide as it is high.
"""

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...launch.launcher import cdiv
from ...launch.workspace import made_outside_pool

# Block row, first piece and the piece after the last one of a work tile.
TILE_FIELDS = 3
# 132 tiles of 128 x 256 in 22 % of the blocks span 4096 rows and as many columns.
RASTER_ROWS = 4096

# Plans by the row pointers they were made from, which live as long as their pattern.
_PLANS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class TileSizes(NamedTuple):
    """How the blocks of a row become work tiles."""

    tile_pieces: int
    """Pieces of a work tile."""
    block_pieces: int
    """Pieces of a block."""
    tile_rows: int
    """Rows of the matrix in a block row of the plan."""


def sddmm_plan(
    indptr: torch.Tensor, indices: torch.Tensor, cols_b: int, sizes: TileSizes
) -> torch.Tensor:
    """Work tiles int32 [tiles, TILE_FIELDS] of a pattern, cached after the first request.

    The first request synchronises. During the capture of a CUDA graph it cannot: the plan then has
    its largest possible size, with tiles of no pieces at its end, and is not cached.
    """
    plans = _PLANS.setdefault(indptr, {})
    if sizes in plans:
        return plans[sizes]
    rows_b, entries = indptr.shape[0] - 1, indices.shape[0]
    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        # each row has at most one tile that is not full
        most = min(rows_b, entries) + entries * sizes.block_pieces // sizes.tile_pieces
        return build_sddmm_plan(indptr, indices, cols_b, sizes, most)

    def make() -> torch.Tensor:
        count = int(_tiles_of_rows(indptr, sizes).sum())
        return build_sddmm_plan(indptr, indices, cols_b, sizes, count)

    plan = made_outside_pool(make, indptr.device)
    if indptr.is_cuda:
        # the next product with this pattern may run on another stream
        torch.cuda.current_stream(indptr.device).synchronize()
    plans[sizes] = plan
    return plan


def build_sddmm_plan(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    cols_b: int,
    sizes: TileSizes,
    count: int,
) -> torch.Tensor:
    """A plan with room for `count` work tiles; those that are not needed have no pieces."""
    rows_b, device = indptr.shape[0] - 1, indptr.device
    if count == 0:
        return torch.empty((0, TILE_FIELDS), dtype=torch.int32, device=device)
    tiles = _tiles_of_rows(indptr, sizes)
    tiles_end = tiles.cumsum(0)
    number = torch.arange(count, device=device)
    row = torch.searchsorted(tiles_end, number, right=True)
    real = row < rows_b
    row = row.clamp(max=rows_b - 1)
    first, end = (x[row].long() * sizes.block_pieces for x in (indptr[:-1], indptr[1:]))
    begin = first + (number - (tiles_end - tiles)[row]) * sizes.tile_pieces
    end = torch.minimum(begin + sizes.tile_pieces, end)
    begin, end = (torch.where(real, x, 0) for x in (begin, end))

    rows_together = max(1, RASTER_ROWS // sizes.tile_rows)
    column = indices[begin // sizes.block_pieces].long()
    key = (row // rows_together) * cols_b + column
    # padding goes last
    key = torch.where(real, key, cdiv(rows_b, rows_together) * cols_b)
    order = torch.sort(key, stable=True).indices
    return torch.stack([row, begin, end], dim=1)[order].int()


def _tiles_of_rows(indptr: torch.Tensor, sizes: TileSizes) -> torch.Tensor:
    """Work tiles of each block row."""
    pieces = torch.diff(indptr).long() * sizes.block_pieces
    return torch.div(pieces + sizes.tile_pieces - 1, sizes.tile_pieces, rounding_mode="floor")
