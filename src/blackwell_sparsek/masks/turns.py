"""In which turn each tile of keys adds to what it gives a block of queries, under a block mask.

Turns follow the order of tiles: who waits for a turn waits for tiles that come earlier. Or they
follow times at which columns were planned to visit blocks (`kernels.attention.bwd_visits`), where
so many columns run at once as there are lanes, each group of columns apart. Then each program has
the columns of one lane of each group, group after group, and visits blocks in the order of their
times. Who waits, waits for an earlier time of the same group: of all visits that are left, the
earliest of the first group waits for nobody, so that programs go on as long as all of them run.
"""

from typing import NamedTuple

import torch

from ..core.torch_state import usable_in_training
from .band import Band
from .block_mask import BlockMask
from .order import blocks_in_band


class Groups(NamedTuple):
    """Columns that are planned together.

    queue : int32 `[n]`, entries `plane * Nb + column` of the KV planes that a mask has, by group
    table : int32 `[number, 4]`: first place in the queue, the place behind the last, columns that
        run at once, and 1 where turns come after those of all groups that have 0
    number : groups
    lanes : columns that run at once in all groups together, about
    shared : planes share masks, and each has its part of the programs
    """

    queue: torch.Tensor
    table: torch.Tensor
    number: int
    lanes: int
    shared: bool


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
    one, those of a section have a part of the programs each. Columns that
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
    own, own_heads = mask.batch * visits.shape[1], visits.shape[1]
    heavy, plane = heavy.view(own, nb), torch.arange(own, device=device)[:, None]
    if own == planes:
        part = plane.div(section, rounding_mode="floor").clamp(max=sections - 1) + 1
        group, apart = torch.where(heavy, 0, part).flatten(), sections
        count, lanes_first, lanes_later = apart + 1, programs, programs
        later = torch.arange(count, device=device) > 0
    else:
        place = place.view(batch, heads, nb)[: mask.batch, :own_heads].reshape(own, nb)
        group, apart, count = (2 * plane + ~heavy).flatten(), own, 2 * own
        # planes that are under way at the same time: of all, the heavy columns
        lanes_first = programs // planes
        lanes_later = programs // _side_by_side(planes, section)
        later = torch.arange(count, device=device) % 2 > 0
    lanes_first, lanes_later = (max(n // in_block, 1) for n in (lanes_first, lanes_later))
    queue = torch.argsort(group * max(order.numel(), 1) + place.flatten())
    bounds = torch.searchsorted(group[queue], torch.arange(count + 1, device=device))
    lanes = torch.where(later, lanes_later, lanes_first)
    table = torch.stack((bounds[:-1], bounds[1:], lanes, later), 1).to(torch.int32)
    return Groups(queue.to(torch.int32), table, count, lanes_later * apart, own < planes)


@usable_in_training
def pieces_of_programs(
    mask: BlockMask,
    groups: Groups,
    lanes: torch.Tensor,
    batch: int,
    heads: int,
    section: int,
    tile: int,
    programs: int,
) -> torch.Tensor:
    """Which tiles of keys each program takes, and in which order.

    Parameters
    ----------
    groups : as `groups_of_columns` makes them with the same arguments
    lanes : int32 `[n]`
        Which of those that run at once each column of `groups.queue` is.

    Returns
    -------
    int32 `[programs + 1 + batch * heads * tiles]`
        Where the tiles of each program begin, behind these numbers, and where the last ones end;
        then entries `plane * tiles + tile`.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0, 0], [1, 1, 1]]).bool(), 64)
    >>> groups = groups_of_columns(mask, torch.arange(3), 1, 1, 1, 1, 64, 2)
    >>> pieces_of_programs(mask, groups, torch.tensor([0, 1, 1]), 1, 1, 1, 64, 2).tolist()
    [0, 1, 3, 0, 1, 2]
    """
    nb, in_block, tiles = mask.grid[1], mask.block_size[1] // tile, -(-mask.seq_lengths[1] // tile)
    planes, columns, device = batch * heads, groups.queue.numel(), lanes.device

    def of_planes(x: torch.Tensor) -> torch.Tensor:
        """Numbers of the queue, by planes and columns: those of a mask for all that share it."""
        by_column = torch.empty_like(x)
        by_column[groups.queue.long()] = x
        by_column = by_column.view(mask.batch, columns // max(mask.batch * nb, 1), nb)
        return by_column.expand(batch, heads, nb).reshape(planes, nb, 1)

    position = torch.arange(columns, device=device)
    group = groups.table[torch.searchsorted(groups.table[:, 1].contiguous(), position, right=True)]
    side, plane = _side_by_side(planes, section), torch.arange(planes, device=device)[:, None, None]
    later, lane = of_planes(group[:, 3]).long(), of_planes(lanes).long()
    if groups.shared:
        in_round = torch.where(later > 0, plane % side, plane)
        lane = lane + in_round * of_planes(group[:, 2])
        later = later * planes + torch.where(later > 0, plane // side, plane)
    tile_in_block = torch.arange(in_block, device=device)
    # more planes than programs take turns with them
    program = (lane * in_block + tile_in_block) % programs
    kv_tile = torch.arange(nb, device=device)[:, None] * in_block + tile_in_block
    program = torch.where(kv_tile < tiles, program, programs).flatten()
    place = ((later * columns + of_planes(position)).expand(planes, nb, in_block)).flatten()
    taken = torch.argsort(program * (2 * planes * max(columns, 1)) + place, stable=True)
    bounds = torch.searchsorted(program[taken], torch.arange(programs + 1, device=device))
    entry = (plane * tiles + kv_tile).flatten()[taken][: planes * tiles]
    return torch.cat((bounds, entry)).to(torch.int32)


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
    waits only for tiles that come earlier in `order`, or that have earlier `times`. Built on the
    device of the mask, without waiting for it.

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


def _side_by_side(planes: int, section: int) -> int:
    """Planes with a mask in common that run at once: as many in each round, if possible."""
    return -(-planes // -(-planes // section)) if planes else 1


def _places(order: torch.Tensor, tiles: int) -> torch.Tensor:
    """Where each tile of a plane comes in `order`, int64 `[planes, tiles]`."""
    place = torch.empty_like(order, dtype=torch.int64)
    place[order.long()] = torch.arange(order.numel(), device=order.device)
    return place.view(order.numel() // max(tiles, 1), tiles)
