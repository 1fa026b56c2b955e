"""Gradients of attention, and the calls that need them.

`bsk::attn_fwd` has a derivative for whatever meets the operator: transforms, modes, compilers. But
what torch does around a Python operator with lists among its arguments takes longer than a small
training step. Where nothing else looks at a call, `attend` gives autograd the same derivative by a
function of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import Unsupported
from .attention import attn_bwd, attn_fwd, backward_dispatch, gradient_call, run_attn_fwd
from .registry import define_autograd
from .repeat import Tensors, is_plain_call

_SINKS = 10


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bsk::attn_fwd`, by the shortest way to its gradients."""
    sinks = options[_SINKS]
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not any(x.requires_grad for x in tensors)
        or not is_plain_call(tensors)
    ):
        out, lse = attn_fwd(q, k, v, *options)
    else:
        out, lse = _Attention.apply(q, k, v, sinks, options)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        options: tuple[Any, ...],
    ) -> Tensors:
        output = run_attn_fwd(q, k, v, *options)
        _save(ctx, q, k, v, options, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        return (*_gradients(ctx, dout, dlse, ctx.needs_input_grad[:4]), None)


def _save(
    ctx: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Sequence[Any],
    output: Sequence[torch.Tensor],
) -> None:
    cu_q, cu_k, max_q, max_k, mask, mask_shape, *scalars, sinks, deterministic, impl = options
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, sinks, *mask)
    # a forward kernel need not have a backward of its own: then `auto` chooses one, as the public
    # functions say
    backward_impl = impl if impl in backward_dispatch.candidates else "auto"
    ctx.options = (max_q, max_k, mask_shape, scalars, deterministic, backward_impl)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, needs: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Of q, k, v and the sinks; None where nobody asked."""
    if dout is None and dlse is None:
        return (None,) * 4
    q, k, v, out, lse, cu_q, cu_k, sinks, *mask = ctx.saved_tensors
    max_q, max_k, mask_shape, scalars, deterministic, impl = ctx.options
    if dout is None:
        dout = torch.zeros_like(out)
    needs = list(needs)
    of_mask = (mask, mask_shape)
    options = (cu_q, cu_k, max_q, max_k, *of_mask, *scalars, sinks, deterministic, needs, impl)
    inputs = (dout, dlse, q, k, v, out, lse, *options)
    # most calls were made before: then not even the operator is needed
    call = gradient_call(*inputs)
    gradients = (None if call is None else call.repeat()) or attn_bwd(*inputs)
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.lists = len(inputs[7]), len(inputs[8])
    q, k, v, *options = inputs
    _save(ctx, q, k, v, options, output)


def _operator_gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    # torch wants the structure of the inputs back, where an empty list counts as one of tensors
    tensors, sizes = ctx.lists
    lists: tuple[Any, Any] = [None] * tensors, None if sizes else []
    # only here does torch index this by argument; before, lists are flattened
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 3 + _SINKS)]
    dq, dk, dv, dsinks = _gradients(ctx, dout, dlse, needs)
    return (dq, dk, dv, None, None, None, None, *lists, None, None, None, None, dsinks, None, None)


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported(
        "attn_bwd: no backward of the backward; use torch's own attention for second derivatives"
    )


define_autograd("attn_fwd", _save_operator, _operator_gradients)
define_autograd("attn_bwd", lambda ctx, inputs, output: None, _refuse_double_backward)
