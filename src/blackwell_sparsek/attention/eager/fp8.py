"""Attention over e4m3 tensors in plain PyTorch: stored values times their scales, then in fp32."""

import torch

from ...calls.fp8 import SCALE_TOKENS, Fp8AttentionCall
from .forward import attention


def forward(call: Fp8AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of a call."""
    given, spec = call.given, call.given.spec
    given.check_lengths()
    q = _values(given.q, call.q_descale, spec.cu_seqlens_q, SCALE_TOKENS)
    k = _values(given.k, call.k_descale, spec.cu_seqlens_k, SCALE_TOKENS)
    v = _values(given.v, call.v_descale, spec.cu_seqlens_k, None)
    out, lse = attention(q, k, v.contiguous(), spec)
    rounded, _ = call.empty_results()
    return rounded.copy_(out), lse


def _values(
    x: torch.Tensor, scale: torch.Tensor | None, cu_seqlens: torch.Tensor | None, tokens: int | None
) -> torch.Tensor:
    """fp32 values; scales change after `tokens` tokens, or by channel if that is None."""
    x = x.float()
    if scale is None:
        return x
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
        scale = scale.expand(len(lengths), -1, -1).repeat_interleave(lengths, 0)
    elif tokens is None:
        scale = scale.unsqueeze(2)
    else:
        if scale.shape[2] > 1:
            scale = scale.repeat_interleave(tokens, 2)[:, :, : x.shape[2]]
        scale = scale.unsqueeze(3)
    return x * scale
