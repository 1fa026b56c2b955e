"""The facts about calls on KV caches."""

from dataclasses import dataclass

import torch

from ..core.arch import Arch, arch_of


@dataclass(frozen=True)
class CacheProblem:
    """One call: where it runs, the dtype of its inputs and that of the cache."""

    arch: Arch
    dtype: torch.dtype
    stored: torch.dtype
    paged: bool

    @classmethod
    def of(cls, x: torch.Tensor, cache: torch.Tensor, paged: bool) -> "CacheProblem":
        """Describe a call that meets `x` with `cache`."""
        return cls(arch_of(x.device), x.dtype, cache.dtype, paged)
