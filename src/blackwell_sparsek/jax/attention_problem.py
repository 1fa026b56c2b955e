"""The properties of an attention call under JAX that the tiles of kernels depend on."""

from dataclasses import dataclass
from typing import Any

from ..core.target import Arch


@dataclass(frozen=True)
class Problem:
    """The properties that portable kernels need, named as in `calls.attention.AttnProblem`."""

    arch: Arch
    dtype: Any
    batch: int
    heads_q: int
    heads_kv: int
    max_q: int
    max_k: int
    head_dim: int
    head_dim_v: int
    mask_block: tuple[int, int] | None
    bias: bool = False


def problem_of(q: Any, k: Any, v: Any, block: tuple[int, int] | None, arch: Arch) -> Problem:
    """The problem of arrays [B, H, S, D], or of their descriptions, under a mask of `block`s."""
    (batch, heads, sq, dim), sk = q.shape, k.shape[2]
    return Problem(arch, q.dtype, batch, heads, k.shape[1], sq, sk, dim, v.shape[3], block)
