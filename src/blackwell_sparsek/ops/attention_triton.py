"""The portable Triton kernels as implementation `triton` of `bsk::attn_fwd` and `merge_states`.

Triton and the kernels are imported at the first call.
"""

import torch

from ..formats.attention_spec import AttnSpec, empty_lse, empty_out
from ..tuning.attention import attn_fwd_config
from ..tuning.problem_attention import AttnProblem
from ..tuning.problem_merge import MergeProblem
from .machine import why_not_portable
from .precision import fp32_precision

_LARGEST_HEAD_DIM = 256
# Positions and band limits are int32 in kernels, and so is the number of programs.
_LONGEST = 2**30 - 1
MOST_PROGRAMS = 2**31 - 1
SMALLEST_TILE = 16


def why_not_forward(problem: AttnProblem) -> str | None:
    """Why the forward kernel cannot run this problem, or None when it can."""
    if (reason := why_not_portable(problem.arch, problem.dtype)) is not None:
        return reason
    dims = (problem.head_dim, problem.head_dim_v)
    if not 1 <= min(dims) <= max(dims) <= _LARGEST_HEAD_DIM:
        return f"needs head dimensions of 1 to {_LARGEST_HEAD_DIM}, got {dims[0]} and {dims[1]}"
    if max(problem.max_q, problem.max_k) > _LONGEST:
        return f"needs sequences of at most {_LONGEST} tokens"
    tiles = -(-problem.max_q // SMALLEST_TILE)
    if problem.batch * problem.heads_q * tiles > MOST_PROGRAMS:
        return f"needs at most {MOST_PROGRAMS} query tiles over batch and heads"
    return None


def why_not_merge(problem: MergeProblem) -> str | None:
    """Why the merge kernel cannot run this problem, or None when it can."""
    return why_not_portable(problem.arch, problem.dtype)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as `empty_out` and `empty_lse` do."""
    from ..kernels.attention.fwd import launch_attn_fwd

    problem = AttnProblem.of(q, k, v, spec)
    out, lse = empty_out(q, v.shape[-1]), empty_lse(q)
    launch_attn_fwd(out, lse, q, k, v, spec, attn_fwd_config(problem, fp32_precision(q.dtype)))
    return out, lse


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of two partial results [..., Dv], [...]."""
    from ..kernels.attention.merge_states import launch_merge_states

    out, lse = o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)
    # the kernel walks over up to three dimensions of rows; more are folded into one
    fold = max(o_a.dim() - 4, 0)
    outputs = [x.flatten(0, fold) if fold else x for x in (out, lse)]
    inputs = [x.flatten(0, fold) if fold else x for x in (o_a, lse_a, o_b, lse_b)]
    launch_merge_states(*outputs, *inputs)
    return out, lse
