"""The Hopper kernel as implementation `sm90` of `bsk::attn_bwd`.

Triton and the kernel are imported at the first call.
"""

import torch

from ..core.launch import scratch
from ..formats.attention_spec import AttnGradients, AttnSpec
from ..tuning.attention_bwd_sm90 import (
    attn_bwd_sm90_apart,
    attn_bwd_sm90_config,
    attn_bwd_sm90_front,
    attn_bwd_sm90_passed_over,
    attn_bwd_sm90_section,
    attn_bwd_sm90_unsupported,
)
from ..tuning.problem_attention import AttnProblem, tma_takes
from .attention_bwd_plan import Columns, Walk, planned_sums
from .attention_bwd_sm90_pair import backward_apart
from .machine import why_no_kernels


def why_not_backward(problem: AttnProblem) -> str | None:
    """Why the backward kernel cannot run this problem, or None when it can."""
    return why_no_kernels(problem.arch) or attn_bwd_sm90_unsupported(problem)


auto_passes = attn_bwd_sm90_passed_over


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
    """Fill `gradients`; those of k and v come together, and scratch takes what nobody asked for."""
    from ..kernels.attention.bwd_sinks import launch_sink_gradients
    from ..kernels.attention.bwd_sm90_launch import launch_attn_bwd_sm90

    problem = AttnProblem.of(q, k, v, spec, backward=True, deterministic=deterministic)
    # the gradient of an expanded or sliced output may be laid out in ways that TMA cannot read
    dout = dout if tma_takes(dout) else dout.contiguous()
    if attn_bwd_sm90_apart(problem):
        backward_apart(gradients, dout, dlse, q, k, v, out, lse, spec, problem)
        return
    config, section = attn_bwd_sm90_config(problem), attn_bwd_sm90_section(problem)
    order = turns = visits = None
    if spec.block_mask is not None:
        group_size = q.shape[1] // k.shape[1]
        sizes = (q.shape[0], k.shape[1], group_size, spec.band, section, config.tile_n)
        walk = Walk(config.parts, attn_bwd_sm90_front(problem, section))
        order, turns, visits = planned_sums(spec.block_mask, Columns(*sizes), walk, deterministic)
    dk, dv = (
        scratch(x.shape, x.dtype, x.device) if gradient is None else gradient
        for x, gradient in ((k, gradients.dk), (v, gradients.dv))
    )
    work = (order, turns, visits, section)
    delta = launch_attn_bwd_sm90(
        gradients.dq, dk, dv, dout, dlse, q, k, v, out, lse, spec, *work, config
    )
    if gradients.dsinks is not None and spec.sinks is not None:
        delta = delta[..., : lse.shape[-1]].contiguous()
        launch_sink_gradients(gradients.dsinks, spec.sinks.contiguous(), lse, delta, None)
