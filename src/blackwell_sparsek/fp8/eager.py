"""Rounding to fp8 in plain PyTorch, on any device."""

import torch

from ..calls.fp8 import QuantizeCall, descale_shape, expanded_scales, rotated
from ..core.fp8 import finite_magnitude, scales_of, within_range


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
    rounded = call.empty_data().copy_(within_range(x * factor, call.dtype))
    return rounded, descale, mean


def _scales(call: QuantizeCall, x: torch.Tensor) -> torch.Tensor:
    magnitude = finite_magnitude(x)
    shape = descale_shape(x.shape, call.scale, call.block)
    if x.numel() == 0:
        return torch.ones(shape, dtype=torch.float32, device=x.device)
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
    return scales_of(largest, call.dtype)
