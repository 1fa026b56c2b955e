"""Attention in plain PyTorch, for what no kernel here computes: dropout, biases, weights.

All scores are formed, so time and memory are those of Sq x Sk, whatever the mask hides. A model
that asks for this works, and a warning says once what it asked for.
"""

import warnings
from functools import lru_cache
from typing import Any

import torch

from ...core.checks import message
from ...core.errors import InvalidInput
from ...masks.band import Band
from ...masks.block_mask import BlockMask

OP = "huggingface"


def why_dense(
    dropout: float,
    output_attentions: Any,
    position_bias: Any,
    mask_bias: Any,
    query_sinks: Any = None,
) -> str | None:
    """The first option of a call that kernels do not support, or None."""
    if output_attentions:
        return "output_attentions asks for the attention weights"
    if dropout != 0.0:
        return f"dropout {dropout} on attention weights"
    if position_bias is not None:
        return "position_bias is added to the scores"
    if mask_bias is not None:
        return "attention_mask is a bias with values other than 0 and -inf"
    if query_sinks is not None:
        return "sinks differ between queries"
    return None


@lru_cache(maxsize=64)
def warn_once(reason: str) -> None:
    """Say once in a process what runs without kernels, and why."""
    warnings.warn(
        f"{OP}: {reason}; such layers run in plain PyTorch, with memory of Sq x Sk",
        UserWarning,
        stacklevel=3,
    )


def elements(
    band: Band, block_mask: BlockMask | None, sq: int, sk: int, device: torch.device
) -> torch.Tensor:
    """The keys visible under a band and a mask, bool `[B or 1, H or 1, Sq, Sk]`."""
    visible = band_elements(band, sq, sk, device)
    return visible if block_mask is None else visible & block_mask.to_element_mask()


def band_elements(band: Band, sq: int, sk: int, device: torch.device) -> torch.Tensor:
    """The keys visible under a band, bool `[1, 1, Sq, Sk]`; the last query is at the last key."""
    q_pos = torch.arange(sk - sq, sk, device=device)[:, None]
    distance = torch.arange(sk, device=device) - q_pos
    left, right = band.scalars()
    return ((distance >= -left) & (distance <= right))[None, None]


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    with_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with a bias on the scores, after the softcap, and dropout on the weights.

    Parameters
    ----------
    query : `[B, Hq, Sq, D]`
    key, value : `[B, Hkv, Sk, D]`
    visible : bool `[B or 1, Hq or 1, Sq or 1, Sk]`
    bias : broadcastable to `[B, Hq, Sq, Sk]`, optional
    sinks : `[Hq]` or `[B, Hq, Sq, 1]`, optional
    with_weights : bool
        Whether to return the weights, after dropout.

    Returns
    -------
    out : `[B, Hq, Sq, Dv]`
        0 where a query sees nothing.
    weights : `[B, Hq, Sq, Sk]` or None
    """
    group = query.shape[1] // key.shape[1]
    key, value = (x if group == 1 else x.repeat_interleave(group, 1) for x in (key, value))
    sees = visible.any(-1, keepdim=True)
    shape = (*query.shape[:3], key.shape[2])
    if bias is not None:
        check_bias(bias, shape)
    if softcap is None and sinks is None and not with_weights:
        # the lowest number and not -inf: a row of -inf has gradients of NaN
        hidden = torch.finfo(query.dtype).min
        mask = visible if bias is None else torch.where(visible, bias.to(query.dtype), hidden)
        # not torch.nn.functional, whose function `patch_sdpa` may have replaced
        out = torch._C._nn.scaled_dot_product_attention(
            query, key, value, mask, dropout, False, scale=scale
        )
        return out.masked_fill(~sees, 0.0), None
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.to(dtype) @ key.to(dtype).mT * factor
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype)
    scores = scores.masked_fill(~visible, torch.finfo(dtype).min)
    if sinks is not None:
        per_head = sinks[:, None, None] if sinks.dim() == 1 else sinks
        column = per_head.to(dtype).expand(*shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(~visible, 0.0)
    weights = torch.nn.functional.dropout(weights.to(query.dtype), dropout)
    return weights @ value, weights if with_weights else None


def check_bias(bias: torch.Tensor, shape: tuple[int, ...]) -> None:
    """A bias must broadcast to the scores."""
    try:
        fits = torch.broadcast_shapes(bias.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InvalidInput(
            message(OP, "position_bias", "does not broadcast", list(shape), list(bias.shape))
        )
