"""Ordered accumulation of dq under a block mask: which KV tiles add to which query block when.

Each KV tile has a rank for each query block that it sees: how many KV tiles add to its dq before
(`block_ranks`). Ranks follow the order in which tiles are taken, so that a tile waits for earlier
ones only. Without a band they follow planned times instead, at which columns of the mask visit
query blocks (`dq_order_kernel`): groups of columns are planned independently, and in each as many
columns run at once as it has lanes. Every program then takes the columns of one lane of each group,
group after group, and visits blocks in the order of their times. A tile waits for an earlier time
of the same group: of all visits that are left, the earliest of the first group waits for none, so
that programs make progress as long as all of them are resident.

All lists are built once for a mask and kept with it (`derived_list`).
"""

from typing import NamedTuple

import torch

from ...core.arch import arch_of
from ...core.torch_state import usable_in_training
from ...launch.recording import unrecorded
from ...masks.band import EVERYTHING, Band
from ...masks.block_mask import BlockMask
from ...masks.derived_lists import derived_list
from ...masks.order import blocks_in_band, longest_columns_first


class Columns(NamedTuple):
    """The arguments of `longest_columns_first` besides the mask."""

    batch: int
    heads: int
    """KV heads."""
    group_size: int
    band: Band
    raster_group: int
    tile: int


class Walk(NamedTuple):
    """How queries are visited: blocks that fill a tile, parts that columns go through together."""

    pack: int
    parts: int


class DqOrder(NamedTuple):
    """Lists for `launch_attn_bwd_sm90`: KV tiles, ranks and visits, None where there are none."""

    order: torch.Tensor | None
    ranks: torch.Tensor | None
    visits: torch.Tensor | None


def dq_order(mask: BlockMask, columns: Columns, walk: Walk, deterministic: bool) -> DqOrder:
    """The lists of a call; without `deterministic` only an order."""
    if not deterministic:
        return DqOrder(_order(mask, columns), None, None)
    visits = None
    if columns.band == EVERYTHING:
        visits = derived_list(mask, _visits, columns, walk)
        order = derived_list(mask, _tiles, columns, walk)
    else:
        # a band may cut lists, which have to be in order for that
        order = _order(mask, columns)
    return DqOrder(order, derived_list(mask, _ranks, columns, walk), visits)


def _order(mask: BlockMask, columns: Columns) -> torch.Tensor:
    return derived_list(mask, longest_columns_first, *columns)


def _visits(mask: BlockMask, columns: Columns, walk: Walk) -> torch.Tensor:
    """Rows of one number for each head that shares a list: int32 `[n, heads]`.

    The query blocks that columns visit, one row for each entry of the lists, then the times at
    which they do, then the lane of each column.
    """
    from .dq_order_kernel import plan_visits

    assert columns.band == EVERYTHING, columns.band
    groups = _groups(mask, columns)
    with unrecorded():
        visits, times, lanes = plan_visits(mask, groups, columns.group_size, *walk)
    lanes = torch.nn.functional.pad(lanes, (0, -lanes.numel() % len(visits)))
    return torch.cat((visits.t(), times.t(), lanes.view(-1, len(visits))))


def _groups(mask: BlockMask, columns: Columns) -> "Groups":
    return column_groups(mask, _order(mask, columns), columns, arch_of(mask.device).num_sms)


def _tiles(mask: BlockMask, columns: Columns, walk: Walk) -> torch.Tensor:
    """Which KV tiles each program takes."""
    groups, programs = _groups(mask, columns), arch_of(mask.device).num_sms
    visits = derived_list(mask, _visits, columns, walk)
    lanes = visits[2 * mask.transposed.indices.numel() :].flatten()[: groups.queue.numel()]
    return program_tiles(mask, groups, lanes, columns, programs)


def _ranks(mask: BlockMask, columns: Columns, walk: Walk) -> torch.Tensor:
    """When each KV tile adds to the gradients of queries."""
    order = _order(mask, columns)
    if columns.band != EVERYTHING:
        return block_ranks(mask, order, columns)
    nnz = mask.transposed.indices.numel()
    plan = derived_list(mask, _visits, columns, walk)
    plan = plan[: 2 * nnz].view(2, nnz, plan.shape[1])
    by_head = [block_ranks(mask, order, columns, *of_head) for of_head in plan.unbind(2)]
    return torch.stack(by_head, 1)


class Groups(NamedTuple):
    """Columns that are planned together; `n` counts those of all (batch, KV head) of a mask.

    queue : int32 `[n]`, entries `batch_head * Nb + column`, by group
    table : int32 `[number, 4]`, rows of `GroupRow`
    number : groups
    lanes : columns that run at once in all groups together, about
    shared : several (batch, head) share a mask, and each has its part of the programs
    """

    queue: torch.Tensor
    table: torch.Tensor
    number: int
    lanes: int
    shared: bool


class GroupRow(NamedTuple):
    """One row of `Groups.table`; as columns of it, all of a kind."""

    begin: torch.Tensor
    """First place in the queue."""
    end: torch.Tensor
    lanes: torch.Tensor
    """Columns that run at once."""
    later: torch.Tensor
    """1 where ranks come after those of all groups that have 0."""


@usable_in_training
def column_groups(mask: BlockMask, order: torch.Tensor, columns: Columns, programs: int) -> Groups:
    """Columns in the order in which `programs` take them, and which of them run together.

    Where every (batch, head) has a mask of its own, those are the columns of a raster group. Where
    several share one, those of a raster group have a part of the programs each. Columns that
    `longest_columns_first` puts before all raster groups are a group of their own.

    Parameters
    ----------
    order : as for `block_ranks`; the band of `columns` plays no part

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool(), 64)
    >>> columns = Columns(1, 1, 1, EVERYTHING, raster_group=1, tile=64)
    >>> groups = column_groups(mask, torch.arange(5), columns, 132)
    >>> groups.queue.tolist(), groups.table.tolist()
    ([0, 1, 2, 3, 4], [[0, 0, 132, 0], [0, 5, 132, 1]])
    """
    batch, heads, group_size, _, raster_group, tile = columns
    (_, nb), in_block, device = mask.grid, mask.block_size[1] // tile, order.device
    batch_heads = batch * heads
    raster_groups = max(batch_heads // raster_group, 1)
    place = _places(order, -(-mask.seq_lengths[1] // tile))[:, ::in_block]
    lists = mask.transposed
    visits = (lists.indptr[1:] - lists.indptr[:-1]).view(mask.batch, mask.heads, nb)
    if mask.heads > 1:
        visits = visits.view(mask.batch, heads, group_size, nb).sum(2)
    # as `longest_columns_first` has it
    heavy = visits.to(torch.int64) * visits.numel() > 2 * visits.sum()
    own, own_heads = mask.batch * visits.shape[1], visits.shape[1]
    heavy, batch_head = heavy.view(own, nb), torch.arange(own, device=device)[:, None]
    if own == batch_heads:
        part = batch_head.div(raster_group, rounding_mode="floor").clamp(max=raster_groups - 1) + 1
        group, separate = torch.where(heavy, 0, part).flatten(), raster_groups
        count, lanes_first, lanes_later = separate + 1, programs, programs
        later = torch.arange(count, device=device) > 0
    else:
        place = place.view(batch, heads, nb)[: mask.batch, :own_heads].reshape(own, nb)
        group, separate, count = (2 * batch_head + ~heavy).flatten(), own, 2 * own
        # each (batch, head) under way has a part of the programs; heavy columns are of all of them
        lanes_first = programs // batch_heads
        lanes_later = programs // _side_by_side(batch_heads, raster_group)
        later = torch.arange(count, device=device) % 2 > 0
    lanes_first, lanes_later = (max(n // in_block, 1) for n in (lanes_first, lanes_later))
    queue = torch.argsort(group * max(order.numel(), 1) + place.flatten())
    bounds = torch.searchsorted(group[queue], torch.arange(count + 1, device=device))
    lanes = torch.where(later, lanes_later, lanes_first)
    rows = GroupRow(bounds[:-1], bounds[1:], lanes, later)
    table = torch.stack(rows, 1).to(torch.int32)
    return Groups(queue.to(torch.int32), table, count, lanes_later * separate, own < batch_heads)


@usable_in_training
def program_tiles(
    mask: BlockMask, groups: Groups, lanes: torch.Tensor, columns: Columns, programs: int
) -> torch.Tensor:
    """Which KV tiles each program takes, and in which order.

    Parameters
    ----------
    groups : as `column_groups` makes them with the same arguments
    lanes : int32 `[n]`
        Which of those that run at once each column of `groups.queue` is.

    Returns
    -------
    int32 `[programs + 1 + batch * heads * tiles]`
        Where the tiles of each program begin, behind these numbers, and where the last ones end;
        then entries `batch_head * tiles + tile`.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0, 0], [1, 1, 1]]).bool(), 64)
    >>> columns = Columns(1, 1, 1, EVERYTHING, raster_group=1, tile=64)
    >>> groups = column_groups(mask, torch.arange(3), columns, 2)
    >>> program_tiles(mask, groups, torch.tensor([0, 1, 1]), columns, 2).tolist()
    [0, 1, 3, 0, 1, 2]
    """
    batch, heads, _, _, raster_group, tile = columns
    nb, in_block, tiles = mask.grid[1], mask.block_size[1] // tile, -(-mask.seq_lengths[1] // tile)
    batch_heads, entries, device = batch * heads, groups.queue.numel(), lanes.device

    def of_batch_heads(x: torch.Tensor) -> torch.Tensor:
        """Numbers of the queue by (batch, head) and column: one mask serves all who share it."""
        by_column = torch.empty_like(x)
        by_column[groups.queue.long()] = x
        by_column = by_column.view(mask.batch, entries // max(mask.batch * nb, 1), nb)
        return by_column.expand(batch, heads, nb).reshape(batch_heads, nb, 1)

    position = torch.arange(entries, device=device)
    ends = GroupRow(*groups.table.unbind(1)).end.contiguous()
    row = groups.table[torch.searchsorted(ends, position, right=True)]
    group = GroupRow(*row.unbind(1))
    side = _side_by_side(batch_heads, raster_group)
    batch_head = torch.arange(batch_heads, device=device)[:, None, None]
    later, lane = of_batch_heads(group.later).long(), of_batch_heads(lanes).long()
    if groups.shared:
        in_round = torch.where(later > 0, batch_head % side, batch_head)
        lane = lane + in_round * of_batch_heads(group.lanes)
        later = later * batch_heads + torch.where(later > 0, batch_head // side, batch_head)
    tile_in_block = torch.arange(in_block, device=device)
    # where there are more (batch, head) than programs, several lanes share a program
    program = (lane * in_block + tile_in_block) % programs
    kv_tile = torch.arange(nb, device=device)[:, None] * in_block + tile_in_block
    program = torch.where(kv_tile < tiles, program, programs).flatten()
    place = later * entries + of_batch_heads(position)
    place = place.expand(batch_heads, nb, in_block).flatten()
    taken = torch.argsort(program * (2 * batch_heads * max(entries, 1)) + place, stable=True)
    bounds = torch.searchsorted(program[taken], torch.arange(programs + 1, device=device))
    entry = (batch_head * tiles + kv_tile).flatten()[taken][: batch_heads * tiles]
    return torch.cat((bounds, entry)).to(torch.int32)


@usable_in_training
def block_ranks(
    mask: BlockMask,
    order: torch.Tensor,
    columns: Columns,
    blocks: torch.Tensor | None = None,
    times: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each KV tile that sees a block of queries, how many of those come before it.

    KV tiles that add to dq by these ranks add in the same order in every run, and wait only for
    tiles that come earlier in `order`, or that have earlier `times`. Built on the device of the
    mask, without waiting for it.

    Parameters
    ----------
    order : int32 `[batch * heads * tiles]`
        KV tiles as `longest_columns_first` gives them, with the same arguments.
    columns : Columns
        Its `tile` divides the width of a block; batch and raster group play no part.
    blocks : int32 `[nnz]`, optional
        Query blocks of the transposed lists, where they come in another order within columns.
    times : int32 `[nnz]`, optional
        When they are visited; ranks are in this order, not in that of tiles.

    Returns
    -------
    int32 `[nnz, block width / tile]`
        For each entry of the transposed lists and each tile of its column; 0 for a tile that the
        band hides from the block.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0], [1, 1]]).bool(), 64)
    >>> columns = Columns(1, 1, 1, EVERYTHING, raster_group=1, tile=64)
    >>> block_ranks(mask, torch.tensor([1, 0]), columns).tolist()
    [[0], [1], [0]]
    """
    (mb, nb), lists, tile = mask.grid, mask.transposed, columns.tile
    tiles, in_block = -(-mask.seq_lengths[1] // tile), mask.block_size[1] // tile
    device = order.device
    place = _places(order, tiles)
    row = lists.row_indices()
    mask_row, column = row // max(nb, 1), row % max(nb, 1)
    # where several (batch, head) share a mask, any will do: their tiles are in the same order
    batch_head = mask_row // mask.heads * columns.heads
    if mask.heads > 1:
        batch_head = batch_head + mask_row % mask.heads // columns.group_size
    kv_tile = column[:, None] * in_block + torch.arange(in_block, device=device)
    left, right = columns.band.scalars()
    lo, hi = blocks_in_band(mask.seq_lengths[::-1], (tile, mask.block_size[0]), right, left, device)
    exists = kv_tile < tiles
    kv_tile = kv_tile.clamp(max=max(tiles - 1, 0))
    block = (lists.indices if blocks is None else blocks)[:, None].long()
    seen = exists & (block >= lo[kv_tile]) & (block < hi[kv_tile])
    # entries that no tile waits for come after all others
    rows = mask.batch * mask.heads * mb
    group = torch.where(seen, mask_row[:, None] * mb + block, rows).flatten()
    if times is None:
        key = group * max(order.numel(), 1) + place[batch_head[:, None], kv_tile].flatten()
    else:
        key = group * 2**31 + times[:, None].expand_as(kv_tile).flatten()
    sorted_place = torch.argsort(key, stable=True)
    group = group[sorted_place]
    rank = torch.arange(group.numel(), device=device) - torch.searchsorted(group, group)
    ranks = torch.empty_like(rank, dtype=torch.int32)
    ranks[sorted_place] = rank.to(torch.int32)
    return ranks.view(-1, in_block) * seen


def _side_by_side(batch_heads: int, raster_group: int) -> int:
    """How many that share a mask run at once: as many in each round, if possible."""
    return -(-batch_heads // -(-batch_heads // raster_group)) if batch_heads else 1


def _places(order: torch.Tensor, tiles: int) -> torch.Tensor:
    """Where each tile of a (batch, head) comes in `order`, int64 `[batch * heads, tiles]`."""
    place = torch.empty_like(order, dtype=torch.int64)
    place[order.long()] = torch.arange(order.numel(), device=order.device)
    return place.view(order.numel() // max(tiles, 1), tiles)
