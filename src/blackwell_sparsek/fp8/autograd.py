"""Gradients of `bsk.fp8.attention`, and the calls that need them.

The gradients are those of the attention without fp8, which the backward pass computes again.
`torch.compile` cannot look into a backward pass that asks autograd for gradients itself, so it gets
the operator `bsk::fp8_attention`, whose derivative consists of operators. So does `torch.vmap`,
which does not batch a function that computes and saves at once. Other calls get an
`autograd.Function`: torch spends less time on it, and its backward replays recorded launches.
"""

from typing import Any, NamedTuple

import torch

from ..attention.api import attention as attention_in
from ..attention.autograd import argument_gradients, save_arguments, saved_arguments
from ..attention.inputs import (
    check_block_mask,
    check_head_dims,
    checked_call,
    fitted_mask,
    scale_or_default,
)
from ..attention.op import OPTIONS_SCHEMA, ForwardArguments, attn_fwd, call_of, operator_options
from ..calls.attention import empty_lse, empty_out
from ..core.checks import is_batched, wants_gradient
from ..core.errors import Unsupported
from ..dispatch.operators import Operator, define_autograd, define_op
from ..masks.band import band_of
from .api import quantized_operand

OP = "fp8.attention"
Tensors = tuple[torch.Tensor, torch.Tensor]


class Choice(NamedTuple):
    """The options of a call that `bsk.attention` does not have."""

    smooth: bool
    rotate: bool
    impl: str
    return_lse: bool
    """If False, the lse stays that of the smoothed keys; correcting it takes another product."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    options: dict[str, Any],
    choice: Choice,
) -> Tensors:
    """Output and lse by the cheapest path that provides gradients.

    `options` are the other arguments of `bsk.attention`.
    """
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    if not torch.is_grad_enabled() or not any(map(wants_gradient, inputs)):
        return _attend(q, k, v, sinks, options, choice)
    if torch.compiler.is_compiling() or any(map(is_batched, inputs)):
        flat = _flat_options(q, k, v, sinks, **options)
        made: Tensors = fp8_attention(q, k, v, *flat, choice.impl, choice.smooth, choice.rotate)
        return made
    apply: Any = _Attention.apply
    return apply(q, k, v, sinks, options, choice)  # type: ignore[no-any-return]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    options: dict[str, Any],
    choice: Choice,
) -> Tensors:
    rounding = {"auto": "auto", "triton": "triton", "sm90": "triton"}.get(choice.impl, "eager")
    rotation: dict[str, Any] = {"hadamard": choice.rotate, "impl": rounding}
    queries = quantized_operand(q, "block", **rotation)
    keys = quantized_operand(k, "block", smooth=choice.smooth, **rotation)
    values = quantized_operand(v, "channel", transposed=True, impl=rounding)
    out, lse = attention_in(
        *(queries.data, keys.data, values.data),
        **options,
        sinks=sinks,
        q_descale=queries.descale,
        k_descale=keys.descale,
        v_descale=values.descale,
        out_dtype=q.dtype,
        return_lse=True,
        impl=choice.impl,
    )
    if keys.mean is not None and choice.return_lse:
        group = q.shape[1] // max(k.shape[1], 1)
        mean = keys.mean.repeat_interleave(group, 1)
        shift = (q.float() @ mean.unsqueeze(-1)).squeeze(-1)
        lse = lse + scale_or_default(OP, options["scale"], q.shape[-1]) * shift
    return out, lse


# The function of autograd.


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
        choice: Choice,
    ) -> Any:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.options = options
        out, lse = _attend(q, k, v, sinks, options, choice)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:
        apply: Any = _Gradients.apply
        wanted = ctx.needs_input_grad[:4]
        return (*apply(dout, *ctx.saved_tensors, ctx.options, wanted), None, None)


class _Gradients(torch.autograd.Function):
    """The backward pass, a function of its own so that a derivative of it raises."""

    @staticmethod
    def forward(
        ctx: Any,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
        wanted: tuple[bool, ...],
    ) -> Any:
        """Gradients of q, k, v and the sinks; None if not needed."""
        leaves: list[Any] = [
            x if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip((q, k, v, sinks), wanted, strict=True)
        ]
        q, k, v, sinks = leaves
        with torch.enable_grad():
            out = attention_in(q, k, v, sinks=sinks, **options)
        needed = [x for x, needed in zip(leaves, wanted, strict=True) if needed]
        made = iter(torch.autograd.grad(out, needed, dout))
        return tuple(next(made) if needed else None for needed in wanted)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refused, as by `bsk.attention`."""
        raise Unsupported(
            f"{OP}: no backward of the backward; use torch's own attention for second derivatives"
        )


# The operator: the arguments of `bsk::attn_fwd`, followed by `smooth` and `hadamard`.


def _flat_options(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    causal: bool,
    window: Any,
    block_mask: Any,
    scale: float | None,
    softcap: float | None,
) -> tuple[Any, ...]:
    """Checked options as operators take them."""
    sq, sk = q.shape[2], k.shape[2]
    block_mask = fitted_mask(block_mask, sq, sk)
    check_head_dims(OP, q, v)
    check_block_mask(OP, block_mask, q, q.shape[0], sq, sk)
    call = checked_call(
        *(OP, q, k, v),
        band=band_of(OP, causal, window),
        block_mask=block_mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        max_q=sq,
        max_k=sk,
    )
    return operator_options(call, for_gradients=True)


def _fp8_attention(*arguments: Any) -> Tensors:
    *others, smooth, rotate = arguments
    given = ForwardArguments(*others)
    spec = call_of(given).spec
    options = {"causal": False, "window": tuple(spec.band), "block_mask": spec.block_mask}
    options |= {"scale": spec.scale, "softcap": spec.softcap or None}
    choice = Choice(smooth, rotate, given.impl, return_lse=True)
    with torch.no_grad():
        return _attend(given.q, given.k, given.v, given.sinks, options, choice)


def _fp8_attention_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Tensors:
    # the output is laid out as the rounded queries, whose heads never share memory
    return empty_out(torch.empty_like(q), v.shape[-1]), empty_lse(q)


fp8_attention: Operator = define_op(
    "fp8_attention",
    f"(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}, str impl, bool smooth, bool hadamard) "
    "-> (Tensor out, Tensor lse)",
    _fp8_attention,
    _fp8_attention_fake,
)


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *arguments, _, _ = inputs
    # `impl` names an implementation in fp8, and gradients have none
    save_arguments(ctx, ForwardArguments(*arguments)._replace(impl="auto"))
    _, lse = output
    ctx.mark_non_differentiable(lse)


def _operator_gradients(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor | None) -> Any:
    given = saved_arguments(ctx, ctx.saved_tensors)
    with torch.no_grad():
        results = attn_fwd(*given)
    *wanted, _, _ = ctx.needs_input_grad
    return (*argument_gradients(given, wanted, dout, None, results), None, None)


define_autograd("fp8_attention", _save_operator, _operator_gradients)
