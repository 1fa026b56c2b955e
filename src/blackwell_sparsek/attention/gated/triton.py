"""Attention whose keys have a gate, by the portable kernels of attention."""

from dataclasses import replace
from typing import TypeVar

import torch

from ...calls.attention import (
    AttentionCall,
    AttnGradients,
    AttnProblem,
    BackwardCall,
    empty_lse,
    empty_out,
)
from ...calls.gated_attention import GatedBackwardCall, GatedCall
from ...dispatch.machine import fp32_precision
from ...launch.workspace import scratch
from ..triton.backward import launch_attn_dkdv, launch_attn_dq
from ..triton.delta import launch_attn_delta, launch_sink_gradients
from ..triton.forward import launch_attn_fwd
from ..triton.tuning import (
    LARGE_SMEM,
    AttnBwdConfig,
    AttnFwdConfig,
    attn_dkdv_config,
    attn_dq_config,
    attn_fwd_config,
)
from .live_blocks import key_gates, with_live_blocks

Config = TypeVar("Config", bound=AttnFwdConfig)


def _narrower(config: Config, given: AttentionCall) -> Config:
    """Tiles of 16 keys for fp32, whose operands fill registers: gates of 32 spill 1 KiB."""
    return replace(config, tile_n=16) if given.q.dtype == torch.float32 else config


def _dq_config(problem: AttnProblem, precision: str, given: AttentionCall) -> AttnBwdConfig:
    """The tiles of dq, with room for its gates where shared memory is small."""
    config = _narrower(attn_dq_config(problem, precision), given)
    dim = max(problem.head_dim, problem.head_dim_v)
    if problem.arch.sm in LARGE_SMEM or problem.dtype == torch.float32 or dim <= 64:
        return config
    # 131072 bytes with 128 rows, and 110592 with two stages of 256 columns, of 101376
    if dim <= 128:
        return replace(config, tile_m=min(config.tile_m, 64))
    return replace(config, num_stages=1)


def forward(call: GatedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as `empty_out` and `empty_lse` do."""
    given = with_live_blocks(call)
    out, lse = empty_out(given.q, given.v.shape[-1]), empty_lse(given.q)
    config = _narrower(attn_fwd_config(given.problem, fp32_precision(given.q.dtype)), given)
    launch_attn_fwd(given, out, lse, config, key_gates(call.gate, call.heads_per_gate))
    return out, lse


def backward(call: GatedBackwardCall) -> None:
    """Fill the gradients that are asked for; the same bits in every run."""
    given, wanted, lse = with_live_blocks(call.forward), call.gradients, call.lse
    precision, gates = (
        fp32_precision(given.q.dtype),
        key_gates(call.forward.gate, call.forward.heads_per_gate),
    )
    delta = scratch(lse.shape, lse.dtype, lse.device)
    launch_attn_delta(delta, call.dout, call.out, call.dlse, lse)
    dq, dk = wanted.dq, wanted.dk
    # a kernel computes the gradient of a gate beside the one that sums over the same axis
    if wanted.dtau is not None and dq is None:
        dq = torch.empty_like(given.q)
    if wanted.du is not None and dk is None:
        dk = torch.empty_like(given.k)
    gradients = AttnGradients(dq, dk, wanted.dv, wanted.dsinks)
    plain = BackwardCall(given, call.dout, call.dlse, call.out, lse, gradients)
    if dq is not None:
        share = None if wanted.dtau is None else torch.empty_like(lse)
        config = _dq_config(plain.problem, precision, given)
        launch_attn_dq(plain, delta, config, gates, share)
        _add_shares(wanted.dtau, share)
    if dk is not None or wanted.dv is not None:
        share = None
        if wanted.du is not None:
            shape = (*given.q.shape[:2], given.k.shape[2])
            share = torch.empty(shape, dtype=lse.dtype, device=lse.device)
        config = attn_dkdv_config(plain.problem, precision)
        if given.q.dtype == torch.float32:
            config = replace(config, tile_m=16)
        launch_attn_dkdv(plain, delta, config, gates, share)
        _add_shares(wanted.du, share)
    if wanted.dsinks is not None and given.spec.sinks is not None:
        launch_sink_gradients(wanted.dsinks, given.spec.sinks.contiguous(), lse, delta, None)


def _add_shares(gradient: torch.Tensor | None, shares: torch.Tensor | None) -> None:
    """Add up the shares [B, Hq, S] of query heads, and of batches that have a gate in common."""
    if gradient is None or shares is None:
        return
    batch, heads, tokens = gradient.shape
    if shares.numel() == 0:
        gradient.zero_()
        return
    sums = shares.view(shares.shape[0], heads, -1, tokens).sum(2)
    gradient.copy_(sums.sum(0, keepdim=True) if batch == 1 else sums)
