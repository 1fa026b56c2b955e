"""`bsk::merge_states` and its gradient: two partial attention results over disjoint keys."""

from typing import Any

import torch

from ..core.errors import Unsupported
from ..eager import softmax_state as eager
from ..reference import softmax_state as reference
from ..tuning.problem_merge import MergeProblem
from . import attention_triton
from .dispatch import Dispatcher, interpreted_only, only_asked
from .registry import define_autograd, define_op

Tensors = tuple[torch.Tensor, ...]

merge_dispatch = Dispatcher("merge_states")
merge_dispatch.register(
    "triton",
    attention_triton.why_not_merge,
    attention_triton.merge_states,
    auto_passes=interpreted_only,
)
merge_dispatch.register("eager", lambda problem: None, eager.merge_states)
merge_dispatch.register(
    "reference", lambda problem: None, reference.merge_states, auto_passes=only_asked
)


def _merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, impl: str
) -> Tensors:
    with torch.autocast(o_a.device.type, enabled=False):
        o, lse = merge_dispatch(impl, MergeProblem.of(o_a), o_a, lse_a, o_b, lse_b)
    return o.contiguous(), lse.contiguous()


def _merge_fake(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, impl: str
) -> Tensors:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_bwd(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> Tensors:
    with torch.autocast(o_a.device.type, enabled=False):
        gradients = eager.merge_states_backward(do, dlse, o_a, lse_a, o_b, lse_b)
    return tuple(gradient.contiguous() for gradient in gradients)


def _merge_bwd_fake(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> Tensors:
    return tuple(x.new_empty(x.shape) for x in (o_a, lse_a, o_b, lse_b))


merge_states = define_op(
    "merge_states",
    "(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, str impl) -> (Tensor o, Tensor lse)",
    _merge,
    _merge_fake,
)
merge_states_bwd = define_op(
    "merge_states_bwd",
    "(Tensor do, Tensor? dlse, Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) "
    "-> (Tensor do_a, Tensor dlse_a, Tensor do_b, Tensor dlse_b)",
    _merge_bwd,
    _merge_bwd_fake,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    if do is None and dlse is None:
        return (None,) * 5
    o_a, lse_a, o_b, lse_b = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o_a)
    return (*merge_states_bwd(do, dlse, o_a, lse_a, o_b, lse_b), None)


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported("merge_states: no backward of the backward")


define_autograd("merge_states", _save_for_backward, _backward)
define_autograd("merge_states_bwd", lambda ctx, inputs, output: None, _refuse_double_backward)
