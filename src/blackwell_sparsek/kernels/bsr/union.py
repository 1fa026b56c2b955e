"""Three block rows walked together: which columns any of them has, and which of them has it.

Made once for a pattern; the product then follows it whatever the values are.
"""

from typing import NamedTuple

import torch

from .config_union_sm90 import MEMBERS
from .pack import pack_pattern


class UnionRows(NamedTuple):
    """Groups of MEMBERS neighbouring block rows of one pattern.

    Attributes
    ----------
    indptr : int32 [groups + 1], where the entries of each group begin
    entries : int32 [n, 1 + MEMBERS], block column, and the stored block of each row or -1
    own : int32 [blocks], the entries that each member row has, one member after the other
    ranks : int32 [MEMBERS, n + 1], how far into `own` a member is at each entry
    """

    indptr: torch.Tensor
    entries: torch.Tensor
    own: torch.Tensor
    ranks: torch.Tensor


def union_rows(
    indptr: torch.Tensor, indices: torch.Tensor, perm: torch.Tensor | None, cols_b: int
) -> UnionRows:
    """Group the rows of a pattern; synchronises to learn how many columns they have together.

    Parameters
    ----------
    indptr, indices : int32 [rows_b + 1], [nnzb], of the orientation whose rows are computed
    perm : int32 [nnzb], the stored block behind each entry; None where that is the entry itself
    cols_b : block columns

    Examples
    --------
    >>> indptr, indices = torch.tensor([0, 2, 3, 3, 4]), torch.tensor([0, 5, 5, 1])
    >>> union = union_rows(indptr.int(), indices.int(), None, 8)
    >>> union.entries.tolist()
    [[0, 0, -1, -1], [5, 1, 2, -1], [1, 3, -1, -1]]
    >>> union.own.tolist(), union.ranks.tolist()
    ([0, 1, 2, 1], [[0, 1, 2, 3], [3, 3, 4, 4], [4, 4, 4, 4]])
    """
    together = pack_pattern(indptr, indices, cols_b, MEMBERS)
    present = together.source >= 0
    blocks = together.source
    if perm is not None and perm.numel():
        blocks = torch.where(present, perm[blocks.clamp(min=0).long()], -1)
    entries = torch.cat([together.indices[:, None], blocks], dim=1).contiguous()
    by_member = present.T
    own = by_member.nonzero()[:, 1].to(torch.int32)
    counts = torch.nn.functional.pad(by_member.cumsum(1), (1, 0))
    before = torch.nn.functional.pad(counts[:-1, -1].cumsum(0), (1, 0))
    return UnionRows(together.indptr, entries, own, (counts + before[:, None]).to(torch.int32))
