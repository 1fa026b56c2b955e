"""`bsk::attn_ragged`: attention of packed queries over a cache. It has no derivative.

q [Tq, Hq, D], out [Tq, Hq, Dv], lse [Hq, Tq]; keys are contiguous [B, Hkv, S, D], pages
[pages, page_size, Hkv, D], or packed [Tk, Hkv, D]. The arguments are the fields of a
`RaggedCall` in their order, the band as its two scalars. Results are written into `out` and `lse`.
"""

from dataclasses import fields
from typing import Any

import torch

from ..calls.ragged import RaggedCall
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.operators import Operator, define_op
from ..masks.band import Band
from ..reference import ragged as reference
from . import eager
from .lengths import check_values
from .tuning import why_not_sm90, why_not_triton

OP = "attention_varlen"


FIELDS = tuple(field.name for field in fields(RaggedCall))


def attend(call: RaggedCall, impl: str) -> None:
    """Fill `out` and `lse` of a checked call, through the operator."""
    values = {name: getattr(call, name) for name in FIELDS}
    values["band"] = call.band.scalars()
    attn_ragged(*values.values(), impl)


def _attn_ragged(*args: Any) -> None:
    *values, impl = args
    named = dict(zip(FIELDS, values, strict=True))
    named["band"] = Band.from_scalars(*named["band"])
    call = RaggedCall(**named)
    # autocast has already cast the queries; in here it would round the sums
    with without_autocast(call.q.device), torch.no_grad():
        ragged_dispatch.run(impl, call)


def _eager(call: RaggedCall) -> None:
    check_values(OP, call)
    eager.attention_ragged(call)


def _reference(call: RaggedCall) -> None:
    check_values(OP, call)
    out, lse = reference.attention_ragged(call)
    call.out.copy_(out)
    call.lse.copy_(lse)


ragged_dispatch: Dispatcher = Dispatcher("attn_ragged")
ragged_dispatch.register("sm90", why_not_sm90, "blackwell_sparsek.ragged.sm90:attention_ragged")
ragged_dispatch.register(
    "triton",
    why_not_triton,
    "blackwell_sparsek.ragged.triton:attention_ragged",
    auto_passes=interpreted_only,
)
ragged_dispatch.register("eager", every_problem, _eager)
ragged_dispatch.register("reference", every_problem, _reference, auto_passes=only_asked)

attn_ragged: Operator = define_op(
    "attn_ragged",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
    "SymInt max_q, SymInt max_k, float scale, Tensor? seqlens_k, Tensor? cu_seqlens_k, "
    "Tensor? page_table, Tensor? slabs, Tensor? seqused_q, Tensor? first_key, Tensor? kv_blocks, "
    "SymInt kv_block_size, SymInt[] band, SymInt chunk, bool top_left, float softcap, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, Tensor? v_scale, bool batch_invariant, "
    "str impl) -> ()",
    _attn_ragged,
    lambda *args: None,
)
