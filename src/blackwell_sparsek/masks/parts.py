"""The building blocks of mask patterns: runs of blocks, bands and their bit masks.

Each function takes time and memory proportional to the blocks it keeps.

Functions marked "CPU only" have results whose sizes depend on the data; the others never wait for
the device of their tensors.
"""

from math import gcd
from typing import NamedTuple

import torch

from ..launch.launcher import cdiv
from . import bits as bit_masks
from .band import Band
from .bits import empty_pool
from .block_lists import BlockLists, check_entry_count, lists_from_blocks, lists_from_sorted
from .block_mask import BlockMask
from .check import IntPair
from .device_build import band_crossings, band_lists, kernels_build

CPU = torch.device("cpu")
FAR = 2**31
"""A position past every key."""


class Problem(NamedTuple):
    """The sizes that a pattern is made for.

    It has no properties: the compiler of torch 2.10 does not trace those of named tuples.
    """

    seq: IntPair
    block: IntPair

    def grid(self) -> IntPair:
        """(Mb, Nb): blocks of queries and of keys."""
        return cdiv(self.seq[0], self.block[0]), cdiv(self.seq[1], self.block[1])

    def shift(self) -> int:
        """Position of query 0, with the last query aligned to the last key."""
        return self.seq[1] - self.seq[0]

    def positions(self, q_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the first and last query of each block."""
        start = q_blocks * self.block[0]
        end = (start + self.block[0]).clamp(max=self.seq[0])
        return start + self.shift(), end - 1 + self.shift()


class Runs(NamedTuple):
    """Key blocks of each query block: `start .. end` visible, of which `full_start .. full_end`
    full; int64 `[Mb]`."""

    start: torch.Tensor
    full_start: torch.Tensor
    full_end: torch.Tensor
    end: torch.Tensor


def runs_of_keys(
    some: tuple[torch.Tensor, torch.Tensor], every: tuple[torch.Tensor, torch.Tensor], p: Problem
) -> Runs:
    """Runs of blocks from ranges of keys, each a pair of int64 `[Mb]` within 0 .. FAR.

    `some` spans the first to the last key that any query of the block sees; `every` holds the keys
    that all its queries see.
    """
    sk, bk = p.seq[1], p.block[1]
    (some_start, some_end), (every_start, every_end) = some, every
    start = some_start.clamp(max=sk) // bk
    end = torch.where(some_start < some_end, (some_end + bk - 1) // bk, start)
    full_start = ((every_start.clamp(max=sk) + bk - 1) // bk).clamp(start, end)
    # a last block that is cut short is full if all of its existing keys are visible
    full_end = torch.where(every_end >= sk, p.grid()[1], every_end // bk).clamp(full_start, end)
    return Runs(start, full_start, full_end, end)


def band_runs(band: Band, p: Problem, device: torch.device = CPU) -> Runs:
    """The runs of a band."""
    left, right = band.scalars()
    first, last = p.positions(torch.arange(p.grid()[0], device=device))
    sk = p.seq[1]
    some = (first - left).clamp(0, sk), (last + right + 1).clamp(0, sk)
    every = (last - left).clamp(0, sk), (first + right + 1).clamp(0, sk)
    return runs_of_keys(some, every, p)


def expand(starts: torch.Tensor, lengths: torch.Tensor, step: int = 1) -> torch.Tensor:
    """All numbers `starts[i] + step * t` with `t < lengths[i]`, run after run; CPU only."""
    before = lengths.cumsum(0, dtype=lengths.dtype) - lengths
    offsets = torch.repeat_interleave(starts - step * before, lengths)
    return offsets.add_(torch.arange(offsets.numel(), dtype=offsets.dtype, device=CPU), alpha=step)


def lists_of_runs(runs: Runs) -> tuple[BlockLists, torch.Tensor, torch.Tensor]:
    """Lists of the blocks in runs, their partial entries, and the rows of those; CPU only.

    The caller fills in the `bits_id` of partial blocks.
    """
    head, tail = runs.full_start - runs.start, runs.end - runs.full_end
    full = runs.full_end - runs.full_start
    check_entry_count(int((head + tail + full).sum()))
    starts = torch.stack([runs.start, runs.full_end, runs.full_start], 1).flatten()
    lengths = torch.stack([head, tail, full], 1).flatten()
    indices = expand(starts.to(torch.int32), lengths.to(torch.int32))
    indptr = torch.nn.functional.pad((head + tail + full).cumsum(0), (1, 0))
    partial_end = indptr[:-1] + head + tail
    entries = expand(indptr[:-1], head + tail)
    rows = torch.repeat_interleave(torch.arange(head.numel(), device=CPU), head + tail)
    bits_id = torch.full_like(indices, -1)
    lists = BlockLists(indptr.to(torch.int32), partial_end.to(torch.int32), indices, bits_id)
    return lists, entries, rows


class BandBits:
    """Bit masks of the blocks that the edges of a band cross.

    Such a bit mask depends only on the distance of the block from the diagonal and on whether the
    end of the sequences cuts it short, so a band of any length has few of them.
    """

    def __init__(self, band: Band, p: Problem, device: torch.device = CPU) -> None:
        (sq, sk), (bq, bk) = p.seq, p.block
        self._p = p
        parts = [
            torch.arange(lo, hi + 1, gcd(bq, bk), device=device)
            for lo, hi in band_crossings(band, *p)
        ]
        empty = torch.empty(0, dtype=torch.int64, device=device)
        self._distances = torch.cat([*parts, empty])
        # how many rows and columns of a block exist: all of them, or fewer in the last block
        self._heights = [bq, sq % bq] if sq % bq else [bq]
        self._widths = [bk, sk % bk] if sk % bk else [bk]
        left, right = band.scalars()
        i = torch.arange(bq, device=device)
        diagonal = self._distances.unsqueeze(-1) + i
        lo, hi = diagonal - left, diagonal + right + 1
        variants = [
            bit_masks.from_intervals(lo, torch.where(i < height, hi.clamp(max=width), 0), bk)
            for height in self._heights
            for width in self._widths
        ]
        self.pool: torch.Tensor = torch.stack(variants, 1).flatten(0, 1)

    def ids(self, q_blocks: torch.Tensor, kv_blocks: torch.Tensor) -> torch.Tensor:
        """Row of the pool for each of these partial blocks, int64."""
        mb, nb = self._p.grid()
        bq, bk = self._p.block
        distance = q_blocks * bq + self._p.shift() - kv_blocks * bk
        where = torch.searchsorted(self._distances, distance)
        short = (q_blocks == mb - 1) if len(self._heights) == 2 else torch.zeros_like(where)
        narrow = (kv_blocks == nb - 1) if len(self._widths) == 2 else torch.zeros_like(where)
        return (where * len(self._heights) + short) * len(self._widths) + narrow


def band_mask(band: Band, p: Problem, device: torch.device = CPU) -> BlockMask:
    """The mask of a band, exact to the element; does not wait for `device` if that is a GPU."""
    if kernels_build(device) and (made := band_lists(band, *p, device)) is not None:
        return BlockMask._from_parts(*made, 1, 1, p.seq, p.block)
    lists, entries, rows = lists_of_runs(band_runs(band, p))
    crossed = BandBits(band, p)
    lists.bits_id[entries] = crossed.ids(rows, lists.indices[entries]).to(torch.int32)
    return BlockMask._from_parts(lists, crossed.pool, 1, 1, p.seq, p.block).to(device)


def blocks_mask(
    rows: torch.Tensor, cols: torch.Tensor, p: Problem, causal: bool, batch_heads: IntPair = (1, 1)
) -> BlockMask:
    """The mask of distinct blocks; with `causal`, those on the diagonal are cut to the element.

    The blocks, int64 `[nnz]`, are sorted by row and column, and each has visible elements.
    """
    mb, nb = p.grid()
    batch, heads = batch_heads
    num_rows = batch * heads * mb
    full = torch.full_like(cols, -1)
    if not causal:
        lists = lists_from_sorted(rows * 2 + 1, cols, full, num_rows)
        return BlockMask._from_parts(lists, empty_pool(p.block, cols.device), batch, heads, *p)
    ids, pool = causal_bits(rows % max(mb, 1), cols, p)
    lists = lists_from_blocks(rows, cols, ids, num_rows, nb)
    return BlockMask._from_parts(lists, pool, batch, heads, *p)


def causal_bits(
    q_blocks: torch.Tensor, kv_blocks: torch.Tensor, p: Problem
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `bits_id`, int64, of blocks that causality cuts, and their pool."""
    band = Band(None, 0)
    crossed = BandBits(band, p, kv_blocks.device)
    is_full = kv_blocks < band_runs(band, p, kv_blocks.device).full_end[q_blocks]
    return torch.where(is_full, -1, crossed.ids(q_blocks, kv_blocks)), crossed.pool
