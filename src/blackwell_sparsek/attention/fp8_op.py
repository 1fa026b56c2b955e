"""`bsk::attn_fwd_fp8`: attention over e4m3 tensors with scales, and its implementations by name."""

from typing import Any

import torch

from ..calls.fp8 import Fp8AttentionCall
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.operators import Operator, define_op
from .op import OPTIONS_SCHEMA, ForwardArguments, call_of, operator_options
from .sm90 import tuning as sm90
from .triton import tuning as triton

Tensors = tuple[torch.Tensor, ...]

fp8_dispatch: Dispatcher = Dispatcher("attn_fwd_fp8")
fp8_dispatch.register(
    "sm90",
    sm90.why_not_fp8,
    "blackwell_sparsek.attention.sm90.launch_fp8:forward",
)
fp8_dispatch.register(
    "triton",
    triton.why_not_fp8,
    "blackwell_sparsek.attention.triton.forward_fp8:forward",
    auto_passes=interpreted_only,
)
fp8_dispatch.register("eager", every_problem, "blackwell_sparsek.attention.eager.fp8:forward")
fp8_dispatch.register(
    "reference",
    every_problem,
    "blackwell_sparsek.reference.fp8:forward",
    auto_passes=only_asked,
)


def attend_fp8(call: Fp8AttentionCall, impl: str) -> Tensors:
    """Output and lse of a checked call, through the operator."""
    given = call.given
    results: Tensors = attn_fwd_fp8(
        *(given.q, given.k, given.v, call.q_descale, call.k_descale, call.v_descale),
        *(call.out_dtype, *operator_options(given, for_gradients=False), impl),
    )
    return results


def _call_of(arguments: tuple[Any, ...]) -> Fp8AttentionCall:
    q, k, v, q_descale, k_descale, v_descale, out_dtype, *others = arguments
    call = call_of(ForwardArguments(q, k, v, *others))
    return Fp8AttentionCall(call, q_descale, k_descale, v_descale, out_dtype)


def _attn_fwd_fp8(*arguments: Any) -> Tensors:
    *_, impl = arguments
    call = _call_of(arguments)
    with without_autocast(call.given.q.device), torch.no_grad():
        results: Tensors = fp8_dispatch.run(impl, call)
    return results


def _attn_fwd_fp8_fake(*arguments: Any) -> Tensors:
    return _call_of(arguments).empty_results()


attn_fwd_fp8: Operator = define_op(
    "attn_fwd_fp8",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    f"ScalarType out_dtype, {OPTIONS_SCHEMA}, str impl) -> (Tensor out, Tensor lse)",
    _attn_fwd_fp8,
    _attn_fwd_fp8_fake,
)
