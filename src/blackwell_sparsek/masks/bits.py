"""Bit masks of partial blocks.

A pool of block masks is int32 `[pool, bq, ceil(bk / 32)]`: bit `j % 32` of word `j // 32` of row
`i` says whether element `(i, j)` of the block is visible.
"""

import torch

from ..core.torch_state import usable_in_training

WORD = 32


def words_per_row(bk: int) -> int:
    """How many 32-bit words hold one row of a block with `bk` columns."""
    return -(-bk // WORD)


def empty_pool(block: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A pool without bit masks, for blocks of `(bq, bk)` that are all full."""
    shape = (0, block[0], words_per_row(block[1]))
    return torch.empty(shape, dtype=torch.int32, device=device)


def pack(visible: torch.Tensor) -> torch.Tensor:
    """Pack bool `[..., bk]` into int32 `[..., ceil(bk / 32)]`."""
    bk = visible.shape[-1]
    words = words_per_row(bk)
    visible = torch.nn.functional.pad(visible, (0, words * WORD - bk))
    lanes = visible.unflatten(-1, (words * 4, 8)).to(torch.uint8)
    weights = torch.ones(8, dtype=torch.uint8, device=visible.device)
    weights <<= torch.arange(8, dtype=torch.uint8, device=visible.device)
    # four bytes form a word in little-endian order, which every supported machine uses
    return (lanes * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack(bits: torch.Tensor, bk: int) -> torch.Tensor:
    """Unpack int32 `[..., ceil(bk / 32)]` into bool `[..., bk]`."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    lanes = ((bits.unsqueeze(-1) >> shifts) & 1).to(torch.bool)
    return lanes.flatten(-2)[..., :bk]


@usable_in_training
def transpose(bits: torch.Tensor, bk: int) -> torch.Tensor:
    """The pool of the transposed blocks: `[pool, bk, ceil(bq / 32)]`."""
    return pack(unpack(bits, bk).transpose(-1, -2))


def from_intervals(lo: torch.Tensor, hi: torch.Tensor, bk: int) -> torch.Tensor:
    """Bits of rows that each see the columns `[lo, hi)`.

    `lo`, `hi` are int64 `[..., bq]` relative to the first column of the block, and may lie outside
    the block. The result is int32 `[..., bq, ceil(bk / 32)]`.
    """
    starts = torch.arange(words_per_row(bk), device=lo.device) * WORD
    first = (lo.clamp(0, bk).unsqueeze(-1) - starts).clamp(0, WORD)
    last = (hi.clamp(0, bk).unsqueeze(-1) - starts).clamp(0, WORD)
    last = torch.maximum(first, last)
    one = torch.ones((), dtype=torch.int64, device=lo.device)
    return ((one << last) - (one << first)).to(torch.int32)


def deduplicate(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct masks of `bits` and, for each mask, its row among them (int32).

    Masks are grouped by a 64-bit hash. If two different masks share a hash, nothing is merged: the
    result is then larger, never wrong.
    """
    count = bits.shape[0]
    everyone = torch.arange(count, device=bits.device)
    flat = bits.flatten(1)
    if count < 2:
        return bits, everyone.to(torch.int32)
    odd = torch.arange(flat.shape[1], device=bits.device) * 2 + 1
    weights = odd * -7046029254386353131  # odd multipliers: one changed word changes the hash
    weights = weights ^ (weights >> 29)
    hashes = (flat.to(torch.int64) * weights).sum(-1)
    distinct, ids = torch.unique(hashes, return_inverse=True)
    first = torch.full_like(distinct, count).scatter_reduce_(0, ids, everyone, "amin")
    pool = bits[first]
    if not torch.equal(pool[ids], bits):
        return bits, everyone.to(torch.int32)
    return pool, ids.to(torch.int32)
