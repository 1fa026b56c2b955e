"""The sends, receives and computations of each rank, as index tensors; no communication."""

from itertools import pairwise
from typing import NamedTuple

import torch

from ..launch.launcher import cdiv
from ..masks.parts import expand
from .plan import Plan
from .visible import Entries, PartMask, Visible, tokens_of


class Exchange(NamedTuple):
    """Rows that a rank sends to and receives from the others, in the order of their ranks.

    A row is a token of one of `copies` masks that differ over batch and KV heads; see `to_rows`.
    """

    copies: tuple[int, int]
    """(B or 1, Hkv or 1): for how many parts of the batch and of the heads the rows differ."""
    columns: torch.Tensor
    """Blocks of keys that arrive from others, ascending."""
    tokens: int
    """Tokens in these blocks."""
    send_index: torch.Tensor
    send_counts: list[int]
    receive_index: torch.Tensor
    """Where the rows that arrive belong among the `copies` of the tokens."""
    receive_counts: list[int]
    is_whole: bool
    """Whether every copy of every token arrives."""

    def to(self, device: torch.device) -> "Exchange":
        """The same with its indices on `device`."""
        return self._replace(
            send_index=self.send_index.to(device), receive_index=self.receive_index.to(device)
        )


class Fetch(NamedTuple):
    """Keys of other ranks that arrive together, in one collective."""

    exchange: Exchange
    mask: PartMask
    gather_index: torch.Tensor | None
    """For an all-gather: where the tokens are among the padded pieces of all ranks."""
    piece: tuple[int, int]
    """For an all-gather: the piece of every shard that is gathered, in tokens from its start."""


class Gathered(NamedTuple):
    """One rank's work with keys that are fetched: its own, then those of others, in order."""

    local: PartMask
    fetches: list[Fetch]


FETCH_TOKENS = 32768
MOST_FETCHES = 4
"""Several fetches, so that one travels while the keys of another are computed.

Each costs a merge, a pass over the output. 32k tokens of 8 KV heads of 128 in 16 bits are 2.7 ms of
a 400 Gb/s adapter, and merging 8k tokens of 32 heads moves 0.4 GB, 0.1 ms on an H200: an estimate,
as is the limit of four, after which little is left to hide.
"""


def gathered(visible: Visible, rank: int, q_heads_per_kv: int, everything: bool) -> Gathered:
    """The work of a rank that fetches what it needs, or `everything`."""
    plan, bk = visible.plan, visible.block[1]
    entries = visible.of_rank(rank)
    wanted = needed_remote(visible, q_heads_per_kv, everything)
    owner, start, width = _places(plan, bk)
    fetches = []
    for first, last in pieces(plan, bk, wanted):
        here = (start >= first) & (start < last)
        exchange = exchange_of(visible, rank, wanted & here)
        columns, index = exchange.columns, None
        if everything:
            places = owner[columns] * (last - first) + start[columns] - first
            index = expand(places, width[columns])
        mask = visible.part(entries, columns, rank)
        fetches.append(Fetch(exchange, mask, index, (first, last)))
    return Gathered(visible.part(entries, plan.blocks(rank, bk), rank), fetches)


def pieces(plan: Plan, block: int, wanted: torch.Tensor) -> list[tuple[int, int]]:
    """Where every shard is cut, in tokens from its start, so that pieces travel one by one.

    The same on all ranks, which have to take part in as many exchanges.
    """
    longest = max(plan.lengths)
    width = (plan.seq_length - torch.arange(wanted.shape[-1], device="cpu") * block).clamp(
        max=block
    )
    most = int((wanted.flatten(1, 2).any(1) * width).sum(1).max()) if width.numel() else 0
    count = max(1, min(MOST_FETCHES, most // FETCH_TOKENS, cdiv(longest, block)))
    cuts = [cdiv(longest, block) * i // count * block for i in range(count)]
    return list(pairwise([*cuts, longest]))


def ring_parts(visible: Visible, rank: int) -> list[PartMask]:
    """How the queries of a rank see the keys of each rank."""
    entries: Entries = visible.of_rank(rank)
    plan, bk = visible.plan, visible.block[1]
    return [visible.part(entries, plan.blocks(r, bk), rank) for r in range(plan.world_size)]


def needed_remote(visible: Visible, q_heads_per_kv: int, everything: bool) -> torch.Tensor:
    """Blocks of keys that each rank has to fetch: bool [ranks, B or 1, Hkv or 1, Nb]."""
    plan, bk = visible.plan, visible.block[1]
    if everything:
        nb = cdiv(plan.seq_length, bk)
        wanted = torch.ones(plan.world_size, 1, 1, nb, dtype=torch.bool, device="cpu")
    else:
        wanted = visible.needed(q_heads_per_kv)
    for rank in range(plan.world_size):
        wanted[rank, ..., plan.blocks(rank, bk)] = False
    return wanted


def exchange_of(visible: Visible, rank: int, wanted: torch.Tensor) -> Exchange:
    """The sends and receives of a rank if each rank fetches the blocks of `wanted`."""
    plan, bk = visible.plan, visible.block[1]
    owner, start, width = _places(plan, bk)
    ranks, batch, heads, _ = wanted.shape
    columns = torch.nonzero(wanted[rank].flatten(0, 1).any(0)).flatten()
    tokens = tokens_of(columns, bk, plan.seq_length)
    # first token of each of these blocks among the tokens that arrive
    new_start = torch.zeros_like(start)
    new_start[columns] = width[columns].cumsum(0) - width[columns]
    own = plan.lengths[rank]
    sends, receives = [], []
    for other in range(ranks):
        copy, block = _copies(wanted[other] & (owner == rank))
        sends.append(expand(copy * own + start[block], width[block]))
        copy, block = _copies(wanted[rank] & (owner == other))
        receives.append(expand(copy * tokens + new_start[block], width[block]))
    counts = [x.numel() for x in receives]
    return Exchange(
        (batch, heads),
        columns,
        tokens,
        torch.cat(sends),
        [x.numel() for x in sends],
        torch.cat(receives),
        counts,
        sum(counts) == batch * heads * tokens,
    )


def _copies(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy and block of each True of bool [batch, heads, Nb]."""
    copy, block = torch.nonzero(wanted.flatten(0, 1), as_tuple=True)
    return copy, block


def _places(plan: Plan, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Owner of each block, its first token on that rank, and its tokens; int64 [Nb]."""
    count = cdiv(plan.seq_length, block)
    owner, start = torch.empty(2, count, dtype=torch.int64, device="cpu")
    width = (plan.seq_length - torch.arange(count, device="cpu") * block).clamp(max=block)
    for rank in range(plan.world_size):
        owned = plan.blocks(rank, block)
        owner[owned] = rank
        start[owned] = width[owned].cumsum(0) - width[owned]
    return owner, start, width


def to_rows(x: torch.Tensor, copies: tuple[int, int]) -> torch.Tensor:
    """[B, H, S, D] as rows [copies * S, the rest], so that a token of a copy is one row."""
    batch, heads = copies
    b, h, tokens, dim = x.shape
    # of the split dimensions one has size 1, so any strides will do
    parts = x.reshape(batch, b // batch, heads, h // heads, tokens, dim)
    rows = batch * heads * x.shape[2]
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(rows, row_width(x, copies))


def row_width(x: torch.Tensor, copies: tuple[int, int]) -> int:
    """Elements of a row of `to_rows`."""
    batch, heads, _, dim = x.shape
    return batch // copies[0] * (heads // copies[1]) * dim


def from_rows(rows: torch.Tensor, copies: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_rows`, a view [B, H, S, D] with B, H and D of `like`."""
    (batch, heads), (b, h, _, d) = copies, like.shape
    parts = rows.view(batch, heads, rows.shape[0] // (batch * heads), b // batch, h // heads, d)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(b, h, parts.shape[2], d)
