"""The Hopper decode kernel as implementation `sm90` of `bsk::attn_decode`.

Triton and the kernel are imported at the first call.
"""

import torch

from ..formats.attention_spec import empty_lse, empty_out
from ..formats.decode_spec import DecodeSpec
from ..tuning.decode_sm90 import attn_decode_sm90_launch, attn_decode_sm90_unsupported
from ..tuning.problem_decode import DecodeProblem
from .machine import why_no_kernels


def why_not(problem: DecodeProblem) -> str | None:
    """Why the kernel cannot run this problem, or None when it can."""
    return why_no_kernels(problem.arch) or attn_decode_sm90_unsupported(problem)


def run(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spec: DecodeSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as `empty_out` and `empty_lse` do."""
    from ..kernels.attention.decode_sm90_launch import launch_attn_decode_sm90

    chosen = attn_decode_sm90_launch(DecodeProblem.of(q, k_cache, v_cache, spec))
    out, lse = empty_out(q, v_cache.shape[-1]), empty_lse(q)
    launch_attn_decode_sm90(out, lse, q, k_cache, v_cache, spec, *chosen)
    return out, lse
