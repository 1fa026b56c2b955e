"""Block masks made by kernels: on a GPU, and where nothing but the kernels needs to see it.

Elsewhere torch functions make the same masks, entry for entry.
"""

from functools import lru_cache
from math import gcd

import numpy as np
import torch

from ..core.compat import why_no_triton
from ..core.launch import cdiv
from . import bits as bit_masks
from .band import EVERYTHING, Band
from .block_lists import BlockLists, check_entry_count

# Blocks of all masks together for which lists are given room: 512 MiB of entries.
MAX_ROOM = 2**26
# The same where a map of all blocks is made to turn lists over; past it, lists are sorted.
MAX_SPREAD = 2**26
# Rows up to which work that grows with their square is no work at all.
MAX_BAND_ROWS = 2**14
MAX_ORDERED_ROWS = 2**15

IntPair = tuple[int, int]


def kernels_build(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Whether kernels make masks on `device`: no mode or transform of PyTorch looks on."""
    return (
        device.type == "cuda"
        and not torch.compiler.is_compiling()
        and all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and why_no_triton() is None
    )


def _room(rows: int, entries: int, device: torch.device) -> BlockLists:
    sizes = (rows + 1, rows, entries, entries)
    return BlockLists(*(torch.empty(n, dtype=torch.int32, device=device) for n in sizes))


@lru_cache(maxsize=64)
def no_bits(block: IntPair, device: torch.device) -> torch.Tensor:
    """A pool of no bit masks, the same for all masks of a kind: there is nothing to write to."""
    shape = (0, block[0], bit_masks.words_per_row(block[1]))
    return torch.empty(shape, dtype=torch.int32, device=device)


def kept_lists(keep: torch.Tensor) -> BlockLists:
    """Lists of the kept blocks of bool `[B, H, Mb, Nb]`, with room for all; `keep` is not empty."""
    from ..device.kept_lists import launch_kept_lists

    lists = _room(keep.shape[:3].numel(), keep.numel(), keep.device)
    launch_kept_lists(*lists, keep)
    return lists


def bounded_lists(keep: torch.Tensor, most: int) -> BlockLists:
    """See `pattern_kept.kept_blocks`; `keep` is not empty, `most` within 1 .. Nb."""
    from ..device.bounded_lists import launch_bounded_lists

    rows = keep.shape[:3].numel()
    lists = _room(rows, rows * most, keep.device)
    launch_bounded_lists(*lists, keep, most)
    return lists


def transposed_lists(lists: BlockLists, planes: int, grid: IntPair, all_full: bool) -> BlockLists:
    """Lists of columns, with as much room as `lists` have; these are not empty."""
    from ..device.kept_lists import launch_kept_lists, launch_spread

    mb, nb = grid
    dtype, device = torch.int8 if all_full else torch.int32, lists.indptr.device
    values = torch.zeros(1, planes, nb, mb, dtype=dtype, device=device)
    launch_spread(values, lists.indptr, lists.indices, lists.bits_id)
    made = _room(planes * nb, lists.indices.numel(), device)
    launch_kept_lists(*made, values)
    return made


def band_crossings(band: Band, seq: IntPair, block: IntPair) -> list[IntPair]:
    """Ranges of distances, first query minus first key, at which an edge crosses a block."""
    bq, bk = block
    step = gcd(bq, bk)
    edges = []
    if band.right is not None:
        edges.append((-band.right - bq + 1, bk - 2 - band.right))
    if band.left is not None:
        edges.append((band.left - bq + 2, band.left + bk - 1))
    if len(edges) == 2 and edges[1][0] <= edges[0][1]:
        edges = [(edges[0][0], edges[1][1])]
    # distances occur in steps, from the shift on
    return [(lo + (seq[1] - seq[0] - lo) % step, hi) for lo, hi in edges]


@lru_cache(maxsize=64)
def _band_plan(band: Band, seq: IntPair, block: IntPair) -> tuple[int, tuple[int, ...]]:
    """How many blocks a band has, and what `device.band_lists.BandSizes` holds."""
    (sq, sk), (bq, bk) = seq, block
    (left, right), shift = band.scalars(), sk - sq
    step = gcd(bq, bk)
    mb, nb = cdiv(sq, bq), cdiv(sk, bk)
    first = np.arange(mb, dtype=np.int64) * bq + shift
    lo = np.clip(first - left, 0, sk)
    hi = np.clip(np.minimum(first + bq, sk) + right, 0, sk)
    count = int(np.where(lo < hi, -(-hi // bk) - lo // bk, 0).sum())
    (near, near_count), (far, far_count) = (
        (lo, max(hi - lo + step, 0) // step)
        for lo, hi in [*band_crossings(band, seq, block), (0, -step), (0, -step)][:2]
    )
    heights, widths = 1 + (sq % bq > 0), 1 + (sk % bk > 0)
    pool = (near_count + far_count) * heights * widths
    sizes = (*seq, left, right, mb, nb, near, near_count, far, step, heights, widths, pool)
    return count, sizes


def band_lists(
    band: Band, seq: IntPair, block: IntPair, device: torch.device
) -> tuple[BlockLists, torch.Tensor] | None:
    """Lists and bit masks of a band; None where there is no block or there are too many rows."""
    from ..device.band_lists import BandSizes, launch_band_lists

    if cdiv(seq[0], block[0]) > MAX_BAND_ROWS:
        return None
    count, plan = _band_plan(band, seq, block)
    if count == 0:
        return None
    check_entry_count(count)
    sizes = BandSizes(*plan)
    lists = _room(sizes.mb, count, device)
    shape = (sizes.pool, block[0], bit_masks.words_per_row(block[1]))
    pool = torch.empty(shape, dtype=torch.int32, device=device)
    launch_band_lists(*lists, pool, sizes, block)
    return lists, pool


def ordered(
    lists: BlockLists,
    sizes: tuple[int, ...],
    sides: tuple[IntPair, IntPair, int, int],
    band: Band,
    *,
    columns: bool,
) -> torch.Tensor | None:
    """Rows of `planes` in the order to take them; None where there are none or too many.

    Parameters
    ----------
    sizes : what `device.row_order.OrderSizes` holds
    sides : lengths, blocks and the two sides of `band`, seen from the rows of `lists`
    columns : whether these lists are the transposed ones
    """
    from ..device.row_order import OrderSizes, launch_row_order

    size = OrderSizes(*sizes)
    rows = size.planes * size.rows
    small_keys = (size.planes // size.section + 2) * (size.most + 1) < 2**31
    if not (0 < rows <= MAX_ORDERED_ROWS and small_keys):
        return None
    order = torch.empty(rows, dtype=torch.int32, device=lists.indptr.device)
    lengths, block, *within = sides
    limits = None if band == EVERYTHING else (within[0], within[1])
    launch_row_order(
        order, lists.indptr, lists.indices, size, lengths, block, limits, columns=columns
    )
    return order
