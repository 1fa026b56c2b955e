"""Which program of a BSR product multiplies which blocks.

A product with one program per block row takes as long as its longest row. The plan cuts long rows
into parts of at most `chunk` blocks and lists all parts, longest first, so that the last programs
to start are the short ones. Parts of a cut row write fp32 partial sums to slots of a workspace; a
second pass adds them in order, so the result does not depend on timing.
"""

from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..launch.workspace import made_outside_pool

# Plans, keyed by the row pointers that they were made from: operators see tensors, not the pattern.
# These tensors are immutable and live as long as their pattern.
_PLANS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class SpmmPlan:
    """The work list of one pattern in one orientation.

    Attributes
    ----------
    items : int32 [n_items, 4]
        (row, begin, end, slot): blocks begin ... end - 1 of block row `row`. Slot -1 is a whole
        row, whose program writes the output; any other is a part, whose program writes its sum to
        that slot. Every row has at least one item, even an empty row. Sorted by length, longest
        first. A row of -1 is padding: it has no blocks, and nothing may be written for it.
    split_rows : int32 [n_split_rows, 3]
        (row, first slot, one past the last slot) of each row that was cut; padded like `items`.
    n_slots : partial sums that the workspace holds.
    """

    items: torch.Tensor
    split_rows: torch.Tensor
    n_slots: int

    @property
    def n_items(self) -> int:
        """Rows of `items`."""
        return self.items.shape[0]

    @property
    def n_split_rows(self) -> int:
        """Rows of `split_rows`."""
        return self.split_rows.shape[0]


def spmm_plan(
    indptr: torch.Tensor, nnz_blocks: int, cols_b: int, chunk: int, bearable: int = 1
) -> SpmmPlan:
    """The plan of a pattern, cached after the first request.

    The first request synchronises. During the capture of a CUDA graph it cannot: the plan is then
    padded to its largest possible size and, being part of the graph, not cached.

    Parameters
    ----------
    indptr : int32 [rows_b + 1], of the orientation whose rows are the rows of the output
    nnz_blocks, cols_b : stored blocks and block columns, which bound the blocks of a row
    chunk : most blocks of a part
    bearable : no row is cut if the longest has at most this many times `chunk` blocks, because the
        second pass would take longer than it saves
    """
    if min(nnz_blocks, cols_b) <= chunk * bearable:
        chunk = 0  # no row can be cut, so all such chunks share a plan
    plans = _PLANS.setdefault(indptr, {})
    key = (chunk, bearable if chunk else 1)
    if key in plans:
        return plans[key]
    if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
        return build_spmm_plan(indptr, chunk, _largest_sizes(indptr, nnz_blocks, chunk))

    def make() -> SpmmPlan:
        even = chunk and bearable > 1 and int(torch.diff(indptr).max()) <= chunk * bearable
        cut = 0 if even else chunk
        return build_spmm_plan(indptr, cut, _exact_sizes(indptr, cut))

    plan = made_outside_pool(make, indptr.device)
    if indptr.is_cuda:
        # the next product with this pattern may run on another stream
        torch.cuda.current_stream(indptr.device).synchronize()
    plans[key] = plan
    return plan


def build_spmm_plan(indptr: torch.Tensor, chunk: int, sizes: tuple[int, int, int]) -> SpmmPlan:
    """Make a plan with `sizes` = (items, split rows, slots), which may be larger than exact.

    `chunk` 0 cuts no row.
    """
    n_items, n_split_rows, n_slots = sizes
    rows_b = indptr.shape[0] - 1
    device = indptr.device
    if rows_b == 0:
        empty = torch.empty((0, 4), dtype=torch.int32, device=device)
        return SpmmPlan(empty, empty[:, :3], 0)
    starts = indptr[:-1].long()
    lengths, parts = _parts(indptr, chunk)
    items_end = parts.cumsum(0)
    slots = torch.where(parts > 1, parts, 0)
    slots_end = slots.cumsum(0)

    item = torch.arange(n_items, device=device)
    row = torch.searchsorted(items_end, item, right=True)
    real = row < rows_b
    row = row.clamp(max=rows_b - 1)
    part = item - (items_end - parts)[row]
    begin = starts[row] + part * lengths[row] // parts[row]
    end = starts[row] + (part + 1) * lengths[row] // parts[row]
    slot = torch.where(parts[row] > 1, (slots_end - slots)[row] + part, -1)
    padding = zip((row, begin, end, slot), (-1, 0, 0, -1), strict=True)
    items = torch.stack([torch.where(real, x, fill) for x, fill in padding], dim=1)
    # padding goes last, because its length of -1 is below that of an empty row
    length = torch.where(real, end - begin, -1)
    items = items[torch.sort(length, descending=True, stable=True).indices].int()

    # the rows that were cut come first, in their order
    split = torch.sort((parts == 1).int(), stable=True).indices[:n_split_rows]
    split_row = torch.where(parts[split] > 1, split, -1)
    split_rows = torch.stack([split_row, (slots_end - slots)[split], slots_end[split]], dim=1)
    return SpmmPlan(items, split_rows.int(), n_slots)


def _parts(indptr: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in each row, and parts that each row is cut into (at least one)."""
    lengths = torch.diff(indptr).long()
    if chunk == 0:
        return lengths, torch.ones_like(lengths)
    return lengths, torch.div(lengths + chunk - 1, chunk, rounding_mode="floor").clamp(min=1)


def _exact_sizes(indptr: torch.Tensor, chunk: int) -> tuple[int, int, int]:
    """(items, split rows, slots); synchronises if a row may be cut."""
    rows_b = indptr.shape[0] - 1
    if chunk == 0 or rows_b == 0:
        return rows_b, 0, 0
    _, parts = _parts(indptr, chunk)
    split = parts > 1
    sizes = torch.stack([parts.sum(), split.sum(), torch.where(split, parts, 0).sum()])
    n_items, n_split_rows, n_slots = sizes.tolist()
    return n_items, n_split_rows, n_slots


def _largest_sizes(indptr: torch.Tensor, nnz_blocks: int, chunk: int) -> tuple[int, int, int]:
    """Upper bounds of `_exact_sizes` that do not read the contents."""
    rows_b = indptr.shape[0] - 1
    if chunk == 0 or rows_b == 0:
        return rows_b, 0, 0
    # a row of n blocks has at most 1 + n // chunk parts, and is cut only if n > chunk
    n_split_rows = min(rows_b, nnz_blocks // (chunk + 1))
    extra = nnz_blocks // chunk
    return rows_b + extra, n_split_rows, n_split_rows + extra
