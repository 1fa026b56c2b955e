"""`bsk::attn_fwd` and `bsk::attn_bwd`: attention, dense or packed, and its gradients.

Layouts: dense q [B, Hq, Sq, D], out [B, Hq, Sq, Dv], lse [B, Hq, Sq]; packed (with `cu_seqlens_*`)
q [Tq, Hq, D], out [Tq, Hq, Dv], lse [Hq, Tq]. A missing mask is two empty lists; `mask_shape` is
[Bm, Hm, Sq, Sk, bq, bk]. `left` and `right` are the scalars of a `Band`. `deterministic` is about
the backward pass alone, but travels with the forward call that the backward pass belongs to.

Implementations of the backward fill the tensors of an `AttnGradients`, laid out as the inputs are,
and compute only those.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..calls.attention import AttnGradients, AttnProblem, AttnSpec, empty_lse, empty_out, tma_takes
from ..dispatch.dispatcher import Dispatcher, interpreted_only, only_asked
from ..dispatch.operators import define_op
from ..masks.band import Band
from ..masks.block_mask import BlockMask
from ..masks.packed import check_cu_seqlens_values
from ..reference import attention as reference
from .eager import backward as eager_backward
from .eager import forward as eager_forward
from .replay import OperatorCall
from .sm90 import route as attention_bwd_sm90
from .sm90 import route as attention_sm90
from .triton import route as attention_bwd_triton
from .triton import route as attention_triton

Tensors = tuple[torch.Tensor, ...]

forward_dispatch = Dispatcher("attn_fwd")
backward_dispatch = Dispatcher("attn_bwd")

_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q, SymInt max_k, "
    "Tensor[] mask, SymInt[] mask_shape, SymInt left, SymInt right, float scale, float softcap, "
    "Tensor? sinks, bool deterministic"
)


def _spec(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    mask: Sequence[torch.Tensor],
    mask_shape: Sequence[int],
    left: int,
    right: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> AttnSpec:
    block_mask = None
    if mask:
        batch, heads, sq, sk, bq, bk = mask_shape
        block_mask = BlockMask._from_tensors(mask, batch, heads, (sq, sk), (bq, bk))
    return AttnSpec(
        scale=scale,
        band=Band.from_scalars(left, right),
        block_mask=block_mask,
        softcap=softcap,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_q=max_q,
        max_k=max_k,
    )


def _everything(problem: AttnProblem) -> str | None:
    return None


def _check_lengths(q: torch.Tensor, k: torch.Tensor, spec: AttnSpec) -> None:
    """Implementations that read the offsets on the host check them first."""
    if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
        op = "attention_varlen"
        check_cu_seqlens_values(op, "cu_seqlens_q", spec.cu_seqlens_q, q.shape[0], spec.max_q)
        check_cu_seqlens_values(op, "cu_seqlens_k", spec.cu_seqlens_k, k.shape[0], spec.max_k)


def _forward_eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec) -> Tensors:
    _check_lengths(q, k, spec)
    return eager_forward.attention(q, k, v, spec)


def _forward_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec
) -> Tensors:
    _check_lengths(q, k, spec)
    out, lse = reference.attention(q, k, v, spec)
    return empty_out(q, v.shape[-1]).copy_(out), lse


def _backward_eager(
    gradients: AttnGradients,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttnSpec,
    deterministic: bool,
) -> None:
    needs = [gradient is not None for gradient in gradients[:3]]
    gradients.fill(
        eager_backward.attention_backward(dout, dlse, q, k, v, out, lse, spec, deterministic, needs)
    )


def _backward_reference(
    gradients: AttnGradients,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttnSpec,
    deterministic: bool,
) -> None:
    gradients.fill(reference.attention_backward(dout, dlse, q, k, v, spec))


forward_dispatch.register(
    "sm90",
    attention_sm90.why_not_forward,
    attention_sm90.forward,
    auto_passes=attention_sm90.auto_passes,
)
forward_dispatch.register(
    "triton",
    attention_triton.why_not_forward,
    attention_triton.forward,
    auto_passes=interpreted_only,
)
forward_dispatch.register("eager", _everything, _forward_eager)
forward_dispatch.register("reference", _everything, _forward_reference, auto_passes=only_asked)
backward_dispatch.register(
    "sm90",
    attention_bwd_sm90.why_not_backward,
    attention_bwd_sm90.backward,
    auto_passes=attention_bwd_sm90.backward_auto_passes,
)
backward_dispatch.register(
    "triton",
    attention_bwd_triton.why_not_backward,
    attention_bwd_triton.backward,
    auto_passes=interpreted_only,
)
backward_dispatch.register("eager", _everything, _backward_eager)
backward_dispatch.register("reference", _everything, _backward_reference, auto_passes=only_asked)


def run_attn_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Tensors:
    """What `bsk::attn_fwd` does, below autograd."""
    cu_q, _, _, _, mask, mask_shape, *scalars, sinks, _, impl = options
    # sinks with gaps are copied, which no launch repeats
    if cu_q is not None or not (sinks is None or sinks.is_contiguous()):
        return _run_forward(q, k, v, *options)
    call = OperatorCall((q, k, v), (sinks,), mask, mask_shape, ("attn_fwd", impl, *scalars))
    return call.repeat() or call.record(lambda: _run_forward(q, k, v, *options))


def _run_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Tensors:
    *described, deterministic, impl = options
    spec = _spec(*described)
    problem = AttnProblem.of(q, k, v, spec, deterministic=deterministic)
    # autocast has done its work before the operator; inside, it would round the sums
    with torch.autocast(q.device.type, enabled=False):
        return forward_dispatch(impl, problem, q, k, v, spec)


def _attn_fwd_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Tensors:
    return empty_out(q, v.shape[-1]), empty_lse(q)


def _attn_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *options: Any,
) -> Tensors:
    inputs = (dout, dlse, q, k, v, out, lse, *options)
    call = gradient_call(*inputs)
    if call is None:
        return _run_backward(*inputs)
    results = call.repeat()
    if results is not None:
        return results
    # a `dout` that TMA cannot read is copied, which no launch repeats
    if not tma_takes(dout):
        return _run_backward(*inputs)
    return call.record(lambda: _run_backward(*inputs))


def gradient_call(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *options: Any,
) -> OperatorCall | None:
    """A call of `bsk::attn_bwd` as one that may be repeated; None where it must run as it is."""
    cu_q, _, _, _, mask, mask_shape, *scalars, sinks, deterministic, needs, impl = options
    # delta for sinks is copied, which no launch repeats
    if cu_q is not None or needs[3] or torch.compiler.is_compiling():
        return None
    kept = ("attn_bwd", impl, *scalars, sinks is None, deterministic, *needs)
    return OperatorCall((dout, q, k, v, out), (dlse, lse), mask, mask_shape, kept)


def _run_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *options: Any,
) -> Tensors:
    *described, deterministic, needs, impl = options
    spec = _spec(*described)
    problem = AttnProblem.of(q, k, v, spec, backward=True, deterministic=deterministic)
    # what comes back may be expanded, from a sum for instance
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    outputs = _empty_gradients(q, k, v, spec.sinks, needs)
    gradients = AttnGradients(
        *(x if needed else None for x, needed in zip(outputs, needs, strict=True))
    )
    with torch.autocast(q.device.type, enabled=False):
        backward_dispatch(
            impl, problem, gradients, dout, dlse, q, k, v, out, lse, spec, deterministic
        )
    return outputs


def _empty_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    needs: Sequence[bool],
) -> Tensors:
    """Gradients laid out as their inputs; those that nobody asked for have no elements."""
    inputs = (q, k, v, sinks)
    return tuple(
        torch.empty_like(x) if needed and x is not None else q.new_empty(0)
        for x, needed in zip(inputs, needs, strict=True)
    )


def _attn_bwd_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *options: Any,
) -> Tensors:
    return _empty_gradients(q, k, v, sinks=options[10], needs=options[-2])


attn_fwd = define_op(
    "attn_fwd",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, str impl) -> (Tensor out, Tensor lse)",
    run_attn_fwd,
    _attn_fwd_fake,
)
attn_bwd = define_op(
    "attn_bwd",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool[] needs, str impl) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _attn_bwd,
    _attn_bwd_fake,
)
