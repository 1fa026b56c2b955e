"""`merge_states`: join attention over two disjoint sets of keys."""

import torch

from ..core.checks import (
    check_derivatives,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput
from ..formats.attention_spec import lse_dtype
from ..ops.merge import merge_states as merge_states_op
from .attention_inputs import DTYPES


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial attention results into the result over both sets of keys.

    Differentiable in all four arguments. Give sinks to one of the two parts only. A side with
    lse -inf has seen nothing and its `o` is ignored.

    Parameters
    ----------
    o_a, o_b : fp16, bf16, fp32 or fp64 `[..., Dv]`
    lse_a, lse_b : fp32 (fp64 for fp64 outputs) `[...]`
        Natural-log denominators, as `attention(..., return_lse=True)` returns them.

    Returns
    -------
    o : `[..., Dv]`, dtype of o_a
    lse : `[...]`

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.functional.attention import attention
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
