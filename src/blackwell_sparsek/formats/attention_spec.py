"""What an attention call asks for besides q, k and v: one object for every implementation."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .band import EVERYTHING, Band
from .block_mask import BlockMask


class AttnSpec(NamedTuple):
    """The options of one attention call, after validation and defaults.

    `band`, `block_mask` and the lengths intersect. With `cu_seqlens_q` and `cu_seqlens_k` the
    tensors are packed, [T, H, D]; a block mask is then indexed by positions inside each sequence
    and covers `(max_q, max_k)`.
    """

    scale: float
    band: Band = EVERYTHING
    block_mask: BlockMask | None = None
    softcap: float = 0.0
    """`softcap * tanh(score / softcap)`; 0 leaves scores alone."""
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0

    @property
    def is_varlen(self) -> bool:
        """Whether sequences are packed along one token axis."""
        return self.cu_seqlens_q is not None


class AttnGradients(NamedTuple):
    """Where the gradients of a call go; None for those that nobody asked for.

    Each has the shape and dtype of its input and a contiguous last dimension.
    """

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dsinks: torch.Tensor | None

    def fill(self, computed: Iterable[torch.Tensor | None]) -> None:
        """Copy what was computed elsewhere to where it was asked for."""
        for gradient, value in zip(self, computed, strict=True):
            if gradient is not None:
                assert value is not None
                gradient.copy_(value)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax and sums run in fp32, and in fp64 when the inputs are fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """`lse` is fp32, except that fp64 inputs keep it in fp64 (so gradients stay exact)."""
    return compute_dtype(dtype)


def heads_are_inner(q: torch.Tensor) -> bool:
    """Whether a [B, H, S, D] tensor lies in memory as [B, S, H, D]."""
    return bool(q.stride(1) < q.stride(2))


def empty_out(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """Output for queries `q`: contiguous, or in q's physical order when its heads are inner.

    A model that projects to [B, S, H * D] and transposes gets its output back in that order, so
    that the reshape after attention is a view.
    """
    if q.dim() == 3:
        return q.new_empty((q.shape[0], q.shape[1], head_dim_v))
    batch, heads, sq, _ = q.shape
    if heads_are_inner(q):
        return q.new_empty((batch, sq, heads, head_dim_v)).transpose(1, 2)
    return q.new_empty((batch, heads, sq, head_dim_v))


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """`lse` for queries `q`: [B, Hq, Sq], or [Hq, Tq] for packed sequences."""
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    return q.new_empty(shape, dtype=lse_dtype(q.dtype))
