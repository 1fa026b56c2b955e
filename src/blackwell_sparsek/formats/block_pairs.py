"""Two neighbouring rows of a block mask as one piece of work that fetches shared blocks once."""

import torch

from ..core.launch import cdiv
from .bits import usable_in_training
from .block_mask import BlockMask
from .block_mask_kernels import kernels_build, ordered_by_count
from .block_order import longest

# Numbers that the table has of each pair: tiles, where they begin, those that both rows see, and
# how many more the first and the second see.
PAIR_FIELDS = 5


@usable_in_training
def paired_rows(mask: BlockMask) -> torch.Tensor:
    """Lists of tiles of two blocks for every two neighbouring rows of a mask of full blocks.

    First come tiles of which both rows see both blocks. In those that follow, the first block is
    one of the first row and the second one of the second, or the one past the last where a row has
    none left. Built on the device of the mask, without waiting for it.

    Returns
    -------
    int32 `[5 * n + 2 * entries]`, of n pairs in all masks
        Tiles of each pair `[n]`; of each pair `[n, 4]` where its tiles begin, how many both rows
        see, and how many more the first and the second see; two blocks of each tile `[entries, 2]`.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), 64)
    >>> paired_rows(mask)[:9].tolist()
    [2, 0, 1, 1, 0, 0, 1, 2, 3]
    """
    (mb, nb), lists = mask.grid, mask._listed
    count, entries = mask.batch * mask.heads * cdiv(mb, 2), lists.indices.numel()
    size, device = PAIR_FIELDS * count + 2 * entries, mask.device
    if kernels_build(device, *lists) and count and entries:
        from ..device.row_pairs import launch_row_pairs

        table = torch.empty(size, dtype=torch.int32, device=device)
        launch_row_pairs(table, lists.indptr, lists.indices, (mb, nb))
        return table
    table = torch.zeros(size, dtype=torch.int32)
    tiles, fields = table[:count], table[count : PAIR_FIELDS * count].view(count, -1)
    blocks = table[PAIR_FIELDS * count :].view(entries, 2)
    indptr, indices = lists.indptr.tolist(), lists.indices.tolist()
    for pair in range(count):
        plane, first = divmod(2 * pair, 2 * cdiv(mb, 2))
        at = [indptr[plane * mb + min(first + i, mb)] for i in range(3)]
        rows = [indices[at[0] : at[1]], indices[at[1] : at[2]]]
        both = sorted(set(rows[0]) & set(rows[1]))
        both = both[: len(both) // 2 * 2]
        alone = [[block for block in row if block not in both] for row in rows]
        fields[pair] = torch.tensor([at[0], len(both) // 2, *map(len, alone)])
        most = max(map(len, alone))
        tiles[pair] = len(both) // 2 + most
        alone = [row + [nb] * (most - len(row)) for row in alone]
        listed = list(zip(both[::2], both[1::2], strict=True)) + list(zip(*alone, strict=True))
        blocks[at[0] : at[0] + len(listed)] = torch.tensor(listed).view(-1, 2)
    return table.to(device)


@usable_in_training
def longest_pairs_first(
    mask: BlockMask, table: torch.Tensor, batch: int, heads: int, section: int
) -> torch.Tensor:
    """Pairs of rows in the order to take them, as `block_order.longest_first` orders rows.

    Parameters
    ----------
    table : as `paired_rows` makes it
    batch, heads : int
        Of the queries; the mask has 1 or as many of each.

    Returns
    -------
    int32 `[batch * heads * ceil(Mb / 2)]`
        Entries `plane * ceil(Mb / 2) + pair`.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 1], [0, 0], [0, 1], [1, 1]]).bool(), 64)
    >>> longest_pairs_first(mask, paired_rows(mask), 1, 2, 1).tolist()
    [1, 0, 3, 2]
    """
    pairs, most = cdiv(mask.grid[0], 2), mask.grid[1]
    if kernels_build(mask.device, table):
        steps = (mask.heads * pairs if mask.batch > 1 else 0, pairs if mask.heads > 1 else 0)
        sizes = (batch * heads, heads, pairs, *steps, 1, 1, 0, section, most)
        if (order := ordered_by_count(table, sizes)) is not None:
            return order
    tiles = table[: mask.batch * mask.heads * pairs].view(mask.batch, mask.heads, pairs)
    return longest(tiles.expand(batch, heads, pairs).reshape(batch * heads, pairs), most, section)
