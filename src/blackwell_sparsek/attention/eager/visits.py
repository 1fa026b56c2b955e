"""Which queries see which keys: ranges of a band, and the kept blocks of a block mask.

Everything here is O(queries + kept blocks): no tensor has one element per (query, key).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...launch.launcher import cdiv
from ...masks.band import Band, kv_range
from ...masks.bits import unpack
from ...masks.block_mask import BlockMask


class Extent(NamedTuple):
    """The lengths of one problem, and the index of its sequence in a batch of masks."""

    sq: int
    sk: int
    sequence: int | None = None


class KeyTile(NamedTuple):
    """Keys `[lo, hi)`, of which `[full_lo, full_hi)` are seen by every query of the tile."""

    lo: int
    hi: int
    full_lo: int
    full_hi: int

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The ranges of keys that some of the queries do not see."""
        return [(a, b) for a, b in ((self.lo, self.full_lo), (self.full_hi, self.hi)) if a < b]


def key_tiles(
    band: Band, q_start: int, q_end: int, extent: Extent, width: int
) -> Iterator[KeyTile]:
    """The keys that queries `[q_start, q_end)` see, at most `width` at a time."""
    lo, hi = kv_range(band, q_start, q_end, extent.sq, extent.sk)
    left, right = band.scalars()
    shift = extent.sk - extent.sq
    # the keys that all of these queries see
    all_lo, all_hi = q_end - 1 + shift - left, q_start + shift + right + 1
    for start in range(lo, hi, width):
        end = min(start + width, hi)
        full_lo = min(max(all_lo, start), end)
        full_hi = max(min(all_hi, end), full_lo)
        yield KeyTile(start, end, full_lo, full_hi)


def band_visible(
    band: Band, q_pos: torch.Tensor, kv_pos: torch.Tensor, extent: Extent
) -> torch.Tensor:
    """Whether each query sees each key; the positions broadcast against each other."""
    left, right = band.scalars()
    distance = kv_pos - q_pos - (extent.sk - extent.sq)
    return (distance >= -left) & (distance <= right)


@dataclass(frozen=True)
class BlockVisits:
    """The blocks each row of a block mask visits, those that need element masks first.

    A mask row is `(batch * heads + head) * q_blocks + q_block`, as in `BlockMask`.
    """

    start: torch.Tensor
    """int64 [rows] first entry of each row."""
    count: torch.Tensor
    """int64 [rows]"""
    cut_count: torch.Tensor
    """int64 [rows]: the first `cut_count` entries of a row need an element mask."""
    column: torch.Tensor
    """int64 [nnz]"""
    bits_id: torch.Tensor
    """int64 [nnz], -1 for blocks without bits."""


def block_visits(mask: BlockMask, band: Band, extent: Extent) -> BlockVisits:
    """Drop the blocks that the band or the lengths hide, and find those that they cut."""
    bq, bk = mask.block_size
    q_blocks = cdiv(mask.seq_lengths[0], bq)
    lists = mask.forward
    rows = mask.batch * mask.heads * q_blocks
    row = lists.row_indices()
    q_block, column = row % max(q_blocks, 1), lists.indices.long()

    shift = extent.sk - extent.sq
    left, right = band.scalars()
    first_q = q_block * bq
    last_q = torch.clamp(first_q + bq, max=extent.sq) - 1
    first_k = column * bk
    last_k = torch.clamp(first_k + bk, max=extent.sk) - 1
    kept = (last_q >= first_q) & (last_k >= first_k)
    kept &= (first_k <= last_q + shift + right) & (last_k >= first_q + shift - left)
    whole = (last_k <= first_q + shift + right) & (first_k >= last_q + shift - left)
    whole &= (first_k + bk <= extent.sk) & (lists.bits_id < 0)

    # rows first, and within a row the cut blocks first; hidden blocks go to the very end
    key = torch.where(kept, row * 2 + whole, 2 * rows)
    key, order = torch.sort(key, stable=True)
    bounds = torch.searchsorted(key, torch.arange(2 * rows + 1, device=key.device))
    start, cut_end, end = bounds[0:-1:2], bounds[1::2], bounds[2::2]
    return BlockVisits(
        start, end - start, cut_end - start, column[order], lists.bits_id.long()[order]
    )


class BlockStep(NamedTuple):
    """Some kept blocks of some rows: entry (i, j) is the j-th of these blocks of row i."""

    column: torch.Tensor
    """int64 [rows, blocks]; 0 where a row has run out of blocks."""
    visible: torch.Tensor | None
    """bool, broadcastable to [rows, bq, blocks * bk]; None when everything is visible."""


def block_step(
    mask: BlockMask,
    visits: BlockVisits,
    band: Band,
    extent: Extent,
    rows: torch.Tensor,
    first: int,
    blocks: int,
    *,
    cut: bool,
    ragged: bool,
) -> BlockStep:
    """Entries `[first, first + blocks)` of the mask rows `rows`.

    `cut` says that some entry may need an element mask, `ragged` that some row may have run out.
    """
    bq, bk = mask.block_size
    device = rows.device
    nth = first + torch.arange(blocks, device=device)
    present = nth < visits.count[rows, None]
    entry = torch.where(present, visits.start[rows, None] + nth, 0)
    column = torch.where(present, visits.column[entry], 0)
    if not cut and not ragged:
        return BlockStep(column, None)
    if not cut:
        visible = present[:, None, :, None].expand(-1, 1, -1, bk)
        return BlockStep(column, visible.reshape(rows.numel(), 1, blocks * bk))

    q_blocks = max(cdiv(mask.seq_lengths[0], bq), 1)
    q_pos = (rows % q_blocks * bq)[:, None] + torch.arange(bq, device=device)
    kv_pos = column[:, :, None] * bk + torch.arange(bk, device=device)
    exists = present[:, :, None] & (kv_pos < extent.sk)
    visible = band_visible(band, q_pos[:, :, None, None], kv_pos[:, None], extent)
    visible = visible & exists[:, None]
    bits_id = torch.where(present, visits.bits_id[entry], -1)
    with_bits = (bits_id >= 0).nonzero(as_tuple=True)
    if with_bits[0].numel():
        i, j = with_bits
        visible[i, :, j] &= unpack(mask.bits[bits_id[i, j]], bk)
    return BlockStep(column, visible.reshape(rows.numel(), bq, blocks * bk))
