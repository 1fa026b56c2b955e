"""Gradients by two Hopper kernels, one for keys and values and one for queries."""

import torch

from ..core.launch import scratch
from ..formats.attention_spec import AttnGradients, AttnSpec
from ..formats.block_order import longest_columns_first, longest_first
from ..tuning.attention_bwd_sm90_pair import (
    attn_bwd_keys_config,
    attn_bwd_keys_section,
    attn_bwd_queries_config,
)
from ..tuning.problem_attention import AttnProblem
from .derived_lists import derived_list


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
    from ..kernels.attention.bwd_sinks import launch_sink_gradients
    from ..kernels.attention.bwd_sm90_pair_launch import (
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
