"""Gradients of attention, and the calls that need them.

`bsk::attn_fwd` has a derivative for whatever meets the operator: transforms, modes, compilers. But
what torch does around a Python operator with lists among its arguments takes longer than a small
training step. Where nothing else looks at a call, `attend` gives autograd the same derivative by a
function of its own, and needs no operator at all without gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..calls.attention import AttentionCall, AttnSpec
from ..core.errors import Unsupported
from ..dispatch.operators import define_autograd
from ..launch.replay import (
    Cache,
    Launches,
    Tensors,
    described,
    is_plain_call,
    keep,
    stream_of,
)
from ..masks.block_mask import BlockMask
from .op import (
    ForwardArguments,
    attn_bwd,
    attn_fwd,
    backward_dispatch,
    operator_options,
    run_backward,
    run_forward,
)
from .replay import bound, forward_lists, gradient_options, recorded_gradients


def attend(call: AttentionCall, impl: str) -> Tensors:
    """Output and lse of a checked call, by the shortest way to its gradients."""
    q, k, v, sinks = call.q, call.k, call.v, call.spec.sinks
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.compiler.is_compiling() or q.is_meta or not is_plain_call(tensors):
        results: Tensors = attn_fwd(q, k, v, *operator_options(call, wants_gradients), impl)
    elif wants_gradients:
        training = TrainingCall.of(call, impl)
        results = _Attention.apply(q, k, v, sinks, (training, call, None, True))
    else:
        results = run_forward(call, impl)
    return results


class TrainingCall:
    """A call that autograd knows of, without its tensors; of a mask it keeps the lists alive.

    The backward pass has launches of its own, which are looked up and bound to the mask once.
    """

    __slots__ = ("_deterministic", "_forward", "_gradients", "_impl", "_of_kind", "_spec")

    def __init__(
        self,
        spec: AttnSpec,
        deterministic: bool,
        impl: str,
        forward: Launches | None = None,
        of_kind: Cache | None = None,
    ):
        self._spec = spec
        self._deterministic = deterministic
        self._impl = impl
        self._forward = forward
        self._gradients: Cache = {}
        # the same, not bound, for calls that differ in their masks alone
        self._of_kind: Cache = {} if of_kind is None else of_kind

    @classmethod
    def of(cls, call: AttentionCall, impl: str) -> "TrainingCall":
        """Of a call; what has gradients or may be large is saved by autograd."""
        spec, mask = call.spec, call.spec.block_mask
        mask = None if mask is None else _lists_of(mask)
        spec = spec._replace(block_mask=mask, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None)
        return cls(spec, call.deterministic, impl)

    def replaying(self, forward: Launches) -> "TrainingCall":
        """The same call by recorded launches; under a mask, `bound` has to follow."""
        spec = self._spec._replace(block_mask=None)
        return TrainingCall(spec, self._deterministic, self._impl, forward)

    def bound(self, mask: BlockMask) -> "TrainingCall":
        """The same call with another mask of the kind."""
        spec = self._spec._replace(block_mask=_lists_of(mask))
        forward: Any = self._forward
        launches = bound(forward, mask, forward_lists(mask))
        return TrainingCall(spec, self._deterministic, self._impl, launches, self._of_kind)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        addresses: list[int],
        return_lse: bool,
    ) -> Tensors:
        """The call with other tensors like those it was recorded with, at `addresses`."""
        made: Any = _apply(q, k, v, sinks, (self, None, addresses, return_lse))
        return made if return_lse else (made,)

    def forward(self, call: AttentionCall | None, addresses: list[int] | None) -> Tensors:
        """Output and lse: of `call`, or by recorded launches from tensors at `addresses`."""
        if call is not None:
            return run_forward(call, self._impl)
        assert self._forward is not None and addresses is not None
        return self._forward(addresses)

    def gradients(
        self,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        saved: Sequence[Any],
        needs: tuple[bool, ...],
    ) -> Tensors:
        """Of q, k, v and the sinks; those that nobody needs have no elements."""
        q, k, v, out, lse, cu_q, cu_k, sinks = saved
        if dout is None:
            dout = torch.zeros_like(out)
        stream = None if self._spec.block_mask is None else stream_of(q)
        found = described(needs, (dout, q, k, v, out, dlse, lse), stream, below_autocast=True)
        if found is not None:
            key, addresses, _ = found
            launches = self._gradients.get(key)
            if launches is None:
                launches = self._gradient_launches(key, sinks)
            if launches is not None:
                return launches(addresses)
        spec = self._spec._replace(sinks=sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        call, impl = AttentionCall(q, k, v, spec, self._deterministic), _backward_impl(self._impl)
        # with gradients enabled, the operator refuses to be derived; modes must see it too
        if torch.is_grad_enabled() or not is_plain_call((dout, q, k, v)):
            options = operator_options(call, for_gradients=True)
            return attn_bwd(dout, dlse, q, k, v, out, lse, *options, list(needs), impl)
        return run_backward(call, dout, dlse, out, lse, needs, impl)

    def _gradient_launches(self, key: Any, sinks: torch.Tensor | None) -> Launches | None:
        """What was recorded for such gradients, bound to the mask."""
        mask = self._spec.block_mask
        recorded = self._of_kind.get(key)
        if recorded is None:
            impl = _backward_impl(self._impl)
            options = gradient_options(self._spec, sinks is not None, self._deterministic, impl)
            recorded = recorded_gradients(key, options, mask)
            if recorded is None:
                return None
            keep(self._of_kind, key, recorded)
        launches = recorded if mask is None else bound(recorded, mask, mask.tensors())
        if not torch.cuda.is_current_stream_capturing():
            keep(self._gradients, key, launches)
        return launches


def _lists_of(mask: BlockMask) -> BlockMask:
    """The mask for gradients, by its lists alone: the mask itself keeps calls, and must end."""
    sizes = (mask.batch, mask.heads, mask.seq_lengths, mask.block_size)
    return BlockMask._from_tensors(mask.tensors(), *sizes)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        # without gradients of their own: torch has work with each argument
        others: tuple[TrainingCall, AttentionCall | None, list[int] | None, bool],
    ) -> Any:
        training, call, addresses, with_lse = others
        output = training.forward(call, addresses)
        cu_q = cu_k = None
        if call is not None:
            cu_q, cu_k = call.spec.cu_seqlens_q, call.spec.cu_seqlens_k
        ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, sinks)
        ctx.training = training
        ctx.set_materialize_grads(False)
        return output if with_lse else output[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
        if dout is None and dlse is None:
            return (None,) * 5
        needs = ctx.needs_input_grad[:4]
        made = ctx.training.gradients(dout, dlse, ctx.saved_tensors, needs)
        return (*_needed(made, needs), None)


# below torch's own `apply`, which looks for transforms: who comes with addresses has looked
_apply = super(torch.autograd.Function, _Attention).apply


def _backward_impl(impl: str) -> str:
    """A forward kernel need not have a backward of its own: then `auto` chooses one."""
    return impl if impl in backward_dispatch.candidates else "auto"


def _needed(made: Tensors, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    return [g if need else None for g, need in zip(made, needs, strict=True)]


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    given = ForwardArguments(*inputs)
    mask, sinks, offsets = given.mask, given.sinks, (given.cu_seqlens_q, given.cu_seqlens_k)
    ctx.save_for_backward(given.q, given.k, given.v, *output, *offsets, sinks, *mask)
    # without what was saved
    ctx.given = given._replace(
        q=None, k=None, v=None, cu_seqlens_q=None, cu_seqlens_k=None, sinks=None,
        mask=[None] * len(mask), impl=_backward_impl(given.impl),
    )  # fmt: skip
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    # only here does torch index this by argument; before, lists are flattened
    wanted = ForwardArguments(*ctx.needs_input_grad)
    needs = [wanted.q, wanted.k, wanted.v, wanted.sinks]
    gradients: list[torch.Tensor | None] = [None] * 4
    given = ctx.given
    if dout is not None or dlse is not None:
        q, k, v, out, lse, cu_q, cu_k, sinks, *mask = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        made = attn_bwd(
            *(dout, dlse, q, k, v, out, lse, cu_q, cu_k, given.max_q, given.max_k, mask),
            *(given.mask_shape, given.left, given.right, given.scale, given.softcap, sinks),
            *(given.deterministic, needs, given.impl),
        )
        gradients = _needed(made, needs)
    dq, dk, dv, dsinks = gradients
    # torch wants the structure of the inputs back, where an empty list counts as one of tensors
    lists: tuple[Any, Any] = given.mask, None if given.mask_shape else []
    return (dq, dk, dv, None, None, None, None, *lists, None, None, None, None, dsinks, None, None)


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported(
        "attn_bwd: no backward of the backward; use torch's own attention for second derivatives"
    )


define_autograd("attn_fwd", _save_operator, _operator_gradients)
define_autograd("attn_bwd", lambda ctx, inputs, output: None, _refuse_double_backward)
