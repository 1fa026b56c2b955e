"""Checks of block masks: sizes on the host, and every index that a kernel would follow."""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.checks import (
    check_dtype,
    check_has_data,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput, InvalidType
from ..launch.launcher import cdiv
from . import bits as bit_masks
from .block_lists import BlockLists

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Sides that kernels can tile; the same for both, so that a mask can always be transposed."""

IntPair = tuple[int, int]


def check_block_size(op: str, block_size: Any) -> IntPair:
    """Normalise `block_size`, an int or (bq, bk)."""
    pair = _int_pair(op, "block_size", block_size)
    for side in pair:
        if side not in BLOCK_SIZES:
            allowed = ", ".join(map(str, BLOCK_SIZES))
            raise InvalidInput(
                message(op, "block_size", "is unsupported", f"sides among {allowed}", pair)
            )
    return pair


def check_seq_lengths(op: str, seq_lengths: Any) -> IntPair:
    """Normalise `seq_lengths`, an int or (Sq, Sk)."""
    pair = _int_pair(op, "seq_lengths", seq_lengths)
    if min(pair) < 0 or max(pair) >= 2**30:
        raise InvalidInput(message(op, "seq_lengths", "is out of range", "0 .. 2**30 - 1", pair))
    return pair


def check_count(
    op: str, arg: str, value: Any, at_least: int = 0, at_most: int | None = None
) -> int:
    """Check that `value` is a plain int from `at_least` to `at_most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidType(message(op, arg, "is not an int", "int", type(value).__name__))
    if value < at_least:
        raise InvalidInput(message(op, arg, "is too small", f"at least {at_least}", value))
    if at_most is not None and value > at_most:
        raise InvalidInput(message(op, arg, "is too large", f"at most {at_most}", value))
    return value


def check_made_for(op: str, made_for: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise unless a mask of `[B, H, Sq, Sk]` fits a problem; a B or H of 1 broadcasts."""
    fits = all(made in (1, want) for made, want in zip(made_for[:2], wanted[:2], strict=True))
    if not fits or tuple(made_for[2:]) != tuple(wanted[2:]):
        batch, heads, sq, sk = wanted
        expected = f"[1 or {batch}, 1 or {heads}, {sq}, {sk}]"
        if 1 < made_for[1] < heads and heads % made_for[1] == 0:
            group = heads // made_for[1]
            expected += f" (of a mask per KV head: mask[:, [h // {group} for h in range({heads})]])"
        problem = f"was made for [B, H, Sq, Sk] = {list(made_for)}"
        raise InvalidInput(message(op, "block_mask", problem, expected, list(made_for)))


def _int_pair(op: str, arg: str, value: Any) -> IntPair:
    pair = value if isinstance(value, (tuple, list, torch.Size)) else (value, value)
    if len(pair) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) for x in pair):
        raise InvalidType(message(op, arg, "is malformed", "an int or a pair of ints", value))
    return pair[0], pair[1]


def check_lists(
    op: str, lists: BlockLists, bits: torch.Tensor, masks: int, seq: IntPair, block: IntPair
) -> None:
    """Check every invariant of `lists` and `bits`: shape, order, range. Waits for the device.

    `seq` and `block` are lengths and block sides in (row, column) order of these lists.
    """
    rows_per_mask, num_cols = cdiv(seq[0], block[0]), cdiv(seq[1], block[1])
    check_layout(op, lists, bits, masks * rows_per_mask, block)
    check_has_data(op, "indptr", lists.indptr)
    _check_pointers(op, lists)
    _check_entries(op, lists, bits.shape[0], num_cols)
    _check_edges(op, lists, bits, rows_per_mask, seq, block)


def check_layout(op: str, lists: BlockLists, bits: torch.Tensor, rows: int, block: IntPair) -> None:
    """Check types, devices and shapes, which tensors without data have as well."""
    named = {**lists._asdict(), "bits": bits}
    for arg, x in named.items():
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, [torch.int32])
    check_same_device(op, named)
    check_shape(op, "indptr", lists.indptr, [rows + 1])
    check_shape(op, "partial_end", lists.partial_end, [rows])
    check_shape(op, "indices", lists.indices, [lists.indices.numel()])
    check_shape(op, "bits_id", lists.bits_id, [lists.indices.numel()])
    tail = [block[0], bit_masks.words_per_row(block[1])]
    if bits.dim() != 3 or list(bits.shape[1:]) != tail:
        raise InvalidInput(
            message(op, "bits", "has a wrong shape", ["pool", *tail], list(bits.shape))
        )


def _first_violation(conditions: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """(which condition, first index where it is True), with a single wait for the device."""
    # with a False in front, an argmax of 0 means "nowhere", for empty conditions too
    firsts = [
        torch.nn.functional.pad(c.flatten().to(torch.int32), (1, 0)).argmax() - 1
        for c in conditions
    ]
    for which, first in enumerate(torch.stack(firsts).tolist()):
        if first >= 0:
            return which, first
    return None


def _check_pointers(op: str, lists: BlockLists) -> None:
    indptr, partial_end = lists.indptr, lists.partial_end
    nnz = lists.indices.numel()
    conditions = [
        indptr[:1] != 0,
        indptr[1:] < indptr[:-1],
        indptr[-1:] != nnz,
        (partial_end < indptr[:-1]) | (partial_end > indptr[1:]),
    ]
    found = _first_violation(conditions)
    if found is None:
        return
    which, row = found
    if which == 0:
        raise InvalidInput(message(op, "indptr[0]", "is wrong", 0, int(indptr[0])))
    if which == 2:
        last = f"indptr[{indptr.numel() - 1}]"
        raise InvalidInput(message(op, last, "is not the number of entries", nnz, int(indptr[-1])))
    lo, hi = int(indptr[row]), int(indptr[row + 1])
    if which == 1:
        raise InvalidInput(message(op, f"indptr[{row + 1}]", "falls", f"at least {lo}", hi))
    raise InvalidInput(
        message(
            op,
            f"partial_end[{row}]",
            "leaves its row",
            f"{lo} .. {hi}",
            int(partial_end[row]),
        )
    )


def _check_entries(op: str, lists: BlockLists, pool: int, num_cols: int) -> None:
    indices, bits_id = lists.indices, lists.bits_id
    if indices.numel() == 0:
        return
    rows = lists.row_indices()
    entries = torch.arange(indices.numel(), device=indices.device)
    is_partial = entries < lists.partial_end[rows]
    same_group = (rows[1:] == rows[:-1]) & (is_partial[1:] == is_partial[:-1])
    conditions = [
        (indices < 0) | (indices >= num_cols),
        same_group & (indices[1:] <= indices[:-1]),
        is_partial & ((bits_id < 0) | (bits_id >= pool)),
        ~is_partial & (bits_id != -1),
    ]
    found = _first_violation(conditions)
    if found is None:
        _check_no_repeat(op, rows, indices, num_cols)
        return
    which, entry = found
    entry += which == 1
    where = f"(entry {entry}, row {int(rows[entry])})"
    if which == 0:
        expected, problem = f"0 .. {num_cols - 1}", "is out of range"
    elif which == 1:
        expected, problem = f"more than {int(indices[entry - 1])}", "does not ascend"
    elif which == 2:
        expected, problem = f"0 .. {pool - 1} of the pool for a partial block", "is out of range"
    else:
        expected, problem = "-1 for a full block", "is wrong"
    arg, x = ("indices", indices) if which < 2 else ("bits_id", bits_id)
    raise InvalidInput(message(op, f"{arg} {where}", problem, expected, int(x[entry])))


def _check_no_repeat(op: str, rows: torch.Tensor, indices: torch.Tensor, num_cols: int) -> None:
    """Find a block that is listed as partial and as full; within a kind, blocks ascend already."""
    keys, order = torch.sort(rows * num_cols + indices, stable=True)
    found = _first_violation([keys[1:] == keys[:-1]])
    if found is not None:
        entry = int(order[found[1] + 1])
        where = f"(entry {entry}, row {int(rows[entry])})"
        got = f"block {int(indices[entry])} twice"
        raise InvalidInput(
            message(op, f"indices {where}", "is partial and full", "each block once", got)
        )


def _check_edges(
    op: str,
    lists: BlockLists,
    bits: torch.Tensor,
    rows_per_mask: int,
    seq: IntPair,
    block: IntPair,
) -> None:
    """Raise if a bit is set for an element that does not exist."""
    bq, bk = block
    whole = torch.tensor([bq], device=bits.device), torch.tensor([bk], device=bits.device)
    # a row of 16 columns leaves half of its word unused
    found = _first_violation([_any_stray(bits, existing_bits(*whole, block))])
    if found is not None:
        raise InvalidInput(
            message(op, f"bits[{found[1]}]", "sets unused bits", f"{bk} bits in a row", "more")
        )
    rows = lists.row_indices()
    rows_left = seq[0] - rows % max(rows_per_mask, 1) * bq
    cols_left = seq[1] - lists.indices.to(torch.int64) * bk
    at_edge = (lists.bits_id >= 0) & ((rows_left < bq) | (cols_left < bk))
    edge = torch.nonzero(at_edge).flatten()
    exists = existing_bits(rows_left[edge], cols_left[edge], block)
    found = _first_violation([_any_stray(bits[lists.bits_id[edge]], exists)])
    if found is not None:
        entry = int(edge[found[1]])
        where = f"(entry {entry}, row {int(rows[entry])})"
        expected = f"zeros past the lengths {seq}"
        raise InvalidInput(
            message(op, f"bits {where}", "show elements that do not exist", expected, "ones")
        )


def _any_stray(bits: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    return ((bits & ~exists) != 0).flatten(1).any(1)


def existing_bits(rows_left: torch.Tensor, cols_left: torch.Tensor, block: IntPair) -> torch.Tensor:
    """Bits of existing elements of blocks with this many rows and columns left, int64 `[n]`."""
    i = torch.arange(block[0], device=rows_left.device)
    hi = torch.where(i < rows_left.unsqueeze(-1), cols_left.unsqueeze(-1), 0)
    return bit_masks.from_intervals(torch.zeros_like(hi), hi, block[1])
