"""Block masks made by kernels: on a GPU, and where nothing but the kernels needs to see it.

Elsewhere torch functions make the same masks, entry for entry.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np
import torch

from ..core.compat import empty_on_gpu, raw_device, why_no_triton
from ..core.env import triton_interpreted
from ..launch.launcher import cdiv
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
        and nobody_looks_on()
        and all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
        and why_no_triton() is None
        and not triton_interpreted()
    )


def nobody_looks_on() -> bool:
    """Whether no compiler, mode or transform of PyTorch follows what is done here."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _empty(size: int, device: torch.device) -> torch.Tensor:
    """Room for int32."""
    if device.type == "cuda" and device.index == raw_device():
        return empty_on_gpu((size,), (1,), torch.int32)
    return torch.empty(size, dtype=torch.int32, device=device)


def _room(rows: int, entries: int, device: torch.device) -> BlockLists:
    return BlockLists(*[_empty(n, device) for n in (rows + 1, rows, entries, entries)])


class BuiltAgain:
    """Launches that built something before, by what they depend on besides addresses.

    A plan is whatever the builder wants to know again. It is found only where kernels build, on
    the current device, and for tensors at addresses that kernels may count on.
    """

    MOST = 64

    def __init__(self) -> None:
        self._plans: dict[Any, Any] = {}

    def find(self, key: Any, *tensors: torch.Tensor) -> Any:
        """The plan for `tensors`, or None."""
        try:
            plan = self._plans.get(key)
        except TypeError:
            # something that no key can hold: the checks will tell
            return None
        if plan is None:
            return None
        bits = 0
        for x in tensors:
            if type(x) is not torch.Tensor:
                return None
            bits |= x.data_ptr()
        usual = not bits & 15 and tensors[0].get_device() == raw_device() and nobody_looks_on()
        return plan if usual else None

    def keep(self, key: Any, plan: Any) -> None:
        """Remember a plan; a stream of new ones starts over."""
        if len(self._plans) >= self.MOST:
            self._plans.clear()
        self._plans[key] = plan


@lru_cache(maxsize=64)
def no_bits(block: IntPair, device: torch.device) -> torch.Tensor:
    """A pool of no bit masks, the same for all masks of a kind: there is nothing to write to."""
    shape = (0, block[0], bit_masks.words_per_row(block[1]))
    return torch.empty(shape, dtype=torch.int32, device=device)


_KEPT = BuiltAgain()
_TURNED = BuiltAgain()
_ORDERED = BuiltAgain()


def _exactly(value: Any) -> tuple[Any, ...]:
    """To tell numbers apart that compare equal: checks take some of them only."""
    if type(value) is tuple or type(value) is list:
        return (tuple(value), *map(type, value))
    return (value, type(value))


def kept_key(keep: Any, *sizes: Any) -> tuple[Any, ...] | None:
    """All that a mask of kept blocks depends on besides them; None where this is no usual call."""
    if type(keep) is not torch.Tensor or torch.compiler.is_compiling():
        return None
    try:
        return (*map(_exactly, sizes), keep.shape, keep.stride(), keep.dtype, keep.get_device())
    except RuntimeError:
        return None


def kept_again(
    key: tuple[Any, ...] | None, keep: torch.Tensor
) -> tuple[BlockLists, tuple[Any, ...]] | None:
    """Lists of kept blocks and what was kept with `key`; None for a call that is new."""
    if key is None or (plan := _KEPT.find(key, keep)) is None:
        return None
    launches, sizes, known = plan
    lists = BlockLists(*[empty_on_gpu((n,), (1,), torch.int32) for n in sizes])
    launches.repeat([*[x.data_ptr() for x in lists], keep.data_ptr()])
    return lists, known


def kept_lists(
    values: torch.Tensor,
    entries: int,
    key: tuple[Any, ...] | None = None,
    known: tuple[Any, ...] = (),
) -> BlockLists:
    """Lists of the kept blocks of `[B, H, Mb, Nb]`, which is not empty, with room for `entries`.

    `values` are what `device.kept_lists` says, `known` what `kept_again` shall tell for `key`.
    """
    from .list_kernels import launch_kept_lists

    lists = _room(values.shape[:3].numel(), entries, values.device)
    launches = launch_kept_lists(*lists, values)
    if key is not None and launches is not None:
        _KEPT.keep(key, (launches, [x.numel() for x in lists], known))
    return lists


def bounded_lists(keep: torch.Tensor, most: int) -> BlockLists:
    """See `pattern_kept.kept_blocks`; `keep` is not empty, `most` within 1 .. Nb."""
    from .list_kernels import launch_bounded_lists

    rows = keep.shape[:3].numel()
    lists = _room(rows, rows * most, keep.device)
    launch_bounded_lists(*lists, keep, most)
    return lists


def transposed_lists(lists: BlockLists, planes: int, grid: IntPair, all_full: bool) -> BlockLists:
    """Lists of columns, with as much room as `lists` have; these are not empty."""
    from .list_kernels import launch_kept_lists, launch_spread

    mb, nb = grid
    dtype, device = torch.int8 if all_full else torch.int32, lists.indptr.device
    values = torch.zeros(1, planes, nb, mb, dtype=dtype, device=device)
    made = _room(planes * nb, lists.indices.numel(), device)
    key = (planes, grid, all_full, device.index, lists.indices.numel())
    read = (lists.indptr, lists.indices, lists.bits_id)
    if (plan := _TURNED.find(key, *read)) is not None:
        spread, list_kept = plan
        at = values.data_ptr()
        spread.repeat([at, *[x.data_ptr() for x in read]])
        list_kept.repeat([*[x.data_ptr() for x in made], at])
        return made
    plan = (launch_spread(values, *read), launch_kept_lists(*made, values))
    if None not in plan:
        _TURNED.keep(key, plan)
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
    from .list_kernels import BandSizes, launch_band_lists

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
    key: tuple[Any, ...],
) -> torch.Tensor | None:
    """Rows of `planes` in the order to take them; None where there are none or too many.

    Parameters
    ----------
    sizes : what `device.row_order.OrderSizes` holds
    sides : lengths, blocks and the two sides of `band`, seen from the rows of `lists`
    columns : whether these lists are the transposed ones
    key : all of these but the addresses of lists, for `ordered_again`
    """
    from .order_kernels import OrderSizes, launch_row_order

    size = OrderSizes(*sizes)
    rows = size.planes * size.rows
    small_keys = (size.planes // size.section + 2) * (size.most + 1) < 2**31
    if not (0 < rows <= MAX_ORDERED_ROWS and small_keys):
        return None
    order = _empty(rows, lists.indptr.device)
    lengths, block, *within = sides
    limits = None if band == EVERYTHING else (within[0], within[1])
    launches = launch_row_order(
        order, lists.indptr, lists.indices, size, lengths, block, limits, columns=columns
    )
    if launches is not None:
        _ORDERED.keep(key, (launches, rows))
    return order


def ordered_again(key: tuple[Any, ...], lists: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What `ordered` makes, where it was called with `key` before."""
    indptr, _, indices, _ = lists
    if (plan := _ORDERED.find(key, indptr, indices)) is None:
        return None
    launches, rows = plan
    order = empty_on_gpu((rows,), (1,), torch.int32)
    launches.repeat([order.data_ptr(), indptr.data_ptr(), indices.data_ptr()])
    return order
