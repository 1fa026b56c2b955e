"""Requirements of all kernels on the device and on Triton, before the conditions of each."""

import torch

from ..core.arch import Arch
from ..core.compat import why_no_triton, why_torch_misses_gpu, why_triton_fails
from ..core.torch_state import bf16_is_exact

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MIN_SM = 80


def why_no_kernels(arch: Arch) -> str | None:
    """Why no kernel of this package can run on `arch`, or None when some may."""
    if arch.sm and arch.interpreted:
        # the user is debugging other kernels; ours would be slow, and Gluon kernels would not run
        return "TRITON_INTERPRET is set, and the tensors are on a GPU"
    # importing Triton takes a moment, which calls on a CPU should not have to wait for
    return why_triton_fails() if arch.sm or arch.interpreted else why_no_triton()


def why_not_portable(arch: Arch, *dtypes: torch.dtype) -> str | None:
    """Why portable kernels cannot run on tensors of `dtypes` on `arch`, or None when they can."""
    if (reason := why_no_kernels(arch)) is not None:
        return reason
    if arch.sm < _MIN_SM and not arch.interpreted:
        reason = f"needs a CUDA GPU of sm_{_MIN_SM} or newer, got {arch}"
        missed = why_torch_misses_gpu() if arch.kind == "cpu" else None
        return reason if missed is None else f"{reason}; {missed}"
    for dtype in dtypes:
        if dtype not in _DTYPES:
            return f"needs float16, bfloat16 or float32, got {dtype}"
    if arch.interpreted and torch.bfloat16 in dtypes and not bf16_is_exact():
        return (
            "TRITON_INTERPRET is set, and Triton's interpreter takes bfloat16 for integers; "
            "blackwell_sparsek.testing.interpreter.interpreter_checks() mends that"
        )
    return None


# The precision of products of float32 operands.


def fp32_precision(dtype: torch.dtype) -> str:
    """The precision of float32 products: tf32 only if the user allowed it for torch's own."""
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and allowed else "ieee"
