"""The facts about a merge of two partial attention results."""

from dataclasses import dataclass

import torch

from ..core.arch import Arch, arch_of


@dataclass(frozen=True)
class MergeProblem:
    """One merge: the number of rows, and the length of each."""

    arch: Arch
    dtype: torch.dtype
    rows: int
    head_dim_v: int

    @classmethod
    def of(cls, o: torch.Tensor) -> "MergeProblem":
        """Describe a merge of tensors shaped like `o` [..., Dv]."""
        return cls(arch_of(o.device), o.dtype, o.shape[:-1].numel(), o.shape[-1])
