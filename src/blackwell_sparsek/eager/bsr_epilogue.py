"""What happens to a finished product in plain PyTorch: activation(product + bias) + residual."""

import torch

from ..core.activations import activate


def finish(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    dense_left: bool,
) -> torch.Tensor:
    """The contiguous result, rounded once; `bias` goes by columns where `dense_left`, else rows."""
    if bias is not None:
        product = product + (bias if dense_left else bias[:, None])
    product = activate(product, activation)
    if residual is not None:
        product = product + residual
    return product.to(out_dtype).contiguous()
