"""The mask of documents packed into one sequence."""

import torch

from . import bits as bit_masks
from .band import Band, band_of
from .bits import usable_in_training
from .block_lists import lists_from_blocks
from .block_mask import BlockMask
from .check import IntPair, check_block_size, check_seq_lengths
from .packed import check_cu_seqlens, check_cu_seqlens_values, check_same_batch
from .parts import CPU, FAR, Problem, Runs, lists_of_runs, runs_of_keys

# partial blocks whose bits are made at a time
CHUNK_BLOCKS = 4096


@usable_in_training
def documents(
    cu_seqlens: torch.Tensor,
    block_size: int | IntPair = 128,
    *,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
) -> BlockMask:
    """Each query sees the keys of its own document, in a batch of 1 that packs them end to end.

    Made on the CPU, in memory of the tokens and of the bits of partial blocks, and placed where
    `cu_seqlens` lives; waits for that device.

    Parameters
    ----------
    cu_seqlens : int32 `[documents + 1]`
        Offsets of the documents; the last is Sq.
    block_size : int or (bq, bk)
    cu_seqlens_k : int32 `[documents + 1]`, optional
        Offsets of the documents among the keys, where they differ.
    causal : bool
        Queries see no later keys; within each document the last query meets the last key.
    window : None, int or (left, right)
        As in `attention`, within each document.

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
    q_offsets = _offsets(op, "cu_seqlens", cu_seqlens)
    k_offsets = q_offsets
    if cu_seqlens_k is not None:
        k_offsets = _offsets(op, "cu_seqlens_k", cu_seqlens_k)
        check_same_batch(op, cu_seqlens, cu_seqlens_k)
    p = Problem(check_seq_lengths(op, (int(q_offsets[-1]), int(k_offsets[-1]))), block)
    lo, hi = _visible_keys(band, q_offsets, k_offsets, p.seq[0])
    lists, entries, rows = lists_of_runs(_runs(lo, hi, p))
    bits = _bits(lo, hi, rows, lists.indices[entries], p)
    # a run may contain blocks of which its queries see nothing
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
        p.grid[0],
        p.grid[1],
    )
    return BlockMask._from_parts(lists, pool, 1, 1, p.seq, block).to(cu_seqlens.device)


def _offsets(op: str, arg: str, cu_seqlens: torch.Tensor) -> torch.Tensor:
    check_cu_seqlens(op, arg, cu_seqlens)
    offsets = cu_seqlens.to(CPU)
    check_cu_seqlens_values(op, arg, offsets, total=int(offsets[-1]))
    return offsets.to(torch.int64)


def _visible_keys(
    band: Band, q_offsets: torch.Tensor, k_offsets: torch.Tensor, sq: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Range of keys `lo .. hi` of each query, int64 `[Sq]`, with hi <= lo where it sees nothing."""
    left, right = band.scalars()
    q = torch.arange(sq, device=CPU)
    document = torch.searchsorted(q_offsets, q, right=True) - 1
    k_start, k_end = k_offsets[document], k_offsets[document + 1]
    position = q - q_offsets[document + 1] + k_end
    return (
        torch.maximum(k_start, position - left),
        torch.minimum(k_end, position + right + 1),
    )


def _runs(lo: torch.Tensor, hi: torch.Tensor, p: Problem) -> Runs:
    sees = lo < hi
    some = (
        _blocks(torch.where(sees, lo, FAR), p, fill=FAR).amin(1),
        _blocks(torch.where(sees, hi, 0), p, fill=0).amax(1),
    )
    every = (
        _blocks(torch.where(sees, lo, FAR), p, fill=0).amax(1),
        _blocks(torch.where(sees, hi, 0), p, fill=FAR).amin(1),
    )
    return runs_of_keys(some, every, p)


def _blocks(x: torch.Tensor, p: Problem, fill: int) -> torch.Tensor:
    """View `[Sq]` as `[Mb, bq]`, with `fill` for queries that do not exist."""
    mb, bq = p.grid[0], p.block[0]
    return torch.nn.functional.pad(x, (0, mb * bq - x.numel()), value=fill).view(mb, bq)


def _bits(
    lo: torch.Tensor, hi: torch.Tensor, q_blocks: torch.Tensor, kv_blocks: torch.Tensor, p: Problem
) -> torch.Tensor:
    bq, bk = p.block
    lo, hi = _blocks(lo, p, fill=0), _blocks(hi, p, fill=0)
    bits = torch.empty(
        q_blocks.numel(), bq, bit_masks.words_per_row(bk), dtype=torch.int32, device=CPU
    )
    for start in range(0, q_blocks.numel(), CHUNK_BLOCKS):
        part = slice(start, start + CHUNK_BLOCKS)
        k_start = (kv_blocks[part].to(torch.int64) * bk).unsqueeze(-1)
        rows = q_blocks[part]
        bits[part] = bit_masks.from_intervals(lo[rows] - k_start, hi[rows] - k_start, bk)
    return bits
