"""Calls that choose keys: tensors and options, checked once, and the problem that they pose."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.arch import Arch, arch_of


class SelectOptions(NamedTuple):
    """How scores are made and entries chosen, after validation and defaults."""

    granularity: int
    lists: int
    most: int
    """Entries that a query may have."""
    top_p: float = 0.0
    """0 takes as many entries as may be."""
    force_first: int = 0
    force_last: int = 0
    activation: str = "none"
    pool: str = "none"
    causal: bool = True

    @property
    def right(self) -> int:
        """Keys after its own position that a query may see; 2**30 stands for all of them."""
        return 0 if self.causal else 2**30


@dataclass(frozen=True)
class SelectProblem:
    """One call without its data."""

    arch: Arch
    dtype: torch.dtype
    batch: int
    heads: int
    q_len: int
    kv_len: int
    dim: int
    options: SelectOptions

    def __str__(self) -> str:
        given = self.options
        return (
            f"on {self.arch}, {self.dtype}, batch {self.batch}, {self.heads} index heads of "
            f"{self.dim} for {given.lists} lists, queries {self.q_len}, keys {self.kv_len}, up to "
            f"{given.most} entries of {given.granularity}"
        )


class SelectCall(NamedTuple):
    """q_index [B, Hi, Tq, D], k_index [B, Hk, Tk, D] with Hk dividing Hi, weights [B, Hi, Tq]."""

    q_index: torch.Tensor
    k_index: torch.Tensor
    weights: torch.Tensor | None
    options: SelectOptions

    @property
    def problem(self) -> SelectProblem:
        """The properties that the choice of an implementation depends on."""
        q, k = self.q_index, self.k_index
        batch, heads, q_len, dim = q.shape
        sizes = (batch, heads, q_len, k.shape[2], dim)
        return SelectProblem(arch_of(q.device), q.dtype, *sizes, self.options)
