"""Checks of attention over e4m3 queries, keys and values with scales."""

from typing import Any

import torch

from ..calls.fp8 import SCALE_TOKENS, Fp8AttentionCall, is_turned
from ..core.checks import (
    check_choice,
    check_derivatives,
    check_dtype,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_tensor,
    message,
    wants_gradient,
)
from ..core.errors import InvalidInput
from ..core.fp8 import E4M3
from ..masks.band import Band
from ..masks.block_mask import BlockMask
from .inputs import DENSE, check_block_mask, check_head_dims, check_qkv_shapes, checked_call

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


_FP8 = (E4M3, torch.float8_e5m2)


def is_fp8_call(q: Any, *others: Any) -> bool:
    """Whether a call is one for fp8: by its queries, or by arguments that only fp8 has."""
    # every call of attention asks this: no generator
    for x in others:
        if x is not None:
            return True
    return getattr(q, "dtype", None) in _FP8


def fp8_call(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    layout: str,
    descales: tuple[Any, Any, Any],
    out_dtype: Any,
    *,
    band: Band,
    block_mask: BlockMask | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    lengths: tuple[int, int] | None = None,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Fp8AttentionCall:
    """Check a call and build it; `lengths` are the longest of packed sequences."""
    tensors = {"q": q, "k": k, "v": v}
    for arg, x in tensors.items():
        check_tensor(op, arg, x)
        check_derivatives(op, arg, x)
        if x.dtype != E4M3:
            _refuse_dtype(op, arg, x, descales, out_dtype)
        check_rank(op, arg, x, layout)
        if not (arg == "v" and is_turned(x)):
            check_last_dim_contiguous(op, arg, x)
        _refuse_gradient(op, arg, x)
    check_same_device(op, {**tensors})
    check_qkv_shapes(op, tensors, layout)
    check_head_dims(op, q, v)
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    check_choice(op, "out_dtype", out_dtype, OUT_DTYPES)
    cu_q, _ = cu_seqlens
    batch = q.shape[0] if cu_q is None else cu_q.numel() - 1
    max_q, max_k = (q.shape[2], k.shape[2]) if lengths is None else lengths
    check_block_mask(op, block_mask, q, batch, max_q, max_k)
    packed = layout != DENSE
    blocks_q, blocks_k = (1 if packed else -(-x.shape[2] // SCALE_TOKENS) for x in (q, k))
    sizes = {
        "q_descale": (batch, q.shape[1], blocks_q),
        "k_descale": (batch, k.shape[1], blocks_k),
        "v_descale": (batch, k.shape[1], v.shape[-1]),
    }
    q_descale, k_descale, v_descale = (
        _checked_scale(op, arg, x, size, q)
        for (arg, size), x in zip(sizes.items(), descales, strict=True)
    )
    call = checked_call(
        op,
        q,
        k,
        v,
        band=band,
        block_mask=block_mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        max_q=max_q,
        max_k=max_k,
        cu_seqlens_q=cu_seqlens[0],
        cu_seqlens_k=cu_seqlens[1],
    )
    if sinks is not None:
        _refuse_gradient(op, "sinks", sinks)
    return Fp8AttentionCall(call, q_descale, k_descale, v_descale, out_dtype)


def _refuse_gradient(op: str, arg: str, x: torch.Tensor) -> None:
    """Refuse a tensor whose gradient autograd would ask for, which would silently be missing."""
    if torch.is_grad_enabled() and wants_gradient(x):
        expected = "bsk.fp8.attention on 16-bit tensors, or torch.no_grad()"
        problem = "requires gradients, which fp8 inputs do not have"
        raise InvalidInput(message(op, arg, problem, expected, "requires_grad=True"))


def _refuse_dtype(
    op: str, arg: str, x: torch.Tensor, descales: tuple[Any, ...], out_dtype: Any
) -> None:
    names = ("q_descale", "k_descale", "v_descale")
    given = [name for name, value in zip(names, descales, strict=True) if value is not None]
    if out_dtype is not None:
        given.append("out_dtype")
    expected = f"{E4M3} for q, k and v (bsk.fp8.quantize makes it)"
    problem = "has an unsupported dtype"
    if given:
        problem = f"is not in fp8, which {', '.join(given)} belong to"
    raise InvalidInput(message(op, arg, problem, expected, x.dtype))


def _checked_scale(
    op: str, arg: str, scale: Any, sizes: tuple[int, int, int], q: torch.Tensor
) -> torch.Tensor | None:
    """A scale as [B or 1, H or 1, n or 1]."""
    if scale is None:
        return None
    check_tensor(op, arg, scale)
    check_derivatives(op, arg, scale)
    check_dtype(op, arg, scale, [torch.float32])
    check_same_device(op, {"q": q, arg: scale})
    _refuse_gradient(op, arg, scale)
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1)
    whole = scale.unsqueeze(-1) if scale.dim() == 2 else scale
    fits = whole.dim() == 3 and all(
        n in (1, size) for n, size in zip(whole.shape, sizes, strict=True)
    )
    if not fits:
        batch, heads, last = sizes
        expected = f"one element, [{batch} or 1, {heads} or 1] or [.., .., {last}]"
        raise InvalidInput(message(op, arg, "has a wrong shape", expected, list(scale.shape)))
    return whole
