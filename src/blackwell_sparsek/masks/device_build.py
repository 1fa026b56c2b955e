"""Block masks built by our kernels on a GPU, and replay of the launches that build them.

On other devices, and while PyTorch traces or transforms the code, torch functions build the same
masks, entry for entry.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from ..core.compat import why_triton_fails
from ..core.env import triton_interpreted
from ..core.torch_private import empty_on_gpu, raw_device
from ..launch.launcher import cdiv
from ..launch.templates import RecordedLaunches
from . import bits as bit_masks
from .band import EVERYTHING, Band
from .block_lists import BlockLists, check_entry_count

# Up to this many blocks of all masks together, kept or not, lists have an entry for each: 512 MiB.
MAX_LISTED_BLOCKS = 2**26
# Up to this many blocks, lists are transposed through a map with a value for each; then by a sort.
MAX_TRANSPOSED_BLOCKS = 2**26
# Up to this many rows, quadratic work costs next to nothing.
MAX_BAND_ROWS = 2**14
MAX_ORDERED_ROWS = 2**15

IntPair = tuple[int, int]
Plan = TypeVar("Plan")


class MaskSizes(NamedTuple):
    """Everything of a mask of full blocks except its lists."""

    no_bits: torch.Tensor
    """The empty pool of bit masks."""
    batch: int
    heads: int
    seq_lengths: IntPair
    block_size: IntPair


def kernels_build(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Whether our kernels build masks on `device`: a GPU, and nothing traces these tensors."""
    return (
        device.type == "cuda"
        and untraced()
        and all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
        and why_triton_fails() is None
        and not triton_interpreted()
    )


def untraced() -> bool:
    """Whether no compiler, dispatch mode or functorch transform of PyTorch is active."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _empty(size: int, device: torch.device) -> torch.Tensor:
    """An uninitialised int32 vector."""
    if device.type == "cuda" and device.index == raw_device():
        return empty_on_gpu((size,), (1,), torch.int32)
    return torch.empty(size, dtype=torch.int32, device=device)


def _empty_lists(rows: int, entries: int, device: torch.device) -> BlockLists:
    return BlockLists(*[_empty(n, device) for n in (rows + 1, rows, entries, entries)])


class BuildPlans(Generic[Plan]):
    """Recorded launches of earlier builds, keyed by all that they depend on besides addresses.

    A plan holds the launches and whatever else the builder needs to replay them. It is found only
    for untraced tensors on the current device, at addresses aligned to 16 bytes, for which the
    kernels were compiled.
    """

    MOST = 64

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def find(self, key: Any, *tensors: torch.Tensor) -> Plan | None:
        """The plan for `tensors`, or None."""
        try:
            plan = self._plans.get(key)
        except TypeError:
            # an argument cannot be hashed: the checks of the ordinary path will report it
            return None
        if plan is None:
            return None
        bits = 0
        for x in tensors:
            if type(x) is not torch.Tensor:
                return None
            bits |= x.data_ptr()
        usual = not bits & 15 and tensors[0].get_device() == raw_device() and untraced()
        return plan if usual else None

    def keep(self, key: Any, plan: Plan) -> None:
        """Cache a plan. At `MOST` plans all are dropped first, so that memory stays bounded."""
        if len(self._plans) >= self.MOST:
            self._plans.clear()
        self._plans[key] = plan


@lru_cache(maxsize=64)
def no_bits(block: IntPair, device: torch.device) -> torch.Tensor:
    """An empty pool that masks may share, because there is nothing in it to write to."""
    return bit_masks.empty_pool(block, device)


class _KeptPlan(NamedTuple):
    launches: RecordedLaunches
    lengths: list[int]
    """Lengths of the four lists."""
    sizes: MaskSizes


class _TransposePlan(NamedTuple):
    spread: RecordedLaunches
    list_kept: RecordedLaunches


class _OrderPlan(NamedTuple):
    launches: RecordedLaunches
    rows: int


_KEPT: BuildPlans[_KeptPlan] = BuildPlans()
_TRANSPOSED: BuildPlans[_TransposePlan] = BuildPlans()
_ORDERED: BuildPlans[_OrderPlan] = BuildPlans()


def _exactly(value: Any) -> tuple[Any, ...]:
    """A key that distinguishes types of numbers: 64.0 == 64, but the checks refuse 64.0."""
    if type(value) is tuple or type(value) is list:
        return (tuple(value), *map(type, value))
    return (value, type(value))


def kept_key(keep: Any, *sizes: Any) -> tuple[Any, ...] | None:
    """Key of all that a mask of kept blocks depends on besides values; None for unusual tensors."""
    if type(keep) is not torch.Tensor or torch.compiler.is_compiling():
        return None
    try:
        return (*map(_exactly, sizes), keep.shape, keep.stride(), keep.dtype, keep.get_device())
    except RuntimeError:
        return None


def repeat_kept(
    key: tuple[Any, ...] | None, keep: torch.Tensor
) -> tuple[BlockLists, MaskSizes] | None:
    """Lists of `keep` by replay of what `kept_lists` recorded for `key`; None without a record."""
    if key is None or (plan := _KEPT.find(key, keep)) is None:
        return None
    lists = BlockLists(*[empty_on_gpu((n,), (1,), torch.int32) for n in plan.lengths])
    plan.launches.repeat([*[x.data_ptr() for x in lists], keep.data_ptr()])
    return lists, plan.sizes


def kept_lists(
    values: torch.Tensor,
    entries: int,
    key: tuple[Any, ...] | None = None,
    sizes: MaskSizes | None = None,
) -> BlockLists:
    """Lists with room for `entries`, from nonempty `values` `[B, H, Mb, Nb]` for `list_kernels`.

    With a `key`, the launches are recorded for `repeat_kept`, which returns `sizes` as well.
    """
    from .list_kernels import launch_kept_lists

    lists = _empty_lists(values.shape[:3].numel(), entries, values.device)
    launches = launch_kept_lists(*lists, values)
    if key is not None and sizes is not None and launches is not None:
        _KEPT.keep(key, _KeptPlan(launches, [x.numel() for x in lists], sizes))
    return lists


def bounded_lists(keep: torch.Tensor, most: int) -> BlockLists:
    """See `topk.kept_blocks`; `keep` is not empty, `most` within 1 .. Nb."""
    from .list_kernels import launch_bounded_lists

    rows = keep.shape[:3].numel()
    lists = _empty_lists(rows, rows * most, keep.device)
    launch_bounded_lists(*lists, keep, most)
    return lists


def transposed_lists(lists: BlockLists, masks: int, grid: IntPair, all_full: bool) -> BlockLists:
    """Lists of the columns of `masks` masks, as long as `lists`, which are not empty."""
    from .list_kernels import launch_kept_lists, launch_spread

    mb, nb = grid
    dtype, device = torch.int8 if all_full else torch.int32, lists.indptr.device
    values = torch.zeros(1, masks, nb, mb, dtype=dtype, device=device)
    made = _empty_lists(masks * nb, lists.indices.numel(), device)
    key = (masks, grid, all_full, device.index, lists.indices.numel())
    read = (lists.indptr, lists.indices, lists.bits_id)
    if (plan := _TRANSPOSED.find(key, *read)) is not None:
        at = values.data_ptr()
        plan.spread.repeat([at, *[x.data_ptr() for x in read]])
        plan.list_kept.repeat([*[x.data_ptr() for x in made], at])
        return made
    spread, list_kept = launch_spread(values, *read), launch_kept_lists(*made, values)
    if spread is not None and list_kept is not None:
        _TRANSPOSED.keep(key, _TransposePlan(spread, list_kept))
    return made


def band_crossings(band: Band, seq: IntPair, block: IntPair) -> list[IntPair]:
    """Ranges of distances (first query minus first key) at which an edge crosses a block."""
    bq, bk = block
    step = gcd(bq, bk)
    edges: list[IntPair] = []
    if band.right is not None:
        edges.append((-band.right - bq + 1, bk - 2 - band.right))
    if band.left is not None:
        edges.append((band.left - bq + 2, band.left + bk - 1))
    if len(edges) == 2:
        (first, right_end), (left_start, last) = edges
        if left_start <= right_end:
            edges = [(first, last)]
    # distances are the shift plus multiples of the step
    return [(lo + (seq[1] - seq[0] - lo) % step, hi) for lo, hi in edges]


@lru_cache(maxsize=64)
def _band_plan(band: Band, seq: IntPair, block: IntPair) -> tuple[int, tuple[int, ...]]:
    """How many blocks a band has, and the fields of `list_kernels.BandSizes`."""
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
    """Lists and bit masks of a band; None for a band without blocks or with too many rows."""
    from .list_kernels import BandSizes, launch_band_lists

    if cdiv(seq[0], block[0]) > MAX_BAND_ROWS:
        return None
    count, plan = _band_plan(band, seq, block)
    if count == 0:
        return None
    check_entry_count(count)
    sizes = BandSizes(*plan)
    lists = _empty_lists(sizes.mb, count, device)
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
    """Rows of all (batch, head)s in the order to run them; None for no rows or too many.

    Parameters
    ----------
    sizes : the fields of `order_kernels.OrderSizes`
    sides : lengths, blocks and the two sides of `band`, seen from the rows of `lists`
    columns : whether these lists are the transposed ones
    key : everything above except the addresses of the lists, for `ordered_again`
    """
    from .order_kernels import OrderSizes, launch_row_order

    size = OrderSizes(*sizes)
    rows = size.batch_heads * size.rows
    small_keys = (size.batch_heads // size.raster_group + 2) * (size.most + 1) < 2**31
    if not (0 < rows <= MAX_ORDERED_ROWS and small_keys):
        return None
    order = _empty(rows, lists.indptr.device)
    lengths, block, left, right = sides
    limits = None if band == EVERYTHING else (left, right)
    launches = launch_row_order(
        order, lists.indptr, lists.indices, size, lengths, block, limits, columns=columns
    )
    if launches is not None:
        _ORDERED.keep(key, _OrderPlan(launches, rows))
    return order


def ordered_again(key: tuple[Any, ...], lists: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What `ordered` builds, by replay of what it recorded for `key`; None without a record."""
    indptr, _, indices, _ = lists
    if (plan := _ORDERED.find(key, indptr, indices)) is None:
        return None
    order = empty_on_gpu((plan.rows,), (1,), torch.int32)
    plan.launches.repeat([order.data_ptr(), indptr.data_ptr(), indices.data_ptr()])
    return order
