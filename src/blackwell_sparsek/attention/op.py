"""`bsk::attn_fwd` and `bsk::attn_bwd`: attention, dense or packed, and its gradients.

`bsk::attn_fwd_into` writes to an `out` that is given, and has no derivative. The operators are a
second entry point, for compilers, modes and transforms. They take flat arguments: a missing mask is
two empty lists, `mask_shape` is [Bm, Hm, Sq, Sk, bq, bk], `left` and `right` are the scalars of a
`Band`. `call_of` turns them into an `AttentionCall`, and `operator_options` is its inverse. From
either entry point, calls run through `run_forward` and `run_backward`.

Layouts: dense q [B, Hq, Sq, D], out [B, Hq, Sq, Dv], lse [B, Hq, Sq]; packed (with `cu_seqlens_*`)
q [Tq, Hq, D], out [Tq, Hq, Dv], lse [Hq, Tq].
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..calls.attention import (
    AttentionCall,
    AttnGradients,
    AttnSpec,
    BackwardCall,
    empty_gradients,
    empty_lse,
    empty_out,
    tma_takes,
)
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.operators import Operator, define_op
from ..launch.replay import NO_RECORDER
from ..masks.band import Band
from ..masks.block_mask import BlockMask
from .replay import CheckedCall, has_plain_sinks
from .sm90 import tuning as sm90
from .triton import tuning as triton

Tensors = tuple[torch.Tensor, ...]


forward_dispatch: Dispatcher = Dispatcher("attn_fwd")
forward_dispatch.register(
    "sm90",
    sm90.why_not_forward,
    "blackwell_sparsek.attention.sm90.launch:forward",
    auto_passes=sm90.attn_fwd_sm90_passed_over,
)
forward_dispatch.register(
    "triton",
    triton.why_not_forward,
    "blackwell_sparsek.attention.triton.forward:forward",
    auto_passes=interpreted_only,
)
forward_dispatch.register(
    "eager", every_problem, "blackwell_sparsek.attention.eager.forward:forward"
)
forward_dispatch.register(
    "reference",
    every_problem,
    "blackwell_sparsek.reference.attention:forward",
    auto_passes=only_asked,
)

backward_dispatch: Dispatcher = Dispatcher("attn_bwd")
backward_dispatch.register(
    "sm90",
    sm90.why_not_backward,
    "blackwell_sparsek.attention.sm90.launch:backward",
    auto_passes=sm90.attn_bwd_sm90_passed_over,
)
backward_dispatch.register(
    "triton",
    triton.why_not_backward,
    "blackwell_sparsek.attention.triton.backward:backward",
    auto_passes=interpreted_only,
)
backward_dispatch.register(
    "eager", every_problem, "blackwell_sparsek.attention.eager.backward:backward"
)
backward_dispatch.register(
    "reference",
    every_problem,
    "blackwell_sparsek.reference.attention:backward",
    auto_passes=only_asked,
)


def run_forward(call: AttentionCall, impl: str) -> Tensors:
    """Output and lse of a checked call, below autograd; lse alone if the call has `out`."""
    again = CheckedCall.forward(call, impl)
    results = None if again is None else again.replay()
    if results is not None:
        return results
    # sinks with gaps are copied, and a replay does not repeat the copy
    recorder = NO_RECORDER if again is None or not has_plain_sinks(call) else again.recorder()
    with recorder:
        return recorder.keep(compute_forward(call, impl))


def compute_forward(call: AttentionCall, impl: str) -> Tensors:
    """As `run_forward`, without looking for recorded launches."""
    # autocast has already cast q, k and v; in here it would round the sums
    with without_autocast(call.q.device):
        results: Tensors = forward_dispatch.run(impl, call)
    return results if call.out is None else results[1:]


def run_backward(
    call: AttentionCall,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    needs: Sequence[bool],
    impl: str,
) -> Tensors:
    """Gradients of q, k, v and the sinks; without elements where `needs` is False."""
    needs = tuple(needs)
    again = CheckedCall.backward(call, dout, dlse, out, lse, needs, impl)
    results = None if again is None else again.replay()
    if results is not None:
        return results
    # a `dout` with gaps or that TMA cannot read is copied, and a replay does not repeat the copy
    copied = dout.stride(-1) != 1 or not tma_takes(dout)
    recorder = NO_RECORDER if again is None or copied else again.recorder()
    with recorder:
        return recorder.keep(compute_backward(call, dout, dlse, out, lse, needs, impl))


def compute_backward(
    call: AttentionCall,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    needs: tuple[bool, ...],
    impl: str,
) -> Tensors:
    """As `run_backward`, without looking for recorded launches."""
    # autograd may pass an expanded gradient, for instance the gradient of a sum
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    results = empty_gradients((call.q, call.k, call.v, call.spec.sinks), needs)
    wanted = (x if needed else None for x, needed in zip(results, needs, strict=True))
    backward = BackwardCall(call, dout, dlse, out, lse, AttnGradients(*wanted))
    with without_autocast(dout.device):
        backward_dispatch.run(impl, backward)
    return results


class ForwardArguments(NamedTuple):
    """The arguments of `bsk::attn_fwd`, or one value for each of them."""

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_q: Any
    max_k: Any
    mask: Any
    mask_shape: Any
    left: Any
    right: Any
    scale: Any
    softcap: Any
    sinks: Any
    alibi_slopes: Any
    bias: Any
    deterministic: Any
    impl: Any


class BackwardArguments(NamedTuple):
    """The arguments of `bsk::attn_bwd`."""

    dout: Any
    dlse: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_q: Any
    max_k: Any
    mask: Any
    mask_shape: Any
    left: Any
    right: Any
    scale: Any
    softcap: Any
    sinks: Any
    alibi_slopes: Any
    bias: Any
    deterministic: Any
    needs: Any
    impl: Any


def call_of(given: ForwardArguments | BackwardArguments) -> AttentionCall:
    """The call that an operator's arguments describe."""
    block_mask = None
    if given.mask:
        batch, heads, sq, sk, bq, bk = given.mask_shape
        block_mask = BlockMask._from_tensors(given.mask, batch, heads, (sq, sk), (bq, bk))
    spec = AttnSpec(
        given.scale,
        Band.from_scalars(given.left, given.right),
        block_mask,
        given.softcap,
        given.sinks,
        given.cu_seqlens_q,
        given.cu_seqlens_k,
        given.max_q,
        given.max_k,
        given.alibi_slopes,
        given.bias,
    )
    return AttentionCall(given.q, given.k, given.v, spec, given.deterministic)


def operator_options(call: AttentionCall, for_gradients: bool) -> tuple[Any, ...]:
    """The arguments of both operators between their tensors and `impl`: the inverse of `call_of`.

    Only the backward pass reads the transposed lists of a mask.
    """
    spec, mask = call.spec, call.spec.block_mask
    tensors: list[torch.Tensor] = []
    shape: list[int] = []
    if mask is not None:
        tensors = mask.tensors(for_gradients=for_gradients)
        shape = [mask.batch, mask.heads, *mask.seq_lengths, *mask.block_size]
    left, right = spec.band.scalars()
    return (
        *(spec.cu_seqlens_q, spec.cu_seqlens_k, spec.max_q, spec.max_k, tensors, shape),
        *(left, right, spec.scale, spec.softcap, spec.sinks, spec.alibi_slopes, spec.bias),
        call.deterministic,
    )


def _attn_fwd(*arguments: Any) -> Tensors:
    given = ForwardArguments(*arguments)
    return run_forward(call_of(given), given.impl)


def _attn_fwd_fake(*arguments: Any) -> Tensors:
    given = ForwardArguments(*arguments)
    return empty_out(given.q, given.v.shape[-1]), empty_lse(given.q)


def _attn_fwd_into(out: torch.Tensor, *arguments: Any) -> torch.Tensor:
    given = ForwardArguments(*arguments)
    (lse,) = run_forward(replace(call_of(given), out=out), given.impl)
    return lse


def _attn_bwd(*arguments: Any) -> Tensors:
    given = BackwardArguments(*arguments)
    call, results = call_of(given), (given.out, given.lse)
    return run_backward(call, given.dout, given.dlse, *results, given.needs, given.impl)


def _attn_bwd_fake(*arguments: Any) -> Tensors:
    given = BackwardArguments(*arguments)
    return empty_gradients((given.q, given.k, given.v, given.sinks), given.needs)


OPTIONS_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q, SymInt max_k, "
    "Tensor[] mask, SymInt[] mask_shape, SymInt left, SymInt right, float scale, float softcap, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? bias, bool deterministic"
)
attn_fwd: Operator = define_op(
    "attn_fwd",
    f"(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}, str impl) -> (Tensor out, Tensor lse)",
    _attn_fwd,
    _attn_fwd_fake,
)
attn_fwd_into: Operator = define_op(
    "attn_fwd_into",
    f"(Tensor(a!) out, Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}, str impl) -> Tensor lse",
    _attn_fwd_into,
    lambda out, q, *others: empty_lse(q),
)
attn_bwd: Operator = define_op(
    "attn_bwd",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS_SCHEMA}, bool[] needs, str impl) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _attn_bwd,
    _attn_bwd_fake,
)
