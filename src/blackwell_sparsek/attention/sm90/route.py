"""The Hopper kernel as implementation `sm90` of `bsk::attn_bwd`.

Triton and the kernel are imported at the first call.
"""

import torch

from ...calls.attention import AttnGradients, AttnProblem, AttnSpec, empty_lse, empty_out, tma_takes
from ...core.compat import why_places_unknown
from ...dispatch.machine import why_no_kernels
from ...launch.launcher import scratch
from ...masks.derived_lists import derived_list
from ...masks.order import longest_columns_first, longest_first
from .dq_order import Columns, DqOrder, Walk, dq_order
from .tuning import (
    attn_bwd_keys_config,
    attn_bwd_keys_section,
    attn_bwd_queries_config,
    attn_bwd_sm90_apart,
    attn_bwd_sm90_config,
    attn_bwd_sm90_front,
    attn_bwd_sm90_passed_over,
    attn_bwd_sm90_section,
    attn_bwd_sm90_unsupported,
    attn_fwd_sm90_config,
    attn_fwd_sm90_passed_over,
    attn_fwd_sm90_section,
    attn_fwd_sm90_unsupported,
)

# The Hopper kernel as implementation `sm90` of `bsk::attn_fwd`.
#
# Triton and the kernel are imported at the first call.


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
    from .launch import launch_attn_fwd_sm90

    problem = AttnProblem.of(q, k, v, spec)
    out, lse = empty_out(q, v.shape[-1]), empty_lse(q)
    config, section = attn_fwd_sm90_config(problem), attn_fwd_sm90_section(problem, spec.band)
    order = None
    # an order of mask rows knows nothing of the lengths of packed sequences
    if (mask := spec.block_mask) is not None and not spec.is_varlen:
        order = derived_list(mask, longest_first, q.shape[0], q.shape[1], spec.band, section)
    launch_attn_fwd_sm90(out, lse, q, k, v, spec, order, section, config)
    return out, lse


def why_not_backward(problem: AttnProblem) -> str | None:
    """Why the backward kernel cannot run this problem, or None when it can."""
    return why_no_kernels(problem.arch) or attn_bwd_sm90_unsupported(problem)


backward_auto_passes = attn_bwd_sm90_passed_over


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
    from ..triton.delta import launch_sink_gradients
    from .launch import launch_attn_bwd_sm90

    problem = AttnProblem.of(q, k, v, spec, backward=True, deterministic=deterministic)
    # the gradient of an expanded or sliced output may be laid out in ways that TMA cannot read
    dout = dout if tma_takes(dout) else dout.contiguous()
    if attn_bwd_sm90_apart(problem):
        backward_apart(gradients, dout, dlse, q, k, v, out, lse, spec, problem)
        return
    config, section = attn_bwd_sm90_config(problem), attn_bwd_sm90_section(problem)
    lists = DqOrder(None, None, None)
    if spec.block_mask is not None:
        group_size = q.shape[1] // k.shape[1]
        sizes = (q.shape[0], k.shape[1], group_size, spec.band, section, config.tile_n)
        walk = Walk(config.parts, attn_bwd_sm90_front(problem, section))
        lists = dq_order(spec.block_mask, Columns(*sizes), walk, deterministic)
    dk, dv = (
        scratch(x.shape, x.dtype, x.device) if gradient is None else gradient
        for x, gradient in ((k, gradients.dk), (v, gradients.dv))
    )
    work = (*lists, section)
    delta = launch_attn_bwd_sm90(
        gradients.dq, dk, dv, dout, dlse, q, k, v, out, lse, spec, *work, config
    )
    if gradients.dsinks is not None and spec.sinks is not None:
        delta = delta[..., : lse.shape[-1]].contiguous()
        launch_sink_gradients(gradients.dsinks, spec.sinks.contiguous(), lse, delta, None)


# Gradients by two Hopper kernels, one for keys and values and one for queries.


def backward_apart(
    gradients: AttnGradients,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttnSpec,
    problem: AttnProblem,
) -> None:
    """Fill `gradients`, under a mask: the same bits in every run. TMA takes `dout`."""
    from ..triton.delta import launch_sink_gradients
    from .launch import (
        launch_attn_bwd_keys_sm90,
        launch_attn_bwd_queries_sm90,
        launch_attn_bwd_terms,
    )

    mask = spec.block_mask
    assert mask is not None
    dq, dk, dv, dsinks = gradients
    terms = launch_attn_bwd_terms(dout, dlse, out, lse)
    group_size = q.shape[1] // k.shape[1]
    if dk is not None or dv is not None:
        # they come together, and scratch takes what nobody asked for
        dk, dv = (
            scratch(x.shape, x.dtype, x.device) if gradient is None else gradient
            for x, gradient in ((k, dk), (v, dv))
        )
        config, section = attn_bwd_keys_config(problem), attn_bwd_keys_section(problem)
        sizes = (q.shape[0], k.shape[1], group_size, spec.band, section, config.tile_n)
        order = derived_list(mask, longest_columns_first, *sizes)
        launch_attn_bwd_keys_sm90(dk, dv, dout, q, k, v, terms, spec, order, config)
    if dq is not None:
        # as in the forward pass: the heads that share keys run together
        order = derived_list(mask, longest_first, q.shape[0], q.shape[1], spec.band, group_size)
        tiles = attn_bwd_queries_config(problem)
        launch_attn_bwd_queries_sm90(dq, dout, q, k, v, terms, spec, order, tiles)
    if dsinks is not None and spec.sinks is not None:
        padded = terms[1].view(*lse.shape[:2], -1)
        delta = padded[..., : lse.shape[-1]].contiguous()
        launch_sink_gradients(dsinks, spec.sinks.contiguous(), lse, delta, None)
