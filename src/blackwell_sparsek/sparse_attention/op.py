"""`bsk::sparse_attn_fwd` and `bsk::sparse_attn_bwd`: attention over selected keys, and gradients.

`bsk::sparse_attn_fwd_into` writes to an `out` that is given, and has no derivative.
The operators take flat arguments: `sizes` is [granularity, kv_len, max_q, max_k], `limit` the right
side of the band that causal leaves, `local` the two sides of the window or empty. `call_of` turns
them into a `SparseAttentionCall`, and `operator_arguments` is its inverse.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..calls.attention import empty_gradients, empty_lse, empty_out
from ..calls.sparse_attention import (
    SparseAttentionCall,
    SparseAttnGradients,
    SparseAttnSpec,
    SparseBackwardCall,
)
from ..core.errors import Unsupported
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.operators import Operator, define_autograd, define_op
from ..masks.band import UNBOUNDED, Band
from ..masks.key_selection import KeySelection
from .sm90 import tuning as sm90
from .triton import tuning as triton

Tensors = tuple[torch.Tensor, ...]


forward_dispatch: Dispatcher = Dispatcher("sparse_attn_fwd")
backward_dispatch: Dispatcher = Dispatcher("sparse_attn_bwd")
forward_dispatch.register(
    "sm90",
    sm90.why_not,
    "blackwell_sparsek.sparse_attention.sm90.latent:forward",
)
backward_dispatch.register(
    "sm90",
    sm90.why_not,
    "blackwell_sparsek.sparse_attention.sm90.backward:backward",
)
for _dispatch, _name in ((forward_dispatch, "forward"), (backward_dispatch, "backward")):
    _dispatch.register(
        "triton",
        triton.why_not,
        f"blackwell_sparsek.sparse_attention.triton.{_name}:{_name}",
        auto_passes=interpreted_only,
    )
    _dispatch.register(
        "eager", every_problem, f"blackwell_sparsek.sparse_attention.eager.{_name}:{_name}"
    )
    _dispatch.register(
        "reference",
        every_problem,
        f"blackwell_sparsek.reference.sparse_attention:{_name}",
        auto_passes=only_asked,
    )


class Arguments(NamedTuple):
    """The arguments of `bsk::sparse_attn_fwd`, or one value for each of them."""

    q: Any
    k: Any
    v: Any
    sinks: Any
    gate: Any
    ids: Any
    counts: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    page_table: Any
    cache_seqlens: Any
    sizes: Any
    limit: Any
    local: Any
    scale: Any
    softcap: Any
    impl: Any


def call_of(given: Arguments) -> SparseAttentionCall:
    """The call that an operator's arguments describe."""
    granularity, kv_len, max_q, max_k = given.sizes
    selection = KeySelection._from_tensors(given.ids, given.counts, granularity, kv_len)
    spec = SparseAttnSpec(
        given.scale,
        selection,
        Band.from_scalars(UNBOUNDED, given.limit),
        Band.from_scalars(*given.local) if given.local else None,
        given.softcap,
        given.sinks,
        given.gate,
        given.cu_seqlens_q,
        given.cu_seqlens_k,
        max_q,
        max_k,
        given.page_table,
        given.cache_seqlens,
    )
    return SparseAttentionCall(given.q, given.k, given.v, spec)


def operator_arguments(call: SparseAttentionCall, impl: str) -> Arguments:
    """The arguments of the operator: the inverse of `call_of`."""
    spec, chosen = call.spec, call.spec.selection
    return Arguments(
        call.q,
        call.k,
        call.v,
        spec.sinks,
        spec.gate,
        chosen.ids,
        chosen.counts,
        spec.cu_seqlens_q,
        spec.cu_seqlens_k,
        spec.page_table,
        spec.cache_seqlens,
        [chosen.granularity, chosen.kv_len, spec.max_q, spec.max_k],
        # not `limit_right`: torch.compile of 2.10 does not trace properties of a NamedTuple
        spec.limit.scalars()[1],
        [] if spec.local is None else [*spec.local.scalars()],
        spec.scale,
        spec.softcap,
        impl,
    )


def attend(call: SparseAttentionCall, impl: str) -> Tensors:
    """Output and lse of a checked call, through the operator; lse alone if the call has `out`."""
    arguments = operator_arguments(call, impl)
    if call.out is not None:
        return (sparse_attn_fwd_into(call.out, *arguments),)
    results: Tensors = sparse_attn_fwd(*arguments)
    return results


def _run(call: SparseAttentionCall, impl: str) -> Tensors:
    # autocast has already cast q, k and v; in here it would round the sums
    with without_autocast(call.q.device):
        results: Tensors = forward_dispatch.run(impl, call)
    return results


def _forward(*arguments: Any) -> Tensors:
    given = Arguments(*arguments)
    return _run(call_of(given), given.impl)


def _forward_into(out: torch.Tensor, *arguments: Any) -> torch.Tensor:
    given = Arguments(*arguments)
    _, lse = _run(replace(call_of(given), out=out), given.impl)
    return lse


def _forward_fake(*arguments: Any) -> Tensors:
    given = Arguments(*arguments)
    return empty_out(given.q, given.v.shape[-1]), empty_lse(given.q)


def _gradients_of(given: Arguments, needs: Sequence[bool]) -> Tensors:
    return empty_gradients((given.q, given.k, given.v, given.sinks, given.gate), needs)


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    needs: Sequence[bool],
    *arguments: Any,
) -> Tensors:
    given = Arguments(*arguments)
    # autograd may pass an expanded gradient, for instance the gradient of a sum
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    results = _gradients_of(given, needs)
    wanted = (x if needed else None for x, needed in zip(results, needs, strict=True))
    call = SparseBackwardCall(call_of(given), dout, dlse, out, lse, SparseAttnGradients(*wanted))
    with without_autocast(given.q.device):
        backward_dispatch.run(given.impl, call)
    return results


def _backward_fake(
    dout: Any, dlse: Any, out: Any, lse: Any, needs: Any, *arguments: Any
) -> Tensors:
    return _gradients_of(Arguments(*arguments), needs)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? gate, Tensor ids, Tensor counts, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? page_table, Tensor? cache_seqlens, "
    "SymInt[] sizes, SymInt limit, SymInt[] local, float scale, float softcap, str impl"
)
sparse_attn_fwd: Operator = define_op(
    "sparse_attn_fwd", f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _forward, _forward_fake
)
sparse_attn_fwd_into: Operator = define_op(
    "sparse_attn_fwd_into",
    f"(Tensor(a!) out, {_ARGUMENTS}) -> Tensor lse",
    _forward_into,
    lambda out, q, *others: empty_lse(q),
)
sparse_attn_bwd: Operator = define_op(
    "sparse_attn_bwd",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, {_ARGUMENTS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dgate)",
    _backward,
    _backward_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    given = Arguments(*inputs)
    # a selection may have been made in inference mode, whose tensors autograd cannot save
    ids, counts = (x.clone() if x.is_inference() else x for x in (given.ids, given.counts))
    given = given._replace(ids=ids, counts=counts)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    ctx.save_for_backward(*output, *tensors)
    # None marks the places of saved tensors, which `_gradients` fills in again
    ctx.given = [None if isinstance(x, torch.Tensor) else (x,) for x in given]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    count = len(Arguments._fields)
    if dout is None and dlse is None:
        return (None,) * count
    out, lse, *tensors = ctx.saved_tensors
    rest = iter(tensors)
    given = Arguments(*(next(rest) if x is None else x[0] for x in ctx.given))
    if given.page_table is not None:
        raise Unsupported("sparse_attn_fwd: keys in pages have no gradients")
    dout = torch.zeros_like(out) if dout is None else dout
    needs = list(ctx.needs_input_grad[:5])
    made = sparse_attn_bwd(dout, dlse, out, lse, needs, *given)
    wanted = [x if needed else None for x, needed in zip(made, needs, strict=True)]
    return (*wanted, *(None,) * (count - 5))


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported("sparse_attention: no backward of the backward")


define_autograd("sparse_attn_fwd", _save, _gradients)
define_autograd("sparse_attn_bwd", lambda ctx, inputs, output: None, _refuse_double_backward)
