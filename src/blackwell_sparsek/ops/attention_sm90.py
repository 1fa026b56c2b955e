"""The Hopper kernel as implementation `sm90` of `bsk::attn_fwd`.

Triton and the kernel are imported at the first call.
"""

import torch

from ..core.compat import why_places_unknown
from ..formats.attention_spec import AttnSpec, empty_lse, empty_out
from ..formats.block_order import longest_first
from ..tuning.attention_sm90 import (
    attn_fwd_sm90_config,
    attn_fwd_sm90_passed_over,
    attn_fwd_sm90_section,
    attn_fwd_sm90_unsupported,
)
from ..tuning.problem_attention import AttnProblem
from .derived_lists import derived_list
from .machine import why_no_kernels


def why_not_forward(problem: AttnProblem) -> str | None:
    """Why the forward kernel cannot run this problem, or None when it can."""
    return (
        why_no_kernels(problem.arch) or attn_fwd_sm90_unsupported(problem) or why_places_unknown()
    )


auto_passes = attn_fwd_sm90_passed_over


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as `empty_out` and `empty_lse` do."""
    from ..kernels.attention.fwd_sm90_launch import launch_attn_fwd_sm90

    problem = AttnProblem.of(q, k, v, spec)
    out, lse = empty_out(q, v.shape[-1]), empty_lse(q)
    config, section = attn_fwd_sm90_config(problem), attn_fwd_sm90_section(problem, spec.band)
    order = None
    # an order of mask rows knows nothing of the lengths of packed sequences
    if (mask := spec.block_mask) is not None and not spec.is_varlen:
        order = derived_list(mask, longest_first, q.shape[0], q.shape[1], spec.band, section)
    launch_attn_fwd_sm90(out, lse, q, k, v, spec, order, section, config)
    return out, lse
