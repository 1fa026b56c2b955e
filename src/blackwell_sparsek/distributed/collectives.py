"""Exchanges of rows between ranks, asynchronous and counted."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ..calls.attention import compute_dtype
from ..core.torch_private import untraced
from .group import Members, add_sent

# the name before torch 2.13, which warns about it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Finish = Callable[[torch.Tensor], torch.Tensor]


class Pending:
    """A transfer under way; `wait` gives what arrived, once `finish` has put it in order.

    On a GPU the transfer runs on a stream of the process group. `finish` runs behind it on a stream
    of this module, beside what the current stream computes, and `wait` makes the current stream
    wait for that, not the host. All memory is allocated on the stream that starts the transfer and
    held until that stream waits, so that no kernel gets it before. A transfer that is given up
    without waiting leaves its memory to the other stream.

    Parameters
    ----------
    works : what `torch.distributed` returned
    arriving : Tensor
        Where the data arrives.
    held : what must not be freed before: what is sent, and what `finish` reads and writes
    finish : function of `arriving`, optional
        Returns what `wait` returns; it may not allocate memory that outlives it.
    """

    def __init__(
        self,
        works: Sequence[Any],
        arriving: torch.Tensor,
        *held: torch.Tensor,
        finish: Finish | None = None,
    ) -> None:
        self._works, self._result, self._held = works, arriving, (arriving, *held)
        self._finish, self._finished = finish, None
        if finish is not None and arriving.is_cuda:
            beside = _stream_beside(arriving.device)
            # not only for the transfer: `finish` writes to memory that the current stream had
            beside.wait_stream(torch.cuda.current_stream(arriving.device))
            with torch.cuda.stream(beside):
                self._arrived()
            self._finished = beside.record_event()

    def wait(self) -> torch.Tensor:
        """Wait for the received tensors; call it once, on the stream that started the transfer."""
        if self._finished is None:
            self._arrived()
        else:
            torch.cuda.current_stream(self._result.device).wait_event(self._finished)
        self._held, self._finished = (), None
        return self._result

    def _arrived(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._result = self._finish(self._result)
        self._works, self._finish = (), None

    def __del__(self) -> None:
        if self._finished is not None:
            beside = _stream_beside(self._result.device)
            for x in (*self._held, self._result):
                x.record_stream(beside)


@lru_cache(maxsize=64)
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """The stream on which arriving data is put in order, one for each GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def start_all_to_all(
    rows: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    members: Members,
    *held: torch.Tensor,
    finish: Finish | None = None,
) -> Pending:
    """Send `send[r]` of the rows to rank r, one after the other; receive `receive[r]` from it."""
    arriving = rows.new_empty((sum(receive), *rows.shape[1:]))
    rows = rows.contiguous()
    each = rows[:1].numel() * rows.element_size() if rows.shape[0] else 0
    add_sent((sum(send) - send[members.rank]) * each)
    work = dist.all_to_all_single(
        arriving, rows, list(receive), list(send), group=members.group, async_op=True
    )
    return Pending([work], arriving, rows, *held, finish=finish)


def start_all_gather(
    rows: torch.Tensor,
    length: int,
    members: Members,
    *held: torch.Tensor,
    finish: Finish | None = None,
) -> Pending:
    """The rows of all ranks, [size, length, ...]; each rank's are padded to `length`."""
    padded = rows.contiguous()
    if rows.shape[0] < length:
        padded = rows.new_zeros((length, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
    arriving = rows.new_empty((members.size * length, *rows.shape[1:]))
    add_sent(padded.numel() * padded.element_size() * (members.size - 1))
    work = _all_gather(arriving, padded, group=members.group, async_op=True)
    whole = arriving.view(members.size, length, *rows.shape[1:])
    return Pending([work], whole, padded, *held, finish=finish)


def start_ring(data: torch.Tensor, count: int, members: Members) -> Pending:
    """Send the elements of `data` to the next rank, and receive `count` from the previous one."""
    arriving = data.new_empty(count)
    data = data.contiguous()
    calls = []
    # nothing is sent for an empty shard: both sides know its length
    if data.numel():
        next_rank = members.peer(members.rank + 1)
        calls.append(dist.P2POp(dist.isend, data, next_rank, group=members.group))
    if count:
        previous = members.peer(members.rank - 1)
        calls.append(dist.P2POp(dist.irecv, arriving, previous, group=members.group))
    add_sent(data.numel() * data.element_size())
    return Pending(dist.batch_isend_irecv(calls) if calls else [], arriving, data)


@untraced
def gather_parts(
    x: torch.Tensor, dim: int, lengths: Sequence[int], members: Members
) -> tuple[torch.Tensor, ...]:
    """The parts of all ranks, `lengths[r]` elements along `dim`; differentiable."""
    if members.size == 1:
        return (x,)
    apply: Any = _GatherParts.apply
    found: tuple[torch.Tensor, ...] = apply(x, dim, tuple(lengths), members)
    return found


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, lengths: tuple[int, ...], members: Members
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.lengths, ctx.members = dim, lengths, members
        rows = x.movedim(dim, 0)
        if max(lengths) == 0:
            return tuple(x.new_empty(x.shape) for _ in lengths)
        whole = start_all_gather(rows, max(lengths), members).wait()
        return tuple(
            part[:length].movedim(0, dim) for part, length in zip(whole, lengths, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        apply: Any = _ReturnParts.apply
        return apply(ctx.dim, ctx.lengths, ctx.members, *gradients), None, None, None


class _ReturnParts(torch.autograd.Function):
    """The adjoint of `_GatherParts`, a function of its own so that it has a derivative too."""

    @staticmethod
    def forward(
        ctx: Any, dim: int, lengths: tuple[int, ...], members: Members, *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.members = dim, lengths, members
        rows = torch.cat([part.movedim(dim, 0) for part in parts])
        own = lengths[members.rank]
        arriving = start_all_to_all(rows, lengths, [own] * members.size, members).wait()
        returned = arriving.view(members.size, own, *rows.shape[1:])
        total = returned.to(compute_dtype(returned.dtype)).sum(0).to(returned.dtype)
        return total.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = gather_parts(gradient, ctx.dim, ctx.lengths, ctx.members)
        return None, None, None, *parts
