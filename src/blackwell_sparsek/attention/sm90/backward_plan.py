"""In which order the Hopper backward adds up dq under a mask: lists that are made once for each."""

from typing import NamedTuple

import torch

from ...core.arch import arch_of
from ...launch.launcher import unrecorded
from ...masks.band import EVERYTHING, Band
from ...masks.block_mask import BlockMask
from ...masks.derived_lists import derived_list
from ...masks.order import longest_columns_first
from ...masks.turns import Groups, groups_of_columns, pieces_of_programs, turns_of_blocks


class Columns(NamedTuple):
    """What `block_order.longest_columns_first` takes besides the mask."""

    batch: int
    heads: int
    """Of the keys."""
    group_size: int
    band: Band
    section: int
    tile: int


class Walk(NamedTuple):
    """How queries are visited: blocks that fill a tile, parts that columns go through together."""

    pack: int
    parts: int


class PlannedSums(NamedTuple):
    """Lists for `bwd_sm90_launch`: tiles of keys, turns and visits, None where there are none."""

    order: torch.Tensor
    turns: torch.Tensor | None
    visits: torch.Tensor | None


def planned_sums(mask: BlockMask, columns: Columns, walk: Walk, deterministic: bool) -> PlannedSums:
    """The lists of a call; without `deterministic` only an order."""
    if not deterministic:
        return PlannedSums(_order(mask, columns), None, None)
    visits = None
    if columns.band == EVERYTHING:
        visits = derived_list(mask, _visits, columns, walk)
        order = derived_list(mask, _pieces, columns, walk)
    else:
        # a band may cut lists, which have to be in order for that
        order = _order(mask, columns)
    return PlannedSums(order, derived_list(mask, _turns, columns, walk), visits)


def _order(mask: BlockMask, columns: Columns) -> torch.Tensor:
    return derived_list(mask, longest_columns_first, *columns)


def _visits(mask: BlockMask, columns: Columns, walk: Walk) -> torch.Tensor:
    """Rows of one number for each head that shares a list: int32 `[n, heads]`.

    The query blocks that columns visit, one row for each of the lists, then when they do, then
    which columns follow each other.
    """
    from .backward_visits import plan_visits

    assert columns.band == EVERYTHING, columns.band
    groups = _groups(mask, columns)
    with unrecorded():
        visits, times, lanes = plan_visits(mask, groups, columns.group_size, *walk)
    lanes = torch.nn.functional.pad(lanes, (0, -lanes.numel() % len(visits)))
    return torch.cat((visits.t(), times.t(), lanes.view(-1, len(visits))))


def _groups(mask: BlockMask, columns: Columns) -> Groups:
    batch, heads, group_size, _, section, tile = columns
    programs = arch_of(mask.device).num_sms
    order = _order(mask, columns)
    return groups_of_columns(mask, order, batch, heads, group_size, section, tile, programs)


def _pieces(mask: BlockMask, columns: Columns, walk: Walk) -> torch.Tensor:
    """Which tiles of keys each program takes."""
    groups, programs = _groups(mask, columns), arch_of(mask.device).num_sms
    visits = derived_list(mask, _visits, columns, walk)
    lanes = visits[2 * mask.transposed.indices.numel() :].flatten()[: groups.queue.numel()]
    batch, heads, _, _, section, tile = columns
    return pieces_of_programs(mask, groups, lanes, batch, heads, section, tile, programs)


def _turns(mask: BlockMask, columns: Columns, walk: Walk) -> torch.Tensor:
    """When each tile of keys adds to the gradients of queries."""
    _, heads, group_size, band, _, tile = columns
    args = (mask, _order(mask, columns), heads, group_size, band, tile)
    if band != EVERYTHING:
        return turns_of_blocks(*args)
    nnz = mask.transposed.indices.numel()
    plan = derived_list(mask, _visits, columns, walk)
    plan = plan[: 2 * nnz].view(2, nnz, plan.shape[1])
    return torch.stack([turns_of_blocks(*args, *of_head) for of_head in plan.unbind(2)], 1)
