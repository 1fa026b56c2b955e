"""`bsk::attn_decode`: attention of a few queries over a cache. It has no derivative.

q [B, Hq, Sq, D], out [B, Hq, Sq, Dv], lse [B, Hq, Sq]; caches [B, Hkv, S, D], or with a page table
[pages, page_size, Hkv, D]. `kv_block_size` is 0 without lists of blocks. `left` and `right` are the
scalars of a `Band`.
"""

from typing import Any

import torch

from ..calls.attention import empty_lse, empty_out
from ..calls.decode import DecodeProblem, DecodeSpec
from ..dispatch.dispatcher import Dispatcher, interpreted_only, only_asked
from ..dispatch.operators import define_op
from ..masks.band import Band
from ..reference import decode as reference
from . import eager as eager
from . import route as decode_sm90
from . import route as decode_triton
from .inputs import check_decode_values

Tensors = tuple[torch.Tensor, ...]

decode_dispatch = Dispatcher("attn_decode")


def _eager(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spec: DecodeSpec
) -> Tensors:
    check_decode_values("attention_decode", q.shape[2], k_cache, spec)
    return eager.attention_decode(q, k_cache, v_cache, spec)


def _reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spec: DecodeSpec
) -> Tensors:
    check_decode_values("attention_decode", q.shape[2], k_cache, spec)
    out, lse = reference.attention_decode(q, k_cache, v_cache, spec)
    return empty_out(q, v_cache.shape[-1]).copy_(out), lse


decode_dispatch.register("sm90", decode_sm90.why_not_sm90, decode_sm90.run_sm90)
decode_dispatch.register(
    "triton", decode_triton.why_not_triton, decode_triton.run_triton, auto_passes=interpreted_only
)
decode_dispatch.register("eager", lambda problem: None, _eager)
decode_dispatch.register("reference", lambda problem: None, _reference, auto_passes=only_asked)


def _attn_decode(
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
    impl: str,
) -> Tensors:
    spec = DecodeSpec(
        scale=scale,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        kv_blocks=kv_blocks,
        kv_block_size=kv_block_size,
        band=Band.from_scalars(left, right),
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    problem = DecodeProblem.of(q, k_cache, v_cache, spec)
    # autocast has done its work before the operator; inside, it would round the sums
    with torch.autocast(q.device.type, enabled=False):
        return decode_dispatch(impl, problem, q, k_cache, v_cache, spec)


def _attn_decode_fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *options: Any
) -> Tensors:
    return empty_out(q, v_cache.shape[-1]), empty_lse(q)


attn_decode = define_op(
    "attn_decode",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? page_table, "
    "Tensor? kv_blocks, SymInt kv_block_size, SymInt left, SymInt right, float scale, "
    "float softcap, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, str impl) "
    "-> (Tensor out, Tensor lse)",
    _attn_decode,
    _attn_decode_fake,
)
