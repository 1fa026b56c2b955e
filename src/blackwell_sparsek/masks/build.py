"""How block masks are made from, and turned back into, other descriptions of a mask."""

from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import check_dtype, check_has_data, check_tensor, message
from ..core.errors import InvalidInput
from ..launch.launcher import cdiv
from . import bits as bit_masks
from .block_lists import BlockLists, lists_from_blocks, transpose_lists
from .check import IntPair, check_block_size, check_lists, check_seq_lengths
from .device_build import (
    MAX_ROOM,
    MAX_SPREAD,
    kept_again,
    kept_key,
    kept_lists,
    kernels_build,
    no_bits,
    transposed_lists,
)

if TYPE_CHECKING:
    from .block_mask import BlockMask


def empty_pool(block: IntPair, device: torch.device) -> torch.Tensor:
    """A pool of no bit masks."""
    shape = (0, block[0], bit_masks.words_per_row(block[1]))
    return torch.empty(shape, dtype=torch.int32, device=device)


def check_lists_are_tensors(op: str, indptr: Any, indices: Any) -> None:
    """The two lists that others are derived from."""
    for arg, x in (("indptr", indptr), ("indices", indices)):
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, [torch.int32])
        if x.dim() != 1:
            raise InvalidInput(message(op, arg, "has a wrong rank", "[n]", list(x.shape)))


def _as_planes(op: str, arg: str, x: Any, layout: str) -> torch.Tensor:
    """View a bool tensor of rank 2 to 4 as `[B, H, rows, columns]`."""
    check_tensor(op, arg, x)
    check_dtype(op, arg, x, [torch.bool])
    check_has_data(op, arg, x)
    if not 2 <= x.dim() <= 4:
        raise InvalidInput(message(op, arg, "has a wrong rank", layout, list(x.shape)))
    planes: torch.Tensor = x.detach()
    return planes if x.dim() == 4 else planes[(None,) * (4 - x.dim())]


def from_dense(
    cls: "type[BlockMask]",
    keep: torch.Tensor,
    block_size: int | IntPair,
    seq_lengths: int | IntPair | None,
) -> "BlockMask":
    """See `BlockMask.from_dense`."""
    op = "BlockMask.from_dense"
    key = kept_key(keep, block_size, seq_lengths)
    if (again := kept_again(key, keep)) is not None:
        listed, (no_pool, batch, heads, seq, block) = again
        return cls._from_parts(listed, no_pool, batch, heads, seq, block, exact=False)
    keep = _as_planes(op, "keep", keep, "[B or 1, H or 1, Mb, Nb]")
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
    if kernels_build(keep.device, keep) and 0 < keep.numel() <= MAX_ROOM:
        no_pool = no_bits(block, keep.device)
        listed = kept_lists(keep, keep.numel(), key, (no_pool, batch, heads, seq, block))
        return cls._from_parts(listed, no_pool, batch, heads, seq, block, exact=False)
    rows, cols = torch.nonzero(keep.flatten(0, 2), as_tuple=True)
    full = torch.full_like(cols, -1)
    lists = lists_from_blocks(rows, cols, full, batch * heads * mb, nb)
    return cls._from_parts(lists, empty_pool(block, keep.device), batch, heads, seq, block)


def from_element_mask(
    cls: "type[BlockMask]", visible: torch.Tensor, block_size: int | IntPair
) -> "BlockMask":
    """See `BlockMask.from_element_mask`."""
    op = "BlockMask.from_element_mask"
    visible = _as_planes(op, "visible", visible, "[B or 1, H or 1, Sq, Sk]")
    bq, bk = block = check_block_size(op, block_size)
    batch, heads, sq, sk = visible.shape
    seq = check_seq_lengths(op, (sq, sk))
    mb, nb = cdiv(sq, bq), cdiv(sk, bk)
    padded = torch.nn.functional.pad(visible, (0, nb * bk - sk, 0, mb * bq - sq))
    tiles = padded.reshape(batch * heads * mb, bq, nb, bk)
    counts = tiles.sum((1, 3))
    rows, cols = torch.nonzero(counts, as_tuple=True)
    full = counts[rows, cols] == existing_elements(rows % max(mb, 1), cols, seq, block)
    partial = torch.nonzero(~full).flatten()
    packed = bit_masks.pack(tiles[rows[partial], :, cols[partial]])
    pool, ids = bit_masks.deduplicate(packed)
    bits_id = torch.full_like(cols, -1)
    bits_id[partial] = ids.long()
    lists = lists_from_blocks(rows, cols, bits_id, batch * heads * mb, nb)
    return cls._from_parts(lists, pool, batch, heads, seq, block)


def may_have_room(mask: "BlockMask") -> bool:
    """Whether lists of unknown origin may be those that `from_dense` gives room for all blocks."""
    indices, (mb, nb) = mask._listed.indices, mask.grid
    # sizes of traced lists may be unknown, and nobody traces what was made by kernels
    plain = indices.is_cuda and not torch.compiler.is_compiling() and type(indices) is torch.Tensor
    return plain and indices.numel() == mask.batch * mask.heads * mb * nb


def transposed(mask: "BlockMask") -> BlockLists:
    """See `BlockMask._listed_transposed`."""
    planes, (mb, nb), lists = mask.batch * mask.heads, mask.grid, mask._listed
    by_kernels = kernels_build(mask.device, *lists)
    if by_kernels and lists.indices.numel() > 0 and planes * mb * nb <= MAX_SPREAD:
        return transposed_lists(lists, planes, (mb, nb), all_full=mask.bits.shape[0] == 0)
    return transpose_lists(mask.forward, planes, mb, nb)


def validate(mask: "BlockMask", transposed: BlockLists | None) -> None:
    """See `BlockMask.validate`."""
    planes, sizes = mask.batch * mask.heads, (mask.seq_lengths, mask.block_size)
    check_lists("BlockMask", mask.forward, mask.bits, planes, *sizes)
    if transposed is None:
        return
    expected = transpose_lists(mask.forward, planes, *mask.grid)
    if not all(map(torch.equal, expected, mask.transposed)):
        raise InvalidInput("BlockMask: transposed lists do not agree with the forward lists")


def same_masks(mask: "BlockMask", other: "BlockMask") -> bool:
    """See `BlockMask.equals`."""
    sizes = [(x.seq_lengths, x.block_size, x.batch, x.heads) for x in (mask, other)]
    if sizes[0] != sizes[1]:
        return False
    a, b = mask.forward, other.forward
    if not all(map(torch.equal, a[:3], b[:3])):
        return False
    partial = a.bits_id >= 0
    return torch.equal(mask.bits[a.bits_id[partial]], other.bits[b.bits_id[partial]])


def to_dense(mask: "BlockMask") -> torch.Tensor:
    """See `BlockMask.to_dense`."""
    mb, nb = mask.grid
    keep = torch.zeros(mask.batch * mask.heads * mb, nb, dtype=torch.bool, device=mask.device)
    keep[mask.forward.row_indices(), mask.forward.indices.long()] = True
    return keep.view(mask.batch, mask.heads, mb, nb)


def existing_elements(
    q_blocks: torch.Tensor, kv_blocks: torch.Tensor, seq: IntPair, block: IntPair
) -> torch.Tensor:
    """How many elements of each block lie within the sequences."""
    height = (seq[0] - q_blocks * block[0]).clamp(max=block[0])
    width = (seq[1] - kv_blocks * block[1]).clamp(max=block[1])
    return height * width


def to_element_mask(mask: "BlockMask") -> torch.Tensor:
    """See `BlockMask.to_element_mask`."""
    (sq, sk), (bq, bk) = mask.seq_lengths, mask.block_size
    mb, nb = mask.grid
    planes = mask.batch * mask.heads
    tiles = torch.zeros(planes * mb, nb, bq, bk, dtype=torch.bool, device=mask.device)
    rows, cols = mask.forward.row_indices(), mask.forward.indices.long()
    partial = mask.forward.bits_id >= 0
    tiles[rows[~partial], cols[~partial]] = True
    shown = bit_masks.unpack(mask.bits[mask.forward.bits_id[partial]], bk)
    tiles[rows[partial], cols[partial]] = shown
    elements = tiles.view(planes, mb, nb, bq, bk).transpose(2, 3)
    elements = elements.reshape(mask.batch, mask.heads, mb * bq, nb * bk)
    return elements[..., :sq, :sk].contiguous()
