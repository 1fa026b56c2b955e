"""Turns the options of an attention call into the arguments of its kernels.

Dense batches and packed sequences, masks and bands become the same few records, so that kernels
need no flags for them. Nothing here needs torch or JAX: see `launch.description`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from ..device.records import (
    Band,
    Bias,
    CuSeqlens,
    GradientScore,
    Heads,
    Lengths,
    MaskLists,
    Score,
    Slopes,
    Strides,
)

if TYPE_CHECKING:
    from ..calls.attention import AttentionCall
    from ..masks.block_mask import BlockMask

LOG2_E = 1.4426950408889634


class AttnStrides(NamedTuple):
    """Strides of batch, head and token of each tensor, as `token_strides` gives them.

    Triton specialises on strides divisible by 16, which makes loads wide. If 16 divides the head
    dimensions, it divides all strides, whatever the lengths.
    """

    out: Strides
    q: Strides
    k: Strides
    v: Strides


class DqStrides(NamedTuple):
    """As `AttnStrides`, for the kernel of dq."""

    q: Strides
    k: Strides
    v: Strides
    dout: Strides
    dq: Strides


class DkdvStrides(NamedTuple):
    """As `AttnStrides`, for the kernel of dk and dv.

    The strides of k or v stand in for a gradient that is not written. They cannot be None: a record
    that holds both records and other constants does not compile with strides of 1 (see
    `testing.sizes_of_one`).
    """

    q: Strides
    k: Strides
    v: Strides
    dout: Strides
    dk: Strides
    dv: Strides


class KernelOperands(NamedTuple):
    """Arguments of attention kernels other than tensors and strides."""

    batch: int
    lengths: Lengths
    """Queries and keys of each sequence; if packed, the maximum lengths."""
    heads: Heads
    band: Band
    score: Score
    cu_seqlens: CuSeqlens
    block_lists: MaskLists | None
    mask_steps: tuple[int, int]
    """Rows of the lists from one batch or head to the next; 0 where the mask broadcasts."""
    block_kv: int | None
    sinks: Any
    """Contiguous, or None."""
    slopes: Slopes | None
    bias: Bias | None
    mask_per_kv_head: bool
    """Whether the query heads that share a KV head share a mask."""


def kernel_operands(call: "AttentionCall") -> KernelOperands:
    """Collect the arguments from tensors and options."""
    q, k, spec = call.q, call.k, call.spec
    if spec.cu_seqlens_q is not None:
        batch, lengths = spec.cu_seqlens_q.numel() - 1, Lengths(spec.max_q, spec.max_k)
    else:
        batch, lengths = q.shape[0], Lengths(q.shape[2], k.shape[2])
    mask = spec.block_mask
    return KernelOperands(
        batch,
        lengths,
        Heads(q.shape[1], q.shape[1] // max(k.shape[1], 1)),
        Band(*spec.band.scalars()),
        score_factors(spec.scale, spec.softcap),
        CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k),
        None if mask is None else MaskLists(*mask._listed, mask.bits, mask.block_size[0]),
        (0, 0) if mask is None else mask_steps(mask),
        None if mask is None else mask.block_size[1],
        None if spec.sinks is None else spec.sinks.contiguous(),
        None if spec.alibi_slopes is None else _slopes(spec.alibi_slopes),
        None if spec.bias is None else Bias(spec.bias, *_used_strides(spec.bias, (0, 1, 2, 3))),
        mask is not None and 1 < mask.heads < q.shape[1],
    )


def _slopes(slopes: Any) -> Slopes:
    return Slopes(slopes, slopes.stride(0) if slopes.dim() == 2 and slopes.shape[0] > 1 else 0)


def score_factors(scale: float, softcap: float) -> Score:
    """The factors that `device.scores` reads; floats, never ints."""
    if softcap:
        return Score(float(softcap) * LOG2_E, float(scale) / float(softcap))
    return Score(float(scale) * LOG2_E, None)


def gradient_factors(scale: float, softcap: float, dtype: Any) -> GradientScore:
    """The factors that `device.backprop` reads; the last multiplies the final sums of dq and dk.

    For fp32 operands, the first factor is for natural logarithms instead of base 2.
    """
    factor, inverse_cap = score_factors(scale, softcap)
    if dtype.itemsize == 4:
        factor = float(softcap) if softcap else float(scale)
    return GradientScore(factor, inverse_cap, float(scale))


class TransposedMask(NamedTuple):
    """A block mask for kernels that own keys and walk over queries."""

    lists: MaskLists | None
    steps: tuple[int, int]
    """Rows of the lists from one batch or query head to the next; 0 where the mask broadcasts."""
    block_q: int | None


def transposed_mask(mask: "BlockMask | None") -> TransposedMask:
    """The transposed counterpart of the lists in `kernel_operands`."""
    if mask is None:
        return TransposedMask(None, (0, 0), None)
    columns = mask.grid[1]
    return TransposedMask(
        MaskLists(*mask._listed_transposed, mask.bits, mask.block_size[1]),
        (mask.heads * columns if mask.batch > 1 else 0, columns if mask.heads > 1 else 0),
        mask.block_size[0],
    )


def mask_steps(mask: "BlockMask") -> tuple[int, int]:
    """Rows of the forward lists between two batches and between two heads."""
    rows = mask.grid[0]
    return mask.heads * rows if mask.batch > 1 else 0, rows if mask.heads > 1 else 0


def token_strides(x: Any) -> Strides:
    """Strides of batch, head and token of [B, H, S, D], or of packed [T, H, D]."""
    # a dimension of size 1 may have any stride; 0 avoids compiling another variant for it
    if x.dim() == 4:
        batch, heads, tokens, _ = x.shape
        of_batch, of_head, of_token, _ = x.stride()
        of_batch = of_batch if batch > 1 else 0
    else:
        tokens, heads, _ = x.shape
        of_token, of_head, _ = x.stride()
        of_batch = 0
    return Strides(of_batch, of_head if heads > 1 else 0, of_token if tokens > 1 else 0)


def _used_strides(x: Any, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of some dimensions, 0 for a dimension of size 1, as in `token_strides`."""
    return tuple(x.stride(d) if x.shape[d] > 1 else 0 for d in dims)
