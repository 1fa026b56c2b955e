"""Masks from tensors of bools: one for each block, or one for each element."""

from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import check_dtype, check_has_data, check_tensor, message
from ..core.errors import InvalidInput
from ..launch.launcher import cdiv
from . import bits as bit_masks
from .block_lists import lists_from_blocks
from .check import IntPair, check_block_size, check_seq_lengths
from .device_build import MAX_LISTED_BLOCKS, MaskSizes, kept_lists, kernels_build, no_bits

if TYPE_CHECKING:
    from .block_mask import BlockMask


def from_blocks(
    cls: type["BlockMask"],
    keep: torch.Tensor,
    block_size: int | IntPair,
    seq_lengths: int | IntPair | None,
    key: tuple[Any, ...] | None,
) -> "BlockMask":
    """See `BlockMask.from_dense`; launches are recorded under `key`."""
    op = "BlockMask.from_dense"
    keep = _with_batch_and_heads(op, "keep", keep, "[B or 1, H or 1, Mb, Nb]")
    block = check_block_size(op, block_size)
    batch, heads, mb, nb = keep.shape
    given = (mb * block[0], nb * block[1]) if seq_lengths is None else seq_lengths
    seq = check_seq_lengths(op, given)
    grid = (cdiv(seq[0], block[0]), cdiv(seq[1], block[1]))
    if grid != (mb, nb):
        raise InvalidInput(
            message(
                op,
                "keep",
                f"does not match seq_lengths {seq} in blocks of {block}",
                f"{grid[0]} x {grid[1]} blocks",
                f"{mb} x {nb}",
            )
        )
    if kernels_build(keep.device, keep) and 0 < keep.numel() <= MAX_LISTED_BLOCKS:
        sizes = MaskSizes(no_bits(block, keep.device), batch, heads, seq, block)
        lists = kept_lists(keep, keep.numel(), key, sizes)
        return cls._from_parts(lists, *sizes, exact=False, any_length=seq_lengths is None)
    rows, cols = torch.nonzero(keep.flatten(0, 2), as_tuple=True)
    full = torch.full_like(cols, -1)
    lists = lists_from_blocks(rows, cols, full, batch * heads * mb, nb)
    pool = bit_masks.empty_pool(block, keep.device)
    return cls._from_parts(lists, pool, batch, heads, seq, block, any_length=seq_lengths is None)


def from_elements(
    cls: type["BlockMask"], visible: torch.Tensor, block_size: int | IntPair
) -> "BlockMask":
    """See `BlockMask.from_element_mask`."""
    op = "BlockMask.from_element_mask"
    visible = _with_batch_and_heads(op, "visible", visible, "[B or 1, H or 1, Sq, Sk]")
    bq, bk = block = check_block_size(op, block_size)
    batch, heads, sq, sk = visible.shape
    seq = check_seq_lengths(op, (sq, sk))
    mb, nb = cdiv(sq, bq), cdiv(sk, bk)
    padded = torch.nn.functional.pad(visible, (0, nb * bk - sk, 0, mb * bq - sq))
    tiles = padded.reshape(batch * heads * mb, bq, nb, bk)
    counts = tiles.sum((1, 3))
    rows, cols = torch.nonzero(counts, as_tuple=True)
    full = counts[rows, cols] == _existing_elements(rows % max(mb, 1), cols, seq, block)
    partial = torch.nonzero(~full).flatten()
    packed = bit_masks.pack(tiles[rows[partial], :, cols[partial]])
    pool, ids = bit_masks.deduplicate(packed)
    bits_id = torch.full_like(cols, -1)
    bits_id[partial] = ids.long()
    lists = lists_from_blocks(rows, cols, bits_id, batch * heads * mb, nb)
    return cls._from_parts(lists, pool, batch, heads, seq, block)


def _with_batch_and_heads(op: str, arg: str, x: Any, layout: str) -> torch.Tensor:
    """View a bool tensor of rank 2 to 4 as `[B, H, rows, columns]`."""
    check_tensor(op, arg, x)
    check_dtype(op, arg, x, [torch.bool])
    check_has_data(op, arg, x)
    if not 2 <= x.dim() <= 4:
        raise InvalidInput(message(op, arg, "has a wrong rank", layout, list(x.shape)))
    detached: torch.Tensor = x.detach()
    return detached if x.dim() == 4 else detached[(None,) * (4 - x.dim())]


def _existing_elements(
    q_blocks: torch.Tensor, kv_blocks: torch.Tensor, seq: IntPair, block: IntPair
) -> torch.Tensor:
    """How many elements of each block lie within the sequences."""
    height = (seq[0] - q_blocks * block[0]).clamp(max=block[0])
    width = (seq[1] - kv_blocks * block[1]).clamp(max=block[1])
    return height * width
