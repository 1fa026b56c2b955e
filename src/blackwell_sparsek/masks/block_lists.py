"""Lists of blocks, row by row: the tensors that hold a block mask in one direction."""

from typing import NamedTuple

import torch

from ..core.errors import Unsupported
from ..core.torch_state import usable_in_training


class BlockLists(NamedTuple):
    """The blocks of each row: partial blocks first, then full ones, each group ascending.

    Attributes
    ----------
    indptr : int32 `[rows + 1]`
        Row r owns the entries `indptr[r] .. indptr[r + 1]`.
    partial_end : int32 `[rows]`
        The entries `indptr[r] .. partial_end[r]` are partial, the rest full.
    indices : int32 `[nnz]`
        Block column of each entry.
    bits_id : int32 `[nnz]`
        Row of the bit pool for a partial block, -1 for a full one.
    """

    indptr: torch.Tensor
    partial_end: torch.Tensor
    indices: torch.Tensor
    bits_id: torch.Tensor

    def row_indices(self) -> torch.Tensor:
        """Row of each entry, int64 `[nnz]`; the number of rows for one that no row owns.

        Does not wait for the device.
        """
        entry = torch.arange(self.indices.numel(), dtype=torch.int32, device=self.indptr.device)
        return torch.searchsorted(self.indptr[1:].contiguous(), entry, right=True)


def entries_listed(lists: BlockLists) -> BlockLists:
    """The same lists without spare entries, which no row owns. Waits for the device.

    They stay where they are: CUDA graphs and recorded launches may have their addresses.
    """
    count = int(lists.indptr[-1])
    return lists._replace(indices=lists.indices[:count], bits_id=lists.bits_id[:count])


def check_entry_count(count: int) -> None:
    """Raise if there are too many entries to count in int32."""
    if count >= 2**31:
        raise Unsupported(f"BlockMask: has {count} blocks; at most 2**31 - 1 can be listed")


def lists_from_blocks(
    rows: torch.Tensor, cols: torch.Tensor, bits_id: torch.Tensor, num_rows: int, num_cols: int
) -> BlockLists:
    """Lists of distinct blocks in any order; all int64 `[nnz]`, `bits_id` -1 for full blocks."""
    group = rows * 2 + (bits_id < 0)
    order = torch.argsort(group * max(num_cols, 1) + cols)
    return lists_from_sorted(group[order], cols[order], bits_id[order], num_rows)


def lists_from_sorted(
    group: torch.Tensor, cols: torch.Tensor, bits_id: torch.Tensor, num_rows: int
) -> BlockLists:
    """Lists of blocks that are already sorted; `group` is 2 * row + (1 if full)."""
    check_entry_count(cols.numel())
    probes = torch.arange(2 * num_rows + 1, device=cols.device, dtype=group.dtype)
    bounds = torch.searchsorted(group, probes).to(torch.int32)
    return BlockLists(
        bounds[::2].contiguous(),
        # a view of one element would be misaligned, and kernels would be compiled again for it
        bounds[1::2].clone(),
        cols.to(torch.int32),
        bits_id.to(torch.int32),
    )


@usable_in_training
def transpose_lists(lists: BlockLists, masks: int, mb: int, nb: int) -> BlockLists:
    """The lists of `masks` masks of `mb` x `nb` blocks, seen from their columns.

    Entries that no row owns come last, where no column owns them.
    """
    # small keys sort several times faster
    key_dtype = torch.int32 if 2 * masks * nb < 2**31 else torch.int64
    rows = lists.row_indices()
    mask = rows.div(max(mb, 1), rounding_mode="floor")
    q_block = (rows - mask * mb).to(torch.int32)
    group = (mask * nb + lists.indices) * 2 + (lists.bits_id < 0)
    group = torch.where(rows < masks * mb, group, 2 * masks * nb).to(key_dtype)
    # rows ascend within each column and kind, so a stable sort leaves the query blocks ascending
    group, order = torch.sort(group, stable=True)
    return lists_from_sorted(group, q_block[order], lists.bits_id[order], masks * nb)
