"""What float32 operands are multiplied in."""

import torch


def fp32_precision(dtype: torch.dtype) -> str:
    """Multiply float32 as torch's own products may: in tf32 only where the user allowed it."""
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and allowed else "ieee"
