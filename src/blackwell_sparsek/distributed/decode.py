"""`bsk.distributed.attention_decode`: new queries over a cache that is split among ranks."""

from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist

from ..attention.inputs import check_sinks
from ..calls.attention import check_impl_and_lse
from ..core.checks import check_choice, check_rank, check_tensor, message
from ..core.errors import InvalidInput, InvalidType, Unsupported
from ..decode.api import attention_decode as decode_local
from ..decode.inputs import (
    autocast_queries,
    check_decode_values,
    decode_call,
    refuse_gradients,
)
from ..decode.op import decode_dispatch
from .collectives import gather_parts
from .group import Members, agree_once, check_same, members_of
from .sequence import with_sinks

OP = "distributed.attention_decode"
SPLITS = ("sequence", "heads")


@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    split: str = "sequence",
    mesh: Any = None,
    group: Any = None,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    split: str = "sequence",
    mesh: Any = None,
    group: Any = None,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: Literal[True],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    split: str = "sequence",
    mesh: Any = None,
    group: Any = None,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    split: str = "sequence",
    mesh: Any = None,
    group: Any = None,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the latest queries over caches of which every rank holds a part.

    All ranks pass the same queries and get the same result, merged by lse. There are no gradients.

    Parameters
    ----------
    q : `[B, Hq, Sq, D]`
        All heads, the same on every rank.
    k_cache, v_cache, page_table, kv_blocks, kv_block_size, k_scale, v_scale :
        This rank's part, as in `bsk.attention_decode`.
    cache_seqlens : int32 `[B]`
        Keys on this rank; 0 is allowed.
    split : "sequence" or "heads"
        By sequence: the keys of rank r come before those of rank r + 1, for each sequence. Where
        the cuts are may differ between sequences. A new token goes to the last rank, or with one
        query at a time to any rank. By heads: each rank holds the same number of KV heads, rank 0
        the first ones, and the output heads are gathered.
    mesh, group : as in `bsk.distributed.attention`
    causal : bool
        Hide the keys after a query's position, counted over all ranks. Several causal queries over
        a cache split by sequence read it once for each.
    window : as in `bsk.attention_decode`
        Not with a cache split by sequence: most ranks would read nothing.
    scale, softcap, sinks, return_lse, impl : as in `bsk.attention_decode`

    Returns
    -------
    out : `[B, Hq, Sq, Dv]`, dtype of q
    lse : fp32 `[B, Hq, Sq]`
        Only with `return_lse`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        For a window over a cache that is split by sequence.

    Examples
    --------
    In a group of one:

    >>> import torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, (k, v) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 100, 64)
    >>> lengths = torch.tensor([70], dtype=torch.int32)
    >>> attention_decode(q, k, v, cache_seqlens=lengths).shape
    torch.Size([1, 8, 1, 64])
    >>> dist.destroy_process_group()
    """
    members = members_of(OP, mesh, group)
    local = {
        "cache_seqlens": cache_seqlens, "page_table": page_table, "kv_blocks": kv_blocks,
        "kv_block_size": kv_block_size, "scale": scale, "softcap": softcap, "k_scale": k_scale,
        "v_scale": v_scale, "impl": impl,
    }  # fmt: skip
    call = _Local(members, q, k_cache, v_cache, local)
    failure: Exception | None = None
    try:
        check_impl_and_lse(OP, impl, return_lse)
        _check(q, k_cache, split, window, page_table, sinks, members)
        if members.size > 1:
            call.check(split, causal, window, sinks)
    except Exception as error:
        failure = error
    if members.size > 1 or failure is not None:
        options = (split, causal, repr(window), scale, softcap, sinks is None, impl)
        _agree(members, failure, q, v_cache, options)
    if split == "heads":
        out, lse = call.by_heads(causal, window, sinks)
    else:
        out, lse = call.by_sequence(causal, sinks)
    return (out, lse) if return_lse else out


class _Local(NamedTuple):
    """A call on this rank's part of the cache."""

    members: Members
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    options: dict[str, Any]

    def run(self, q: torch.Tensor, **options: Any) -> Any:
        """`bsk.attention_decode` on this rank."""
        return decode_local(
            q, self.k_cache, self.v_cache, return_lse=True, **{**self.options, **options}
        )

    def check(self, split: str, causal: Any, window: Any, sinks: Any) -> None:
        """Raise what `run` would: it does so on this rank alone, and the others would wait."""
        options = {arg: x for arg, x in self.options.items() if arg != "impl"}
        heads = self._heads if split == "heads" else slice(None)
        call = decode_call(
            *(OP, autocast_queries(OP, self.q)[:, heads], self.k_cache, self.v_cache),
            causal=causal,
            window=window,
            sinks=None if sinks is None else sinks[heads],
            **options,
        )
        refuse_gradients(OP, call)
        chosen = decode_dispatch.choose(self.options["impl"], call.problem)
        if chosen is not None and chosen.name in ("eager", "reference"):
            # these read lengths and pages anyway
            check_decode_values(OP, call)

    @property
    def _heads(self) -> slice:
        """The query heads of this rank, split by heads."""
        heads = self.q.shape[1] // self.members.size
        return slice(heads * self.members.rank, heads * (self.members.rank + 1))

    def by_sequence(self, causal: bool, sinks: torch.Tensor | None) -> Any:
        q, queries = self.q, self.q.shape[2]
        if causal and queries > 1:
            parts = [
                self.run(q[:, :, i : i + 1], causal=False, cache_seqlens=lengths)
                for i, lengths in enumerate(self._visible_lengths())
            ]
            out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        else:
            # one query comes after all keys
            out, lse = self.run(q, causal=False)
        sums = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)
        each = [q.shape[0]] * self.members.size
        everyone = torch.stack(gather_parts(sums, 0, each, self.members))
        outs, lses = everyone[..., :-1], everyone[..., -1]
        total = torch.logsumexp(lses, 0)
        share = torch.where(lses == -torch.inf, 0.0, (lses - total).exp())
        merged = (share.unsqueeze(-1) * outs).sum(0)
        return with_sinks(merged, total, sinks, out.dtype)

    def _visible_lengths(self) -> list[torch.Tensor]:
        """How many keys of this rank each causal query sees, int32 [B] each."""
        own: torch.Tensor = self.options["cache_seqlens"]
        members, queries = self.members, self.q.shape[2]
        if members.size == 1:
            lengths = own.unsqueeze(0)
        else:
            lengths = own.new_empty(members.size, own.numel())
            dist.all_gather(list(lengths.unbind()), own.contiguous(), group=members.group)
        start, total = lengths[: members.rank].sum(0), lengths.sum(0)
        ends = [total - queries + 1 + i - start for i in range(queries)]
        return [torch.minimum(end.clamp(min=0), own).to(torch.int32) for end in ends]

    def by_heads(self, causal: bool, window: Any, sinks: torch.Tensor | None) -> Any:
        heads, span = self.q.shape[1] // self.members.size, self._heads
        out, lse = self.run(
            self.q[:, span],
            causal=causal,
            window=window,
            sinks=None if sinks is None else sinks[span].contiguous(),
        )
        each = [heads] * self.members.size
        outs = torch.cat(gather_parts(out, 1, each, self.members), 1)
        return outs, torch.cat(gather_parts(lse, 1, each, self.members), 1)


def _check(
    q: Any, k_cache: Any, split: str, window: Any, page_table: Any, sinks: Any, members: Members
) -> None:
    check_choice(OP, "split", split, SPLITS)
    check_tensor(OP, "q", q)
    check_rank(OP, "q", q, "[B, Hq, Sq, D]")
    check_tensor(OP, "k_cache", k_cache)
    check_rank(OP, "k_cache", k_cache, "[B, Hkv, S, D]")
    if not q.is_floating_point():
        raise InvalidType(message(OP, "q", "has an unsupported dtype", "a float dtype", q.dtype))
    check_sinks(OP, sinks, q)
    if split == "sequence" and window is not None:
        expected = "split='heads', or no window: a cache of the window fits on one rank"
        problem = "does not apply to a cache split by sequence"
        raise Unsupported(message(OP, "window", problem, expected, window))
    if split == "heads":
        heads = k_cache.shape[1 if page_table is None else 2] * members.size
        if heads == 0 or q.shape[1] % heads:
            expected = f"a multiple of {heads}, the KV heads of all ranks"
            raise InvalidInput(
                message(OP, "q", "has a wrong number of heads", expected, q.shape[1])
            )


def _agree(
    members: Members, failure: Exception | None, q: Any, v_cache: Any, options: tuple[Any, ...]
) -> None:
    if failure is not None:
        agree_once(OP, members, None, str, failure)
        return
    sizes = (*q.shape, v_cache.shape[-1], str(q.dtype))
    key = (OP, *sizes, *options)
    texts = agree_once(OP, members, key, lambda: f"sizes {sizes}, options {options}", None)
    check_same(OP, texts)
