"""Attention split by heads: the exchange between shards of the sequence and shards of the heads."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..calls.attention import compute_dtype
from ..masks.block_lists import lists_from_blocks
from ..masks.block_mask import BlockMask
from .collectives import Pending, start_all_to_all
from .group import Members
from .plan import Plan

Span = tuple[int, int]


class HeadSplit(NamedTuple):
    """Which query heads, and which KV heads for them, each rank computes: `start .. end`."""

    q: list[Span]
    kv: list[Span]


def split_heads(heads_q: int, heads_kv: int, ranks: int) -> HeadSplit:
    """Whole groups of query heads per rank, or parts of one group where there are more ranks.

    With fewer KV heads than ranks, several ranks hold the same KV head. Ranks may get none.

    >>> split_heads(8, 2, 4)
    HeadSplit(q=[(0, 2), (2, 4), (4, 6), (6, 8)], kv=[(0, 1), (0, 1), (1, 2), (1, 2)])
    """
    group = heads_q // heads_kv if heads_kv else 0
    if heads_kv >= ranks or heads_kv == 0:
        bounds = [heads_kv * rank // ranks for rank in range(ranks + 1)]
        kv = list(pairwise(bounds))
        return HeadSplit([(lo * group, hi * group) for lo, hi in kv], kv)
    q, kv = [], []
    for rank in range(ranks):
        head = rank * heads_kv // ranks
        sharing = [r for r in range(ranks) if r * heads_kv // ranks == head]
        place, count = sharing.index(rank), len(sharing)
        lo, hi = (head * group + group * i // count for i in (place, place + 1))
        q.append((lo, hi))
        # a rank without query heads needs no keys
        kv.append((head, head + 1) if lo < hi else (head, head))
    return HeadSplit(q, kv)


class Exchanger(NamedTuple):
    """The ranks, and the order of the tokens of a plan."""

    members: Members
    lengths: tuple[int, ...]
    order: torch.Tensor
    """Positions of the tokens of all ranks, one rank after the other."""
    join_index: torch.Tensor
    """The inverse of `order`."""

    @classmethod
    def of(cls, members: Members, plan: Plan, device: torch.device) -> "Exchanger":
        """The exchange of tokens of a plan."""
        order = torch.cat([plan.positions(rank) for rank in range(plan.world_size)])
        return cls(members, plan.lengths, order.to(device), plan.join_index().to(device))

    def start_to_heads(self, x: torch.Tensor, spans: Sequence[Span]) -> "Moving":
        """[B, H, own tokens, D] of all heads to [B, own heads, S, D] of all tokens."""
        lo, hi = spans[self.members.rank]
        batch, _, _, dim = x.shape
        sent = [x[:, a:b].reshape(-1) for a, b in spans]
        counts = [batch * (hi - lo) * length * dim for length in self.lengths]
        pending = self._exchange(sent, counts)

        def arranged() -> torch.Tensor:
            parts = [
                part.view(batch, hi - lo, length, dim)
                for part, length in zip(
                    torch.split(pending.wait(), counts), self.lengths, strict=True
                )
            ]
            return torch.cat(parts, 2).index_select(2, self.join_index)

        return arranged

    def start_to_sequence(self, y: torch.Tensor, spans: Sequence[Span], heads: int) -> "Moving":
        """The adjoint: [B, own heads, S, D] to [B, heads, own tokens, D]; shared heads add up."""
        batch, _, _, dim = y.shape
        own = self.lengths[self.members.rank]
        parts = torch.split(y.index_select(2, self.order), list(self.lengths), 2)
        counts = [batch * (b - a) * own * dim for a, b in spans]
        pending = self._exchange([part.reshape(-1) for part in parts], counts)
        dtype = y.dtype

        def arranged() -> torch.Tensor:
            arrived = pending.wait()
            shape, wide = (batch, heads, own, dim), compute_dtype(dtype)
            total = torch.zeros(shape, dtype=wide, device=arrived.device)
            for part, (a, b) in zip(torch.split(arrived, counts), spans, strict=True):
                total[:, a:b] += part.view(batch, b - a, own, dim)
            return total.to(dtype)

        return arranged

    def _exchange(self, sent: list[torch.Tensor], receive: list[int]) -> Pending:
        counts = [x.numel() for x in sent]
        return start_all_to_all(torch.cat(sent), counts, receive, self.members)


Moving = Callable[[], torch.Tensor]
"""An exchange under way: waits for it and gives what arrived."""


def to_heads(
    inputs: Sequence[torch.Tensor], exchanger: Exchanger, spans: Sequence[Sequence[Span]]
) -> tuple[torch.Tensor, ...]:
    """`Exchanger.start_to_heads` of several tensors with `spans` for each, and its derivative.

    All of them travel before the first has to be there: the next is packed meanwhile.
    """
    apply: Any = _ToHeads.apply
    found: tuple[torch.Tensor, ...] = apply(exchanger, tuple(map(tuple, spans)), *inputs)
    return found


def to_sequence(
    y: torch.Tensor, exchanger: Exchanger, spans: Sequence[Span], heads: int
) -> torch.Tensor:
    """`Exchanger.start_to_sequence` with its derivative."""
    apply: Any = _ToSequence.apply
    found: torch.Tensor = apply(y, exchanger, tuple(spans), heads)
    return found


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchanger: Exchanger, spans: tuple[tuple[Span, ...], ...], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchanger, ctx.spans = exchanger, spans
        ctx.heads = [x.shape[1] for x in inputs]
        moving = [exchanger.start_to_heads(x, s) for x, s in zip(inputs, spans, strict=True)]
        return tuple(arranged() for arranged in moving)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        each = zip(gradients, ctx.spans, ctx.heads, ctx.needs_input_grad[2:], strict=True)
        if torch.is_grad_enabled():
            # autograd does not see what ranks exchange, and these may be differentiated again
            found = [
                to_sequence(gradient, ctx.exchanger, spans, heads) if needed else None
                for gradient, spans, heads, needed in each
            ]
            return None, None, *found
        # ranks have compared which gradients they want
        moving = [
            ctx.exchanger.start_to_sequence(gradient, spans, heads) if needed else None
            for gradient, spans, heads, needed in each
        ]
        return None, None, *(None if arranged is None else arranged() for arranged in moving)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, exchanger: Exchanger, spans: tuple[Span, ...], heads: int
    ) -> torch.Tensor:
        ctx.exchanger, ctx.spans = exchanger, spans
        return exchanger.start_to_sequence(y, spans, heads)()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (moved,) = to_heads((gradient,), ctx.exchanger, (ctx.spans,))
        return moved, None, None, None


def mask_of_heads(mask: BlockMask, span: Span) -> BlockMask:
    """The masks of some heads; one mask for all heads stays as it is."""
    lo, hi = span
    if mask.heads == 1 or (lo, hi) == (0, mask.heads):
        return mask
    lists, (mb, nb) = mask.forward, mask.grid
    rows = lists.row_indices()
    head = rows // max(mb, 1) % mask.heads
    keep = (head >= lo) & (head < hi)
    rows, head = rows[keep], head[keep]
    batch = rows // max(mb * mask.heads, 1)
    new_rows = (batch * (hi - lo) + head - lo) * mb + rows % max(mb, 1)
    made = lists_from_blocks(
        new_rows,
        lists.indices[keep].long(),
        lists.bits_id[keep].long(),
        mask.batch * (hi - lo) * mb,
        nb,
    )
    sizes = (mask.batch, hi - lo, mask.seq_lengths, mask.block_size)
    return BlockMask._from_parts(made, mask.bits, *sizes)
