"""Output and lse of sparse attention in plain PyTorch, part by part of the heads."""

import torch

from ...attention.eager.forward import forward as attend_dense
from ...calls.attention import (
    AttentionCall,
    AttnSpec,
    compute_dtype,
)
from ...calls.sparse_attention import SparseAttentionCall
from . import by_block, by_query
from .parts import parts_of


def forward(call: SparseAttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, in the tensors of `call.empty_results`."""
    call.check_values()
    out, lse = call.empty_results()
    if not by_block.is_faster(call):
        for part in parts_of(call):
            by_query.attend(part, part.own(out), part.own_lse(lse))
        return out, lse
    buffers = by_block.Buffers()
    near = None if call.spec.local is None else by_block.Result(*attend_dense(local_call(call)))
    for part in parts_of(call):
        beside = None
        if near is not None:
            beside = by_block.Result(part.own(near.out), part.own_lse(near.lse))
        by_block.attend(part, part.own(out), part.own_lse(lse), beside, buffers)
    return out, lse


def local_call(call: SparseAttentionCall) -> AttentionCall:
    """Attention over the window alone, in the precision of sums."""
    spec = call.spec
    assert spec.local is not None
    options = AttnSpec(
        spec.scale,
        spec.local,
        softcap=spec.softcap,
        cu_seqlens_q=spec.cu_seqlens_q,
        cu_seqlens_k=spec.cu_seqlens_k,
        max_q=spec.max_q,
        max_k=spec.max_k,
    )
    dtype = compute_dtype(call.q.dtype)
    return AttentionCall(call.q.to(dtype), call.k.to(dtype), call.v.to(dtype), options)
