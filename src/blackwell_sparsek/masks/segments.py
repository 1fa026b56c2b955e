"""Masks of numbered tokens: a query sees the keys that have the same number.

Padding, documents packed into one sequence and selections of key blocks per query are all of this
kind. `segments` and the functions after it leave the edges of a band (causality, a window) to the
attention call and make bits only where numbers differ within a block; `documents`, public as
`bsk.masks.documents`, is exact to the element.
"""

import torch
from torch.nn.functional import pad

from ..core.checks import check_has_data
from ..core.torch_state import usable_in_training
from ..launch.launcher import cdiv
from . import bits as bit_masks
from .band import EVERYTHING, Band, band_of
from .block_lists import BlockLists, lists_from_blocks
from .block_mask import BlockMask
from .check import IntPair, check_block_size, check_seq_lengths, existing_bits
from .packed import check_cu_seqlens, check_cu_seqlens_values, check_same_batch
from .parts import CPU, FAR, Problem, Runs, band_runs, lists_of_runs, runs_of_keys

# how many partial blocks get their bits at a time
CHUNK_BLOCKS = 1024


@usable_in_training
def segments(
    q_segment: torch.Tensor,
    k_segment: torch.Tensor,
    block_size: IntPair,
    *,
    band: Band = EVERYTHING,
    keep: torch.Tensor | None = None,
) -> BlockMask:
    """Query i sees key j if their numbers are equal. Waits for the device.

    Parameters
    ----------
    q_segment : int `[B, Sq]`
    k_segment : int `[B, Sk]`
    block_size : (bq, bk)
    band : Band
        The band of the attention call: blocks that it hides are left out, its edges are not cut.
    keep : bool `[B or 1, H or 1, Mb, Nb]`, optional
        Which blocks may be visible at all.

    Examples
    --------
    >>> padded = torch.tensor([[-1, 0, 0]])
    >>> mask = segments(torch.zeros_like(padded), padded, (16, 16))
    >>> mask.to_element_mask()[0, 0, 0].int()
    tensor([0, 1, 1], dtype=torch.int32)
    """
    p = Problem((q_segment.shape[1], k_segment.shape[1]), block_size)
    (bq, bk), (mb, nb) = p.block, p.grid()
    q, k = _in_blocks(q_segment, bq), _in_blocks(k_segment, bk)
    q_low, q_high = (x[:, None, :, None] for x in q.aminmax(dim=2))
    k_low, k_high = (x[:, None, None, :] for x in k.aminmax(dim=2))
    meets = (q_low <= k_high) & (k_low <= q_high)
    runs = band_runs(band, p, q.device)
    column = torch.arange(nb, device=q.device)
    meets &= (column >= runs.start[:, None]) & (column < runs.end[:, None])
    if keep is not None:
        meets = meets & keep
    batch, heads = meets.shape[:2]
    one = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    rows, cols = torch.nonzero(meets.flatten(0, 2), as_tuple=True)
    full = one.expand_as(meets).flatten(0, 2)[rows, cols]
    partial = torch.nonzero(~full).flatten()
    mask_row, col = rows[partial], cols[partial]
    item, q_block = mask_row // (heads * mb), mask_row % mb
    bits = torch.empty(
        partial.numel(), bq, bit_masks.words_per_row(bk), dtype=torch.int32, device=q.device
    )
    for start in range(0, partial.numel(), CHUNK_BLOCKS):
        part = slice(start, start + CHUNK_BLOCKS)
        equal = q[item[part], q_block[part]].unsqueeze(-1) == k[item[part], col[part]].unsqueeze(-2)
        bits[part] = bit_masks.pack(equal)
    return _mask(rows, cols, partial, bits, (batch, heads), p)


@usable_in_training
def selected_blocks(
    selected: torch.Tensor,
    block_size: IntPair,
    seq_lengths: IntPair,
    *,
    visible_keys: torch.Tensor | None = None,
) -> BlockMask:
    """Each query sees its own selection of key blocks. Waits for the device.

    Parameters
    ----------
    selected : bool `[B or 1, H or 1, Sq, Nb]`
        Which blocks of keys each query sees.
    block_size : (bq, bk)
    seq_lengths : (Sq, Sk)
    visible_keys : bool `[B, Sk]`, optional
        Keys that any query may see.

    Examples
    --------
    >>> selected = torch.tensor([[True, False], [True, True]])[None, None]
    >>> selected_blocks(selected, (16, 16), (2, 32)).to_element_mask().sum(-1)
    tensor([[[16, 32]]])
    """
    p = Problem(seq_lengths, block_size)
    (bq, bk), (mb, nb) = p.block, p.grid()
    if visible_keys is not None:
        in_blocks = pad(visible_keys, (0, nb * bk - p.seq[1])).view(-1, nb, bk)
        selected = selected & in_blocks.any(2)[:, None, None]
    batch, heads = selected.shape[:2]
    tiles = pad(selected, (0, 0, 0, mb * bq - p.seq[0])).view(batch * heads * mb, bq, nb)
    counts = tiles.sum(1)
    rows, cols = torch.nonzero(counts, as_tuple=True)
    height = (p.seq[0] - rows % max(mb, 1) * bq).clamp(max=bq)
    full = counts[rows, cols] == height
    if visible_keys is not None:
        whole = pad(visible_keys, (0, nb * bk - p.seq[1]), value=True).view(-1, nb, bk).all(2)
        full &= whole[rows // (heads * mb), cols]
    partial = torch.nonzero(~full).flatten()
    row, col = rows[partial], cols[partial]
    # a whole row of a block is visible or hidden: all bits or none
    bits = -tiles[row, :, col].int().unsqueeze(-1).expand(-1, -1, bit_masks.words_per_row(bk))
    if visible_keys is not None:
        words = bit_masks.pack(in_blocks)[row // (heads * mb), col]
        bits = bits & words.unsqueeze(1)
    return _mask(rows, cols, partial, bits, (batch, heads), p)


@usable_in_training
def every_block(visible: torch.Tensor, block_size: IntPair) -> BlockMask:
    """A mask of elements that lists every block, so that its sizes do not depend on the data.

    Does not wait for the device.

    Parameters
    ----------
    visible : bool `[B or 1, H or 1, Sq, Sk]`
    block_size : (bq, bk)

    Examples
    --------
    >>> every_block(torch.eye(20, dtype=torch.bool)[None, None], (16, 16)).nnz_blocks
    4
    """
    batch, heads, sq, sk = visible.shape
    bq, bk = block_size
    mb, nb = cdiv(sq, bq), cdiv(sk, bk)
    rows = batch * heads * mb
    padded = pad(visible, (0, nb * bk - sk, 0, mb * bq - sq))
    words = bit_masks.pack(padded.reshape(rows, bq, nb, bk))
    pool = words.transpose(1, 2).flatten(0, 1).contiguous()
    return _all_partial(pool, rows, nb, visible.device, (batch, heads), ((sq, sk), block_size))


@usable_in_training
def every_key_block(visible_keys: torch.Tensor, sq: int, block_size: IntPair) -> BlockMask:
    """The same keys for each of `sq` queries, listing every block. Does not wait for the device.

    All rows of blocks share one set of bits (two if the last row is cut short), so memory does not
    grow with Sq x Sk elements.

    Parameters
    ----------
    visible_keys : bool `[B, Sk]`
    sq : int
    block_size : (bq, bk)

    Examples
    --------
    >>> every_key_block(torch.tensor([[False, True]]), 3, (16, 16)).to_element_mask()[0, 0].int()
    tensor([[0, 1],
            [0, 1],
            [0, 1]], dtype=torch.int32)
    """
    batch, sk = visible_keys.shape
    bq, bk = block_size
    mb, nb = cdiv(sq, bq), cdiv(sk, bk)
    device = visible_keys.device
    words = bit_masks.pack(pad(visible_keys, (0, nb * bk - sk)).view(batch, nb, bk))
    exists = torch.arange(bq, device=device) < sq - (mb - 1) * bq
    whole = words.unsqueeze(2).expand(-1, -1, bq, -1)
    short = torch.where(exists[:, None], whole, 0)
    pool = torch.stack([whole, short]).flatten(0, 2)
    row = torch.arange(batch * mb, device=device)
    first = (row // mb + torch.where(row % mb == mb - 1, batch, 0)) * nb
    ids = (first.unsqueeze(-1) + torch.arange(nb, device=device)).flatten()
    return _all_partial(pool, batch * mb, nb, device, (batch, 1), ((sq, sk), block_size), ids)


def _in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """View `[B, S]` as `[B, blocks, block]`; the last token stands in for those past the end."""
    count = cdiv(x.shape[1], block)
    index = torch.arange(count * block, device=x.device).clamp(max=x.shape[1] - 1)
    return x[:, index].view(x.shape[0], count, block)


def _mask(
    rows: torch.Tensor,
    cols: torch.Tensor,
    partial: torch.Tensor,
    bits: torch.Tensor,
    batch_heads: IntPair,
    p: Problem,
) -> BlockMask:
    """The mask of blocks (row, col); `partial` ones have `bits`, cleared past the sequences."""
    (sq, sk), (bq, bk), (mb, nb) = p.seq, p.block, p.grid()
    batch, heads = batch_heads
    row, col = rows[partial], cols[partial]
    bits = bits & existing_bits(sq - row % max(mb, 1) * bq, sk - col * bk, p.block)
    pool, ids = bit_masks.deduplicate(bits)
    bits_id = torch.full_like(cols, -1)
    bits_id[partial] = ids.long()
    lists = lists_from_blocks(rows, cols, bits_id, batch * heads * mb, nb)
    return BlockMask._from_parts(lists, pool, batch, heads, *p)


def _all_partial(
    pool: torch.Tensor,
    rows: int,
    nb: int,
    device: torch.device,
    batch_heads: IntPair,
    sizes: tuple[IntPair, IntPair],
    ids: torch.Tensor | None = None,
) -> BlockMask:
    indptr = torch.arange(rows + 1, dtype=torch.int32, device=device) * nb
    columns = torch.arange(nb, dtype=torch.int32, device=device).repeat(rows)
    if ids is None:
        ids = torch.arange(rows * nb, dtype=torch.int32, device=device)
    lists = BlockLists(indptr, indptr[1:].contiguous(), columns, ids.to(torch.int32))
    return BlockMask._from_parts(lists, pool, *batch_heads, *sizes)


# like CHUNK_BLOCKS, for documents
DOCUMENT_CHUNK_BLOCKS = 4096


@usable_in_training
def documents(
    cu_seqlens: torch.Tensor,
    block_size: int | IntPair = 128,
    *,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
) -> BlockMask:
    """Each query sees the keys of its own document; documents are packed into a batch of 1.

    Made on the CPU, in memory proportional to the tokens and to the bits of partial blocks, and
    moved to the device of `cu_seqlens`; waits for that device.

    Parameters
    ----------
    cu_seqlens : int32 `[documents + 1]`
        Offsets of the documents; the last is Sq.
    block_size : int or (bq, bk)
    cu_seqlens_k : int32 `[documents + 1]`, optional
        Offsets of the documents among the keys, if they differ.
    causal : bool
        Queries see no later keys; in each document the last query is aligned with the last key.
    window : None, int or (left, right)
        As in `attention`, within each document.

    Raises
    ------
    InvalidInput
        For an unsupported block size or another value out of range.

    Examples
    --------
    >>> documents(torch.tensor([0, 2, 5], dtype=torch.int32), 16).to_element_mask()[0, 0].int()
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 0, 1, 1, 1],
            [0, 0, 1, 1, 1],
            [0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    op = "masks.documents"
    block = check_block_size(op, block_size)
    band = band_of(op, causal, window)
    q_offsets = _document_offsets(op, "cu_seqlens", cu_seqlens)
    k_offsets = q_offsets
    if cu_seqlens_k is not None:
        k_offsets = _document_offsets(op, "cu_seqlens_k", cu_seqlens_k)
        check_same_batch(op, cu_seqlens, cu_seqlens_k)
    p = Problem(check_seq_lengths(op, (int(q_offsets[-1]), int(k_offsets[-1]))), block)
    lo, hi = _visible_keys(band, q_offsets, k_offsets, p.seq[0])
    lists, entries, rows = lists_of_runs(_document_runs(lo, hi, p))
    bits = _document_bits(lo, hi, rows, lists.indices[entries], p)
    # a run may contain blocks in which its queries see nothing
    seen = (bits != 0).flatten(1).any(1)
    pool, ids = bit_masks.deduplicate(bits[seen])
    mask_rows = lists.row_indices()
    lists.bits_id[entries[seen]] = ids
    keep = torch.ones_like(lists.bits_id, dtype=torch.bool)
    keep[entries[~seen]] = False
    lists = lists_from_blocks(
        mask_rows[keep],
        lists.indices[keep].long(),
        lists.bits_id[keep].long(),
        p.grid()[0],
        p.grid()[1],
    )
    return BlockMask._from_parts(lists, pool, 1, 1, p.seq, block).to(cu_seqlens.device)


def _document_offsets(op: str, arg: str, cu_seqlens: torch.Tensor) -> torch.Tensor:
    check_cu_seqlens(op, arg, cu_seqlens)
    check_has_data(op, arg, cu_seqlens)
    offsets = cu_seqlens.to(CPU)
    check_cu_seqlens_values(op, arg, offsets, total=int(offsets[-1]))
    return offsets.to(torch.int64)


def _visible_keys(
    band: Band, q_offsets: torch.Tensor, k_offsets: torch.Tensor, sq: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Range of keys `lo .. hi` of each query, int64 `[Sq]`, with hi <= lo if it sees nothing."""
    left, right = band.scalars()
    q = torch.arange(sq, device=CPU)
    document = torch.searchsorted(q_offsets, q, right=True) - 1
    k_start, k_end = k_offsets[document], k_offsets[document + 1]
    position = q - q_offsets[document + 1] + k_end
    return (
        torch.maximum(k_start, position - left),
        torch.minimum(k_end, position + right + 1),
    )


def _document_runs(lo: torch.Tensor, hi: torch.Tensor, p: Problem) -> Runs:
    sees = lo < hi
    some = (
        _query_blocks(torch.where(sees, lo, FAR), p, fill=FAR).amin(1),
        _query_blocks(torch.where(sees, hi, 0), p, fill=0).amax(1),
    )
    every = (
        _query_blocks(torch.where(sees, lo, FAR), p, fill=0).amax(1),
        _query_blocks(torch.where(sees, hi, 0), p, fill=FAR).amin(1),
    )
    return runs_of_keys(some, every, p)


def _query_blocks(x: torch.Tensor, p: Problem, fill: int) -> torch.Tensor:
    """View `[Sq]` as `[Mb, bq]`, with `fill` for queries that do not exist."""
    mb, bq = p.grid()[0], p.block[0]
    return torch.nn.functional.pad(x, (0, mb * bq - x.numel()), value=fill).view(mb, bq)


def _document_bits(
    lo: torch.Tensor, hi: torch.Tensor, q_blocks: torch.Tensor, kv_blocks: torch.Tensor, p: Problem
) -> torch.Tensor:
    bq, bk = p.block
    lo, hi = _query_blocks(lo, p, fill=0), _query_blocks(hi, p, fill=0)
    bits = torch.empty(
        q_blocks.numel(), bq, bit_masks.words_per_row(bk), dtype=torch.int32, device=CPU
    )
    for start in range(0, q_blocks.numel(), DOCUMENT_CHUNK_BLOCKS):
        part = slice(start, start + DOCUMENT_CHUNK_BLOCKS)
        k_start = (kv_blocks[part].to(torch.int64) * bk).unsqueeze(-1)
        rows = q_blocks[part]
        bits[part] = bit_masks.from_intervals(lo[rows] - k_start, hi[rows] - k_start, bk)
    return bits
