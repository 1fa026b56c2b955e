"""Attention over a sequence split among ranks: keys fetched at once, or passed round a ring.

Partial results over disjoint keys are merged by their lse. The backward pass computes each part's
gradients from the final output and lse, so the parts add up:

    p = exp(s - lse)    ds = p * (dout v^T - sum_d out * dout + dlse)

Keys and values are fetched again for it, so that between the passes a rank stores its own shard
only. Gradients of keys go back to their owner and are summed in fp32 in the order of the ranks,
which makes the sums of a rank the same in every run.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.merge import merge_states
from ..attention.op import run_backward, run_forward
from ..calls.attention import AttentionCall, AttnSpec, compute_dtype, empty_lse, empty_out
from ..core.errors import Unsupported
from ..masks.band import EVERYTHING
from .collectives import Pending, start_all_gather, start_all_to_all, start_ring
from .group import Members
from .schedule import Exchange, Fetch, Gathered, from_rows, row_width, to_rows
from .visible import PartMask

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class SequenceRun:
    """One call: the ranks, this rank's schedule, and the options of the softmax."""

    members: Members
    lengths: tuple[int, ...]
    work: Gathered | list[PartMask]
    """Keys fetched at once, or parts by the rank that owns the keys, for a ring."""
    scale: float
    softcap: float
    deterministic: bool
    impl: str

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PartMask) -> Any:
        """The attention of q over the keys of a part, without sinks."""
        spec = AttnSpec(
            self.scale,
            EVERYTHING,
            part.mask,
            self.softcap,
            max_q=q.shape[2],
            max_k=k.shape[2],
        )
        return AttentionCall(q, k, v, spec, self.deterministic)


def attend_split(
    run: SequenceRun,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
) -> Pair:
    """Output and lse of this rank's queries."""
    apply: Any = _SplitAttention.apply
    found: Pair = apply(q, k, v, sinks, run)
    return found


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        run: SequenceRun,
    ) -> Pair:
        total = _Merged(q, v)
        for k_part, v_part, part in _parts(run, k, v):
            if not part.is_empty:
                total.add(*run_forward(run.call(q, k_part, v_part, part), run.impl))
        out, lse = total.result(sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.run = run
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        given = (dout, dlse, *ctx.saved_tensors, ctx.run, ctx.needs_input_grad[:4])
        apply: Any = _SplitGradients.apply
        made = apply(*given) if torch.is_grad_enabled() else _gradients(*given)
        return (*made, None)


class _SplitGradients(torch.autograd.Function):
    """The backward pass where it may be differentiated itself, which raises."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        return _gradients(*given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Unsupported("distributed.attention: no backward of the backward")


def _gradients(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    run: SequenceRun,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v and the sinks; None if not needed."""
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = _Gradients(run, q, dout, dlse, out, lse)
    back = _gathered_backward if isinstance(run.work, Gathered) else _ring_backward
    dk, dv = back(run, k, v, gradients)
    dsinks = None if sinks is None else _sink_gradient(sinks, dout, dlse, out, lse)
    made = (gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks)
    return tuple(g if need else None for g, need in zip(made, needs, strict=True))


class _Merged:
    """The running result over disjoint keys; sums of several parts are kept in fp32."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor) -> None:
        self._q, self._head_dim_v = q, v.shape[-1]
        self._parts: Pair | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the result over further keys."""
        if self._parts is None:
            self._parts = out, lse
        else:
            before, lse_before = self._parts
            dtype = compute_dtype(out.dtype)
            self._parts = merge_states(before.to(dtype), lse_before, out.to(dtype), lse)

    def result(self, sinks: torch.Tensor | None) -> Pair:
        """Output in the dtype of q, and lse."""
        if self._parts is None:
            out = empty_out(self._q, self._head_dim_v).zero_()
            self._parts = out, empty_lse(self._q).fill_(-torch.inf)
        return with_sinks(*self._parts, sinks, self._q.dtype)


def with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype
) -> Pair:
    """The result over all keys once a logit per head joins the denominator; output in `dtype`."""
    if sinks is not None:
        joined = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        factor = torch.where(joined == -torch.inf, 0.0, (lse - joined).exp())
        out, lse = out.to(lse.dtype) * factor.unsqueeze(-1), joined
    return out.to(dtype), lse


class _Gradients:
    """Gradients of parts, from the final output and lse; `dq` sums up in fp32."""

    def __init__(
        self,
        run: SequenceRun,
        q: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        self._run, self._q, self._rows = run, q, (dout, dlse, out, lse)
        self.dq = torch.zeros_like(q, dtype=compute_dtype(q.dtype))

    def of_part(self, k: torch.Tensor, v: torch.Tensor, part: PartMask) -> Pair | None:
        """Gradients of the keys and values of a part; None if nothing is visible there."""
        if part.is_empty:
            return None
        call, needs = self._run.call(self._q, k, v, part), (True, True, True, False)
        dq, dk, dv, _ = run_backward(call, *self._rows, needs, self._run.impl)
        self.dq += dq
        return dk, dv


def _parts(run: SequenceRun, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Keys, values and mask of each part; the next part travels while one is computed."""
    if isinstance(run.work, Gathered):
        yield from _gathered_parts(run, run.work, k, v)
    else:
        yield from _ring_steps(run, run.work, k, v)


def _gathered_parts(run: SequenceRun, work: Gathered, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Own keys first; each fetch is under way before the keys that came before it are computed."""
    copies = work.fetches[0].exchange.copies
    rows = _joined_rows(k, v, copies)
    pending: Pending | None = _fetch(run, work.fetches[0], rows)
    yield k, v, work.local
    for at, fetch in enumerate(work.fetches):
        assert pending is not None
        arrived = pending.wait()
        following = work.fetches[at + 1 : at + 2]
        pending = _fetch(run, following[0], rows) if following else None
        yield *_split_rows(arrived, k, v, copies), fetch.mask


def _joined_rows(k: torch.Tensor, v: torch.Tensor, copies: tuple[int, int]) -> torch.Tensor:
    """Keys and values of a token side by side, so that they travel together."""
    return torch.cat([to_rows(k, copies), to_rows(v, copies)], 1)


def _split_rows(
    rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, copies: tuple[int, int]
) -> Pair:
    """The inverse of `_joined_rows`: views [B, Hkv, tokens, D or Dv]."""
    width = row_width(k, copies)
    return from_rows(rows[:, :width], copies, k), from_rows(rows[:, width:], copies, v)


def _fetch(run: SequenceRun, fetch: Fetch, rows: torch.Tensor) -> Pending:
    """Start to fetch rows of other ranks; they arrive in the order of their tokens."""
    exchange = fetch.exchange
    batch, heads = exchange.copies
    shape = (batch * heads * exchange.tokens, rows.shape[1])
    index = fetch.gather_index
    if index is not None:
        gathered = rows.new_empty(shape)

        def select(arrived: torch.Tensor) -> torch.Tensor:
            return torch.index_select(arrived.flatten(0, 1), 0, index, out=gathered)

        first, last = fetch.piece
        piece, held = rows[first:last], (index, gathered)
        return start_all_gather(piece, last - first, run.members, *held, finish=select)
    # masks hide the rows that do not arrive, but 0 * NaN would show them
    ordered = rows.new_empty(shape) if exchange.is_whole else rows.new_zeros(shape)

    def place(arrived: torch.Tensor) -> torch.Tensor:
        return ordered.index_copy_(0, exchange.receive_index, arrived)

    sent = rows.index_select(0, exchange.send_index)
    counts, held = exchange.receive_counts, (exchange.receive_index, ordered)
    return start_all_to_all(sent, exchange.send_counts, counts, run.members, *held, finish=place)


def _gathered_backward(
    run: SequenceRun, k: torch.Tensor, v: torch.Tensor, gradients: _Gradients
) -> Pair:
    """Gradients of fetched keys return to their owners while the next ones are computed."""
    assert isinstance(run.work, Gathered)
    fetches = run.work.fetches
    copies, dtype = fetches[0].exchange.copies, compute_dtype(k.dtype)
    width = row_width(k, copies) + row_width(v, copies)
    parts = _gathered_parts(run, run.work, k, v)
    own = gradients.of_part(*next(parts))
    if own is None:
        shape = (copies[0] * copies[1] * k.shape[2], width)
        total = torch.zeros(shape, dtype=dtype, device=k.device)
    else:
        total = _joined_rows(*own, copies).to(dtype)
    returning: list[tuple[Exchange, Pending]] = []
    for fetch, part in zip(fetches, parts, strict=True):
        exchange, far = fetch.exchange, gradients.of_part(*part)
        if far is None:
            leaving = k.new_zeros(exchange.receive_index.numel(), width)
        else:
            leaving = _joined_rows(*far, copies).index_select(0, exchange.receive_index)
        if returning:
            _add_returned(total, *returning.pop())
        counts = exchange.receive_counts, exchange.send_counts
        returning.append((exchange, start_all_to_all(leaving, *counts, run.members)))
    _add_returned(total, *returning.pop())
    return _split_rows(total, k, v, copies)


def _add_returned(total: torch.Tensor, exchange: Exchange, pending: Pending) -> None:
    """Add gradients of own keys that other ranks computed, in the order of the ranks."""
    counts = exchange.send_counts
    pieces = torch.split(pending.wait(), counts), torch.split(exchange.send_index, counts)
    for rows, index in zip(*pieces, strict=True):
        total.index_add_(0, index, rows.to(total.dtype))


def _ring_steps(run: SequenceRun, parts: list[PartMask], k: torch.Tensor, v: torch.Tensor) -> Any:
    """Own keys first, then those received from the previous rank; each rank passes keys on."""
    members, like, data = run.members, (k, v), _packed(k, v)
    for step in range(members.size):
        source = (members.rank - step) % members.size
        before = run.lengths[(source - 1) % members.size]
        last = step + 1 == members.size
        pending = None if last else start_ring(data, _size(like, before), members)
        yield k, v, parts[source]
        if pending is not None:
            data = pending.wait()
            k, v = _unpacked(data, like, before)


def _ring_backward(
    run: SequenceRun, k: torch.Tensor, v: torch.Tensor, gradients: _Gradients
) -> Pair:
    """Sums of dk and dv travel with their keys, one step behind, and end at the owner."""
    assert isinstance(run.work, list)
    members, like, dtype = run.members, (k, v), compute_dtype(k.dtype)
    total = torch.zeros(_size(like, k.shape[2]), dtype=dtype, device=k.device)
    pending: Pending | None = None
    for step, (k_part, v_part, part) in enumerate(_ring_steps(run, run.work, k, v)):
        made = gradients.of_part(k_part, v_part, part)
        if pending is not None:
            total = pending.wait()
        if made is not None:
            total += _packed(*made)
        before = run.lengths[(members.rank - step - 1) % members.size]
        pending = start_ring(total, _size(like, before), members)
    assert pending is not None
    return _unpacked(pending.wait(), like, k.shape[2])


def _packed(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.flatten() for x in tensors])


def _size(like: Pair, length: int) -> int:
    """Elements of keys and values like these, of another length."""
    return sum(x.shape[0] * x.shape[1] * length * x.shape[3] for x in like)


def _unpacked(data: torch.Tensor, like: Pair, length: int) -> Pair:
    shape_k, shape_v = ((*x.shape[:2], length, x.shape[3]) for x in like)
    keys, values = torch.split(data, [math.prod(shape_k), math.prod(shape_v)])
    return keys.view(shape_k), values.view(shape_v)


def _sink_gradient(
    sinks: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> torch.Tensor:
    """Of this rank's queries: the sum over ranks is the gradient of the whole sequence."""
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    share = torch.where(lse == -torch.inf, 0.0, (sinks.to(lse.dtype)[:, None] - lse).exp())
    return -(share * delta).sum((0, 2)).to(sinks.dtype)
