"""Rounding to fp8 in plain PyTorch, on any device."""

import torch

from ..calls.fp8 import (
    LARGEST,
    SMALLEST_SCALE,
    QuantizeCall,
    descale_shape,
    expanded_scales,
    rotated,
)


def quantize(call: QuantizeCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, scales and means of a call."""
    x = call.x.float()
    mean = call.empty_mean()
    if call.smooth:
        finite = torch.where(x.isfinite(), x, 0.0)
        mean = finite.sum(-2) / max(x.shape[-2], 1)
        x = x - mean.unsqueeze(-2)
    if call.hadamard:
        x = rotated(x)
    descale = _scales(call, x)
    factor = expanded_scales(descale.reciprocal(), x.shape, call.scale, call.block)
    limit = LARGEST[call.dtype]
    scaled = x * factor
    # drop the sign of NaN, as the conversion instruction of the GPU does
    scaled = torch.where(scaled.isnan(), torch.nan, scaled.clamp(-limit, limit))
    return call.empty_data().copy_(scaled), descale, mean


def _scales(call: QuantizeCall, x: torch.Tensor) -> torch.Tensor:
    magnitude = torch.where(x.isfinite(), x.abs(), 0.0)
    shape = descale_shape(x.shape, call.scale, call.block)
    if x.numel() == 0:
        return torch.ones(shape, device=x.device)
    if call.scale == "tensor":
        largest = magnitude.amax()
    else:
        group, (tokens, channels) = call.group, x.shape[-2:]
        by_token, by_channel = group.tokens or tokens, group.channels or channels
        padding = (0, -channels % by_channel, 0, -tokens % by_token)
        magnitude = torch.nn.functional.pad(magnitude, padding)
        *outer, tokens, channels = magnitude.shape
        split = (*outer, tokens // by_token, by_token, channels // by_channel, by_channel)
        largest = magnitude.view(split).amax((-3, -1)).view(shape)
    # by a tensor: dividing by a number, torch multiplies by its reciprocal on a GPU
    limit = torch.full_like(largest, LARGEST[call.dtype])
    scales = (largest / limit).clamp_min(SMALLEST_SCALE)
    return torch.where(largest == 0, 1.0, scales)
