"""KeySelection: the keys, or blocks of keys, that each query token has chosen."""

import copy
from typing import Any, NamedTuple

import torch

from ..core.checks import (
    check_choice,
    check_dtype,
    check_has_data,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput
from ..core.torch_state import usable_in_training
from ..launch.launcher import cdiv
from .block_mask import BlockMask
from .check import IntPair, check_count

GRANULARITIES = (1, 4, 16, 32, 64, 128)
"""Keys of one entry that kernels can tile."""

# Positions in the list of a head are int32.
MOST_ENTRIES = 2**31 - 1

LAYOUT = "[B, Hs, Tq, K]"

# What copies and saved selections consist of.
STATE = ("ids", "counts", "granularity", "kv_len")


class QueriesOfBlocks(NamedTuple):
    """For each block of keys the entries that name it, in the order of their queries.

    `starts` int32 `[lists, blocks + 1]`: block c of a list owns `places[list, starts[list, c] ..
    starts[list, c + 1]]`. `places` int32 `[lists, Tq * K]`: entry `place % K` of query `place // K`
    """

    starts: torch.Tensor
    places: torch.Tensor


class BlocksOfSequences(NamedTuple):
    """The blocks of each query's own sequence, int64 [Tq]: the first of them, and how many."""

    first: torch.Tensor
    number: torch.Tensor


class KeySelection:
    """The keys that each query token selects, in entries of `granularity` keys.

    Entry c stands for the keys `c * granularity` up to the next entry or the end of the keys. With
    packed sequences there is one list of tokens, B is 1, and entries count inside the sequence of
    their query; with pages, entries count in positions of the sequence, not in pages.

    The constructor keeps the tensors it is given, which must not be changed afterwards, and checks
    them, which waits for the device. `from_indices` takes indices in any order.

    Parameters
    ----------
    ids : int32 `[B, Hs, Tq, K]`
        Ascending without duplicates in the first `counts` places; the others may hold anything.
        Hs is 1 (all heads alike), the number of KV heads or that of query heads. Contiguous in
        the last dimension.
    counts : int32 `[B, Hs, Tq]`
        Entries of each query, 0 to K.
    granularity : int
        Keys of an entry: 1, 4, 16, 32, 64 or 128.
    kv_len : int
        Keys per sequence: Sk, those of the longest packed sequence, or what its pages can hold.

    Raises
    ------
    InvalidInput
        If ids or counts are out of range, not ascending or not int32.

    Examples
    --------
    >>> import torch
    >>> ids = torch.tensor([[[[0, 2], [1, 0]]]], dtype=torch.int32)
    >>> counts = torch.tensor([[[2, 1]]], dtype=torch.int32)
    >>> KeySelection(ids, counts, granularity=4, kv_len=10).to_dense().int()[0, 0]
    tensor([[1, 1, 1, 1, 0, 0, 0, 0, 1, 1],
            [0, 0, 0, 0, 1, 1, 1, 1, 0, 0]], dtype=torch.int32)
    """

    ids: torch.Tensor
    counts: torch.Tensor
    granularity: int
    kv_len: int

    def __init__(
        self, ids: torch.Tensor, counts: torch.Tensor, *, granularity: int, kv_len: int
    ) -> None:
        _check_layout("KeySelection", ids, counts, granularity, kv_len)
        self._set(ids, counts, granularity, kv_len)
        self.validate()

    def _set(self, ids: torch.Tensor, counts: torch.Tensor, granularity: int, kv_len: int) -> None:
        self.ids, self.counts = ids.detach(), counts.detach()
        self.granularity, self.kv_len = granularity, kv_len

    @classmethod
    def _from_tensors(
        cls, ids: torch.Tensor, counts: torch.Tensor, granularity: int, kv_len: int
    ) -> "KeySelection":
        """A selection whose tensors are known to be right, or whose numbers kernels check."""
        made = cls.__new__(cls)
        made._set(ids, counts, granularity, kv_len)
        return made

    @classmethod
    @usable_in_training
    def from_indices(
        cls, indices: torch.Tensor, *, granularity: int, kv_len: int, check: bool = True
    ) -> "KeySelection":
        """Sort and count the indices of each query.

        Parameters
        ----------
        indices : int32 or int64 `[B, Hs, Tq, K]`
            Entries in any order, -1 for none.
        granularity, kv_len : int
            As in the constructor.
        check : bool
            Whether to check the indices, which waits for the device. Without it, nothing waits, so
            that a CUDA graph may capture this. Kernels then return NaN for queries with an index
            out of range, and count an entry twice that is listed twice; `eager` and `reference`,
            which wait anyway, raise.

        Examples
        --------
        >>> import torch
        >>> indices = torch.tensor([[[[5, -1, 2]]]])
        >>> chosen = KeySelection.from_indices(indices, granularity=16, kv_len=100)
        >>> chosen.ids[..., :2].tolist(), chosen.counts.tolist()
        ([[[[2, 5]]]], [[[2]]])
        """
        op = "KeySelection.from_indices"
        _check_sizes(op, granularity, kv_len)
        _check_ids(op, "indices", indices, [torch.int32, torch.int64])
        none = torch.iinfo(indices.dtype).max
        given = indices.detach()
        kept = given != -1
        order = torch.where(kept, given, none).sort(-1)
        # what int32 cannot hold stays out of range: wrapped around, it could name an entry
        small = torch.iinfo(torch.int32)
        ids = order.values.clamp(small.min, small.max).to(torch.int32)
        made = cls._from_tensors(ids, kept.sum(-1, dtype=torch.int32), granularity, kv_len)
        if check:
            check_has_data(op, "indices", indices)
            made._check_values(op, "indices", order.indices)
        return made

    @property
    def batch(self) -> int:
        """Selections along the batch."""
        return int(self.ids.shape[0])

    @property
    def heads(self) -> int:
        """Lists along the heads: 1, the KV heads or the query heads."""
        return int(self.ids.shape[1])

    @property
    def q_len(self) -> int:
        """Query tokens."""
        return int(self.ids.shape[2])

    @property
    def most(self) -> int:
        """Entries that a query may have."""
        return int(self.ids.shape[3])

    @property
    def num_blocks(self) -> int:
        """Entries that there are to choose from."""
        return cdiv(self.kv_len, self.granularity)

    @property
    def device(self) -> torch.device:
        """Where the lists are."""
        return self.ids.device

    def __repr__(self) -> str:
        return (
            f"KeySelection({list(self.ids.shape)}, granularity={self.granularity}, "
            f"kv_len={self.kv_len}, device={self.device})"
        )

    def to(self, device: torch.device | str) -> "KeySelection":
        """The same selection on another device."""
        ids, counts = self.ids.to(device), self.counts.to(device)
        return KeySelection._from_tensors(ids, counts, self.granularity, self.kv_len)

    def validate(self) -> None:
        """Raise `InvalidInput` for the first count or entry that is wrong. Waits for the device."""
        op = "KeySelection"
        check_has_data(op, "ids", self.ids)
        most = self.most
        wrong = (self.counts < 0) | (self.counts > most)
        _raise_first(op, "counts", self.counts, wrong, f"0 to {most}")
        self._check_values(op, "ids", None)

    def _check_values(self, op: str, arg: str, places: torch.Tensor | None) -> None:
        """Check entries; `places` says where in the user's tensor each of them was."""
        live = self.listed()
        wrong = live & ((self.ids < 0) | (self.ids >= self.num_blocks))
        _raise_first(op, arg, self.ids, wrong, f"0 to {self.num_blocks - 1}", places)
        pairs = live[..., 1:]
        before, after = self.ids[..., :-1], self.ids[..., 1:]
        for problem, expected, wrong in (
            ("is listed twice", "each entry once", pairs & (after == before)),
            ("does not ascend", "more than the entry before it", pairs & (after < before)),
        ):
            none = torch.zeros_like(live[..., :1])
            wrong = torch.cat([none, wrong], -1)
            _raise_first(op, arg, self.ids, wrong, expected, places, problem)

    def listed(self) -> torch.Tensor:
        """bool [B, Hs, Tq, K]: which places hold an entry."""
        return torch.arange(self.most, device=self.device) < self.counts[..., None]

    def keys_of_entries(self) -> torch.Tensor:
        """int64 [B, Hs, Tq]: how many existing keys each query has chosen."""
        starts = self.ids.to(torch.int64) * self.granularity
        keys = (self.kv_len - starts).clamp(0, self.granularity)
        return torch.where(self.listed(), keys, 0).sum(-1)

    @property
    def density(self) -> float:
        """Chosen keys over all keys. Waits for the device."""
        total = self.counts.numel() * self.kv_len
        return float(self.keys_of_entries().sum()) / total if total else 0.0

    def to_dense(self) -> torch.Tensor:
        """bool `[B, Hs, Tq, kv_len]`: which keys each query has chosen."""
        blocks, shape = self.num_blocks, self.counts.shape
        # one more column takes what is not listed
        chosen = torch.zeros((*shape, blocks + 1), dtype=torch.bool, device=self.device)
        entries = torch.where(self.listed(), self.ids, blocks).to(torch.int64)
        chosen.scatter_(-1, entries, True)
        keys = chosen[..., :-1].repeat_interleave(self.granularity, -1)
        return keys[..., : self.kv_len]

    def to_block_mask(self, block_size: int | IntPair, heads: int | None = None) -> BlockMask:
        """The same choice as a `BlockMask`, with a bit for each element of partial blocks.

        Makes `to_dense()` on the way, so it is meant for sizes where that fits.

        Parameters
        ----------
        block_size : int or (bq, bk)
        heads : int, optional
            Query heads, if the lists belong to KV heads: each is repeated for its query heads.
        """
        dense = self.to_dense()
        if heads is not None:
            op = "KeySelection.to_block_mask"
            check_count(op, "heads", heads, at_least=1)
            if heads % self.heads:
                expected = f"a multiple of the {self.heads} lists"
                raise InvalidInput(message(op, "heads", "does not fit", expected, heads))
            dense = dense.repeat_interleave(heads // self.heads, 1)
        return BlockMask.from_element_mask(dense, block_size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        op = "KeySelection"
        if not isinstance(state, dict) or sorted(map(str, state)) != sorted(STATE):
            got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            what = "the state of a saved KeySelection"
            raise InvalidInput(message(op, what, "does not fit", STATE, got))
        _check_layout(op, **state)
        self._set(**state)
        if not self.ids.is_meta:
            self.validate()

    def __copy__(self) -> "KeySelection":
        return KeySelection._from_tensors(self.ids, self.counts, self.granularity, self.kv_len)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeySelection":
        # unlike a saved one, a copy is as right as its original, and need not wait for the device
        ids, counts = copy.deepcopy((self.ids, self.counts), memo)
        return KeySelection._from_tensors(ids, counts, self.granularity, self.kv_len)

    def transpose(self) -> QueriesOfBlocks:
        """For each block the queries that chose it. Does not wait for the device."""
        return queries_of_blocks(self.ids, self.counts, self.num_blocks)


# What `__setstate__` takes is plain data, and all of it is checked.
torch.serialization.add_safe_globals([KeySelection])


def queries_of_blocks(
    ids: torch.Tensor,
    counts: torch.Tensor,
    blocks: int,
    sequences: BlocksOfSequences | None = None,
) -> QueriesOfBlocks:
    """Lists of the queries that chose each of `blocks` blocks.

    Blocks of packed `sequences` are numbered through. Entries out of range are left out.
    """
    batch, heads, tokens, most = ids.shape
    listed = torch.arange(most, device=ids.device) < counts[..., None]
    numbers = ids.to(torch.int64)
    own = blocks if sequences is None else sequences.number[:, None]
    inside = listed & (numbers >= 0) & (numbers < own)
    if sequences is not None:
        numbers = numbers + sequences.first[:, None]
    numbers = torch.where(inside, numbers, blocks).to(torch.int32)
    # stable: the queries of a block stay in their order, and so do sums over them
    order = numbers.reshape(batch * heads, tokens * most).sort(dim=-1, stable=True)
    bounds = torch.arange(blocks + 1, dtype=torch.int32, device=ids.device)
    starts = torch.searchsorted(
        order.values, bounds.expand(batch * heads, -1).contiguous(), out_int32=True
    )
    return QueriesOfBlocks(starts, order.indices.to(torch.int32))


def _check_layout(op: str, ids: Any, counts: Any, granularity: Any, kv_len: Any) -> None:
    _check_sizes(op, granularity, kv_len)
    _check_ids(op, "ids", ids, [torch.int32])
    check_last_dim_contiguous(op, "ids", ids)
    _check_counts(op, ids, counts)


def _check_sizes(op: str, granularity: Any, kv_len: Any) -> None:
    check_choice(op, "granularity", granularity, GRANULARITIES)
    check_count(op, "kv_len", kv_len)
    if kv_len >= 2**30:
        raise InvalidInput(message(op, "kv_len", "is out of range", "0 .. 2**30 - 1", kv_len))


def _check_ids(op: str, arg: str, ids: Any, dtypes: list[torch.dtype]) -> None:
    check_tensor(op, arg, ids)
    check_dtype(op, arg, ids, dtypes)
    check_rank(op, arg, ids, LAYOUT)
    if ids.shape[2] * ids.shape[3] > MOST_ENTRIES:
        expected = f"at most {MOST_ENTRIES} entries for a head"
        raise InvalidInput(message(op, arg, "has too many entries", expected, list(ids.shape)))


def _check_counts(op: str, ids: torch.Tensor, counts: Any) -> None:
    check_tensor(op, "counts", counts)
    check_dtype(op, "counts", counts, [torch.int32])
    check_shape(op, "counts", counts, ids.shape[:3])
    check_same_device(op, {"ids": ids, "counts": counts})


def _raise_first(
    op: str,
    arg: str,
    values: torch.Tensor,
    wrong: torch.Tensor,
    expected: str,
    places: torch.Tensor | None = None,
    problem: str = "is out of range",
) -> None:
    """Name the first wrong value, and where the user put it."""
    if not bool(wrong.any()):
        return
    at = tuple(int(i) for i in wrong.nonzero()[0])
    *row, last = at
    column = last if places is None else int(places[at])
    name = f"{arg}[{', '.join(map(str, (*row, column)))}]"
    raise InvalidInput(message(op, name, problem, expected, int(values[at])))
