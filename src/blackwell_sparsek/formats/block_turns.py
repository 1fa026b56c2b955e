"""In which turn each tile of keys adds to what it gives a block of queries, under a block mask.

Turns follow the order of tiles: who waits for a turn waits for tiles that come earlier. Or they
follow times at which columns were planned to visit blocks (`kernels.attention.bwd_visits`), where
so many columns run at once as there are lanes, each group of columns apart. Then a tile may wait
for one that is taken later. Let all that is left of a group wait, and Y be the first column of it
that nobody has taken: all visits with times before Y begins are of columns that were taken, the
earliest of them waits for nobody, and so there are none left. At most one column in each other lane
has later visits. So fewer tiles wait than there are lanes, and as long as a launch has as many
programs that run, one of them is there to take Y.
"""

from typing import NamedTuple

import torch

from .band import Band
from .bits import usable_in_training
from .block_mask import BlockMask
from .block_order import blocks_in_band


class Groups(NamedTuple):
    """Columns that are planned together.

    queue : int32 `[n]`, entries `plane * Nb + column` of the KV planes that a mask has, by group
    table : int32 `[count, 4]`: first place in the queue, the place behind the last, columns that
        run at once, and 1 where turns come after those of all groups that have 0
    count : groups
    lanes : columns that run at once in all groups together, about
    """

    queue: torch.Tensor
    table: torch.Tensor
    count: int
    lanes: int


@usable_in_training
def groups_of_columns(
    mask: BlockMask,
    order: torch.Tensor,
    batch: int,
    heads: int,
    group_size: int,
    section: int,
    tile: int,
    programs: int,
) -> Groups:
    """Columns in the order in which `programs` take them, and which of them run together.

    Where every plane has a mask of its own, those are the planes of a section. Where planes share
    one, they follow each other closely, and each has its part of the programs. Columns that
    `block_order.longest_columns_first` puts before all sections are a group of their own.

    Parameters
    ----------
    order, heads, group_size, tile
        As for `turns_of_blocks`.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool(), 64)
    >>> groups = groups_of_columns(mask, torch.arange(5), 1, 1, 1, 1, 64, 132)
    >>> groups.queue.tolist(), groups.table.tolist()
    ([0, 1, 2, 3, 4], [[0, 0, 132, 0], [0, 5, 132, 1]])
    """
    (_, nb), in_block, device = mask.grid, mask.block_size[1] // tile, order.device
    planes, sections = batch * heads, max(batch * heads // section, 1)
    place = _places(order, -(-mask.seq_lengths[1] // tile))[:, ::in_block]
    lists = mask.transposed
    visits = (lists.indptr[1:] - lists.indptr[:-1]).view(mask.batch, mask.heads, nb)
    if mask.heads > 1:
        visits = visits.view(mask.batch, heads, group_size, nb).sum(2)
    # as `block_order` has it
    heavy = visits.to(torch.int64) * visits.numel() > 2 * visits.sum()
    kv_heads = visits.shape[1]
    own = mask.batch * kv_heads
    plane = torch.arange(own, device=device)[:, None].expand(own, nb)
    if own == planes:
        part = plane.div(section, rounding_mode="floor").clamp(max=sections - 1) + 1
        group = torch.where(heavy.view(own, nb), 0, part)
        lanes = [programs // in_block] * (1 + sections)
        later = [0] + [1] * sections
    else:
        place = place.view(batch, heads, nb)[: mask.batch, :kv_heads].reshape(own, nb)
        group = 2 * plane + ~heavy.view(own, nb)
        # planes that are under way at the same time: of all, the heavy columns
        width = planes - (sections - 1) * section
        lanes = [max(programs // (n * in_block), 1) for n in (planes, width)] * own
        later = [0, 1] * own
    key = group.reshape(-1) * order.numel() + place.reshape(-1)
    queue = torch.argsort(key)
    count = len(lanes)
    ends = torch.arange(count + 1, device=device)
    ends = torch.searchsorted(group.reshape(-1)[queue], ends)
    # small numbers reach a device without waiting for it
    table = torch.empty(count, 4, dtype=torch.int32, device=device)
    table[:, 0], table[:, 1] = ends[:-1], ends[1:]
    if own == planes:
        table[:, 2], table[:, 3] = lanes[0], 1
        table[:1, 3] = 0
    else:
        table[::2, 2], table[1::2, 2] = lanes[0], lanes[1]
        table[::2, 3], table[1::2, 3] = 0, 1
    return Groups(queue.to(torch.int32), table, count, sum(n for n, l in zip(lanes, later) if l))


@usable_in_training
def turns_of_blocks(
    mask: BlockMask,
    order: torch.Tensor,
    heads: int,
    group_size: int,
    band: Band,
    tile: int,
    blocks: torch.Tensor | None = None,
    times: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many tiles of keys see a block of queries and come before, for each that sees it.

    Whoever adds to sums of the queries in these turns does so in the same order in every run, and
    waits only for tiles that come earlier in `order`. Built on the device of the mask, without
    waiting for it.

    Parameters
    ----------
    order : int32 `[batch * heads * tiles]`
        Tiles of keys as `block_order.longest_columns_first` gives them, with the same arguments.
    heads, group_size : int
        KV heads, and query heads that share one.
    tile : int
        Keys of a tile; divides the width of a block.
    blocks : int32 `[nnz]`, optional
        Query blocks of the transposed lists, where they come in another order within columns.
    times : int32 `[nnz]`, optional
        When they are visited; turns are in this order, not in that of tiles.

    Returns
    -------
    int32 `[nnz, block width / tile]`
        For each entry of the transposed lists and each tile of its column; 0 for a tile that the
        band hides from the block.

    Examples
    --------
    >>> from .band import EVERYTHING
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0], [1, 1]]).bool(), 64)
    >>> turns_of_blocks(mask, torch.tensor([1, 0]), 1, 1, EVERYTHING, 64).tolist()
    [[0], [1], [0]]
    """
    (mb, nb), lists = mask.grid, mask.transposed
    tiles, in_block = -(-mask.seq_lengths[1] // tile), mask.block_size[1] // tile
    device = order.device
    place = _places(order, tiles)
    row = lists.row_indices()
    mask_plane, column = row // max(nb, 1), row % max(nb, 1)
    # of planes that share a mask, any will do: their tiles are in the same order
    plane = mask_plane // mask.heads * heads
    if mask.heads > 1:
        plane = plane + mask_plane % mask.heads // group_size
    kv_tile = column[:, None] * in_block + torch.arange(in_block, device=device)
    left, right = band.scalars()
    lo, hi = blocks_in_band(mask.seq_lengths[::-1], (tile, mask.block_size[0]), right, left, device)
    exists = kv_tile < tiles
    kv_tile = kv_tile.clamp(max=max(tiles - 1, 0))
    block = (lists.indices if blocks is None else blocks)[:, None].long()
    seen = exists & (block >= lo[kv_tile]) & (block < hi[kv_tile])
    # those that nobody waits for stand behind all others
    rows = mask.batch * mask.heads * mb
    group = torch.where(seen, mask_plane[:, None] * mb + block, rows).flatten()
    if times is None:
        key = group * max(order.numel(), 1) + place[plane[:, None], kv_tile].flatten()
    else:
        key = group * 2**31 + times[:, None].expand_as(kv_tile).flatten()
    sorted_place = torch.argsort(key, stable=True)
    group = group[sorted_place]
    turn = torch.arange(group.numel(), device=device) - torch.searchsorted(group, group)
    turns = torch.empty_like(turn, dtype=torch.int32)
    turns[sorted_place] = turn.to(torch.int32)
    return turns.view(-1, in_block) * seen


@usable_in_training
def columns_in_order(mask: BlockMask, order: torch.Tensor, heads: int, tile: int) -> torch.Tensor:
    """Columns of each plane of a mask in the order in which their first tiles come.

    Parameters are those of `turns_of_blocks`.

    Returns
    -------
    int64 `[planes, Nb]`
        Planes of KV heads that have a mask of their own.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0], [1, 1]]).bool(), 64)
    >>> columns_in_order(mask, torch.tensor([1, 3, 2, 0]), 2, 64).tolist()
    [[1, 0]]
    """
    place = _places(order, -(-mask.seq_lengths[1] // tile))
    place = place[:, :: mask.block_size[1] // tile].reshape(-1, heads, mask.grid[1])
    # of planes that share a mask, any will do: their tiles are in the same order
    place = place[: mask.batch, : mask.heads]
    return torch.argsort(place.flatten(0, 1), dim=1)


def _places(order: torch.Tensor, tiles: int) -> torch.Tensor:
    """Where each tile of a plane comes in `order`, int64 `[planes, tiles]`."""
    place = torch.empty_like(order, dtype=torch.int64)
    place[order.long()] = torch.arange(order.numel(), device=order.device)
    return place.view(order.numel() // max(tiles, 1), tiles)
