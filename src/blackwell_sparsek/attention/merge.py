"""`bsk::merge_states` and its gradient: two partial attention results over disjoint keys."""

from typing import Any

import torch

from ..calls.attention import MergeCall, lse_dtype
from ..core.checks import (
    check_derivatives,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput, Unsupported
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.operators import Operator, define_autograd, define_op
from ..reference import merge as reference
from .eager import softmax as eager
from .inputs import DTYPES
from .triton.tuning import why_not_merge


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial attention results into the result over both sets of keys.

    Differentiable in all four arguments. Give sinks to one of the two parts only. A side with
    lse -inf has seen no key, and its `o` is ignored.

    Parameters
    ----------
    o_a, o_b : fp16, bf16, fp32 or fp64 `[..., Dv]`
    lse_a, lse_b : fp32 (fp64 for fp64 outputs) `[...]`
        Natural-log denominators, as `attention(..., return_lse=True)` returns them.

    Returns
    -------
    o : `[..., Dv]`, dtype of o_a
    lse : `[...]`

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.attention.api import attention
    >>> q, k, v = torch.randn(3, 1, 2, 12, 16)
    >>> a = attention(q, k[:, :, :5], v[:, :, :5], return_lse=True)
    >>> b = attention(q, k[:, :, 5:], v[:, :, 5:], return_lse=True)
    >>> o, lse = merge_states(*a, *b)
    >>> torch.allclose(o, attention(q, k, v), atol=1e-5)
    True
    """
    op = "merge_states"
    tensors = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
    for arg, x in tensors.items():
        check_tensor(op, arg, x)
        check_derivatives(op, arg, x)
    check_same_device(op, {**tensors})
    if o_a.dim() < 1:
        raise InvalidInput(message(op, "o_a", "has a wrong rank", "[..., Dv]", list(o_a.shape)))
    check_dtype(op, "o_a", o_a, DTYPES)
    check_dtype(op, "o_b", o_b, [o_a.dtype])
    check_shape(op, "o_b", o_b, o_a.shape)
    for arg in ("lse_a", "lse_b"):
        check_dtype(op, arg, tensors[arg], [lse_dtype(o_a.dtype)])
        check_shape(op, arg, tensors[arg], o_a.shape[:-1])
    return merge_states_op(o_a, lse_a, o_b, lse_b, "auto")


Tensors = tuple[torch.Tensor, ...]

merge_dispatch: Dispatcher = Dispatcher("merge_states")
merge_dispatch.register(
    "triton",
    why_not_merge,
    "blackwell_sparsek.attention.triton.merge:merge_states",
    auto_passes=interpreted_only,
)
merge_dispatch.register("eager", every_problem, lambda call: eager.merge_states(*call))
merge_dispatch.register(
    "reference",
    every_problem,
    lambda call: reference.merge_states(*call),
    auto_passes=only_asked,
)


def _merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, impl: str
) -> Tensors:
    with without_autocast(o_a.device):
        o, lse = merge_dispatch.run(impl, MergeCall(o_a, lse_a, o_b, lse_b))
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
    with without_autocast(o_a.device):
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


merge_states_op: Operator = define_op(
    "merge_states",
    "(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, str impl) -> (Tensor o, Tensor lse)",
    _merge,
    _merge_fake,
)
merge_states_bwd: Operator = define_op(
    "merge_states_bwd",
    "(Tensor do, Tensor? dlse, Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) "
    "-> (Tensor do_a, Tensor dlse_a, Tensor do_b, Tensor dlse_b)",
    _merge_bwd,
    _merge_bwd_fake,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors)
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
