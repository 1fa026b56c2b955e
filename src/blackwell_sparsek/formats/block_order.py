"""The order in which the rows of a block mask are taken, so that no long one comes last."""

import torch

from .band import EVERYTHING, Band
from .bits import usable_in_training
from .block_mask import BlockMask


@usable_in_training
def longest_first(
    mask: BlockMask, batch: int, heads: int, band: Band, section: int
) -> torch.Tensor:
    """Rows of a mask, broadcast to `batch` and `heads`, in the order to take them.

    Rows with more than twice the average number of visible blocks come first, wherever they are:
    one of them started late would run alone at the end. The others come section by section, since
    the keys of a section of planes are meant to stay in cache, the longest first within each.
    Among equals the order is that of `device.schedule.place_in_sections`. Built on the device of
    the mask, without waiting for it.

    Parameters
    ----------
    batch, heads : int
        Of the queries; the mask has 1 or as many of each.
    band : Band
        What else limits the visible blocks.
    section : int
        Neighbouring planes (batch * heads + head) whose rows stay together.

    Returns
    -------
    int32 `[batch * heads * Mb]`
        Entries `plane * Mb + query block`.

    Examples
    --------
    >>> mask = BlockMask.from_dense(torch.tensor([[1, 0], [1, 1], [0, 0]]).bool(), 64)
    >>> longest_first(mask, 1, 2, EVERYTHING, 2).tolist()
    [1, 4, 0, 3, 2, 5]
    """
    mb, nb = mask.grid
    planes = batch * heads
    visits = visible_blocks(mask, band)
    heavy = visits > 2 * visits.float().mean()
    # tile by tile from the last, and through all planes for each: what a stable sort keeps
    visits, heavy = (
        x.view(mask.batch, mask.heads, mb).expand(batch, heads, mb).reshape(planes, mb).t().flip(0)
        for x in (visits, heavy)
    )
    small = (planes // section + 2) * (nb + 1) < 2**31
    # small keys sort several times faster
    dtype = torch.int32 if small else torch.int64
    plane = torch.arange(planes, device=mask.device, dtype=dtype)
    group = torch.where(heavy, 0, plane.div(section, rounding_mode="floor") + 1)
    key = group * (nb + 1) + (nb - visits)
    place = torch.sort(key.flatten(), stable=True).indices
    row = mb - 1 - place.div(max(planes, 1), rounding_mode="floor")
    return (place % max(planes, 1) * mb + row).to(torch.int32)


def visible_blocks(mask: BlockMask, band: Band) -> torch.Tensor:
    """How many blocks of each row lie within the band, int32 `[batch * heads * Mb]`."""
    lists = mask.forward
    if band == EVERYTHING:
        return lists.indptr[1:] - lists.indptr[:-1]
    mb, _ = mask.grid
    lo, hi = _blocks_in_band(mask, band)
    q_block = lists.row_indices() % max(mb, 1)
    seen = (lists.indices >= lo[q_block]) & (lists.indices < hi[q_block])
    before = torch.nn.functional.pad(torch.cumsum(seen, 0, dtype=torch.int32), (1, 0))
    return before[lists.indptr[1:]] - before[lists.indptr[:-1]]


def _blocks_in_band(mask: BlockMask, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """Key blocks `[lo, hi)` that each query block sees: `band.kv_range` for all of them at once."""
    (sq, sk), (bq, bk) = mask.seq_lengths, mask.block_size
    left, right = band.scalars()
    first = torch.arange(0, sq, bq, device=mask.device)
    end = (first + bq).clamp(max=sq)
    lo = (first + (sk - sq) - left).clamp(min=0)
    hi = (end + (sk - sq) + right).clamp(max=sk)
    hi = torch.where(lo < hi, hi, lo)
    return lo // bk, torch.where(lo < hi, (hi + bk - 1) // bk, lo // bk)
