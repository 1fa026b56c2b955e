"""A checked call of `bsk.distributed.attention` on one of several ranks.

`RanksCall.attend` chooses the method, makes this rank's masks and schedule or finds them among
those of earlier calls, and runs it. `api` checks the arguments, and agrees on them with the other
ranks.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..attention.api import attention as attend_whole
from ..attention.inputs import check_sinks
from ..attention.op import run_forward
from ..core.checks import check_rank, message
from ..core.errors import InvalidInput, InvalidType, Unsupported
from ..core.torch_state import is_explaining
from ..dispatch.dispatcher import Explained
from ..masks.band import EVERYTHING, Band
from ..masks.block_mask import BlockMask
from ..masks.packed import check_cu_seqlens
from .explain import MethodDecision
from .group import Members
from .heads import Exchanger, mask_of_heads, split_heads, to_heads, to_sequence
from .plan import Plan
from .schedule import Fetch, Gathered, gathered, ring_parts
from .sequence import SequenceRun, attend_split
from .traffic import Shapes, bytes_of, choose
from .visible import PartMask, Visible

METHODS = ("auto", "allgather", "needed", "ring", "ulysses", "heads")
OP = "distributed.attention"

T = TypeVar("T")


class OtherRanks(NamedTuple):
    """What every rank knows about the others: the tokens and the query heads of each."""

    lengths: tuple[int, ...]
    heads: tuple[int, ...]


class RanksCall(NamedTuple):
    """The options of a call on one rank, checked as far as one rank can."""

    members: Members
    plan: Plan | None
    method: str
    cu_seqlens: torch.Tensor | None
    band: Band
    block_mask: BlockMask | None
    scale: float
    softcap: float
    sinks: torch.Tensor | None
    deterministic: bool
    impl: str
    return_lse: bool
    sizes: tuple[Any, ...]
    """Shape of q and k, dtype, and which gradients are wanted."""

    def key(self, q: torch.Tensor) -> tuple[Any, ...]:
        """Equal for calls that need no new agreement of the ranks; large tensors by identity."""
        return (
            OP, q.shape, self.plan, self.method, self.band,
            _identity(self.cu_seqlens), id(self.block_mask), self.scale, self.softcap,
            self.sinks is None, self.deterministic, self.impl, self.return_lse, self.sizes,
        )  # fmt: skip

    def text(self, q: torch.Tensor) -> str:
        """The call as text for other ranks: own sizes first, then everything that must agree."""
        _, heads, length, _ = q.shape
        plan = None if self.plan is None else hash(self.plan)
        offsets = None if self.cu_seqlens is None else _checksum(self.cu_seqlens)
        return (
            f"{length}|{heads if self.method == 'heads' else 0}|method {self.method}, "
            f"plan {plan}, sizes {self.sizes}, {self.band}, mask {_mask_text(self.block_mask)}, "
            f"documents {offsets}, scale {self.scale}, softcap {self.softcap}, "
            f"sinks {self.sinks is not None}, impl {self.impl}, lse {self.return_lse}"
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: OtherRanks) -> Any:
        """The call on one of several ranks; arguments that differ have been refused."""
        if self.method == "heads":
            return self._of_heads(q, k, v, others)
        plan = self.plan or _runs(others.lengths, self.block_mask is not None)
        self._check_mask(q, plan.seq_length, q.shape[1])
        shapes = Shapes.of(q, k, v)
        visible = self._visible(plan)
        method = self.method
        if method == "auto":
            chosen = ("auto", shapes, plan)
            method = self._kept(chosen, lambda: choose(visible, shapes)).method
        if is_explaining():
            raise Explained(self._explained(q, k, v, visible, method))
        if method == "ulysses":
            return self._ulysses(q, k, v, plan)
        if self.impl == "reference":
            expected = "'eager', 'triton' or 'sm90', or method 'ulysses'"
            problem = "recomputes the softmax over all keys, which no rank has"
            raise Unsupported(message(OP, "impl", problem, expected, "'reference'"))
        return attend_split(self._run(q, k, visible, method), q, k, v, self.sinks)

    def _run(self, q: torch.Tensor, k: torch.Tensor, visible: Visible, method: str) -> SequenceRun:
        """The call of a method that exchanges keys, with this rank's schedule."""
        plan, rank, device = visible.plan, self.members.rank, q.device
        ratio = q.shape[1] // max(k.shape[1], 1)
        key = (method, plan, ratio, rank, device)
        work = self._kept(key, lambda: scheduled(visible, rank, ratio, method, device))
        softmax = (self.scale, self.softcap, self.deterministic, self.impl)
        return SequenceRun(self.members, plan.lengths, work, *softmax)

    def _explained(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, method: str
    ) -> MethodDecision:
        """The report of `bsk.explain`; exchanges and computes nothing."""
        plan, shapes = visible.plan, Shapes.of(q, k, v)
        reasons = dict(choose(visible, shapes).reasons)
        if self.method != "auto":
            others = (name for name in METHODS[1:] if name != method)
            reasons = dict.fromkeys(others, f"method={method!r} was asked for")
        local = None
        if method != "ulysses":
            run = self._run(q, k, visible, method)
            work = run.work
            own = work.local if isinstance(work, Gathered) else work[self.members.rank]
            if not own.is_empty:
                try:
                    run_forward(run.call(q, k, v, own), self.impl)
                except Explained as stop:
                    local = stop.decision
        lengths = f"{min(plan.lengths)} to {max(plan.lengths)}"
        problem = (
            f"{plan.seq_length} tokens in tiles of {plan.tile} on {plan.world_size} ranks, "
            f"{lengths} each; {shapes.heads_q} query and {shapes.heads_kv} KV heads"
        )
        sent, work_of = bytes_of(visible, method, shapes), visible.work()
        imbalance = float(work_of.max() / work_of.mean()) if float(work_of.sum()) else 1.0
        return MethodDecision(
            *(OP, self.method, method, problem, reasons, None), sent, imbalance, local
        )

    def _of_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: OtherRanks
    ) -> Any:
        ends = [*accumulate(others.heads)]
        end = ends[self.members.rank]
        span = (end - q.shape[1], end)
        self._check_mask(q, q.shape[2], ends[-1])
        _check_sinks_of_all(self.sinks, q, ends[-1])
        return self._whole(q, k, v, span)

    def _ulysses(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> Any:
        heads = q.shape[1]
        spans = split_heads(heads, k.shape[1], self.members.size)
        key = ("exchanger", plan, id(self.members.group), q.device)
        exchanger = self._kept(key, lambda: Exchanger.of(self.members, plan, q.device))
        q, k, v = to_heads((q, k, v), exchanger, (spans.q, spans.kv, spans.kv))
        out, lse = self._whole(q, k, v, spans.q[self.members.rank])
        out = to_sequence(out, exchanger, spans.q, heads)
        if self.return_lse:
            lse = to_sequence(lse.unsqueeze(-1), exchanger, spans.q, heads).squeeze(-1)
        return out, lse

    def _whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: tuple[int, int]
    ) -> Any:
        """`bsk.attention` on whole sequences of this rank's query heads, `span`."""
        mask, band, sinks = self.block_mask, self.band, self.sinks
        if self.cu_seqlens is not None:
            mask, band = document_mask(q, band, mask, self.cu_seqlens), EVERYTHING
        if mask is not None:
            whole, device = mask, q.device
            key = ("heads", span, q.shape[2], device)
            mask = self._kept(key, lambda: mask_of_heads(whole, span).to(device))
        if sinks is not None:
            sinks = sinks[slice(*span)]
        return attend_whole(
            *(q, k, v), window=(band.left, band.right), block_mask=mask, scale=self.scale,
            softcap=self.softcap or None, sinks=sinks, return_lse=True,
            deterministic=self.deterministic, impl=self.impl,
        )  # fmt: skip

    def _check_mask(self, q: torch.Tensor, length: int, heads: int) -> None:
        if self.block_mask is not None:
            self.block_mask.check_problem(OP, q.shape[0], heads, length, length)

    def _visible(self, plan: Plan) -> Visible:
        parts = (OP, plan, self.band, self.block_mask, self.cu_seqlens)
        return self._kept(("visible", plan), lambda: Visible(*parts))

    def _kept(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The result of `make`, or of an earlier call with the same mask and options."""
        masks = (self.band, id(self.block_mask), _identity(self.cu_seqlens))
        return _remember((*masks, *key), make, self.block_mask, self.cu_seqlens)


def scheduled(
    visible: Visible, rank: int, ratio: int, method: str, device: torch.device
) -> Gathered | list[PartMask]:
    """The schedule of a rank for a method that exchanges keys, with its index tensors on `device`.

    `ratio` is the number of query heads per KV head.
    """

    def placed(part: PartMask) -> PartMask:
        return part if part.mask is None else part._replace(mask=part.mask.to(device))

    if method == "ring":
        return [placed(part) for part in ring_parts(visible, rank)]
    made = gathered(visible, rank, ratio, everything=method == "allgather")

    def moved(fetch: Fetch) -> Fetch:
        index = fetch.gather_index
        return fetch._replace(
            exchange=fetch.exchange.to(device),
            mask=placed(fetch.mask),
            gather_index=None if index is None else index.to(device),
        )

    return Gathered(placed(made.local), [moved(fetch) for fetch in made.fetches])


def document_mask(
    q: torch.Tensor, band: Band, block_mask: BlockMask | None, cu_seqlens: torch.Tensor
) -> BlockMask:
    """The mask of whole sequences: documents, a band inside each, and a block mask."""
    key = ("documents", q.shape, q.device, band, id(block_mask), _identity(cu_seqlens))

    def make() -> BlockMask:
        check_rank(OP, "q", q, "[B, Hq, S, D]")
        check_cu_seqlens(OP, "cu_seqlens", cu_seqlens)
        length, device = q.shape[2], q.device
        if block_mask is not None:
            check_is_mask(block_mask)
            block_mask.check_problem(OP, q.shape[0], block_mask.heads, length, length)
        plan = _runs((length,), block_mask is not None)
        return Visible(OP, plan, band, block_mask, cu_seqlens).whole().to(device)

    return _remember(key, make, block_mask, cu_seqlens)


@lru_cache(maxsize=64)
def _runs(lengths: tuple[int, ...], for_mask: bool) -> Plan:
    """The plan of runs of tokens with these lengths, in the order of the ranks."""
    bounds = [0, *accumulate(lengths)]
    inner = [bound for bound in bounds[:-1] if bound < bounds[-1]]
    tile = next((side for side in (256, 128, 64, 32, 16) if not any(b % side for b in inner)), None)
    if tile is None:
        raise InvalidInput(
            message(
                OP,
                "q",
                "is cut inside of blocks",
                "lengths that are multiples of 16 on all ranks but the last, or a plan",
                list(lengths),
            )
        )
    # blocks of a mask have sides up to 256, those of a band up to 128
    tile = tile if for_mask else min(tile, 128)
    ends = [-(-bound // tile) for bound in bounds]
    owned = [tuple(range(start, end)) for start, end in pairwise(ends)]
    return Plan(bounds[-1], tile, tuple(owned))


def check_is_mask(block_mask: Any) -> None:
    """Check the type of a block mask."""
    if not isinstance(block_mask, BlockMask):
        got = f"{type(block_mask).__module__}.{type(block_mask).__name__}"
        raise InvalidType(message(OP, "block_mask", "is not a block mask", "BlockMask", got))


def _check_sinks_of_all(sinks: torch.Tensor | None, q: torch.Tensor, heads: int) -> None:
    """Sinks of all heads, of which this rank has some."""
    if sinks is not None:
        check_sinks(OP, sinks, q.new_empty(1).expand(1, heads, 1, 1))


# Masks and schedules of earlier calls, with the tensors that their keys identify.
_KEPT: "OrderedDict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]" = OrderedDict()
MOST_KEPT = 64
_checksums: "WeakKeyDictionary[BlockMask, int]" = WeakKeyDictionary()


def _remember(key: tuple[Any, ...], make: Callable[[], T], *held: Any) -> T:
    if key in _KEPT:
        _KEPT.move_to_end(key)
        found: T
        found, _ = _KEPT[key]
        return found
    made = make()
    # an id stays unique as long as its object lives
    _KEPT[key] = made, held
    if len(_KEPT) > MOST_KEPT:
        _KEPT.popitem(last=False)
    return made


def _identity(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """A key that changes when the contents of `x` do."""
    if x is None:
        return None
    # writes to tensors of inference mode are not counted, so their contents are read
    return (id(x), tuple(x.tolist())) if x.is_inference() else (id(x), x._version)


def _checksum(x: torch.Tensor) -> int:
    """A number that differs if the contents do, in all likelihood. Waits for the device."""
    flat = x.detach().flatten().long().cpu()
    return int((flat * (torch.arange(flat.numel(), device="cpu") % 65521 + 1)).sum())


def _mask_text(mask: BlockMask | None) -> str:
    if mask is None:
        return "none"
    if mask not in _checksums:
        lists = mask.forward
        _checksums[mask] = sum(_checksum(x) for x in (*lists, mask.bits))
    sizes = (mask.batch, mask.heads, *mask.seq_lengths, *mask.block_size)
    return f"{sizes} {_checksums[mask]}"
