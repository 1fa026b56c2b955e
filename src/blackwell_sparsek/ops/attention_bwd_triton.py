"""The portable Triton kernels as implementation `triton` of `bsk::attn_bwd`.

Separate kernels for dQ and for dK/dV, without atomics: the same bits in every run, whether that was
asked for or not. Triton and the kernels are imported at the first call.
"""

import torch

from ..core.launch import scratch
from ..formats.attention_spec import AttnGradients, AttnSpec
from ..tuning.attention_bwd import attn_dkdv_config, attn_dq_config
from ..tuning.problem_attention import AttnProblem
from .attention_triton import MOST_PROGRAMS, SMALLEST_TILE, why_not_forward
from .precision import fp32_precision


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
    from ..kernels.attention.bwd_delta import launch_attn_delta
    from ..kernels.attention.bwd_dkdv import launch_attn_dkdv
    from ..kernels.attention.bwd_dq import launch_attn_dq
    from ..kernels.attention.bwd_sinks import launch_sink_gradients

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
