"""Gradients of sparse attention in plain PyTorch, part by part of the heads."""

import torch

from ...attention.eager.backward import backward as backward_dense
from ...calls.attention import AttnGradients, BackwardCall, compute_dtype, fill_gradients
from ...calls.sparse_attention import SparseBackwardCall
from . import by_block, by_query
from .forward import local_call
from .parts import parts_of


def backward(call: SparseBackwardCall) -> None:
    """Fill the gradients that are asked for."""
    given = call.forward
    spec, dtype = given.spec, compute_dtype(given.q.dtype)
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (given.q, given.k, given.v)
    )
    dout, lse, out = call.dout.to(dtype), call.lse, call.out.to(dtype)
    delta = (dout * out).sum(-1)
    if spec.is_varlen:
        delta = delta.T
    if call.dlse is not None:
        delta = delta - call.dlse
    dgate = None
    if spec.gate is not None:
        dgate = torch.zeros(spec.gate.shape, dtype=dtype, device=spec.gate.device)
    blocks = by_block.is_faster(given)
    buffers = by_block.Buffers()
    for part in parts_of(given):
        own = (
            part.own(dout),
            part.own_lse(lse),
            part.own_lse(delta),
            part.own(dq),
            part.keys(dk),
            part.keys(dv),
            None if dgate is None else part.lists(dgate),
        )
        if blocks:
            by_block.add_gradients(part, *own, buffers)
        else:
            by_query.add_gradients(part, *own)
    if blocks and spec.local is not None:
        # the window's share of the same softmax: its lse, and with it delta, are those of all keys
        near = AttnGradients(
            torch.empty_like(dq), torch.empty_like(dk), torch.empty_like(dv), dsinks=None
        )
        backward_dense(BackwardCall(local_call(given), dout, call.dlse, out, lse, near))
        for total, share in zip((dq, dk, dv), near, strict=False):
            assert share is not None
            total += share
    dsinks = None
    if spec.sinks is not None:
        heads = (-1, 1) if spec.is_varlen else (1, -1, 1)
        shift = torch.where(lse == -torch.inf, torch.inf, lse)
        sums = -torch.exp(spec.sinks.to(dtype).view(heads) - shift) * delta
        dsinks = sums.sum(-1) if spec.is_varlen else sums.sum((0, 2))
    fill_gradients(call.gradients, (dq, dk, dv, dsinks, dgate))
