"""Bytes that each method sends, from the plan and the mask alone."""

from typing import Any, NamedTuple

import torch

from ..calls.attention import compute_dtype
from ..core.checks import check_choice, message
from ..core.errors import InvalidType
from ..masks.band import band_of
from ..masks.block_mask import BlockMask
from ..masks.packed import check_cu_seqlens
from .heads import Span, split_heads
from .plan import Plan
from .schedule import needed_remote
from .visible import Visible

METHODS = ("allgather", "needed", "ring", "ulysses")
NEARLY_ALL = 0.9
"""Share of all keys from which fetching them with one collective is simpler and no slower."""


class Shapes(NamedTuple):
    """Sizes of q, k and v, except for the number of tokens.

    Examples
    --------
    >>> q, k = torch.empty(1, 8, 32, 64), torch.empty(1, 2, 32, 64)
    >>> Shapes.of(q, k, k) == Shapes(1, 8, 2, 64, 64, torch.float32)
    True
    """

    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> "Shapes":
        """The sizes of these tensors."""
        batch, heads_q, _, head_dim = q.shape
        return cls(batch, heads_q, k.shape[1], head_dim, v.shape[3], q.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        width = self.head_dim + self.head_dim_v
        return self.batch * self.heads_kv * width * self.dtype.itemsize


class Traffic(NamedTuple):
    """Bytes that each rank sends to others, as `traffic` returns them."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def traffic(
    plan: Plan,
    method: str,
    shapes: Shapes,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: Any = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Traffic:
    """Bytes that each rank sends in `bsk.distributed.attention`, computed without processes.

    Parameters
    ----------
    plan : Plan
    method : "allgather", "needed", "ring" or "ulysses"
    shapes : Shapes
        Batch, query heads, KV heads, head dims of keys and of values, dtype.
    causal, window, block_mask, cu_seqlens : as in `bsk.distributed.attention`

    Returns
    -------
    Traffic
        Of the forward and the backward pass, by rank.

    Raises
    ------
    InvalidInput
        For an unknown method, or a mask that does not fit the plan.

    Examples
    --------
    >>> shapes = Shapes(1, 8, 2, 64, 64, torch.bfloat16)
    >>> plan = Plan.contiguous(4096, 4)
    >>> traffic(plan, "needed", shapes, causal=True, window=256).forward
    (131072, 131072, 131072, 0)
    >>> traffic(plan, "allgather", shapes).forward
    (1572864, 1572864, 1572864, 1572864)
    """
    op = "traffic"
    check_choice(op, "method", method, METHODS)
    for arg, value, kind in (("plan", plan, Plan), ("shapes", shapes, Shapes)):
        if not isinstance(value, kind):
            got = type(value).__name__
            raise InvalidType(message(op, arg, "has a wrong type", kind.__name__, got))
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            got = type(block_mask).__name__
            raise InvalidType(message(op, "block_mask", "is not a block mask", "BlockMask", got))
        length = plan.seq_length
        block_mask.check_problem(op, shapes.batch, shapes.heads_q, length, length)
    if cu_seqlens is not None:
        check_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    visible = Visible(op, plan, band_of(op, causal, window), block_mask, cu_seqlens)
    return bytes_of(visible, method, shapes)


def bytes_of(visible: Visible, method: str, shapes: Shapes) -> Traffic:
    """`traffic` of queries and keys whose visibility is known."""
    plan = visible.plan
    ranks, lengths = plan.world_size, plan.lengths
    if ranks == 1:
        return Traffic((0,), (0,))
    if method == "ring":
        return _ring(lengths, shapes)
    if method == "ulysses":
        return _ulysses(lengths, shapes)
    ratio = shapes.heads_q // max(shapes.heads_kv, 1)
    fetched = fetched_rows(visible, ratio, everything=method == "allgather")
    wanted = needed_remote(visible, ratio, everything=method == "allgather")
    row = shapes.kv_bytes // max(wanted.shape[1] * wanted.shape[2], 1)
    out = tuple(row * int(n) for n in fetched.sum(0))
    back = tuple(row * int(n) for n in fetched.sum(1))
    if method == "allgather":
        out = (shapes.kv_bytes * max(lengths) * (ranks - 1),) * ranks
    return Traffic(out, tuple(a + b for a, b in zip(out, back, strict=True)))


def fetched_rows(visible: Visible, q_heads_per_kv: int, everything: bool) -> torch.Tensor:
    """Rows that rank r fetches from rank s: int64 [r, s]; see `schedule.Exchange`."""
    plan, bk = visible.plan, visible.block[1]
    wanted = needed_remote(visible, q_heads_per_kv, everything)
    blocks = wanted.flatten(1, 2).sum(1)
    width = (plan.seq_length - torch.arange(blocks.shape[1], device="cpu") * bk).clamp(max=bk)
    tokens = blocks * width
    columns = [tokens[:, plan.blocks(s, bk)].sum(1) for s in range(plan.world_size)]
    return torch.stack(columns, 1)


def _ring(lengths: tuple[int, ...], shapes: Shapes) -> Traffic:
    """Every rank passes on all shards but the last to arrive, and in the backward all sums."""
    total = sum(lengths)
    out = [
        shapes.kv_bytes * (total - lengths[(rank + 1) % len(lengths)])
        for rank in range(len(lengths))
    ]
    wider = compute_dtype(shapes.dtype).itemsize // shapes.dtype.itemsize
    return Traffic(tuple(out), tuple(x + shapes.kv_bytes * wider * total for x in out))


def _ulysses(lengths: tuple[int, ...], shapes: Shapes) -> Traffic:
    ranks = len(lengths)
    spans = split_heads(shapes.heads_q, shapes.heads_kv, ranks)
    item, total = shapes.dtype.itemsize, sum(lengths)

    def heads(spans: list[Span], but: int) -> int:
        return sum(b - a for rank, (a, b) in enumerate(spans) if rank != but)

    out, back = [], []
    for rank, own in enumerate(lengths):
        far_q, far_kv = heads(spans.q, rank), heads(spans.kv, rank)
        here_q, here_kv = (b - a for a, b in (spans.q[rank], spans.kv[rank]))
        kv_width = shapes.head_dim + shapes.head_dim_v
        inputs = own * (far_q * shapes.head_dim + far_kv * kv_width) * item
        results = (total - own) * here_q * shapes.head_dim_v * item
        out.append(shapes.batch * (inputs + results))
        results = own * far_q * shapes.head_dim_v * item
        inputs = (total - own) * (here_q * shapes.head_dim + here_kv * kv_width) * item
        back.append(shapes.batch * (inputs + results))
    return Traffic(tuple(out), tuple(back))


class Choice(NamedTuple):
    """The method of `auto`, and why it is none of the others."""

    method: str
    reasons: dict[str, str]


def choose(visible: Visible, shapes: Shapes) -> Choice:
    """The method whose busiest rank sends the fewest bytes in the forward pass."""
    most = {method: max(bytes_of(visible, method, shapes).forward) for method in METHODS}
    best, everything = "needed", most["allgather"]
    if most["needed"] >= NEARLY_ALL * everything:
        best = "allgather"
    ranks = visible.plan.world_size
    even = shapes.heads_kv % ranks == 0 or (
        shapes.heads_kv > 0 and ranks % shapes.heads_kv == 0 and shapes.heads_q % ranks == 0
    )
    if even and most["ulysses"] < most[best]:
        best = "ulysses"
    reasons = {
        method: f"its busiest rank sends {most[method]:,} bytes, that of {best} {most[best]:,}"
        for method in METHODS
        if method != best
    }
    if best == "allgather":
        reasons["needed"] += f": {NEARLY_ALL:.0%} of all keys or more, so one collective for all"
    if not even:
        heads = f"{shapes.heads_q} query and {shapes.heads_kv} KV heads"
        reasons["ulysses"] = f"{heads} do not divide evenly among {ranks} ranks"
    reasons["ring"] += "; only runs when asked for, where memory is short"
    reasons["heads"] = "is for inputs with whole sequences of a rank's heads"
    return Choice(best, reasons)
