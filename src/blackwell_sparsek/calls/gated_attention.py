"""Calls of attention whose keys have a gate: tensors and options, checked once."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from .attention import AttentionCall, AttnProblem


class KeyGate(NamedTuple):
    """Scores of keys and thresholds of queries: a key counts with `clip(u - tau, 0, 1)`."""

    u: torch.Tensor
    """[B or 1, Hg, Sk], contiguous in the last dimension, as tau."""
    tau: torch.Tensor
    """[B or 1, Hg, Sq]."""


@dataclass(eq=False)
class GatedCall:
    """One call, checked: what every implementation of the forward pass is given.

    Hg is 1, the number of KV heads or that of query heads; the spec is that of dense attention.
    """

    attention: AttentionCall
    gate: KeyGate

    @property
    def problem(self) -> AttnProblem:
        """The properties that the choice of an implementation and of tiles depends on."""
        return self.attention.problem

    @property
    def heads_per_gate(self) -> int:
        """Query heads that share a row of u."""
        return int(self.attention.q.shape[1] // max(self.gate.u.shape[1], 1))


class GatedGradients(NamedTuple):
    """The tensors that receive the gradients of a call; None if a gradient is not needed."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dsinks: torch.Tensor | None
    du: torch.Tensor | None
    dtau: torch.Tensor | None


@dataclass(eq=False)
class GatedBackwardCall:
    """The backward pass of a call; `dlse` is None if there is no gradient of lse."""

    forward: GatedCall
    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    gradients: GatedGradients

    @cached_property
    def problem(self) -> AttnProblem:
        """The properties that the choice of an implementation and of tiles depends on."""
        return replace(self.forward.problem, backward=True)
