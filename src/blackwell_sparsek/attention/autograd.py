"""Gradients of attention, and the calls that need them.

`bsk::attn_fwd` has a derivative for whatever meets the operator: transforms, modes, compilers. But
what torch does around a Python operator with lists among its arguments takes longer than a small
training step. Where nothing else looks at a call, `attend` gives autograd the same derivative by a
function of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.errors import Unsupported
from ..dispatch.operators import define_autograd
from ..launch.replay import Cache, Tensors, described, is_plain_call, keep
from ..masks.block_mask import BlockMask
from .op import attn_bwd, attn_fwd, backward_dispatch, gradient_call, run_attn_fwd
from .replay import bound_to, stream_of

_SINKS = 10

Launches = Callable[[list[int]], Tensors]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bsk::attn_fwd`, by the shortest way to its gradients."""
    cu_q, cu_k, sinks = *options[:2], options[_SINKS]
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not any(x.requires_grad for x in tensors)
        or not is_plain_call(tensors)
    ):
        out, lse = attn_fwd(q, k, v, *options)
    else:
        out, lse = _Attention.apply(q, k, v, sinks, (Attended.of(options), cu_q, cu_k, None, True))
    return out, lse


class Attended:
    """A call that autograd knows of, without its tensors; of a mask it keeps the lists alive.

    The backward pass has launches of its own. They are looked up once for calls that differ in
    their masks alone, and bound to each mask once.
    """

    __slots__ = ("_forward", "_gradients", "_mask", "_of_kind", "_scalars", "_sizes")

    def __init__(
        self,
        sizes: tuple[int, int],
        mask: tuple[Sequence[torch.Tensor], Sequence[int]],
        scalars: tuple[Any, ...],
        forward: Launches | None = None,
        of_kind: Cache | None = None,
    ):
        self._sizes = sizes
        self._mask = mask
        self._scalars = scalars
        self._forward = forward
        self._gradients: Cache = {}
        self._of_kind: Cache = {} if of_kind is None else of_kind

    @classmethod
    def of(cls, options: Sequence[Any]) -> "Attended":
        """From the options of `bsk::attn_fwd`."""
        _, _, max_q, max_k, mask, mask_shape, *scalars, _, deterministic, impl = options
        return cls((max_q, max_k), (mask, mask_shape), (*scalars, deterministic, impl))

    def by(self, forward: Launches) -> "Attended":
        """The same call by recorded launches; under a mask, `bound` has to follow."""
        tensors, mask_shape = self._mask
        mask = ((), mask_shape) if tensors else self._mask
        return Attended(self._sizes, mask, self._scalars, forward)

    def bound(self, mask: BlockMask, bind: Callable[[Any], Launches]) -> "Attended":
        """The same call with another mask of the kind."""
        lists = (mask.tensors(for_gradients=True), self._mask[1])
        forward = bind(self._forward)
        return Attended(self._sizes, lists, self._scalars, forward, self._of_kind)

    def options(
        self,
        cu_q: torch.Tensor | None,
        cu_k: torch.Tensor | None,
        sinks: torch.Tensor | None,
        *needs: Sequence[bool],
    ) -> tuple[Any, ...]:
        """As `bsk::attn_fwd` takes them, and `bsk::attn_bwd` with `needs`."""
        *scalars, deterministic, impl = self._scalars
        if needs:
            impl = _backward_impl(impl)
        return (
            *(cu_q, cu_k, *self._sizes, *self._mask),
            *(*scalars, sinks, deterministic, *needs, impl),
        )

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
        made: Any = _apply(q, k, v, sinks, (self, None, None, addresses, return_lse))
        return made if return_lse else (made,)

    def forward(self, tensors: tuple[Any, ...], addresses: list[int] | None) -> Tensors:
        """Output and lse of q, k, v, the sinks and the offsets of packed sequences."""
        if addresses is not None and self._forward is not None:
            return self._forward(addresses)
        q, k, v, sinks, cu_q, cu_k = tensors
        return run_attn_fwd(q, k, v, *self.options(cu_q, cu_k, sinks))

    def gradients(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        saved: Sequence[Any],
        needs: list[bool],
    ) -> Tensors:
        """Of q, k, v and the sinks; those that nobody needs have no elements."""
        q, k, v, out, lse, cu_q, cu_k, sinks = saved
        # packed sequences and sinks are never known, nor what has derivatives of its own
        stream = stream_of(q) if self._mask[0] else None
        call = described(tuple(needs), (dout, q, k, v, out, dlse, lse), stream, below_autocast=True)
        launches = None if call is None else self._gradients.get(call[0])
        if call is not None and launches is not None:
            return launches(call[1])
        inputs = (dout, dlse, q, k, v, out, lse, *self.options(cu_q, cu_k, sinks, needs))
        launches = None if call is None else self._launches(call[0], inputs)
        return attn_bwd(*inputs) if call is None or launches is None else launches(call[1])

    def _launches(self, key: Any, inputs: tuple[Any, ...]) -> Launches | None:
        """What was recorded for gradients of such `inputs`, bound to the mask."""
        recorded = self._of_kind.get(key)
        if recorded is None:
            again = gradient_call(*inputs)
            recorded = None if again is None else again.recorded()
            if recorded is None:
                return None
            keep(self._of_kind, key, recorded)
        lists, mask_shape = self._mask
        launches = bound_to(recorded, lists, mask_shape) if lists else recorded
        if not torch.cuda.is_current_stream_capturing():
            keep(self._gradients, key, launches)
        return launches


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        # without gradients of their own: torch has work with each argument
        others: tuple[Attended, torch.Tensor | None, torch.Tensor | None, list[int] | None, bool],
    ) -> Any:
        attended, cu_q, cu_k, addresses, with_lse = others
        output = attended.forward((q, k, v, sinks, cu_q, cu_k), addresses)
        ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, sinks)
        ctx.attended = attended
        ctx.set_materialize_grads(False)
        return output if with_lse else output[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
        needs = list(ctx.needs_input_grad[:4])
        saved = ctx.saved_tensors
        gradients = _of_results(
            dout, dlse, saved[3], needs, lambda d: ctx.attended.gradients(d, dlse, saved, needs)
        )
        return (*gradients, None)


# below torch's own `apply`, which looks for transforms: who comes with addresses has looked
_apply = super(torch.autograd.Function, _Attention).apply


def _backward_impl(impl: str) -> str:
    """A forward kernel need not have a backward of its own: then `auto` chooses one."""
    return impl if impl in backward_dispatch.candidates else "auto"


def _of_results(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    needs: Sequence[bool],
    gradients: Callable[[torch.Tensor], Tensors],
) -> tuple[torch.Tensor | None, ...]:
    """What comes back to q, k, v and the sinks; None where nobody asked."""
    if dout is None and dlse is None:
        return (None,) * 4
    made = gradients(torch.zeros_like(out) if dout is None else dout)
    return tuple([g if need else None for g, need in zip(made, needs, strict=True)])


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.lists = len(inputs[7]), len(inputs[8])
    q, k, v, cu_q, cu_k, max_q, max_k, mask, mask_shape, *scalars, sinks, deterministic, impl = (
        inputs
    )
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, sinks, *mask)
    ctx.options = (max_q, max_k, mask_shape, scalars, deterministic, _backward_impl(impl))
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    # torch wants the structure of the inputs back, where an empty list counts as one of tensors
    tensors, sizes = ctx.lists
    lists: tuple[Any, Any] = [None] * tensors, None if sizes else []
    # only here does torch index this by argument; before, lists are flattened
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 3 + _SINKS)]
    q, k, v, out, lse, cu_q, cu_k, sinks, *mask = ctx.saved_tensors
    max_q, max_k, mask_shape, scalars, deterministic, impl = ctx.options
    options = (cu_q, cu_k, max_q, max_k, mask, mask_shape, *scalars, sinks, deterministic)
    dq, dk, dv, dsinks = _of_results(
        dout,
        dlse,
        out,
        needs,
        lambda d: attn_bwd(d, dlse, q, k, v, out, lse, *options, needs, impl),
    )
    return (dq, dk, dv, None, None, None, None, *lists, None, None, None, None, dsinks, None, None)


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported(
        "attn_bwd: no backward of the backward; use torch's own attention for second derivatives"
    )


define_autograd("attn_fwd", _save_operator, _operator_gradients)
define_autograd("attn_bwd", lambda ctx, inputs, output: None, _refuse_double_backward)
