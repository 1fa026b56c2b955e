"""Which two block rows work together, sharing columns of the dense operand.

Two programs of a cluster take a row each. What of X both need is fetched once for both, so rows
with many columns in common are paired, and those columns come first in both rows.
"""

from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.apart import made_apart

# Numbers that describe one row of a pair.
PAIR_FIELDS = 8
_PAIRS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class PairPlan:
    """The work list of pairs of rows.

    Attributes
    ----------
    items : int32 [2 * n_items, PAIR_FIELDS]
        Two rows each: (row, begin, end, shared, most, 0, 0, 0): places begin ... end - 1 of `cols`
        and `entries`, the first `shared` of which both rows have; `most` of both lengths. A row
        of -1 stands for the missing one of an odd number.
    cols, entries : int32 [nnz]
        Block column, and block, at each place.
    """

    items: torch.Tensor
    cols: torch.Tensor
    entries: torch.Tensor
    n_slots: int = 0

    @property
    def n_items(self) -> int:
        """Pairs."""
        return self.items.shape[0] // 2

    @property
    def n_split_rows(self) -> int:
        """No row is cut."""
        return 0


def row_pairs(indptr: torch.Tensor, indices: torch.Tensor, cols_b: int) -> PairPlan:
    """The pairs of a pattern, from the cache where they were asked for before."""
    plan = _PAIRS.get(indptr)
    if plan is None:
        plan = made_apart(lambda: build_row_pairs(indptr, indices, cols_b), indptr.device)
        _PAIRS[indptr] = plan
    return plan


def build_row_pairs(indptr: torch.Tensor, indices: torch.Tensor, cols_b: int) -> PairPlan:
    """Pair rows by what they have in common."""
    device = indptr.device
    rows = indptr.numel() - 1
    lengths = torch.diff(indptr).long()
    nnz = int(indptr[-1])
    indices = indices[:nnz].long()
    row = torch.repeat_interleave(torch.arange(rows, device=device), lengths)
    present = torch.zeros((rows + rows % 2, cols_b), device=device)
    present[row, indices] = 1
    common = present @ present.T
    padded = torch.nn.functional.pad(lengths, (0, rows % 2))
    partner = _matched(common - 0.5 * (padded[:, None] - padded[None, :]).abs())
    shared = present[partner[row], indices] > 0
    order = torch.argsort(row * 2 * cols_b + (~shared) * cols_b + indices)
    ends = torch.nn.functional.pad(indptr[1:].long(), (0, rows % 2))
    begins = ends - padded
    every = torch.arange(rows + rows % 2, device=device)
    first = every[every < partner]
    most = torch.maximum(padded[first], padded[partner[first]])
    first = first[torch.argsort(most, descending=True, stable=True)]
    pairs = torch.stack([first, partner[first]], 1).flatten()
    number = torch.where(pairs < rows, pairs, -1)
    count = common[pairs, partner[pairs]].long()
    most = torch.maximum(padded[pairs], padded[partner[pairs]])
    zero = torch.zeros_like(pairs)
    fields = [number, begins[pairs], ends[pairs], count, most, zero, zero, zero]
    items = torch.stack(fields, 1).int()
    return PairPlan(items, indices[order].int(), order.int())


def _matched(gain: torch.Tensor) -> torch.Tensor:
    """For each row its partner, pairs of the highest gain first."""
    rows = gain.shape[0]
    upper = torch.triu_indices(rows, rows, 1)
    order = torch.argsort(gain.cpu()[upper[0], upper[1]], descending=True, stable=True)
    partner = [-1] * rows
    for a, b in zip(upper[0][order].tolist(), upper[1][order].tolist(), strict=True):
        if partner[a] < 0 and partner[b] < 0:
            partner[a], partner[b] = b, a
    return torch.tensor(partner, device=gain.device)
