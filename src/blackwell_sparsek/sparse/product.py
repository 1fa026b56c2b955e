"""The blocks of a product of two block-sparse matrices, and the pairs of blocks behind each."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .pattern import BSRPattern


class PairLists(NamedTuple):
    """Triples of blocks (first, second, out) with out += first @ second, indexed by each role.

    `first`, `second`, `out` are int32 [pairs]. `order_x` lists the pairs sorted by their block in
    role x, and block i of that role owns order_x[ptr_x[i]] ... order_x[ptr_x[i + 1] - 1].
    All three orders are kept because each role is the result of some derivative.
    """

    first: torch.Tensor
    second: torch.Tensor
    out: torch.Tensor
    order_out: torch.Tensor
    ptr_out: torch.Tensor
    order_first: torch.Tensor
    ptr_first: torch.Tensor
    order_second: torch.Tensor
    ptr_second: torch.Tensor

    def swapped(self) -> "PairLists":
        """The same triples with `first` and `second` exchanged."""
        return PairLists(
            self.second,
            self.first,
            self.out,
            *(self.order_out, self.ptr_out),
            *(self.order_second, self.ptr_second),
            *(self.order_first, self.ptr_first),
        )

    def solve_first(self) -> "PairLists":
        """Roles for `first += out @ second`."""
        return PairLists(
            self.out,
            self.second,
            self.first,
            *(self.order_first, self.ptr_first),
            *(self.order_out, self.ptr_out),
            *(self.order_second, self.ptr_second),
        )

    def solve_second(self) -> "PairLists":
        """Roles for `second += first @ out`."""
        return PairLists(
            self.first,
            self.out,
            self.second,
            *(self.order_second, self.ptr_second),
            *(self.order_first, self.ptr_first),
            *(self.order_out, self.ptr_out),
        )


def _sorted_by(role: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, order = torch.sort(role, stable=True)
    ids = torch.arange(blocks + 1, dtype=role.dtype, device=role.device)
    return order.int(), torch.searchsorted(keys, ids, out_int32=True)


def product_pattern(
    a: BSRPattern, b: BSRPattern, a_transposed: bool, b_transposed: bool
) -> tuple[BSRPattern, PairLists]:
    """The pattern of op(a) @ op(b) and its pairs, in entries of `a` and `b` as stored.

    The numbers of pairs and of blocks of the result depend on the data: this synchronizes.
    """
    a.check_unwritten()
    b.check_unwritten()
    seen_a = a.transposed() if a_transposed else a
    seen_b = b.transposed() if b_transposed else b
    # Entry e of A in block column k is multiplied with every entry of block row k of B.
    starts = seen_b.indptr[seen_a.indices.long()].long()
    partners = seen_b.indptr[seen_a.indices.long() + 1].long() - starts
    a_entries = torch.arange(seen_a.nnz_blocks, device=a.device)
    first = a_entries.repeat_interleave(partners)
    before = partners.cumsum(0) - partners
    second = torch.arange(first.shape[0], device=a.device) + (starts - before)[first]
    key = seen_a.row_indices().long()[first] * seen_b.cols_b + seen_b.indices[second]
    blocks, out = torch.unique(key, sorted=True, return_inverse=True)

    rows = torch.div(blocks, max(seen_b.cols_b, 1), rounding_mode="floor")
    counts = torch.bincount(rows, minlength=seen_a.rows_b)
    pattern = BSRPattern._from_parts(
        F.pad(counts.cumsum(0), (1, 0)).int(),
        (blocks - rows * seen_b.cols_b).int(),
        (seen_a.shape[0], seen_b.shape[1]),
        (seen_a.block_shape[0], seen_b.block_shape[1]),
    )
    if a_transposed:
        first = a.transpose_perm[first]
    if b_transposed:
        second = b.transpose_perm[second]
    first, second, out = first.int(), second.int(), out.int()
    pairs = PairLists(
        first,
        second,
        out,
        *_sorted_by(out, pattern.nnz_blocks),
        *_sorted_by(first, a.nnz_blocks),
        *_sorted_by(second, b.nnz_blocks),
    )
    return pattern, pairs
