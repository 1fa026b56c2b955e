"""The activations that a product may end with, by name.

A new one is added here, for plain PyTorch, and in `device/epilogue.py`, for kernels; nothing else
knows the names.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F


def _relu_slope(x: torch.Tensor) -> torch.Tensor:
    return x > 0


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return cdf + x * density


def _silu_slope(x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


class _Activation(NamedTuple):
    function: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor], torch.Tensor]
    """The derivative, itself differentiable."""


# gelu is the exact one, with erf, as in torch by default.
_BY_NAME = {
    "relu": _Activation(F.relu, _relu_slope),
    "gelu": _Activation(F.gelu, _gelu_slope),
    "silu": _Activation(F.silu, _silu_slope),
}
ACTIVATIONS = (None, *_BY_NAME)


def activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply the activation of that name; None changes nothing."""
    return x if activation is None else _BY_NAME[activation].function(x)


def activation_grad(grad: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    """grad * activation'(x), itself differentiable in both."""
    return grad * _BY_NAME[activation].slope(x)
