"""The activations that a product may end with, by name."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS = (None, "relu", "gelu", "silu")

# gelu is the exact one, with erf, as in torch by default.
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


def activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply the activation of that name; None changes nothing."""
    return x if activation is None else _FUNCTIONS[activation](x)


def activation_grad(grad: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    """grad * activation'(x), itself differentiable in both."""
    if activation == "relu":
        return grad * (x > 0)
    if activation == "silu":
        gate = torch.sigmoid(x)
        return grad * (gate * (1 + x * (1 - gate)))
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (cdf + x * density)
