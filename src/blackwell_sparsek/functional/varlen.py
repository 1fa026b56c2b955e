"""`attention_varlen`: sequences of different lengths, packed end to end."""

from typing import Any

import torch

from ..core.checks import message
from ..core.errors import InvalidInput, InvalidType
from ..formats.band import band_of
from ..formats.block_mask import BlockMask
from ..formats.varlen import check_cu_seqlens, check_same_batch
from ..ops.attention_repeat import attention_results
from .attention_inputs import (
    PACKED,
    autocast_qkv,
    call_operator,
    check_block_mask,
    check_head_dims,
    check_qkv,
)


def _check_max(op: str, arg: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise InvalidType(message(op, arg, "is not an int", "int", type(value).__name__))
    if value < 0:
        raise InvalidInput(message(op, arg, "is negative", "an int >= 0", value))


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention within each of several packed sequences; see `attention` for the options.

    Sequence b owns queries `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` and keys likewise, and is a
    problem of its own: positions and alignment count inside it. Lengths may be 0. The numbers in
    `cu_seqlens_*` are checked by the implementations that read them on the host (`eager`, which
    waits for the device to do so, and `reference`).

    Parameters
    ----------
    q : fp16, bf16, fp32 or fp64 `[Tq, Hq, D]`
    k : `[Tk, Hkv, D]`
    v : `[Tk, Hkv, Dv]`
    cu_seqlens_q, cu_seqlens_k : int32 `[B + 1]`
        Offsets, from 0 to Tq and Tk, on the device of q.
    max_seqlen_q, max_seqlen_k : int
        At least the longest length.
    block_mask : BlockMask, optional
        Made for `(max_seqlen_q, max_seqlen_k)`, with 1 or B masks along the batch, indexed by
        positions inside each sequence.
    causal, window, scale, softcap, sinks, return_lse, deterministic, impl :
        As in `attention`; positions count inside each sequence.

    Returns
    -------
    out : `[Tq, Hq, Dv]`, dtype of q
    lse : fp32 `[Hq, Tq]`
        Only with `return_lse`.

    Examples
    --------
    >>> import torch
    >>> q = k = v = torch.randn(10, 4, 16)
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> attention_varlen(
    ...     q, k, v, offsets, offsets, max_seqlen_q=7, max_seqlen_k=7, causal=True
    ... ).shape
    torch.Size([10, 4, 16])
    """
    options = (max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, deterministic, impl)
    offsets = (cu_seqlens_q, cu_seqlens_k)

    def checked() -> tuple[torch.Tensor, torch.Tensor]:
        return _attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, block_mask, sinks, *options)

    results = attention_results(q, k, v, sinks, block_mask, options, checked, return_lse, offsets)
    return (results[0], results[1]) if return_lse else results[0]


def _attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_mask: BlockMask | None,
    sinks: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int | tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check everything and run the operator."""
    op = "attention_varlen"
    check_qkv(op, q, k, v, PACKED)
    check_head_dims(op, q, v)
    check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, device=q.device)
    check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, device=q.device)
    check_same_batch(op, cu_seqlens_q, cu_seqlens_k)
    _check_max(op, "max_seqlen_q", max_seqlen_q)
    _check_max(op, "max_seqlen_k", max_seqlen_k)
    band = band_of(op, causal, window)
    batch = cu_seqlens_q.numel() - 1
    check_block_mask(op, block_mask, q, batch, max_seqlen_q, max_seqlen_k)
    q, k, v = autocast_qkv(op, q, k, v)
    return call_operator(
        op,
        q,
        k,
        v,
        band=band,
        block_mask=block_mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        deterministic=deterministic,
        impl=impl,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
