"""The blocks of each row as records that a program finds without looking anything up first.

A product of few columns is over in microseconds; every load that waits for another one shows.
Row pointers, then indices, then blocks are three round trips to memory. A record stands at an
address known from the number of the program and holds all that its program needs to ask for its
blocks.
"""

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.apart import made_apart

# Tables by the row pointers they were made from, which live as long as their pattern. The same
# pointers serve a pattern with and one without `perm`.
_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# A table may have this many slots for each stored block, and some more where there are few. Past
# that a few rows are much longer than the others, which wants a plan that cuts them.
_SLOTS_PER_BLOCK, _SPARE_SLOTS = 4, 1 << 16
# Numbers before the slots of a record: row, blocks.
HEADER = 2


class RowTable(NamedTuple):
    """The records of one pattern in one orientation.

    `records` is int32 [rows_b, HEADER + 2 * width]: row, number of blocks n, then `width` entries
    of the values, then `width` block columns, of which the first n count and the others are -1.
    Longest rows come first. `width` is the length of the longest row, at least 1.
    """

    records: torch.Tensor
    width: int


def row_table(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None
) -> RowTable | None:
    """The table of a pattern, from the cache where it was asked for before.

    The first request synchronises: the table is complete before any stream sees it, so a kernel
    may read it before kernels in front of it have finished. None where rows are too uneven for a
    table, and while a CUDA graph is captured unless the table exists.

    Parameters
    ----------
    indptr : int32 [rows_b + 1], of the orientation whose rows are the rows of the output
    indices : int32 [nnzb], block columns
    perm : int32 [nnzb] or None, which entry of the values stands behind each index
    """
    tables = _TABLES.setdefault(indptr, {})
    key = perm is None
    if key in tables:
        return tables[key]
    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    table = made_apart(lambda: build_row_table(indptr, indices, perm), indptr.device)
    if indptr.is_cuda:
        torch.cuda.current_stream(indptr.device).synchronize()
    tables[key] = table
    return table


def build_row_table(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None
) -> RowTable | None:
    """Make a table; None where rows are too uneven. Synchronises for the longest row."""
    rows_b, nnz_blocks = indptr.shape[0] - 1, indices.shape[0]
    lengths = torch.diff(indptr)
    width = int(lengths.max()) if nnz_blocks else 1
    if rows_b * width > _SLOTS_PER_BLOCK * nnz_blocks + _SPARE_SLOTS:
        return None
    rows = torch.sort(lengths, descending=True, stable=True).indices
    slot = torch.arange(width, dtype=torch.int32, device=indptr.device)
    present = slot < lengths[rows, None]
    entry = torch.where(present, indptr[rows, None] + slot, 0)
    if nnz_blocks:
        columns = torch.where(present, indices[entry], -1)
        entry = entry if perm is None else perm[entry]
    else:
        columns = torch.full_like(entry, -1)
    entries = torch.where(present, entry, -1)
    header = torch.stack([rows.int(), lengths[rows]], dim=1)
    return RowTable(torch.cat([header, entries, columns], dim=1), width)
