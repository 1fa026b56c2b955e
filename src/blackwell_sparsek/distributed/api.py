"""`bsk.distributed.attention`: attention over tensors that are split among ranks."""

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor, Shard

from ..attention.api import attention as attend_whole
from ..attention.inputs import (
    DENSE,
    autocast_qkv,
    check_head_dims,
    check_qkv,
    check_sinks,
    is_deterministic,
    scale_or_default,
    softcap_or_off,
)
from ..attention.op import run_forward
from ..core.checks import (
    check_choice,
    check_derivatives,
    check_rank,
    check_tensor,
    is_batched,
    message,
)
from ..core.env import IMPLS
from ..core.errors import BskError, InvalidInput, InvalidType, Unsupported
from ..core.torch_private import untraced
from ..core.torch_state import is_explaining
from ..dispatch.dispatcher import Explained
from ..masks.band import EVERYTHING, Band, band_of
from ..masks.block_mask import BlockMask
from ..masks.packed import check_cu_seqlens
from .explain import MethodDecision
from .group import Members, agree_once, check_same, members_of
from .heads import Exchanger, mask_of_heads, split_heads, to_heads, to_sequence
from .plan import Plan
from .schedule import Fetch, Gathered, gathered, ring_parts
from .sequence import SequenceRun, attend_split
from .traffic import Shapes, bytes_of, choose
from .visible import PartMask, Visible

METHODS = ("auto", "allgather", "needed", "ring", "ulysses", "heads")
OP = "distributed.attention"

T = TypeVar("T")


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    plan: Plan | None = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    plan: Plan | None = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    plan: Plan | None = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    plan: Plan | None = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Self-attention over a sequence that is split among the ranks of a group.

    Each rank passes the queries, keys and values of its own tokens and gets their outputs, equal to
    those of `bsk.attention` on the whole sequence. Every rank has to call this, and to run the
    backward pass if any does.

    Parameters
    ----------
    q, k, v : `[B, Hq, tokens, D]`, `[B, Hkv, tokens, D]`, `[B, Hkv, tokens, Dv]`
        This rank's tokens, as `plan.shard(x, 2)` cuts them; there may be none. Or DTensors,
        `Shard(2)` on a mesh of one dimension (`Shard(1)` for the method "heads"); results are then
        DTensors too.
    mesh : DeviceMesh of one dimension, optional
    group : ProcessGroup, optional
        By default the default group.
    plan : Plan, optional
        Which tokens each rank has. By default runs of tokens in the order of the ranks, whose
        lengths are multiples of 16, except the last.
    method : str
        - `allgather`: every rank fetches all keys and values. One collective, memory for all keys.
        - `needed`: every rank fetches the blocks that its queries see. Bytes and memory in
          proportion to the kept blocks.
        - `ring`: keys and values pass from rank to rank, and the next shard travels while one is
          computed. Memory for two shards.
        - `ulysses`: queries, keys and values are exchanged so that each rank has whole sequences of
          some heads. With fewer KV heads than ranks, several ranks get the same KV head.
        - `heads`: inputs are already whole sequences of this rank's heads, as tensor parallel
          projections give them; nothing is sent.
        - `auto`: the one of `needed`, `allgather` and `ulysses` that sends the fewest bytes.
    cu_seqlens : int32 `[documents + 1]`, optional
        Offsets of documents in the whole sequence: queries see keys of their own document, and
        causal and window count inside it.
    causal, window, scale, softcap, sinks, return_lse, deterministic, impl :
        As in `bsk.attention`. All gradients but that of the sinks are complete; each rank has its
        own queries' part of the gradient of the sinks, to be summed over ranks like that of any
        replicated parameter. `impl="reference"` is for the method "heads" alone. The other options
        of `bsk.attention` (key_gate, alibi_slopes, bias, descales, out) are refused.
    block_mask : BlockMask, optional
        For the whole sequence, the same on every rank. Its blocks must fit the tiles of the plan.

    Returns
    -------
    out : `[B, Hq, tokens, Dv]`, dtype of q
    lse : fp32 `[B, Hq, tokens]`
        Only with `return_lse`.

    Notes
    -----
    Sums over ranks run in fp32 in the order of the ranks, so results are the same bits in every
    run whenever those of the local kernels are (`deterministic`).

    Ranks compare their arguments before they exchange data: if one has failed or differs, all
    raise. They do so in every call if the group has a backend for the CPU, such as gloo, and
    otherwise, since the host has to wait for it, in the first call with new sizes or options. If a
    rank fails later, or does not call at all, the others end with the timeout of the group.

    Masks of shards are made on the CPU in the first call with a plan, mask and options, and kept
    for later ones; a mask or `cu_seqlens` on a GPU is copied for this, which waits.

    `bsk.explain(bsk.distributed.attention, ...)` shows the method, the bytes that each rank sends,
    the imbalance, and why not the other methods. With a plan, one rank can ask alone.

    Examples
    --------
    Under `torchrun --nproc-per-node 4`::

        plan = bsk.distributed.balance(bsk.distributed.Band(None, 0), 4, seq_length=S)
        q, k, v = (plan.shard(x, 2) for x in (q, k, v))
        out = bsk.distributed.attention(q, k, v, plan=plan, causal=True)
        whole = plan.unshard(out, 2)

    In a group of one:

    >>> import torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = v = torch.randn(1, 2, 40, 16)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 2, 40, 16])
    >>> dist.destroy_process_group()
    """
    if isinstance(q, DTensor):
        options = {
            "plan": plan, "cu_seqlens": cu_seqlens, "causal": causal, "window": window,
            "block_mask": block_mask, "scale": scale, "softcap": softcap, "sinks": sinks,
            "deterministic": deterministic, "impl": impl, **others,
        }  # fmt: skip
        placed = _of_dtensors(q, k, v, mesh, group, method, options)
        return placed if return_lse else placed[0]
    members = members_of(OP, mesh, group)
    if members.size == 1:
        # straight to the plain call, which repeats a recorded launch in a few microseconds
        if others:
            _refuse(others)
        if plan is not None or method != "auto":
            _check_alone(plan, members, method, q)
        _check_lengths(q, k)
        if cu_seqlens is not None:
            check_tensor(OP, "q", q)
            check_tensor(OP, "cu_seqlens", cu_seqlens)
            band = band_of(OP, causal, window)
            block_mask = _document_mask(q, band, block_mask, cu_seqlens)
            causal, window = False, None
        return attend_whole(
            q, k, v, causal=causal, window=window, block_mask=block_mask, scale=scale,
            softcap=softcap, sinks=sinks, return_lse=return_lse, deterministic=deterministic,
            impl=impl,
        )  # fmt: skip
    out, lse = _over_ranks(
        members, q, k, v, (causal, window), others, plan=plan, method=method,
        cu_seqlens=cu_seqlens, block_mask=block_mask, scale=scale, softcap=softcap, sinks=sinks,
        deterministic=deterministic, impl=impl, return_lse=return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


@untraced
def _over_ranks(
    members: Members,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sides: tuple[Any, Any],
    others: dict[str, Any],
    **options: Any,
) -> Any:
    """Output and lse over several ranks; `sides` are causal and window.

    `options` are those of `_checked_call`. One break in a compiled graph: the compiler would break
    at every collective and cached mask, and compile the pieces between for each rank.
    """
    failure: Exception | None = None
    call: _Call | None = None
    try:
        if others:
            _refuse(others)
        q, k, v = _checked(q, k, v)
        call = _checked_call(q, k, v, members, band=band_of(OP, *sides), **options)
    except Exception as error:
        failure = error
    plan = options["plan"]
    if is_explaining() and isinstance(plan, Plan):
        # the plan knows the others, so one rank may ask alone
        if failure is not None:
            raise failure
        known = _Others(plan.lengths, ())
    else:
        known = _agreed(members, call, failure, q)
    assert call is not None
    return call.attend(q, k, v, known)


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_qkv(OP, q, k, v, DENSE)
    check_head_dims(OP, q, v)
    _check_lengths(q, k)
    for arg, x in {"q": q, "k": k, "v": v}.items():
        check_derivatives(OP, arg, x)
        if is_batched(x):
            problem, expected = "is mapped over by torch.vmap", "a batch dimension of q, k and v"
            raise Unsupported(message(OP, arg, problem, expected, "a transform"))
    return autocast_qkv(OP, q, k, v)


# Options of `bsk.attention` that shards do not have, and what to do instead.
REFUSED = {
    "key_gate": "key_gate=None: thresholds run over the whole sequence, which no rank has",
    "alibi_slopes": "alibi_slopes=None, or rotary embeddings at plan.positions()",
    "bias": "bias=None, or a block_mask for a bias of 0 and -inf",
    "q_descale": "q, k and v in 16 bits or more",
    "k_descale": "q, k and v in 16 bits or more",
    "v_descale": "q, k and v in 16 bits or more",
    "out_dtype": "out_dtype=None: results have the dtype of q",
    "out": "out=None: results are new tensors",
}


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in REFUSED:
            raise TypeError(f"{OP}() got an unexpected keyword argument {name!r}")
        if value is not None:
            problem, got = "is not available over several ranks", type(value).__name__
            raise Unsupported(message(OP, name, problem, REFUSED[name], got))


def _check_lengths(q: Any, k: Any) -> None:
    """Queries and keys are those of the same tokens; what are no tensors is refused elsewhere."""
    queries, keys = (x.shape[2:3] if isinstance(x, torch.Tensor) else () for x in (q, k))
    if queries and keys and queries != keys:
        got = f"{queries[0]} queries, {keys[0]} keys"
        raise InvalidInput(message(OP, "q/k", "have different lengths", "self-attention", got))


def _check_alone(plan: Any, members: Members, method: Any, q: Any) -> None:
    """What the plain call does not know, in a group of one."""
    check_choice(OP, "method", method, METHODS)
    check_tensor(OP, "q", q)
    check_rank(OP, "q", q, "[B, Hq, S, D]")
    if plan is not None:
        _check_plan(plan, members, method, q)


def _document_mask(
    q: torch.Tensor, band: Band, block_mask: BlockMask | None, cu_seqlens: torch.Tensor
) -> BlockMask:
    """What whole sequences see under documents, a band inside them and a block mask."""
    key = ("documents", q.shape, q.device, band, id(block_mask), _identity(cu_seqlens))

    def make() -> BlockMask:
        check_rank(OP, "q", q, "[B, Hq, S, D]")
        check_cu_seqlens(OP, "cu_seqlens", cu_seqlens)
        length, device = q.shape[2], q.device
        if block_mask is not None:
            _check_is_mask(block_mask)
            block_mask.check_problem(OP, q.shape[0], block_mask.heads, length, length)
        plan = _runs((length,), block_mask is not None)
        return Visible(OP, plan, band, block_mask, cu_seqlens).whole().to(device)

    return _remember(key, make, block_mask, cu_seqlens)


class _Others(NamedTuple):
    """What this rank knows of the others: their numbers of tokens and of query heads."""

    lengths: tuple[int, ...]
    heads: tuple[int, ...]


class _Call(NamedTuple):
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
        """What the agreement of the ranks depends on, compared by identity where it is large."""
        return (
            OP, q.shape, self.plan, self.method, self.band,
            _identity(self.cu_seqlens), id(self.block_mask), self.scale, self.softcap,
            self.sinks is None, self.deterministic, self.impl, self.return_lse, self.sizes,
        )  # fmt: skip

    def text(self, q: torch.Tensor) -> str:
        """The same as text for other ranks: own sizes first, then what must be equal."""
        _, heads, length, _ = q.shape
        plan = None if self.plan is None else hash(self.plan)
        offsets = None if self.cu_seqlens is None else _checksum(self.cu_seqlens)
        return (
            f"{length}|{heads if self.method == 'heads' else 0}|method {self.method}, "
            f"plan {plan}, sizes {self.sizes}, {self.band}, mask {_mask_text(self.block_mask)}, "
            f"documents {offsets}, scale {self.scale}, softcap {self.softcap}, "
            f"sinks {self.sinks is not None}, impl {self.impl}, lse {self.return_lse}"
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: _Others) -> Any:
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
        work = self._kept(key, lambda: _scheduled(visible, rank, ratio, method, device))
        softmax = (self.scale, self.softcap, self.deterministic, self.impl)
        return SequenceRun(self.members, plan.lengths, work, *softmax)

    def _explained(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, method: str
    ) -> MethodDecision:
        """What `bsk.explain` reports; nothing is exchanged or computed."""
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

    def _of_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: _Others) -> Any:
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
            mask, band = _document_mask(q, band, mask, self.cu_seqlens), EVERYTHING
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
        """What `make` returns, from an earlier call with the same mask and options if possible."""
        masks = (self.band, id(self.block_mask), _identity(self.cu_seqlens))
        return _remember((*masks, *key), make, self.block_mask, self.cu_seqlens)


def _scheduled(
    visible: Visible, rank: int, ratio: int, method: str, device: torch.device
) -> Gathered | list[PartMask]:
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


def _agreed(
    members: Members, call: "_Call | None", failure: Exception | None, q: torch.Tensor
) -> _Others:
    key = None if call is None else call.key(q)
    # what the key identifies
    held = None if call is None else (call.cu_seqlens, call.block_mask)
    texts = agree_once(
        OP, members, key, lambda: "" if call is None else call.text(q), failure, held
    )
    rows = [text.split("|", 2) for text in texts]
    check_same(OP, [rest for _, _, rest in rows])
    return _Others(
        tuple(int(length) for length, _, _ in rows), tuple(int(heads) for _, heads, _ in rows)
    )


def _checked_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    members: Members,
    plan: Any,
    method: str,
    cu_seqlens: Any,
    band: Band,
    block_mask: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    deterministic: Any,
    impl: str,
    return_lse: bool,
) -> _Call:
    check_choice(OP, "method", method, METHODS)
    check_choice(OP, "impl", impl, IMPLS)
    if plan is not None:
        _check_plan(plan, members, method, q)
    if cu_seqlens is not None:
        check_cu_seqlens(OP, "cu_seqlens", cu_seqlens)
    if block_mask is not None:
        _check_is_mask(block_mask)
    if method != "heads":
        check_sinks(OP, sinks, q)
        if plan is not None and block_mask is not None:
            length = plan.seq_length
            block_mask.check_problem(OP, q.shape[0], q.shape[1], length, length)
    batch, heads, _, dim = q.shape
    shared = batch, dim, v.shape[-1], str(q.dtype), *(x.requires_grad for x in (q, k, v))
    sizes = shared if method == "heads" else (*shared, heads, k.shape[1])
    return _Call(
        members, plan, method, cu_seqlens, band, block_mask, scale_or_default(OP, scale, dim),
        softcap_or_off(OP, softcap), sinks, is_deterministic(OP, deterministic), impl, return_lse,
        sizes,
    )  # fmt: skip


def _check_is_mask(block_mask: Any) -> None:
    if not isinstance(block_mask, BlockMask):
        got = f"{type(block_mask).__module__}.{type(block_mask).__name__}"
        raise InvalidType(message(OP, "block_mask", "is not a block mask", "BlockMask", got))


def _check_sinks_of_all(sinks: torch.Tensor | None, q: torch.Tensor, heads: int) -> None:
    """Sinks of all heads, of which this rank has some."""
    if sinks is not None:
        check_sinks(OP, sinks, q.new_empty(1).expand(1, heads, 1, 1))


def _check_plan(plan: Any, members: Members, method: str, q: torch.Tensor) -> None:
    if not isinstance(plan, Plan):
        raise InvalidType(message(OP, "plan", "is not a plan", "Plan", type(plan).__name__))
    if method == "heads":
        expected = "None, since each rank has whole sequences"
        raise InvalidInput(
            message(OP, "plan", "does not apply to the method heads", expected, plan)
        )
    plan.check_world(OP, members.size)
    length = plan.lengths[members.rank]
    if q.shape[2] != length:
        expected = f"{length} tokens on rank {members.rank}, as the plan says"
        raise InvalidInput(message(OP, "q", "has a wrong length", expected, q.shape[2]))


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


def _identity(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What changes when the contents of `x` do."""
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


def _of_dtensors(
    q: Any, k: Any, v: Any, mesh: Any, group: Any, method: str, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    of_mesh = q.device_mesh
    try:
        method = _method_of_dtensors(q, k, v, mesh, group, method)
    except BskError as error:
        # with a plan, `explain` is asked by one rank alone
        alone = is_explaining() and isinstance(options["plan"], Plan)
        if of_mesh.ndim == 1 and not alone:
            members = members_of(OP, of_mesh, None)
            agree_once(OP, members, None, str, error)
        raise
    local = (x.to_local() for x in (q, k, v))
    out, lse = attention(*local, mesh=of_mesh, method=method, return_lse=True, **options)
    shape = torch.Size((*q.shape[:3], v.shape[3]))
    return _placed(out, q, shape), _placed(lse, q, q.shape[:3])


def _method_of_dtensors(q: Any, k: Any, v: Any, mesh: Any, group: Any, method: str) -> str:
    """The method, "heads" where `auto` finds whole sequences; raises for other placements."""
    if not all(isinstance(x, DTensor) for x in (k, v)):
        got = ", ".join(type(x).__name__ for x in (q, k, v))
        raise InvalidType(message(OP, "q/k/v", "are of different kinds", "all DTensors", got))
    of_mesh, placements = q.device_mesh, q.placements
    if any(x.device_mesh != of_mesh or x.placements != placements for x in (k, v)):
        got = ", ".join(str(x.placements) for x in (q, k, v))
        raise InvalidInput(message(OP, "q/k/v", "are placed differently", "one placement", got))
    if group is not None or (mesh is not None and mesh != of_mesh):
        problem = "does not apply to DTensors, which have a mesh"
        raise InvalidInput(message(OP, "mesh/group", problem, "None", "another"))
    if of_mesh.ndim == 1 and placements[0] == Shard(1) and method in ("auto", "heads"):
        method = "heads"
    elif of_mesh.ndim != 1 or placements[0] != Shard(2) or method == "heads":
        expected = "Shard(2) on a mesh of one dimension, or Shard(1) for the method heads"
        got = f"{placements} on {of_mesh.ndim} dimensions, method {method!r}"
        raise Unsupported(message(OP, "q/k/v", "are placed otherwise", expected, got))
    return method


def _placed(x: torch.Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=stride)
