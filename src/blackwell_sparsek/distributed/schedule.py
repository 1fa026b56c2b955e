"""What each rank sends, receives and computes, as index tensors: pure data, no communication."""

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


class Gathered(NamedTuple):
    """One rank's work with keys fetched all at once: its own, then those of the others."""

    exchange: Exchange
    local: PartMask
    remote: PartMask
    gather_index: torch.Tensor | None
    """For an all-gather: where the remote tokens are among the padded shards of all ranks."""


def gathered(visible: Visible, rank: int, q_heads_per_kv: int, everything: bool) -> Gathered:
    """The work of a rank that fetches what it needs, or `everything`."""
    plan, bk = visible.plan, visible.block[1]
    entries = visible.of_rank(rank)
    exchange = exchange_of(visible, rank, needed_remote(visible, q_heads_per_kv, everything))
    local = visible.part(entries, plan.blocks(rank, bk), rank)
    remote = visible.part(entries, exchange.columns, rank)
    index = None
    if everything:
        owner, start, width = _places(plan, bk)
        columns = exchange.columns
        index = expand(owner[columns] * max(plan.lengths) + start[columns], width[columns])
    return Gathered(exchange, local, remote, index)


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
        wanted = torch.ones(plan.world_size, 1, 1, nb, dtype=torch.bool)
    else:
        wanted = visible.needed(q_heads_per_kv)
    for rank in range(plan.world_size):
        wanted[rank, ..., plan.blocks(rank, bk)] = False
    return wanted


def exchange_of(visible: Visible, rank: int, wanted: torch.Tensor) -> Exchange:
    """What a rank sends and receives if each rank fetches the blocks of `wanted`."""
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
    owner, start = torch.empty(2, count, dtype=torch.int64)
    width = (plan.seq_length - torch.arange(count) * block).clamp(max=block)
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
