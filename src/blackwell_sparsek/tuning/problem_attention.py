"""The facts about an attention call that the choice of an implementation may depend on."""

from dataclasses import dataclass

import torch

from ..core.arch import Arch, arch_of
from ..formats.attention_spec import AttnSpec


@dataclass(frozen=True)
class AttnProblem:
    """One attention call, forward or backward, without its data."""

    arch: Arch
    dtype: torch.dtype
    batch: int
    heads_q: int
    heads_kv: int
    max_q: int
    max_k: int
    head_dim: int
    head_dim_v: int
    varlen: bool
    banded: bool
    """Whether causal or a window limits a side."""
    mask_block: tuple[int, int] | None
    """Block size of the block mask, None without one."""
    element_bits: bool
    """Whether some blocks of the mask are partial."""
    softcap: bool
    sinks: bool
    backward: bool = False
    deterministic: bool = False
    positive: bool = True
    """Whether scores are multiplied by a factor above zero before the softmax."""
    tma: bool = False
    """Whether TMA can copy q, k and v: addresses and strides in steps of 16 bytes."""
    tokens: tuple[int, int] | None = None
    """Queries and keys of all packed sequences together; None for dense batches."""

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttnSpec,
        *,
        backward: bool = False,
        deterministic: bool = False,
    ) -> "AttnProblem":
        """Describe a call, dense or packed."""
        batch = q.shape[0]
        if spec.cu_seqlens_q is not None:
            batch = spec.cu_seqlens_q.numel() - 1
        mask = spec.block_mask
        return cls(
            arch=arch_of(q.device),
            dtype=q.dtype,
            batch=batch,
            heads_q=q.shape[1],
            heads_kv=k.shape[1],
            max_q=spec.max_q,
            max_k=spec.max_k,
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            varlen=spec.is_varlen,
            banded=spec.band != (None, None),
            mask_block=None if mask is None else mask.block_size,
            element_bits=mask is not None and mask.bits.shape[0] > 0,
            softcap=spec.softcap != 0.0,
            sinks=spec.sinks is not None,
            backward=backward,
            deterministic=deterministic,
            # under a softcap, the factor before the softmax is the softcap
            positive=spec.scale > 0 or spec.softcap > 0,
            tma=all(tma_takes(x) for x in (q, k, v)),
            tokens=(q.shape[0], k.shape[0]) if spec.is_varlen else None,
        )

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        flags = ("varlen", "banded", "softcap", "sinks", "deterministic")
        extras = [name for name in flags if getattr(self, name)]
        if self.mask_block is not None:
            extras.append(f"blocks {self.mask_block[0]} x {self.mask_block[1]}")
        return (
            f"{direction} on {self.arch}, {self.dtype}, batch {self.batch}, heads {self.heads_q}:"
            f"{self.heads_kv}, queries {self.max_q}, keys {self.max_k}, head dim {self.head_dim}"
            f"/{self.head_dim_v}" + (f", {', '.join(extras)}" if extras else "")
        )


# Bytes between tokens of packed sequences that their descriptors can go back by.
FARTHEST_TOKENS = 2**34


def tma_takes(x: torch.Tensor) -> bool:
    """Whether TMA can copy tiles of `x`: address and strides in steps of 16 bytes."""
    *outer, row = (
        stride * x.element_size() if size > 1 else 16
        for size, stride in zip(x.shape, x.stride(), strict=True)
    )
    aligned = all(0 < stride < 2**40 and stride % 16 == 0 for stride in outer)
    if x.dim() == 3:
        aligned = aligned and outer[0] < FARTHEST_TOKENS
    return aligned and row <= 16 and x.data_ptr() % 16 == 0 and x.numel() > 0
