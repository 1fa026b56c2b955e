"""The order in which the rows of a block mask run, so that no long row comes last."""

from typing import NamedTuple

import torch

from ..core.torch_state import usable_in_training
from .band import EVERYTHING, Band
from .block_lists import BlockLists
from .block_mask import BlockMask
from .device_build import kernels_build, ordered, ordered_again


@usable_in_training
def longest_first(
    mask: BlockMask, batch: int, heads: int, band: Band, raster_group: int
) -> torch.Tensor:
    """Rows of a mask, broadcast to `batch` and `heads`, in the order to run them.

    Rows with more than twice the average number of visible blocks come first, wherever they are:
    if one of them started late, it would run alone at the end. The others follow raster group by
    raster group, because the keys of a group of heads should stay in cache; within each group the
    longest come first. Ties are in the order of `device.schedule.raster_place`. Built on the device
    of the mask, without waiting for it.

    Parameters
    ----------
    batch, heads : int
        Of the queries; the mask has 1 or as many of each.
    band : Band
        Limits the visible blocks further.
    raster_group : int
        How many neighbouring (batch, head)s stay together.

    Returns
    -------
    int32 `[batch * heads * Mb]`
        Entries `batch_head * Mb + query block`.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0], [1, 1], [0, 0]]).bool(), 64)
    >>> longest_first(mask, 1, 2, EVERYTHING, 2).tolist()
    [1, 4, 0, 3, 2, 5]
    """
    key = ("rows", _kind(mask), batch, heads, band, raster_group)
    if (order := ordered_again(key, mask._listed)) is not None:
        return order
    mb, nb = mask.grid
    if kernels_build(mask.device, *mask._listed):
        steps = (mask.heads * mb if mask.batch > 1 else 0, mb if mask.heads > 1 else 0)
        sizes = (batch * heads, heads, mb, *steps, 1, 1, 0, raster_group, nb)
        sides = _Sides(mask.seq_lengths, mask.block_size, *band.scalars())
        made = ordered(mask._listed, sizes, sides, band, columns=False, key=key)
        if made is not None:
            return made
    visits = visible_blocks(mask, band).view(mask.batch, mask.heads, mb)
    return _longest(visits.expand(batch, heads, mb).reshape(batch * heads, mb), nb, raster_group)


@usable_in_training
def longest_columns_first(
    mask: BlockMask,
    batch: int,
    heads: int,
    group_size: int,
    band: Band,
    raster_group: int,
    tile: int,
) -> torch.Tensor:
    """KV tiles in the order to run them, when each visits all queries that see it.

    As `longest_first`, for the columns of a mask: the length of a tile is the number of query
    blocks over all `group_size` query heads that share its KV head.

    Parameters
    ----------
    batch, heads : int
        Of the keys.
    tile : int
        Keys of a tile; divides the width of a block.

    Returns
    -------
    int32 `[batch * heads * ceil(Sk / tile)]`
        Entries `batch_head * tiles + tile`.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0], [1, 1], [0, 0]]).bool(), 64)
    >>> longest_columns_first(mask, 1, 2, 1, EVERYTHING, 2, 64).tolist()
    [0, 2, 1, 3]
    """
    key = ("columns", _kind(mask), batch, heads, group_size, band, raster_group, tile)
    if (order := ordered_again(key, mask._listed_transposed)) is not None:
        return order
    (mb, nb), (_, block_kv) = mask.grid, mask.block_size
    (sq, sk), (left, right) = mask.seq_lengths, band.scalars()
    sides = _Sides((sk, sq), mask.block_size[::-1], right, left)
    tiles, group = -(-sk // tile), group_size if mask.heads > 1 else 1
    if kernels_build(mask.device, *mask._listed):
        steps = (mask.heads * nb if mask.batch > 1 else 0, group * nb if mask.heads > 1 else 0)
        grouped = (block_kv // tile, group, nb, raster_group, mb * group)
        sizes = (batch * heads, heads, tiles, *steps, *grouped)
        made = ordered(mask._listed_transposed, sizes, sides, band, columns=True, key=key)
        if made is not None:
            return made
    lists = mask._listed_transposed if band == EVERYTHING else mask.transposed
    visits = _visible(lists, sides, band).view(mask.batch, mask.heads, nb)
    if mask.heads > 1:
        visits = visits.view(mask.batch, heads, group_size, nb).sum(2)
    visits = visits.expand(batch, heads, nb).reshape(batch * heads, nb)
    visits = visits.repeat_interleave(block_kv // tile, 1)[:, :tiles]
    # under a causal band the early columns are long, so they come first among equals
    order = _longest(visits.flip(1), mb * group, raster_group)
    batch_head = order.div(max(tiles, 1), rounding_mode="floor")
    return batch_head * tiles + (tiles - 1 - (order - batch_head * tiles))


def _kind(mask: BlockMask) -> tuple[object, ...]:
    """Everything that an order depends on besides the lists of a mask."""
    return (mask.batch, mask.heads, mask.seq_lengths, mask.block_size, mask.device.index)


def _longest(visits: torch.Tensor, most: int, raster_group: int) -> torch.Tensor:
    """Entries `batch_head * rows + row` of visits `[batch * heads, rows]`, none above `most`."""
    batch_heads, rows = visits.shape
    heavy = visits.to(torch.int64) * visits.numel() > 2 * visits.sum()
    # tile by tile from the last, each through all heads; a stable sort keeps this order
    visits, heavy = (x.t().flip(0) for x in (visits, heavy))
    small = (batch_heads // raster_group + 2) * (most + 1) < 2**31
    # small keys sort several times faster
    dtype = torch.int32 if small else torch.int64
    batch_head = torch.arange(batch_heads, device=visits.device, dtype=dtype)
    # as `device.schedule.raster_group_of`
    groups = batch_head.div(raster_group, rounding_mode="floor").clamp(
        max=max(batch_heads // raster_group, 1) - 1
    )
    group = torch.where(heavy, 0, groups + 1)
    key = group * (most + 1) + (most - visits)
    place = torch.sort(key.flatten(), stable=True).indices
    row = rows - 1 - place.div(max(batch_heads, 1), rounding_mode="floor")
    return (place % max(batch_heads, 1) * rows + row).to(torch.int32)


class _Sides(NamedTuple):
    """A mask seen from its rows, or from its columns: lengths, blocks and the band."""

    lengths: tuple[int, int]
    block: tuple[int, int]
    left: int
    right: int


def visible_blocks(mask: BlockMask, band: Band) -> torch.Tensor:
    """How many blocks of each row lie within the band, int32 `[batch * heads * Mb]`."""
    sides = _Sides(mask.seq_lengths, mask.block_size, *band.scalars())
    return _visible(mask._listed if band == EVERYTHING else mask.forward, sides, band)


def _visible(lists: BlockLists, sides: _Sides, band: Band) -> torch.Tensor:
    if band == EVERYTHING:
        return lists.indptr[1:] - lists.indptr[:-1]
    lo, hi = blocks_in_band(*sides, lists.indptr.device)
    row = lists.row_indices() % max(lo.numel(), 1)
    seen = (lists.indices >= lo[row]) & (lists.indices < hi[row])
    before = torch.nn.functional.pad(torch.cumsum(seen, 0, dtype=torch.int32), (1, 0))
    return before[lists.indptr[1:]] - before[lists.indptr[:-1]]


def blocks_in_band(
    lengths: tuple[int, ...],
    block: tuple[int, int],
    left: int,
    right: int,
    device: torch.device | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks `[lo, hi)` that each row of blocks sees: `band.kv_range` for all of them at once."""
    (sq, sk), (bq, bk) = lengths, block
    first = torch.arange(0, sq, bq, device=device)
    end = (first + bq).clamp(max=sq)
    lo = (first + (sk - sq) - left).clamp(min=0)
    hi = (end + (sk - sq) + right).clamp(max=sk)
    hi = torch.where(lo < hi, hi, lo)
    return lo // bk, torch.where(lo < hi, (hi + bk - 1) // bk, lo // bk)
