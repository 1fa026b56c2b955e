"""Masks from functions and from other masks: evaluation, intersection, union, selection, pictures.

Works on the blocks of the grid, and on bits only where a block is partial. Waits for the device.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import check_has_data, message
from ..core.errors import InvalidInput, InvalidType
from . import bits as bit_masks
from .block_lists import lists_from_blocks
from .check import check_block_size, check_count, check_seq_lengths, existing_bits
from .flex import evaluate

if TYPE_CHECKING:
    from .block_mask import BlockMask

# Of (batch, head, query, key), as for FlexAttention.
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Entries of a table of blocks that are not rows of a pool of bits.
FULL, ABSENT = -1, -2


def from_function(
    cls: type["BlockMask"],
    mask_mod: MaskMod,
    seq_lengths: Any,
    block_size: Any,
    batch: int,
    heads: int,
    device: torch.device | str,
) -> "BlockMask":
    """See `BlockMask.from_function`."""
    op = "BlockMask.from_function"
    if not callable(mask_mod):
        got = type(mask_mod).__name__
        expected = "a function of (b, h, q, kv)"
        raise InvalidType(message(op, "mask_mod", "is not callable", expected, got))
    seq, block = check_seq_lengths(op, seq_lengths), check_block_size(op, block_size)
    masks = check_count(op, "batch", batch) * check_count(op, "heads", heads)
    mb, nb = (-(-n // size) for n, size in zip(seq, block, strict=True))
    rows = torch.arange(masks * mb, device=device).repeat_interleave(nb)
    cols = torch.arange(nb, device=device).repeat(masks * mb)
    check_has_data(op, "the mask", rows)
    shown, exists = evaluate(op, mask_mod, rows, cols, heads, mb, seq, block)
    some = (shown != 0).flatten(1).any(1)
    full = (shown == exists).flatten(1).all(1) & some
    rows, cols, shown, full = rows[some], cols[some], shown[some], full[some]
    pool, ids = bit_masks.deduplicate(shown[~full])
    bits_id = torch.full_like(cols, FULL)
    bits_id[~full] = ids.long()
    lists = lists_from_blocks(rows, cols, bits_id, masks * mb, nb)
    return cls._from_parts(lists, pool, batch, heads, seq, block)


def block_table(mask: "BlockMask", batch: int, heads: int) -> torch.Tensor:
    """int64 [batch, heads, Mb, Nb]: row of the pool, FULL or ABSENT."""
    mb, nb = mask.grid
    rows = mask.batch * mask.heads * mb
    table = torch.full((rows, nb), ABSENT, device=mask.device)
    lists = mask.forward
    table[lists.row_indices(), lists.indices.long()] = lists.bits_id.long()
    return table.view(mask.batch, mask.heads, mb, nb).expand(batch, heads, mb, nb)


def combined(a: "BlockMask", b: Any, symbol: str) -> "BlockMask":
    """`a & b` or `a | b`; either may broadcast along the batch and the heads."""
    op = f"BlockMask {symbol} BlockMask"
    # a mask that was made without lengths takes the lengths of the other
    if a._fits(*b.seq_lengths):
        a = a.for_lengths(*b.seq_lengths)
    elif b._fits(*a.seq_lengths):
        b = b.for_lengths(*a.seq_lengths)
    for arg, x, y in (("seq_lengths", a.seq_lengths, b.seq_lengths),
                      ("block_size", a.block_size, b.block_size),
                      ("device", a.device, b.device)):  # fmt: skip
        if x != y:
            raise InvalidInput(message(op, arg, "differ", "two masks alike", f"{x} and {y}"))
    sizes = []
    for arg, n, m in (("batch", a.batch, b.batch), ("heads", a.heads, b.heads)):
        if n != m and 1 not in (n, m):
            raise InvalidInput(message(op, arg, "differ", "equal numbers, or 1", f"{n} and {m}"))
        sizes.append(max(n, m))
    batch, heads = sizes
    of_a, of_b = (block_table(x, batch, heads).flatten(0, 2) for x in (a, b))
    seq, block = a.seq_lengths, a.block_size
    mb, nb = a.grid
    if symbol == "&":
        kept = (of_a != ABSENT) & (of_b != ABSENT)
        whole = (of_a == FULL) & (of_b == FULL)
    else:
        kept = (of_a != ABSENT) | (of_b != ABSENT)
        whole = (of_a == FULL) | (of_b == FULL)
    rows, cols = torch.nonzero(kept & ~whole, as_tuple=True)
    q_block = rows % max(mb, 1)
    exists = existing_bits(seq[0] - q_block * block[0], seq[1] - cols * block[1], block)
    first = _bits_of(of_a[rows, cols], a.bits, exists)
    second = _bits_of(of_b[rows, cols], b.bits, exists)
    shown = first & second if symbol == "&" else first | second
    some = (shown != 0).flatten(1).any(1)
    full = (shown == exists).flatten(1).all(1) & some
    pool, ids = bit_masks.deduplicate(shown[some & ~full])
    bits_id = torch.full_like(cols, FULL)
    bits_id[some & ~full] = ids.long()
    full_rows, full_cols = torch.nonzero(whole, as_tuple=True)
    lists = lists_from_blocks(
        torch.cat([full_rows, rows[some]]),
        torch.cat([full_cols, cols[some]]),
        torch.cat([torch.full_like(full_cols, FULL), bits_id[some]]),
        batch * heads * mb,
        nb,
    )
    any_length = a._any_length and b._any_length
    return type(a)._from_parts(lists, pool, batch, heads, seq, block, any_length=any_length)


def _bits_of(entries: torch.Tensor, pool: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """Bits of blocks by their entries in a table."""
    shown = torch.where((entries == FULL).view(-1, 1, 1), exists, 0)
    partial = entries >= 0
    shown[partial] = pool[entries[partial]]
    return shown


def selected(mask: "BlockMask", index: Any) -> "BlockMask":
    """The masks of some batches and heads; an int keeps its dimension, with size 1."""
    op = "BlockMask[...]"
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > 2:
        expected = "[batch] or [batch, head], each an int, a slice or a list of ints"
        raise InvalidInput(message(op, "index", "has too many dimensions", expected, len(parts)))
    batch_part, head_part = (*parts, slice(None), slice(None))[:2]
    batches, heads = _numbers(op, batch_part, mask.batch), _numbers(op, head_part, mask.heads)
    table = block_table(mask, mask.batch, mask.heads)[batches][:, heads]
    batch, count, mb, nb = table.shape
    if batch * count == 0:
        raise InvalidInput(message(op, "index", "selects nothing", "at least one mask", index))
    flat = table.flatten(0, 2)
    rows, cols = torch.nonzero(flat != ABSENT, as_tuple=True)
    bits_id = flat[rows, cols]
    used, renamed = torch.unique(bits_id[bits_id >= 0], return_inverse=True)
    bits_id[bits_id >= 0] = renamed
    lists = lists_from_blocks(rows, cols, bits_id, batch * count * mb, nb)
    sizes = (batch, count, mask.seq_lengths, mask.block_size)
    any_length = mask._any_length
    return type(mask)._from_parts(lists, mask.bits[used], *sizes, any_length=any_length)


def _numbers(op: str, part: Any, size: int) -> list[int]:
    if isinstance(part, slice):
        # by numbers, because tensors do not take negative steps
        return list(range(size)[part])
    numbers = part if isinstance(part, list) else [part]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            expected, got = "an int, a slice or a list of ints", type(number).__name__
            raise InvalidType(message(op, "index", "is of a wrong type", expected, got))
        if not -size <= number < size:
            raise IndexError(message(op, "index", "is out of range", f"0 to {size - 1}", number))
    return numbers


def to_svg(mask: "BlockMask", batch: int, head: int, pixels: int) -> str:
    """See `BlockMask.to_svg`."""
    for arg, index in (("batch", batch), ("head", head)):
        if not isinstance(index, int) or isinstance(index, bool):
            got = type(index).__name__
            raise InvalidType(message("BlockMask.to_svg", arg, "is not an int", "int", got))
    one = selected(mask, (batch, head))
    lists = one.forward
    mb, nb = one.grid
    side = max(1, pixels // max(mb, nb, 1))
    rows, cols = lists.row_indices().tolist(), lists.indices.tolist()
    colours = {True: "#7fa8d9", False: "#1f4e8c"}
    squares = [
        f'<rect x="{col * side}" y="{row * side}" width="{side}" height="{side}" '
        f'fill="{colours[bits >= 0]}"/>'
        for row, col, bits in zip(rows, cols, lists.bits_id.tolist(), strict=True)
    ]
    width, height = nb * side, mb * side
    (sq, sk), (bq, bk) = one.seq_lengths, one.block_size
    title = (
        f"{sq} queries (down) and {sk} keys (across) in blocks of {bq} x {bk}: "
        f"{100 * one.density:.1f} % kept; light blocks are partial"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#f2f2f2"/>',
            *squares,
            "</svg>",
            "",
        ]
    )
