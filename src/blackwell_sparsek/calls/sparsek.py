"""SparseK calls: rows of scores, how much weight each may give, and the problem that they pose."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.arch import Arch, arch_of


@dataclass(frozen=True)
class SparsekProblem:
    """One SparseK call without its data."""

    arch: Arch
    dtype: torch.dtype
    rows: int
    length: int
    prefixes: bool
    """Whether only thresholds are wanted, of each prefix of a row."""

    def __str__(self) -> str:
        kind = "thresholds of prefixes" if self.prefixes else "weights"
        return f"{kind} on {self.arch}, {self.dtype}, {self.rows} rows of {self.length}"


class SparsekCall(NamedTuple):
    """Scores z [..., n] with k, one number or [...], and the lengths of rows (None: all n)."""

    z: torch.Tensor
    k: torch.Tensor | float
    lengths: torch.Tensor | None

    @property
    def problem(self) -> SparsekProblem:
        """The properties that the choice of an implementation depends on."""
        z = self.z
        return SparsekProblem(arch_of(z.device), z.dtype, z.shape[:-1].numel(), z.shape[-1], False)


class PrefixSparsekCall(NamedTuple):
    """Scores u [..., n] with k [...], for thresholds of u[..., :1], u[..., :2] and so on."""

    u: torch.Tensor
    k: torch.Tensor

    @property
    def problem(self) -> SparsekProblem:
        """The properties that the choice of an implementation depends on."""
        u = self.u
        return SparsekProblem(arch_of(u.device), u.dtype, u.shape[:-1].numel(), u.shape[-1], True)
