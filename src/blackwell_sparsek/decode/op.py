"""`bsk::attn_decode`, attention of a few queries over a cache, and `bsk::attn_decode_into`, which
writes to an `out` that is given. They have no derivative.

q [B, Hq, Sq, D], out [B, Hq, Sq, Dv], lse [B, Hq, Sq]; caches [B, Hkv, S, D], or with a page table
[pages, page_size, Hkv, D]. `kv_block_size` is 0 without lists of blocks. `left` and `right` are the
scalars of a `Band`.
"""

from typing import Any

import torch

from ..calls.attention import empty_lse, empty_out
from ..calls.decode import DecodeCall
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.operators import Operator, define_op
from ..masks.band import Band
from ..reference import decode as reference
from . import eager
from .inputs import check_decode_values
from .tuning import why_not_sm90, why_not_triton

Tensors = tuple[torch.Tensor, ...]


def decode(call: DecodeCall, impl: str) -> Tensors:
    """Output and lse of a checked call, through the operator; lse alone if the call has `out`."""
    arguments = (
        call.q,
        call.k_cache,
        call.v_cache,
        call.cache_seqlens,
        call.page_table,
        call.kv_blocks,
        call.kv_block_size,
        *call.band.scalars(),
        call.scale,
        call.softcap,
        call.sinks,
        call.k_scale,
        call.v_scale,
        call.alibi_slopes,
        impl,
    )
    if call.out is None:
        results: Tensors = attn_decode(*arguments)
        return results
    return (attn_decode_into(call.out, *arguments),)


def _run(
    out: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    kv_blocks: torch.Tensor | None,
    kv_block_size: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    impl: str,
) -> Tensors:
    call = DecodeCall(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        scale=scale,
        page_table=page_table,
        kv_blocks=kv_blocks,
        kv_block_size=kv_block_size,
        band=Band.from_scalars(left, right),
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        out=out,
    )
    # autocast has already cast the queries; in here it would round the sums
    with without_autocast(q.device):
        return decode_dispatch.run(impl, call)


def _attn_decode(*args: Any) -> Tensors:
    return _run(None, *args)


def _attn_decode_into(*args: Any) -> torch.Tensor:
    _, lse = _run(*args)
    return lse


def _attn_decode_fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *options: Any
) -> Tensors:
    return empty_out(q, v_cache.shape[-1]), empty_lse(q)


def _eager(call: DecodeCall) -> Tensors:
    check_decode_values("attention_decode", call)
    return eager.attention_decode(call)


def _reference(call: DecodeCall) -> Tensors:
    check_decode_values("attention_decode", call)
    exact, lse = reference.attention_decode(call)
    out, _ = call.empty_results()
    return out.copy_(exact), lse


decode_dispatch: Dispatcher = Dispatcher("attn_decode")
decode_dispatch.register("sm90", why_not_sm90, "blackwell_sparsek.decode.sm90_latent:decode")
decode_dispatch.register(
    "triton",
    why_not_triton,
    "blackwell_sparsek.decode.triton:decode",
    auto_passes=interpreted_only,
)
decode_dispatch.register("eager", every_problem, _eager)
decode_dispatch.register("reference", every_problem, _reference, auto_passes=only_asked)

ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? page_table, "
    "Tensor? kv_blocks, SymInt kv_block_size, SymInt left, SymInt right, float scale, "
    "float softcap, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? alibi_slopes, "
    "str impl"
)

attn_decode: Operator = define_op(
    "attn_decode",
    f"({ARGUMENTS}) -> (Tensor out, Tensor lse)",
    _attn_decode,
    _attn_decode_fake,
)

attn_decode_into: Operator = define_op(
    "attn_decode_into",
    f"(Tensor(a!) out, {ARGUMENTS}) -> Tensor lse",
    _attn_decode_into,
    lambda out, q, *options: empty_lse(q),
)
