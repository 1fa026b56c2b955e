"""From the options of an attention call to the arguments of its kernels.

Dense batches and packed sequences, masks and bands become the same few tuples here, so that kernels
need no flag for them.
"""

from typing import Any, NamedTuple

import torch

from ...core.launch import cdiv
from ...formats.attention_spec import AttnSpec
from ...formats.block_lists import BlockLists
from ...formats.block_mask import BlockMask

LOG2_E = 1.4426950408889634


class KernelOperands(NamedTuple):
    """What attention kernels take besides tensors and strides."""

    batch: int
    lengths: tuple[int, int]
    """Queries and keys of each sequence; of the longest when they are packed."""
    heads: tuple[int, int]
    """Query heads, and how many of them share a KV head."""
    band: tuple[int, int]
    score: tuple[float, float | None]
    """Factor to base-2 exponents, and the factor inside of a softcap's tanh."""
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None]
    block_lists: tuple[Any, ...] | None
    block_kv: int | None


def kernel_operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec
) -> KernelOperands:
    """Collect them from tensors and options."""
    if spec.cu_seqlens_q is not None:
        batch, lengths = spec.cu_seqlens_q.numel() - 1, (spec.max_q, spec.max_k)
    else:
        batch, lengths = q.shape[0], (q.shape[2], k.shape[2])
    mask = spec.block_mask
    return KernelOperands(
        batch,
        lengths,
        (q.shape[1], q.shape[1] // k.shape[1]),
        spec.band.scalars(),
        score_factors(spec.scale, spec.softcap),
        (spec.cu_seqlens_q, spec.cu_seqlens_k),
        None if mask is None else list_operands(mask, mask.forward),
        None if mask is None else mask.block_size[1],
    )


def score_factors(scale: float, softcap: float) -> tuple[float, float | None]:
    """`(scale_log2, inverse_cap)` as `device.scores` reads them; floats, never ints."""
    if softcap:
        return float(softcap) * LOG2_E, float(scale) / float(softcap)
    return float(scale) * LOG2_E, None


def list_operands(mask: BlockMask, lists: BlockLists) -> tuple[Any, ...]:
    """Lists, bits, and the steps from batch, head and query to a row; 0 where masks broadcast."""
    rows = cdiv(mask.seq_lengths[0], mask.block_size[0])
    batch_step = mask.heads * rows if mask.batch > 1 else 0
    head_step = rows if mask.heads > 1 else 0
    return (*lists, mask.bits, batch_step, head_step, mask.block_size[0])


def token_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token of [B, H, S, D], or of packed [T, H, D]."""
    if x.dim() == 4:
        return _used_strides(x, (0, 1, 2))
    return (0, *_used_strides(x, (1, 0)))


def lse_strides(lse: torch.Tensor) -> tuple[int, int, int]:
    """The same of lse, [B, H, S] or packed [H, T]."""
    if lse.dim() == 3:
        return _used_strides(lse, (0, 1, 2))
    return (0, *_used_strides(lse, (0, 1)))


def _used_strides(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    # a dimension of size 1 may have any stride; 0 keeps it from compiling another variant
    return tuple(x.stride(d) if x.shape[d] > 1 else 0 for d in dims)
