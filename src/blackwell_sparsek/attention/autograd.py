"""Gradients of attention, and the calls that need them.

`bsk::attn_fwd` has a derivative for everything that sees the operator: transforms, modes,
compilers. But torch takes longer to call a Python operator with list arguments than a small
training step takes. If none of these intercepts a call, `attend` gives autograd the same derivative
through an `autograd.Function`; without gradients it bypasses the operator altogether.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ..calls.attention import AttentionCall, AttnSpec
from ..core.checks import is_differentiated_by_func
from ..core.errors import Unsupported
from ..dispatch.operators import define_autograd, is_in_older_batch
from ..launch.replay import (
    Cache,
    Launches,
    Tensors,
    described,
    is_plain_call,
    keep,
    seen_before,
    stream_of,
)
from ..masks.block_mask import BlockMask
from .op import (
    ForwardArguments,
    attn_bwd,
    attn_fwd,
    attn_fwd_into,
    backward_dispatch,
    compute_backward,
    compute_forward,
    operator_options,
    run_backward,
)
from .replay import (
    bound,
    forward_lists,
    given_offsets,
    gradient_options,
    recorded_gradients,
    sinks_to_read,
)
from .resize_backward import gradient_recorder, resized_gradients


def attend(call: AttentionCall, impl: str, plain: bool = False) -> Tensors:
    """Output and lse of a checked call, by the cheapest path that provides its gradients.

    A call with `out` has no gradients, and only its lse is returned. `plain` means that
    `launch.replay.is_plain_call` is known to be true.
    """
    q, k, v, spec = call.q, call.k, call.v, call.spec
    sinks, further = spec.sinks, (spec.sinks, spec.alibi_slopes, spec.bias, call.out)
    tensors = (q, k, v, *(x for x in further if x is not None))
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    plain = plain or (not torch.compiler.is_compiling() and is_plain_call(tensors))
    if call.out is not None and (q.is_meta or not plain):
        flat = operator_options(call, for_gradients=False)
        results: Tensors = (attn_fwd_into(call.out, q, k, v, *flat, impl),)
    elif not plain and is_differentiated_by_func(*tensors):
        results = _TransformedAttention.apply(
            q, k, v, sinks, spec._replace(sinks=None), call.deterministic, impl
        )
    elif q.is_meta or not plain:
        results = attn_fwd(q, k, v, *operator_options(call, wants_gradients), impl)
    elif wants_gradients:
        training = TrainingCall.of(call, impl)
        make = partial(compute_forward, call, impl)
        others = (training, make, _fixed_tensors(spec), True)
        results = _Attention.apply(q, k, v, sinks, others)
    else:
        results = compute_forward(call, impl)
    return results


class TrainingCall:
    """A call as autograd keeps it: without its tensors, but with the lists of its mask.

    The launches of the backward pass are recorded separately; they are looked up and bound to the
    mask once.
    """

    __slots__ = (
        *("_deterministic", "_forward", "_gradients", "_impl", "_lengths", "_of_kind"),
        *("_options", "_spec"),
    )

    def __init__(
        self,
        spec: AttnSpec,
        deterministic: bool,
        impl: str,
        options: tuple[Any, ...],
        forward: Launches | None = None,
        of_kind: Cache | None = None,
        lengths: tuple[int, int] | None = None,
    ):
        self._spec = spec
        self._deterministic = deterministic
        self._impl = impl
        # the result of `gradient_options`
        self._options = options
        self._forward = forward
        self._gradients: Cache = {}
        # launches not yet bound to a mask, shared by calls that differ only in their masks
        self._of_kind: Cache = {} if of_kind is None else of_kind
        # of queries and keys if they differ from the spec, which takes long to copy
        self._lengths = lengths

    @classmethod
    def of(cls, call: AttentionCall, impl: str) -> "TrainingCall":
        """The record of a call without the tensors that autograd saves."""
        spec, mask = call.spec, call.spec.block_mask
        mask = None if mask is None else _lists_of(mask)
        given = (call.deterministic, backward_dispatch.own_or_auto(impl), spec.is_varlen)
        options = gradient_options(spec, spec.sinks is not None, *given)
        spec = spec.without_tensors()._replace(block_mask=mask)
        return cls(spec, call.deterministic, impl, options)

    def replaying(self, forward: Launches) -> "TrainingCall":
        """The same call by recorded launches; with a mask, call `bound` next."""
        spec = self._spec._replace(block_mask=None)
        return TrainingCall(spec, self._deterministic, self._impl, self._options, forward)

    def resized(self, max_q: int, max_k: int) -> "TrainingCall":
        """The same call with other lengths, for which nothing is recorded."""
        *alike, longest = options = self._options
        if longest:
            options = (*alike, (max_q, max_k))
        given = (self._spec, self._deterministic, self._impl, options)
        return TrainingCall(*given, lengths=(max_q, max_k))

    def bound(self, mask: BlockMask) -> "TrainingCall":
        """The same call with another mask of the same kind."""
        spec = self._spec._replace(block_mask=_lists_of(mask))
        forward: Any = self._forward
        launches = bound(forward, mask, forward_lists(mask))
        given = (spec, self._deterministic, self._impl, self._options)
        return TrainingCall(*given, launches, self._of_kind)

    def attend(self, inputs: Sequence[Any], addresses: list[int], return_lse: bool) -> Tensors:
        """The call on new inputs, at `addresses`, that match those it was recorded with."""
        make = partial(cast(Launches, self._forward), addresses)
        return self._applied(inputs, make, return_lse)

    def attend_with(self, results: Tensors, inputs: Sequence[Any], return_lse: bool) -> Tensors:
        """The call on these inputs; `results` are its output and lse, already computed."""
        return self._applied(inputs, lambda: results, return_lse)

    def _applied(
        self, inputs: Sequence[Any], make: Callable[[], Tensors], return_lse: bool
    ) -> Tensors:
        q, k, v, sinks, *offsets = inputs
        fixed = _NOTHING_FIXED
        if offsets:
            # as `given_offsets` returns them
            cu_q, cu_k = offsets
            fixed = (cu_q, cu_q if cu_k is None else cu_k, None, None)
        made: Any = _apply(q, k, v, sinks, (self, make, fixed, return_lse))
        return made if return_lse else (made,)

    def gradients(
        self,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        saved: Sequence[Any],
        needs: tuple[bool, ...],
    ) -> Tensors:
        """Gradients of q, k, v and the sinks; those that are not needed have no elements."""
        q, k, v, out, lse, sinks, cu_q, cu_k, slopes, bias = saved
        if dout is None:
            dout = torch.zeros_like(out)
        mask, options = self._spec.block_mask, self._options
        stream = None if mask is None else stream_of(q)
        found = None
        if slopes is None and bias is None:
            read = (sinks_to_read(sinks, needs), *given_offsets(cu_q, cu_k))
            inputs = (dout, q, k, v, out, dlse, lse, *read)
            found = described(needs, inputs, stream, below_autocast=True)
        if found is not None:
            # a resized call has no launches yet, and hashing a key takes long
            launches = self._gradients.get(found.key) if self._gradients else None
            if launches is None:
                launches = self._gradient_launches(found.key, options)
            if launches is not None:
                return launches(found.addresses)
            if mask is None:
                made = resized_gradients(found, options, (q, k, v))
                if made is not None:
                    return made
        first = found is not None and not seen_before(found.key)
        spec, impl = self._spec, backward_dispatch.own_or_auto(self._impl)
        if self._lengths is not None:
            max_q, max_k = self._lengths
            spec = spec._replace(max_q=max_q, max_k=max_k)
        spec = _with_tensors(spec, sinks, cu_q, cu_k, slopes, bias)
        call = AttentionCall(q, k, v, spec, self._deterministic)
        tensors = (dout, out, lse, q, k, v)
        # with gradients enabled, the operator makes a double backward raise; modes must see it too
        incoming = (dout,) if dlse is None else (dout, dlse)
        if (
            torch.is_grad_enabled()
            or not is_plain_call((*incoming, q, k, v))
            or any(map(is_in_older_batch, incoming))
        ):
            flat = operator_options(call, for_gradients=True)
            return attn_bwd(dout, dlse, q, k, v, out, lse, *flat, list(needs), impl)
        if not first:
            return run_backward(call, dout, dlse, out, lse, needs, impl)
        with gradient_recorder(found, options, call, tensors) as recorder:
            return recorder.keep(compute_backward(call, dout, dlse, out, lse, needs, impl))

    def _gradient_launches(self, key: Any, options: tuple[Any, ...]) -> Launches | None:
        """The launches recorded for gradients with this key, bound to the mask, or None."""
        mask = self._spec.block_mask
        recorded = self._of_kind.get(key) if self._of_kind else None
        if recorded is None:
            recorded = recorded_gradients(key, options, mask)
            if recorded is None:
                return None
            keep(self._of_kind, key, recorded)
        launches = recorded if mask is None else bound(recorded, mask, mask.tensors())
        if not torch.cuda.is_current_stream_capturing():
            keep(self._gradients, key, launches)
        return launches


# Offsets of packed sequences, slopes and bias: tensors of a call that have no gradient.
_NOTHING_FIXED: tuple[Any, Any, Any, Any] = (None, None, None, None)


def _fixed_tensors(spec: AttnSpec) -> tuple[Any, Any, Any, Any]:
    return spec.cu_seqlens_q, spec.cu_seqlens_k, spec.alibi_slopes, spec.bias


def _with_tensors(spec: AttnSpec, sinks: Any, *fixed: Any) -> AttnSpec:
    """The inverse of `AttnSpec.without_tensors`."""
    cu_q, cu_k, slopes, bias = fixed
    return spec._replace(
        sinks=sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, alibi_slopes=slopes, bias=bias
    )


def _lists_of(mask: BlockMask) -> BlockMask:
    """A mask that shares the lists; keeping `mask` would form a cycle, as it caches calls."""
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
        # one tuple for all that has no gradient, because torch spends time on every argument
        others: tuple[TrainingCall, Callable[[], Tensors], tuple[Any, Any, Any, Any], bool],
    ) -> Any:
        training, make, fixed, with_lse = others
        output = make()
        ctx.save_for_backward(q, k, v, *output, sinks, *fixed)
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


# skips torch's own `apply`, which checks for transforms: `described` has already done so
_apply = super(torch.autograd.Function, _Attention).apply


class _TransformedAttention(torch.autograd.Function):
    """The derivative for transforms of `torch.func`, which ignore derivatives of operators."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        # transforms find the tensors inside this tuple
        spec: AttnSpec,
        deterministic: bool,
        impl: str,
    ) -> Any:
        call = AttentionCall(q, k, v, spec._replace(sinks=sinks), deterministic)
        return attn_fwd(q, k, v, *operator_options(call, for_gradients=True), impl)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, sinks, spec, deterministic, impl = inputs
        ctx.save_for_backward(q, k, v, *output, sinks, *_fixed_tensors(spec))
        ctx.spec = spec.without_tensors()
        ctx.deterministic, ctx.impl = deterministic, backward_dispatch.own_or_auto(impl)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:
        q, k, v, out, lse, sinks, *fixed = ctx.saved_tensors
        spec = _with_tensors(ctx.spec, sinks, *fixed)
        call, needs = (
            AttentionCall(q, k, v, spec, ctx.deterministic),
            list(ctx.needs_input_grad[:4]),
        )
        options = operator_options(call, for_gradients=True)
        made = _TransformedGradients.apply(dout, dlse, q, k, v, out, lse, options, needs, ctx.impl)
        return (*_needed(made, needs), None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()


class _TransformedGradients(torch.autograd.Function):
    """`bsk::attn_bwd` for transforms of `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        *tensors, options, needs, impl = arguments
        return attn_bwd(*tensors, *options, needs, impl)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _refuse_double_backward(ctx, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()


def _needed(made: Tensors, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    return [g if need else None for g, need in zip(made, needs, strict=True)]


# Arguments of the operators that autograd saves, besides the lists of a mask.
_SAVED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes", "bias")


def save_arguments(ctx: Any, given: ForwardArguments, *results: torch.Tensor) -> None:
    """Save the results, and after them the arguments that `saved_arguments` puts together."""
    tensors = (getattr(given, name) for name in _SAVED)
    ctx.save_for_backward(*results, *tensors, *given.mask)
    ctx.given = given._replace(**dict.fromkeys(_SAVED), mask=None)
    ctx.set_materialize_grads(False)


def saved_arguments(ctx: Any, tensors: Sequence[Any]) -> ForwardArguments:
    """The arguments, from the saved tensors that follow the results."""
    single, mask = tensors[: len(_SAVED)], list(tensors[len(_SAVED) :])
    given: ForwardArguments = ctx.given
    return given._replace(**dict(zip(_SAVED, single, strict=True)), mask=mask)


def argument_gradients(
    given: ForwardArguments,
    wanted: Sequence[Any],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    results: Tensors,
) -> tuple[Any, ...]:
    """A gradient or None for each argument; `wanted` says of each whether it needs one."""
    of_arguments = ForwardArguments(*wanted)
    needs = [of_arguments.q, of_arguments.k, of_arguments.v, of_arguments.sinks]
    gradients: list[torch.Tensor | None] = [None] * 4
    if dout is not None or dlse is not None:
        out, lse = results
        dout = torch.zeros_like(out) if dout is None else dout
        q, k, v, *options, impl = given
        made = attn_bwd(dout, dlse, q, k, v, out, lse, *options, needs, impl)
        gradients = _needed(made, needs)
    dq, dk, dv, dsinks = gradients
    # torch expects the structure of the inputs, and treats an empty list as a list of tensors
    shape: Any = None if given.mask_shape else []
    mask = [None] * len(given.mask)
    none = ForwardArguments(*[None] * len(ForwardArguments._fields))
    return tuple(none._replace(q=dq, k=dk, v=dv, mask=mask, mask_shape=shape, sinks=dsinks))


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    given = ForwardArguments(*inputs)
    save_arguments(ctx, given._replace(impl=backward_dispatch.own_or_auto(given.impl)), *output)


def _operator_gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    out, lse, *tensors = ctx.saved_tensors
    given = saved_arguments(ctx, tensors)
    # torch indexes this by argument only here; during the forward, lists are flattened
    return argument_gradients(given, ctx.needs_input_grad, dout, dlse, (out, lse))


def _refuse_forward_mode() -> Any:
    raise Unsupported(
        "attn_fwd: no forward-mode derivative, which torch.func.hessian and jacfwd ask for; "
        "use torch's own attention for it"
    )


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported(
        "attn_bwd: no backward of the backward; use torch's own attention for second derivatives"
    )


define_autograd("attn_fwd", _save_operator, _operator_gradients)
define_autograd("attn_bwd", lambda ctx, inputs, output: None, _refuse_double_backward)
