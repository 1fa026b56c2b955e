"""Attention whose keys have a gate, by the Hopper forward; its gradients are portable."""

from dataclasses import replace

import torch

from ...calls.attention import AttentionCall, empty_lse
from ...calls.gated_attention import GatedCall
from ...masks.derived_lists import derived_list
from ...masks.order import longest_first
from ..sm90.launch import launch_attn_fwd_sm90
from ..sm90.tuning import attn_fwd_sm90_config, attn_fwd_sm90_raster_group
from .live_blocks import key_gates, with_live_blocks


def forward(call: GatedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as `empty_out` and `empty_lse` do."""
    given = with_live_blocks(call)
    q, band, mask = given.q, given.spec.band, given.spec.block_mask
    assert mask is not None, "a call without queries or keys is not for this kernel"
    raster_group = attn_fwd_sm90_raster_group(given.problem, band)
    order = derived_list(mask, longest_first, q.shape[0], q.shape[1], band, raster_group)
    return launch_gated_sm90(call, given, order, raster_group)


def launch_gated_sm90(
    call: GatedCall, given: AttentionCall, order: torch.Tensor, raster_group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel over the mask of `given`, whose rows are taken in this `order`."""
    out, lse = given.empty_out(), empty_lse(given.q)
    # gates take the registers that queries would lie in
    config = replace(attn_fwd_sm90_config(given.problem), GATED=True, Q_REGISTERS=False)
    # tiles are copied without conversion, from multiples of 16 bytes, and may end past the keys
    u = torch.nn.functional.pad(call.gate.u.float(), (0, -call.gate.u.shape[-1] % 128 + 128))
    gates = key_gates(call.gate._replace(u=u), call.heads_per_gate)
    launch_attn_fwd_sm90(given, out, lse, order, raster_group, config, gates)
    return out, lse
