"""The portable Triton kernels as implementation `triton` of `bsk::attn_fwd` and `merge_states`.

Triton and the kernels are imported at the first call.
"""

import torch

from ...calls.attention import (
    AttnGradients,
    AttnProblem,
    AttnSpec,
    MergeProblem,
    empty_lse,
    empty_out,
)
from ...dispatch.machine import fp32_precision, why_not_portable
from ...launch.launcher import scratch
from .tuning import attn_dkdv_config, attn_dq_config, attn_fwd_config

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
    from .forward import launch_attn_fwd

    problem = AttnProblem.of(q, k, v, spec)
    out, lse = empty_out(q, v.shape[-1]), empty_lse(q)
    launch_attn_fwd(out, lse, q, k, v, spec, attn_fwd_config(problem, fp32_precision(q.dtype)))
    return out, lse


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of two partial results [..., Dv], [...]."""
    from .merge import launch_merge_states

    out, lse = o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)
    # the kernel walks over up to three dimensions of rows; more are folded into one
    fold = max(o_a.dim() - 4, 0)
    outputs = [x.flatten(0, fold) if fold else x for x in (out, lse)]
    inputs = [x.flatten(0, fold) if fold else x for x in (o_a, lse_a, o_b, lse_b)]
    launch_merge_states(*outputs, *inputs)
    return out, lse


# The portable Triton kernels as implementation `triton` of `bsk::attn_bwd`.
#
# Separate kernels for dQ and for dK/dV, without atomics: the same bits in every run, whether that
# was asked for or not. Triton and the kernels are imported at the first call.


def why_not_backward(problem: AttnProblem) -> str | None:
    """Why the backward kernels cannot run this problem, or None when they can."""
    if (reason := why_not_forward(problem)) is not None:
        return reason
    tiles = -(-problem.max_k // SMALLEST_TILE)
    if problem.batch * problem.heads_kv * tiles > MOST_PROGRAMS:
        return f"needs at most {MOST_PROGRAMS} key tiles over batch and heads"
    return None


def backward(
    gradients: AttnGradients,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttnSpec,
    deterministic: bool,
) -> None:
    """Fill the gradients that are not None."""
    from .backward import launch_attn_dkdv, launch_attn_dq
    from .delta import launch_attn_delta, launch_sink_gradients

    problem = AttnProblem.of(q, k, v, spec, backward=True, deterministic=deterministic)
    precision = fp32_precision(q.dtype)
    dq, dk, dv, dsinks = gradients
    delta = None
    if dq is not None or dk is not None or dsinks is not None:
        delta = scratch(lse.shape, lse.dtype, lse.device)
        launch_attn_delta(delta, dout, out, dlse, lse)
    if dq is not None and delta is not None:
        config = attn_dq_config(problem, precision)
        launch_attn_dq(dq, dout, q, k, v, lse, delta, spec, config)
    if dk is not None or dv is not None:
        config = attn_dkdv_config(problem, precision)
        launch_attn_dkdv(dk, dv, dout, q, k, v, lse, delta, spec, config)
    if dsinks is not None and delta is not None and spec.sinks is not None:
        sinks = spec.sinks.contiguous()
        launch_sink_gradients(dsinks, sinks, lse, delta, spec.cu_seqlens_q)
