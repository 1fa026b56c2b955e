"""Masks of whole blocks with a bound on their number, made without waiting for the device."""

import torch

from ..core.launch import cdiv
from . import bits as bit_masks
from .bits import usable_in_training
from .block_lists import BlockLists
from .block_mask import BlockMask
from .block_mask_check import IntPair
from .block_mask_kernels import bounded_lists, kernels_build


@usable_in_training
def kept_blocks(
    keep: torch.Tensor, most: int, block_size: IntPair, seq_lengths: IntPair
) -> BlockMask:
    """Keep the given blocks, at most `most` in each row.

    Every row lists `most` blocks, so sizes depend on no data. Those that are not kept have no bit
    set; they are taken from the end of the row, where causality leaves them out anyway.

    Parameters
    ----------
    keep : bool `[B or 1, H or 1, Mb, Nb]`
    most : int
        At least the most blocks that any row keeps; with more of them, some are lost.
    block_size : (bq, bk)
    seq_lengths : (Sq, Sk)

    Examples
    --------
    >>> keep = torch.tensor([[True, False, False], [True, False, True]])[None, None]
    >>> mask = kept_blocks(keep, 2, (16, 16), (32, 48))
    >>> mask.nnz_blocks, mask.to_element_mask()[0, 0, ::16, ::16].int().tolist()
    (4, [[1, 0, 0], [1, 0, 1]])
    """
    batch, heads, mb, nb = keep.shape
    rows, most = batch * heads * mb, min(most, nb)
    device = keep.device
    bq, bk = block_size
    assert (mb, nb) == (cdiv(seq_lengths[0], bq), cdiv(seq_lengths[1], bk))
    pool = torch.zeros(1, bq, bit_masks.words_per_row(bk), dtype=torch.int32, device=device)
    if kernels_build(device, keep) and 0 < rows * most < 2**31:
        lists = bounded_lists(keep, most)
        return BlockMask._from_parts(lists, pool, batch, heads, seq_lengths, block_size)
    column = torch.arange(nb, device=device)
    # kept blocks first, then the others from the end
    order = torch.where(keep, column, 2 * nb - column).view(rows, nb).sort(dim=1).values[:, :most]
    kept = order < nb
    order = torch.where(kept, order + nb, 2 * nb - order).sort(dim=1).values
    kept = order >= nb
    indptr = torch.arange(rows + 1, dtype=torch.int32, device=device) * most
    lists = BlockLists(
        indptr,
        indptr[:-1] + (~kept).sum(1, dtype=torch.int32),
        torch.where(kept, order - nb, order).flatten().to(torch.int32),
        torch.where(kept, -1, 0).flatten().to(torch.int32),
    )
    return BlockMask._from_parts(lists, pool, batch, heads, seq_lengths, block_size)
