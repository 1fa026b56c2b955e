"""Sparse attention backward on Hopper: dq and gates by one kernel, dk and dv by another.

Both have sums of one order and no atomics, so every run gives the same bits. Where fewer than eight
query heads share a KV head and a list, or TMA does not take the queries, dk and dv come from the
portable kernel. Called as impl "sm90" of `bsk::sparse_attn_bwd`.
"""

from dataclasses import replace

import torch

from ...calls.attention import tma_takes
from ...calls.sparse_attention import SparseBackwardCall
from ...core.arch import arch_of
from ...dispatch.machine import fp32_precision
from ..triton.backward import fill_gradients, launch_sparse_attn_dkdv
from ..triton.tuning import sparse_attn_config
from .dkdv import launch_sparse_attn_dkdv_sm90
from .dq import launch_sparse_attn_dq_sm90
from .tuning import sparse_dkdv_sm90_config, sparse_dq_sm90_config


def backward(call: SparseBackwardCall) -> None:
    """Fill the gradients that are asked for; the same bits in every run."""
    problem = call.problem
    programs = arch_of(call.dout.device).num_sms

    def launch_dq(delta: torch.Tensor, shares: torch.Tensor | None) -> None:
        launch_sparse_attn_dq_sm90(call, delta, shares, sparse_dq_sm90_config(problem), programs)

    def launch_dkdv(delta: torch.Tensor) -> None:
        config = sparse_dkdv_sm90_config(problem)
        if config is None or not tma_takes(call.forward.q):
            portable = sparse_attn_config(problem, fp32_precision(problem.dtype))
            launch_sparse_attn_dkdv(call, delta, portable)
        else:
            dout = call.dout if tma_takes(call.dout) else call.dout.contiguous()
            launch_sparse_attn_dkdv_sm90(replace(call, dout=dout), delta, config)

    fill_gradients(call, launch_dq, launch_dkdv)
