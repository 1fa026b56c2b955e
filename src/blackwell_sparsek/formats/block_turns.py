"""In which turn each tile of keys adds to what it gives a block of queries, under a block mask.

Turns follow the order of tiles alone: who waits for a turn waits for tiles that come earlier.
"""

import torch

from .band import Band
from .bits import usable_in_training
from .block_mask import BlockMask
from .block_order import blocks_in_band


@usable_in_training
def turns_of_blocks(
    mask: BlockMask,
    order: torch.Tensor,
    heads: int,
    group_size: int,
    band: Band,
    tile: int,
    blocks: torch.Tensor | None = None,
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
    key = group * max(order.numel(), 1) + place[plane[:, None], kv_tile].flatten()
    sorted_place = torch.argsort(key)
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
