"""The plan of paired block rows, which share copies of the dense operand X.

Two programs of a cluster take a row each (PAIRED in `spmm.py`). What both need of X is copied once
for both, so rows with many block columns in common are paired, and those columns come first in both
rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...launch.workspace import made_outside_pool

# Partners are chosen among this many rows: comparing all rows of a tall matrix would take seconds.
MATCHED_ROWS = 512

# Pairs by the row pointers they were made from, which live as long as their pattern. The same
# pointers serve a pattern with and one without `perm`.
_PAIRS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class PairedRow(NamedTuple):
    """One row of a pair, as the plan stores it and the kernel reads it."""

    block_row: Any  # -1: the missing one of an odd number of rows
    begin: Any  # places of the lists, begin ... end - 1
    end: Any
    shared: Any  # blocks, the first ones, whose columns both rows have
    longest: Any  # blocks of the longer row


PAIR_FIELDS = len(PairedRow._fields)


@dataclass(frozen=True)
class PairPlan:
    """The work list of pairs of rows.

    Attributes
    ----------
    items : int32 [2 * n_items, PAIR_FIELDS]
        The two rows of each pair as `PairedRow`, longest pairs first. The missing row of an odd
        number has no blocks.
    cols, entries : int32 [nnz]
        Block column, and stored block, at each place.
    """

    items: torch.Tensor
    cols: torch.Tensor
    entries: torch.Tensor

    @property
    def n_items(self) -> int:
        """Pairs."""
        return self.items.shape[0] // 2

    @property
    def n_slots(self) -> int:
        """No row is split, so there are no partial sums."""
        return 0


def row_pairs(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None, cols_b: int
) -> PairPlan | None:
    """The pairs of a pattern, from the cache where they were asked for before.

    The first request synchronises; None while a CUDA graph is captured, unless they exist.

    Parameters
    ----------
    indptr, indices : int32 [rows_b + 1] and [nnz], of the orientation whose rows are paired
    perm : int32 [nnz], the block behind each entry; None where blocks are stored in that order
    cols_b : block columns
    """
    plans = _PAIRS.setdefault(indptr, {})
    plan = plans.get(perm is None)
    if plan is None:
        if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        plan = made_outside_pool(
            lambda: build_row_pairs(indptr, indices, perm, cols_b), indptr.device
        )
        if indptr.is_cuda:
            # the next product with this pattern may run on another stream
            torch.cuda.current_stream(indptr.device).synchronize()
        plans[perm is None] = plan
    return plan


def build_row_pairs(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None, cols_b: int
) -> PairPlan:
    """Pair rows by what they have in common; parameters as in `row_pairs`."""
    device = indptr.device
    rows = indptr.numel() - 1
    odd = rows % 2
    nnz = int(indptr[-1])
    columns = indices[:nnz].long()
    lengths = torch.diff(indptr).long()
    row = torch.repeat_interleave(torch.arange(rows, device=device), lengths, output_size=nnz)
    present = torch.zeros((rows + odd, cols_b), dtype=torch.bool, device=device)
    present[row, columns] = True
    lengths = torch.nn.functional.pad(lengths, (0, odd))
    partner = _partners(present, lengths)

    shared = present[partner[row], columns]
    order = torch.argsort((row * 2 + (~shared).long()) * cols_b + columns)
    blocks = order if perm is None else perm[order]

    every = torch.arange(rows + odd, device=device)
    first = every[every < partner]
    longest = torch.maximum(lengths[first], lengths[partner[first]])
    first = first[torch.argsort(longest, descending=True, stable=True)]
    pairs = torch.stack([first, partner[first]], dim=1).flatten()
    other = partner[pairs]
    ends = torch.nn.functional.pad(indptr[1:].long(), (0, odd))
    common = (present[pairs] & present[other]).sum(1)
    most = torch.maximum(lengths[pairs], lengths[other])
    number = torch.where(pairs < rows, pairs, -1)
    items = PairedRow(
        block_row=number,
        begin=(ends - lengths)[pairs],
        end=ends[pairs],
        shared=common,
        longest=most,
    )
    return PairPlan(torch.stack(items, dim=1).int(), columns[order].int(), blocks.int())


def _partners(present: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The partner of each row; their number is even."""
    rows = present.shape[0]
    found = []
    for start in range(0, rows, MATCHED_ROWS):
        some = present[start : start + MATCHED_ROWS].float()
        size = lengths[start : start + MATCHED_ROWS]
        # a program waits where its partner's row is longer
        gain = some @ some.T - 0.5 * (size[:, None] - size[None, :]).abs()
        found += [start + row for row in _matched(gain.cpu())]
    return torch.tensor(found, dtype=torch.int64, device=present.device)


def _matched(gain: torch.Tensor) -> list[int]:
    """The partner of each row, matched greedily by gain."""
    count = gain.shape[0]
    one, other = torch.triu_indices(count, count, 1)
    order = torch.argsort(gain[one, other], descending=True, stable=True)
    partner = [-1] * count
    for a, b in zip(one[order].tolist(), other[order].tolist(), strict=True):
        if partner[a] < 0 and partner[b] < 0:
            partner[a], partner[b] = b, a
    return partner


def pairs_saved(density: float) -> float:
    """Share of X that random rows of this density, paired, fetch only once.

    Examples
    --------
    >>> round(pairs_saved(0.22), 2), round(pairs_saved(1.0), 2)
    (0.17, 0.5)
    """
    return 0.08 + 0.42 * density
