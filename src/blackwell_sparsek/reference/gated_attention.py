"""Attention whose keys have a gate, as a formula: dense, in fp64.

    w[i, j] = clip(u[j] - tau[i], 0, 1)                 0 where u[j] is -inf or j is not visible
    lse[i]  = log(sum_j w[i, j] exp(s[i, j]) + exp(sink))
    out[i]  = sum_j w[i, j] exp(s[i, j] - lse[i]) v[j]

with the scores s of `attention.py`. Gradients come from plain autograd.
"""

import torch

from ..calls.attention import AttentionCall, empty_out, fill_gradients, lse_dtype
from ..calls.gated_attention import GatedBackwardCall, GatedCall, KeyGate
from .attention import _attend, visible_elements


def forward(call: GatedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as by other implementations."""
    out, lse = gated_attention(call)
    given = call.attention
    return empty_out(given.q, given.v.shape[-1]).copy_(out), lse


def backward(call: GatedBackwardCall) -> None:
    """Fill the gradients that are asked for."""
    fill_gradients(call.gradients, gated_attention_backward(call.forward, call.dout, call.dlse))


def gated_attention(
    call: GatedCall, precision: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the dtype of q, and lse."""
    given = call.attention
    q, k, v = (x.to(precision) for x in (given.q, given.k, given.v))
    weights = _weights(call, precision)
    visible = visible_elements(q.shape[2], k.shape[2], given.spec, q.device)
    # a NaN of a weight has to show, so that only zeros hide their keys
    visible = visible & (weights != 0)
    bias = torch.log(torch.where(visible, weights, 1.0))
    out, lse = _attend(q, k, v, given.spec, visible, bias)
    return out.to(given.q.dtype), lse.to(lse_dtype(given.q.dtype))


def _weights(call: GatedCall, precision: torch.dtype) -> torch.Tensor:
    """w [B or 1, Hq, Sq, Sk]."""
    u, tau = (x.to(precision).repeat_interleave(call.heads_per_gate, dim=1) for x in (call.gate))
    missing = (u == -torch.inf)[:, :, None, :]
    over = torch.where(missing, -1.0, u[:, :, None, :]) - tau[..., None]
    # clamp's own derivative is 1 at its ends, where ours is 0
    inside = (over > 0) & (over < 1) | over.isnan()
    return torch.where(missing, 0.0, torch.where(inside, over, (over >= 1).to(precision)))


def gated_attention_backward(
    call: GatedCall, dout: torch.Tensor, dlse: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Gradients of q, k, v, the sinks (None without them), u and tau."""
    given = call.attention
    inputs = [given.q, given.k, given.v, *call.gate]
    if given.spec.sinks is not None:
        inputs.append(given.spec.sinks)

    def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, u, tau, *sinks = tensors
        spec = given.spec._replace(sinks=sinks[0] if sinks else None)
        return gated_attention(GatedCall(AttentionCall(q, k, v, spec), KeyGate(u, tau)))

    outputs, pull_back, *_ = torch.func.vjp(forward, *inputs)
    dlse = torch.zeros_like(outputs[1]) if dlse is None else dlse
    dq, dk, dv, du, dtau, *dsinks = pull_back((dout, dlse))
    return [dq, dk, dv, dsinks[0] if dsinks else None, du, dtau]
