"""Block rows that hold equally many blocks, so that one batched product serves them all.

Finding them needs the row counts on the host: one synchronisation on a GPU, once per pattern,
since the result is kept as long as the pattern's tensor lives.
"""

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class RowGroup(NamedTuple):
    """Rows with the same count of entries; `entries` [rows, count] are positions in the pattern."""

    rows: list[int]
    row_ids: torch.Tensor
    entries: torch.Tensor


_groups_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def row_groups(indptr: torch.Tensor) -> list[RowGroup]:
    """The rows of `indptr` [rows + 1] that are not empty, grouped by their count."""
    if indptr not in _groups_of:
        _groups_of[indptr] = _find_groups(indptr.long())
    groups: list[RowGroup] = _groups_of[indptr]
    return groups


def _find_groups(indptr: torch.Tensor) -> list[RowGroup]:
    counts, order = torch.sort(indptr.diff(), stable=True)
    distinct, sizes = torch.unique_consecutive(counts, return_counts=True)
    groups = []
    for count, row_ids in zip(distinct.tolist(), torch.split(order, sizes.tolist()), strict=True):
        if count > 0:
            within = torch.arange(count, device=indptr.device)
            entries = indptr[row_ids][:, None] + within
            groups.append(RowGroup(row_ids.tolist(), row_ids, entries))
    return groups


def rows_at_once(device: torch.device, elements_per_row: int) -> int:
    """How many rows to gather into one batched product.

    On a CPU a product of 128 Ki gathered elements is long against its call, and gathering one row
    at a time keeps the copy in the cache; smaller rows are batched up to 4 MiB. On a GPU launches
    are what costs, and 256 MiB of scratch is the bound.
    """
    if device.type == "cpu":
        return 1 if elements_per_row >= 2**17 else 2**20 // max(1, elements_per_row)
    return max(1, 2**26 // max(1, elements_per_row))


def columns_at_once(device: torch.device, elements_per_column: int) -> int:
    """How many columns of the dense operand to gather for one row: the same bounds."""
    limit = 2**21 if device.type == "cpu" else 2**26
    return max(64, limit // max(1, elements_per_column))
