"""`bsk::gated_attn_fwd` and `bsk::gated_attn_bwd`: attention whose keys have a gate.

The operators take flat arguments: a missing mask is two empty lists, `mask_shape` is
[Bm, Hm, Sq, Sk, bq, bk], `band` the scalars of a `Band`. `call_of` turns them into a `GatedCall`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...calls.attention import (
    AttentionCall,
    AttnProblem,
    AttnSpec,
    empty_gradients,
    empty_lse,
    empty_out,
)
from ...calls.gated_attention import GatedBackwardCall, GatedCall, GatedGradients, KeyGate
from ...core.errors import Unsupported
from ...core.torch_state import without_autocast
from ...dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ...dispatch.operators import Operator, define_autograd, define_op
from ...masks.band import Band
from ...masks.block_mask import BlockMask
from ..sm90 import tuning as sm90
from ..triton import tuning as triton

Tensors = tuple[torch.Tensor, ...]


def _why_not_sm90(problem: AttnProblem) -> str | None:
    """Why the Hopper kernel cannot run this problem, or None."""
    # a weight multiplies 2 to the power of a score, which leaves float16 few bits where it is small
    if problem.dtype == torch.float16:
        return "gates need bfloat16: float16 does not hold their small weights"
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return "has no shared memory for gates beside heads over 128"
    return "there are no queries" if problem.max_q == 0 else sm90.why_not_forward(problem)


forward_dispatch: Dispatcher = Dispatcher("gated_attn_fwd")
backward_dispatch: Dispatcher = Dispatcher("gated_attn_bwd")
forward_dispatch.register(
    "sm90",
    _why_not_sm90,
    "blackwell_sparsek.attention.gated.sm90:forward",
    auto_passes=sm90.attn_fwd_sm90_passed_over,
)
for _dispatch, _name, _why_not in (
    (forward_dispatch, "forward", triton.why_not_forward),
    (backward_dispatch, "backward", triton.why_not_backward),
):
    _dispatch.register(
        "triton",
        _why_not,
        f"blackwell_sparsek.attention.gated.triton:{_name}",
        auto_passes=interpreted_only,
    )
    _dispatch.register("eager", every_problem, f"blackwell_sparsek.attention.gated.eager:{_name}")
    _dispatch.register(
        "reference",
        every_problem,
        f"blackwell_sparsek.reference.gated_attention:{_name}",
        auto_passes=only_asked,
    )


class Arguments(NamedTuple):
    """The arguments of `bsk::gated_attn_fwd`, or one value for each of them."""

    q: Any
    k: Any
    v: Any
    sinks: Any
    u: Any
    tau: Any
    mask: Any
    mask_shape: Any
    band: Any
    scale: Any
    softcap: Any
    impl: Any


# q, k, v, sinks, u and tau
DIFFERENTIABLE = 6


def call_of(given: Arguments) -> GatedCall:
    """The call that an operator's arguments describe."""
    block_mask = None
    if given.mask:
        batch, heads, sq, sk, bq, bk = given.mask_shape
        block_mask = BlockMask._from_tensors(given.mask, batch, heads, (sq, sk), (bq, bk))
    spec = AttnSpec(
        given.scale,
        Band.from_scalars(*given.band),
        block_mask,
        given.softcap,
        given.sinks,
        max_q=given.q.shape[2],
        max_k=given.k.shape[2],
    )
    return GatedCall(AttentionCall(given.q, given.k, given.v, spec), KeyGate(given.u, given.tau))


def attend(call: GatedCall, impl: str) -> Tensors:
    """Output and lse of a checked call, through the operator."""
    given, mask = call.attention, call.attention.spec.block_mask
    tensors: list[torch.Tensor] = []
    shape: list[int] = []
    if mask is not None:
        tensors = mask.tensors(for_gradients=torch.is_grad_enabled())
        shape = [mask.batch, mask.heads, *mask.seq_lengths, *mask.block_size]
    spec = given.spec
    results: Tensors = gated_attn_fwd(
        *(given.q, given.k, given.v, spec.sinks, *call.gate, tensors, shape),
        *([*spec.band.scalars()], spec.scale, spec.softcap, impl),
    )
    return results


def _forward(*arguments: Any) -> Tensors:
    given = Arguments(*arguments)
    # autocast has already cast q, k and v; in here it would round the sums
    with without_autocast(given.q.device):
        results: Tensors = forward_dispatch.run(given.impl, call_of(given))
    return results


def _forward_fake(*arguments: Any) -> Tensors:
    given = Arguments(*arguments)
    return empty_out(given.q, given.v.shape[-1]), empty_lse(given.q)


def _gradients_of(given: Arguments, needs: Sequence[bool]) -> Tensors:
    return empty_gradients((given.q, given.k, given.v, given.sinks, given.u, given.tau), needs)


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
    call = GatedBackwardCall(call_of(given), dout, dlse, out, lse, GatedGradients(*wanted))
    with without_autocast(given.q.device):
        backward_dispatch.run(given.impl, call)
    return results


def _backward_fake(
    dout: Any, dlse: Any, out: Any, lse: Any, needs: Any, *arguments: Any
) -> Tensors:
    return _gradients_of(Arguments(*arguments), needs)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor u, Tensor tau, Tensor[] mask, "
    "SymInt[] mask_shape, SymInt[] band, float scale, float softcap, str impl"
)
gated_attn_fwd: Operator = define_op(
    "gated_attn_fwd", f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _forward, _forward_fake
)
gated_attn_bwd: Operator = define_op(
    "gated_attn_bwd",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, {_ARGUMENTS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor du, Tensor dtau)",
    _backward,
    _backward_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    given = Arguments(*inputs)
    ctx.save_for_backward(*output, *given[:DIFFERENTIABLE], *given.mask)
    ctx.given = given._replace(
        q=None, k=None, v=None, sinks=None, u=None, tau=None, mask=[None] * len(given.mask),
        impl=backward_dispatch.own_or_auto(given.impl),
    )  # fmt: skip
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    wanted: list[torch.Tensor | None] = [None] * DIFFERENTIABLE
    if dout is not None or dlse is not None:
        out, lse, *tensors = ctx.saved_tensors
        q, k, v, sinks, u, tau, *mask = tensors
        given = ctx.given._replace(q=q, k=k, v=v, sinks=sinks, u=u, tau=tau, mask=mask)
        dout = torch.zeros_like(out) if dout is None else dout
        made = gated_attn_bwd(dout, dlse, out, lse, needs, *given)
        wanted = [x if needed else None for x, needed in zip(made, needs, strict=True)]
    # torch expects the structure of the inputs, and treats an empty list as a list of tensors
    lists: tuple[Any, Any] = (ctx.given.mask, None if ctx.given.mask_shape else [])
    return (*wanted, *lists, None, None, None, None)


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported("attention with key_gate: no backward of the backward")


define_autograd("gated_attn_fwd", _save, _gradients)
define_autograd("gated_attn_bwd", lambda ctx, inputs, output: None, _refuse_double_backward)
