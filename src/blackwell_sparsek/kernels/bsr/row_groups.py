"""Which block rows work together, sharing what they need of the dense operand.

The programs of a cluster take a row each. What of X several of them need is fetched once for all of
these, and arrives in the same stage of each one's ring. So every program takes its blocks in an
order in which shared ones come at the same step for all who share them, without a gap in between.
"""

from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.apart import made_apart

# Numbers that describe one row of a group.
GROUP_FIELDS = 8
# Bits of `shares` above the programs that share a step: who fetches which half of the columns.
FETCH_BIT = 8
_GROUPS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class GroupPlan:
    """The work list of groups of rows.

    Attributes
    ----------
    items : int32 [size * n_items, GROUP_FIELDS]
        `size` rows a group: (row, begin, end, most, 0, 0, 0, 0): places begin ... end - 1 of the
        lists below; `most` is the length of the group's longest row. A row of -1 stands for one
        that is missing.
    cols, entries, shares : int32 [nnz]
        Block column, and block, at each place; the programs that share the column as bits (0: this
        one alone), and in bits 8 and 9 which halves of it this program fetches for them.
    """

    items: torch.Tensor
    cols: torch.Tensor
    entries: torch.Tensor
    shares: torch.Tensor
    size: int
    n_slots: int = 0

    @property
    def n_items(self) -> int:
        """Groups."""
        return self.items.shape[0] // self.size

    @property
    def n_split_rows(self) -> int:
        """No row is cut."""
        return 0


def row_groups(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    perm: torch.Tensor | None,
    cols_b: int,
    size: int,
) -> GroupPlan | None:
    """The groups of a pattern, from the cache where they were asked for before.

    The first request synchronises; None while a CUDA graph is captured, unless they exist.

    Parameters
    ----------
    indptr, indices : int32 [rows_b + 1] and [nnz], of the orientation whose rows are grouped
    perm : int32 [nnz], the block behind each entry; None where blocks are stored in that order
    cols_b : block columns
    size : rows of a group, 2 or 4
    """
    plans = _GROUPS.setdefault(indptr, {})
    if size not in plans:
        if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        plans[size] = made_apart(
            lambda: build_row_groups(indptr, indices, perm, cols_b, size), indptr.device
        )
        if indptr.is_cuda:
            # the next product with this pattern may run on another stream
            torch.cuda.current_stream(indptr.device).synchronize()
    return plans[size]


def build_row_groups(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    perm: torch.Tensor | None,
    cols_b: int,
    size: int,
) -> GroupPlan:
    """Group rows by what they have in common. Parameters as in `row_groups`."""
    device = indptr.device
    rows = indptr.numel() - 1
    padding = -rows % size
    lengths = torch.diff(indptr).long()
    nnz = int(indptr[-1])
    indices = indices[:nnz].long()
    row = torch.repeat_interleave(torch.arange(rows, device=device), lengths)
    present = torch.zeros((rows + padding, cols_b), dtype=torch.bool, device=device)
    present[row, indices] = True
    padded = torch.nn.functional.pad(lengths, (0, padding))
    members = torch.arange(rows + padding, device=device)[:, None]
    while members.shape[1] < size:
        members = _joined(members, present, padded)
    most = padded[members].amax(1)
    members = members[torch.argsort(most, descending=True, stable=True)]
    group = torch.empty_like(padded)
    place = torch.empty_like(padded)
    group[members] = torch.arange(members.shape[0], device=device)[:, None]
    place[members] = torch.arange(size, device=device)[None, :]

    bit = 1 << torch.arange(size, device=device)
    codes = (present[members] * bit[None, :, None]).sum(1)
    slots, shared = (_pair_slots if size == 2 else _quad_slots)(codes)
    my_slot = slots[group[row], indices]
    my_shared = shared[group[row], indices]
    # blocks that are not shared fill what is left, in order
    longest = int(padded.max()) if rows else 0
    free = torch.arange(longest, device=device)[None, :] < padded[:, None]
    free[row[my_shared], my_slot[my_shared]] = False
    my_slot[~my_shared] = free.nonzero()[:, 1]

    order = torch.argsort(row * (longest + 1) + my_slot)
    code = torch.where(my_shared, codes[group[row], indices], 0)
    mine = bit[place[row]]
    lowest, highest = code & -code, 1 << (code.float().log2().floor().long().clamp(min=0))
    fetch = (mine == lowest).long() + 2 * (mine == highest).long()
    shares = torch.where(code > 0, code + (fetch << FETCH_BIT), 0)

    ends = torch.nn.functional.pad(indptr[1:].long(), (0, padding))
    flat = members.flatten()
    most = padded[members].amax(1).repeat_interleave(size)
    zero = torch.zeros_like(flat)
    number = torch.where(flat < rows, flat, -1)
    fields = [number, (ends - padded)[flat], ends[flat], most, zero, zero, zero, zero]
    items = torch.stack(fields, 1).int()
    blocks = order if perm is None else perm[order]
    lists = (indices[order].int(), blocks.int(), shares[order].int())
    return GroupPlan(items, *lists, size)


def _joined(members: torch.Tensor, present: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Groups of twice as many rows: those that have most in common first."""
    any_present = present[members].any(1).float()
    most = lengths[members].amax(1)
    gain = any_present @ any_present.T - 0.5 * (most[:, None] - most[None, :]).abs()
    count = members.shape[0]
    upper = torch.triu_indices(count, count, 1)
    order = torch.argsort(gain.cpu()[upper[0], upper[1]], descending=True, stable=True)
    left, right = [], []
    taken = [False] * count
    for a, b in zip(upper[0][order].tolist(), upper[1][order].tolist(), strict=True):
        if not (taken[a] or taken[b]):
            taken[a] = taken[b] = True
            left.append(a)
            right.append(b)
    return torch.cat([members[left], members[right]], 1)


def _within(codes: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For columns of a code: their number among those of the same code; and how many there are."""
    hit = codes == wanted
    number = hit.cumsum(1) - 1
    return torch.where(hit, number, -1), hit.sum(1)


def _pair_slots(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Step of each shared column [groups, columns], and whether it is shared, for two programs."""
    number, _ = _within(codes, 3)
    return number.clamp(min=0), codes == 3


def _quad_slots(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for four programs.

    Columns of all four come first. Beside those of three, the fourth has others of its own; columns
    of two go beside those of the other two. Who has too few of its own to fill the gaps shares
    less: first not what two have beyond the other two, then not what three have.
    """
    groups, columns = codes.shape
    chosen_slots = torch.zeros_like(codes)
    chosen = torch.zeros_like(codes, dtype=torch.bool)
    undecided = torch.ones(groups, dtype=torch.bool, device=codes.device)
    for level in range(3):
        slots = torch.zeros_like(codes)
        shared = torch.zeros_like(codes, dtype=torch.bool)
        number, base = _within(codes, 15)
        slots = torch.where(number >= 0, number, slots)
        shared |= number >= 0
        base = base.clone()
        if level < 2:
            for triple in (7, 11, 13, 14):
                number, count = _within(codes, triple)
                slots = torch.where(number >= 0, base[:, None] + number, slots)
                shared |= number >= 0
                base += count
        for one, other in ((3, 12), (5, 10), (6, 9)):
            number_a, count_a = _within(codes, one)
            number_b, count_b = _within(codes, other)
            least, most = torch.minimum(count_a, count_b), torch.maximum(count_a, count_b)
            limit = most if level == 0 else least
            for number in (number_a, number_b):
                hit = (number >= 0) & (number < limit[:, None])
                slots = torch.where(hit, base[:, None] + number, slots)
                shared |= hit
            base += limit
        fits = torch.ones_like(undecided)
        for program in range(4):
            has = (codes >> program) & 1 > 0
            own = (has & ~shared).sum(1)
            fits &= own >= base - (has & shared).sum(1)
        take = undecided & fits
        chosen_slots = torch.where(take[:, None], slots, chosen_slots)
        chosen = torch.where(take[:, None], shared, chosen)
        undecided &= ~fits
    return chosen_slots, chosen
