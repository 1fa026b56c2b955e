"""Which keys the queries of each rank see: the masks of shards, and who needs which blocks.

All of this is computed on the CPU from data that every rank has, so each rank knows what the
others need from it without asking.
"""

from typing import NamedTuple

import torch

from ..core.checks import message
from ..core.errors import InvalidInput
from ..launch.launcher import cdiv
from ..masks import bits as bit_masks
from ..masks.band import EVERYTHING, Band
from ..masks.block_lists import lists_from_blocks
from ..masks.block_mask import BlockMask
from ..masks.parts import BandBits, Problem, Runs, band_runs, lists_of_runs
from ..masks.segments import documents
from .plan import Plan

BAND_BLOCKS = (128, 64, 32, 16)
"""Sides of the blocks for masks that have none of their own: the largest that fits the tile."""


class Entries(NamedTuple):
    """Visible blocks: row `(mask * Mb + query block)`, key block, and row of the pool or -1."""

    rows: torch.Tensor
    cols: torch.Tensor
    bits_id: torch.Tensor
    pool: torch.Tensor

    def select(self, keep: torch.Tensor) -> "Entries":
        """The entries where `keep`, bool."""
        return Entries(self.rows[keep], self.cols[keep], self.bits_id[keep], self.pool)


class PartMask(NamedTuple):
    """How the queries of a rank see some blocks of keys."""

    is_empty: bool
    mask: BlockMask | None
    """None if nothing or everything is visible."""


class Visible:
    """The keys that the queries of every rank see under a plan.

    Parameters
    ----------
    op : str
        For messages.
    plan : Plan
    band : Band
    block_mask : BlockMask, optional
        For the whole sequence; its blocks must fit the tiles.
    cu_seqlens : int32 [documents + 1], optional
        Documents; the band then counts inside each of them.
    """

    def __init__(
        self,
        op: str,
        plan: Plan,
        band: Band,
        block_mask: BlockMask | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> None:
        length, tile = plan.seq_length, plan.tile
        if block_mask is None:
            side = next(side for side in BAND_BLOCKS if tile % side == 0)
            block = (side, side)
        else:
            block = block_mask.block_size
            if tile % max(block):
                expected = f"a multiple of {max(block)}, the larger side of the mask's blocks"
                raise InvalidInput(
                    message(op, "plan", "has tiles that do not hold whole blocks", expected, tile)
                )
        self.plan: Plan = plan
        self.block: tuple[int, int] = block
        self.batch: int = 1 if block_mask is None else block_mask.batch
        self.heads: int = 1 if block_mask is None else block_mask.heads
        self._problem = Problem((length, length), block)
        self._runs: Runs | None = None
        self._entries: Entries | None = None
        if cu_seqlens is not None:
            mask = documents(cu_seqlens.cpu(), block, window=(band.left, band.right))
            if mask.seq_lengths[0] != length:
                got = mask.seq_lengths[0]
                raise InvalidInput(
                    message(op, "cu_seqlens", "do not end with the sequence", length, got)
                )
            found = _entries_of(mask)
            if block_mask is not None:
                found = _intersect(_entries_of(block_mask.to("cpu")), found, self._problem)
            self._entries = found
        elif block_mask is None:
            # the lists of a long band are large, and a rank needs only its own
            self._runs = band_runs(band, self._problem)
            self._bits = BandBits(band, self._problem)
        else:
            found = _entries_of(block_mask.to("cpu"))
            self._entries = found if band == EVERYTHING else _cut(found, band, self._problem)

    def of_rank(self, rank: int) -> Entries:
        """The blocks that the queries of a rank see; rows count its own blocks of queries."""
        owned = self.plan.blocks(rank, self.block[0])
        if self._runs is not None:
            runs = Runs(*(x[owned] for x in self._runs))
            lists, partial, rows = lists_of_runs(runs)
            ids = lists.bits_id.long()
            cols = lists.indices.long()
            ids[partial] = self._bits.ids(owned[rows], cols[partial])
            return Entries(lists.row_indices(), cols, ids, self._bits.pool)
        assert self._entries is not None
        local = torch.full((self._problem.grid()[0],), -1, device="cpu")
        local[owned] = torch.arange(owned.numel(), device="cpu")
        mb = max(self._problem.grid()[0], 1)
        at = local[self._entries.rows % mb]
        found = self._entries.select(at >= 0)
        masks = found.rows // mb
        return found._replace(rows=masks * owned.numel() + at[at >= 0])

    def needed(self, q_heads_per_kv: int = 1) -> torch.Tensor:
        """Which blocks of keys each rank sees: bool [ranks, B or 1, Hkv or 1, Nb]."""
        ranks, (mb, nb) = self.plan.world_size, self._problem.grid()
        owner = torch.empty(mb, dtype=torch.int64, device="cpu")
        for rank in range(ranks):
            owner[self.plan.blocks(rank, self.block[0])] = rank
        if self._runs is not None:
            change = torch.zeros(ranks, nb + 1, dtype=torch.int64, device="cpu")
            ones = torch.ones_like(owner)
            change.index_put_((owner, self._runs.start), ones, accumulate=True)
            change.index_put_((owner, self._runs.end), -ones, accumulate=True)
            return (change.cumsum(1)[:, None, None, :nb]) > 0
        assert self._entries is not None
        kv_heads = 1 if self.heads == 1 else self.heads // q_heads_per_kv
        found = torch.zeros(ranks, self.batch, kv_heads, nb, dtype=torch.bool, device="cpu")
        masks, q_block = self._entries.rows // max(mb, 1), self._entries.rows % max(mb, 1)
        head = masks % self.heads
        if self.heads > 1:
            head = head // q_heads_per_kv
        found[owner[q_block], masks // self.heads, head, self._entries.cols] = True
        return found

    def work(self) -> torch.Tensor:
        """Kept blocks of the queries of each rank, over batch and heads; float64 [ranks]."""
        mb = max(self._problem.grid()[0], 1)
        if self._runs is not None:
            counts = (self._runs.end - self._runs.start).double()
        else:
            assert self._entries is not None
            counts = torch.bincount(self._entries.rows % mb, minlength=mb).double()
        owned = (self.plan.blocks(rank, self.block[0]) for rank in range(self.plan.world_size))
        return torch.stack([counts[blocks].sum() for blocks in owned])

    def part(self, entries: Entries, columns: torch.Tensor, rank: int) -> PartMask:
        """The mask of a rank's queries over the blocks of keys `columns`, ascending.

        `entries` are those of `of_rank`.
        """
        nb = self._problem.grid()[1]
        position = torch.full((nb,), -1, device="cpu")
        position[columns] = torch.arange(columns.numel(), device="cpu")
        at = position[entries.cols]
        found = entries.select(at >= 0)
        at = at[at >= 0]
        if at.numel() == 0:
            return PartMask(True, None)
        seq = self.plan.lengths[rank], tokens_of(columns, self.block[1], self.plan.seq_length)
        q_blocks = cdiv(seq[0], self.block[0])
        rows = self.batch * self.heads * q_blocks
        if at.numel() == rows * columns.numel() and bool((found.bits_id < 0).all()):
            return PartMask(False, None)
        lists = lists_from_blocks(found.rows, at, found.bits_id, rows, columns.numel())
        mask = BlockMask._from_parts(lists, found.pool, self.batch, self.heads, seq, self.block)
        return PartMask(False, mask)

    def whole(self) -> BlockMask:
        """The mask of the whole sequence."""
        assert self._entries is not None
        found, (mb, nb) = self._entries, self._problem.grid()
        lists = lists_from_blocks(
            found.rows, found.cols, found.bits_id, self.batch * self.heads * mb, nb
        )
        return BlockMask._from_parts(
            lists, found.pool, self.batch, self.heads, self._problem.seq, self.block
        )


def tokens_of(columns: torch.Tensor, block: int, length: int) -> int:
    """Tokens in these blocks; the last block of a sequence may be shorter."""
    return int((length - columns * block).clamp(max=block).sum())


def _entries_of(mask: BlockMask) -> Entries:
    lists = mask.forward
    return Entries(lists.row_indices(), lists.indices.long(), lists.bits_id.long(), mask.bits)


def _cut(entries: Entries, band: Band, p: Problem) -> Entries:
    """The entries inside a band, those on its edges cut to the element."""
    runs = band_runs(band, p)
    q_block = entries.rows % max(p.grid()[0], 1)
    inside = (entries.cols >= runs.start[q_block]) & (entries.cols < runs.end[q_block])
    entries, q_block = entries.select(inside), q_block[inside]
    cols = entries.cols
    crossed = (cols < runs.full_start[q_block]) | (cols >= runs.full_end[q_block])
    edge = BandBits(band, p)
    ids = torch.full_like(cols, -1)
    ids[crossed] = edge.ids(q_block[crossed], cols[crossed])
    return _with_bits(entries, ids, edge.pool)


def _intersect(entries: Entries, other: Entries, p: Problem) -> Entries:
    """The entries that a second mask, one for all batches and heads, shows as well."""
    nb = max(p.grid()[1], 1)
    keys, order = torch.sort(other.rows * nb + other.cols)
    wanted = (entries.rows % max(p.grid()[0], 1)) * nb + entries.cols
    at = torch.searchsorted(keys, wanted).clamp(max=max(keys.numel() - 1, 0))
    both = keys[at] == wanted if keys.numel() else torch.zeros_like(wanted, dtype=torch.bool)
    return _with_bits(entries.select(both), other.bits_id[order[at[both]]], other.pool)


def _with_bits(entries: Entries, ids: torch.Tensor, pool: torch.Tensor) -> Entries:
    """Each entry cut by row `ids` of `pool` (-1: not at all); what becomes empty is dropped."""
    mine, theirs = entries.bits_id, ids
    cut = theirs >= 0
    bits = pool[theirs[cut]]
    has_own = mine[cut] >= 0
    bits[has_own] &= entries.pool[mine[cut][has_own]]
    distinct, new = bit_masks.deduplicate(bits)
    result = mine.clone()
    result[cut] = new.long() + entries.pool.shape[0]
    kept = torch.ones_like(cut)
    kept[cut] = (bits != 0).flatten(1).any(1)
    joined = Entries(entries.rows, entries.cols, result, torch.cat([entries.pool, distinct]))
    return joined.select(kept)
