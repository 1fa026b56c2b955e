"""Conversion of FlexAttention's block masks."""

from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import check_shape, message
from ..core.errors import InvalidInput, InvalidType
from ..launch.launcher import cdiv
from . import bits as bit_masks
from .bits import empty_pool
from .block_lists import lists_from_blocks
from .check import IntPair, check_block_size, check_seq_lengths, existing_bits

if TYPE_CHECKING:
    from .block_mask import BlockMask

OP = "BlockMask.from_flex"
# elements of partial blocks for which mask_mod is evaluated at a time
CHUNK_ELEMENTS = 1 << 22


def from_flex(cls: "type[BlockMask]", flex_mask: Any) -> "BlockMask":
    """See `BlockMask.from_flex`."""
    # a slow import that only users of FlexAttention should pay for
    from torch.nn.attention import flex_attention as flex

    if not isinstance(flex_mask, flex.BlockMask):
        wanted = "torch.nn.attention.flex_attention.BlockMask"
        got = type(flex_mask).__name__
        raise InvalidType(message(OP, "flex_mask", "is of a wrong type", wanted, got))
    block = check_block_size(OP, tuple(flex_mask.BLOCK_SIZE))
    seq = check_seq_lengths(OP, tuple(flex_mask.seq_lengths))
    mb, nb = cdiv(seq[0], block[0]), cdiv(seq[1], block[1])
    if flex_mask.kv_num_blocks.dim() != 3:
        shape = list(flex_mask.kv_num_blocks.shape)
        raise InvalidInput(message(OP, "kv_num_blocks", "has a wrong rank", "[B, H, Mb]", shape))
    batch, heads, _ = flex_mask.kv_num_blocks.shape

    kv_rows, kv_cols = _listed("kv", flex_mask.kv_num_blocks, flex_mask.kv_indices, mb, nb)
    full_rows, full_cols = kv_rows[:0], kv_cols[:0]
    full_num, full_indices = flex_mask.full_kv_num_blocks, flex_mask.full_kv_indices
    if full_num is not None and full_indices is not None:
        full_rows, full_cols = _listed("full_kv", full_num, full_indices, mb, nb)
    rows, cols = torch.cat([kv_rows, full_rows]), torch.cat([kv_cols, full_cols])
    _check_listed_once(rows, cols, nb)

    bits_id = torch.full_like(cols, -1)
    pool = empty_pool(block, cols.device)
    mask_mod = flex_mask.mask_mod
    if mask_mod is not None and mask_mod is not flex.noop_mask:
        bits, exists = evaluate(OP, mask_mod, kv_rows, kv_cols, heads, mb, seq, block)
        is_full, is_empty = (bits == exists).flatten(1).all(1), (bits == 0).flatten(1).all(1)
        partial = torch.nonzero(~is_full & ~is_empty).flatten()
        pool, ids = bit_masks.deduplicate(bits[partial])
        bits_id[partial] = ids.to(bits_id.dtype)
        seen = torch.ones_like(cols, dtype=torch.bool)
        seen[: is_empty.numel()] = ~is_empty
        rows, cols, bits_id = rows[seen], cols[seen], bits_id[seen]
    lists = lists_from_blocks(rows, cols, bits_id, batch * heads * mb, nb)
    return cls._from_parts(lists, pool, batch, heads, seq, block)


def _listed(
    name: str, num_blocks: torch.Tensor, indices: torch.Tensor, mb: int, nb: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column, int64, of the entries that count: the first `num_blocks` of each row."""
    batch, heads = num_blocks.shape[:2]
    check_shape(OP, f"{name}_num_blocks", num_blocks, [batch, heads, mb])
    check_shape(OP, f"{name}_indices", indices, [batch, heads, mb, indices.shape[-1]])
    capacity = indices.shape[-1]
    counts = num_blocks.flatten()
    wrong = torch.nonzero((counts < 0) | (counts > capacity)).flatten().tolist()
    if wrong:
        where = f"{name}_num_blocks (row {wrong[0]})"
        got = int(counts[wrong[0]])
        raise InvalidInput(message(OP, where, "is out of range", f"0 .. {capacity}", got))
    slots = torch.arange(capacity, device=indices.device)
    rows, entries = torch.nonzero(slots < counts.unsqueeze(-1), as_tuple=True)
    cols = indices.flatten(0, 2)[rows, entries].to(torch.int64)
    stray = torch.nonzero((cols < 0) | (cols >= nb)).flatten().tolist()
    if stray:
        first = stray[0]
        where = f"{name}_indices (row {int(rows[first])}, entry {int(entries[first])})"
        expected = f"0 .. {nb - 1}"
        raise InvalidInput(message(OP, where, "is out of range", expected, int(cols[first])))
    return rows, cols


def _check_listed_once(rows: torch.Tensor, cols: torch.Tensor, nb: int) -> None:
    keys, _ = torch.sort(rows * nb + cols)
    again = torch.nonzero(keys[1:] == keys[:-1]).flatten().tolist()
    if again:
        row, col = divmod(int(keys[again[0]]), nb)
        raise InvalidInput(
            message(OP, "kv_indices", "repeat a block", "each once", f"row {row}, block {col}")
        )


def evaluate(
    op: str,
    mask_mod: Any,
    rows: torch.Tensor,
    cols: torch.Tensor,
    heads: int,
    mb: int,
    seq: IntPair,
    block: IntPair,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of `mask_mod` on the given blocks, and bits of the elements that exist there."""
    from torch.nn.attention.flex_attention import create_mask

    bq, bk = block
    mask_index, q_block = rows // max(mb, 1), rows % max(mb, 1)
    exists = existing_bits(seq[0] - q_block * bq, seq[1] - cols * bk, block)
    bits = torch.empty_like(exists)
    step = max(1, CHUNK_ELEMENTS // (bq * bk))
    for start in range(0, rows.numel(), step):
        part = slice(start, min(start + step, rows.numel()))
        b, h = mask_index[part] // heads, mask_index[part] % heads
        q0, k0 = q_block[part] * bq, cols[part] * bk

        def on_block(
            _: torch.Tensor,
            entry: torch.Tensor,
            i: torch.Tensor,
            j: torch.Tensor,
            places: tuple[torch.Tensor, ...] = (b, h, q0, k0),
        ) -> torch.Tensor:
            batch, head, q_start, k_start = (x[entry] for x in places)
            # mask_mods index tensors by position, so they must not get a position past the end
            q_pos = (q_start + i).clamp(max=seq[0] - 1)
            seen = mask_mod(batch, head, q_pos, (k_start + j).clamp(max=seq[1] - 1))
            _check_seen(op, seen)
            return seen

        count = part.stop - part.start
        shown = create_mask(on_block, 1, count, bq, bk, device=str(rows.device))
        bits[part] = bit_masks.pack(shown[0]) & exists[part]
    return bits, exists


def _check_seen(op: str, seen: Any) -> None:
    """A `mask_mod` must return one bool: the bits of another number would mask wrong elements."""
    expected = "one bool without dimensions, such as q >= kv"
    if not isinstance(seen, torch.Tensor):
        got = type(seen).__name__
        raise InvalidType(message(op, "mask_mod", "does not return a tensor", expected, got))
    if seen.dtype != torch.bool:
        raise InvalidType(message(op, "mask_mod", "returns a wrong dtype", expected, seen.dtype))
    if seen.dim():
        shape = list(seen.shape)
        raise InvalidInput(message(op, "mask_mod", "returns a wrong shape", expected, shape))
