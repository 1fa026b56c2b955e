"""`kv_append`: new keys and values behind what a cache holds, in place."""

from typing import Any

import torch

from ..core.checks import (
    check_dtype,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput
from .layout import CONTIGUOUS, FP8, NEW, PAGED, STORED, check_scale
from .op import kv_append as kv_append_op
from .replay import cache_results

_OP = "kv_append"


def kv_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    counts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Write token t of sequence b to slot `cache_seqlens[b] + t` of its cache.

    The lengths are read on the device and nothing waits for it, so a CUDA graph that holds this
    call writes to wherever the lengths and the page table point at each replay. `cache_seqlens` is
    not advanced. A slot that does not exist is not written: past the capacity, a negative length,
    a page id out of range. On CPU tensors, where looking is free, that is an `InvalidInput`.

    Parameters
    ----------
    k_cache : fp16, bf16, fp32, fp64 or float8_e4m3fn `[B, Hkv, S, D]`
        With `page_table`: `[pages, page_size, Hkv, D]`. Any strides with a contiguous last
        dimension, for each tensor its own.
    v_cache : the same with Dv in place of D
    k, v : `[B, Hkv, T, D]`, `[B, Hkv, T, Dv]`
        The dtype of the caches; any float dtype for fp8 caches. No gradient flows through a cache.
    cache_seqlens : int32 `[B]`
        Tokens that each sequence holds before this call.
    counts : int32 `[B]`, optional
        Append only the first `counts[b]` of the T tokens.
    page_table : int32 `[B, max_pages]`, optional
        Pages of each sequence in their order; -1 where there is none.
    k_scale, v_scale : fp32, one element or `[Hkv]`, optional
        fp8 caches hold `x * (1 / scale)`, rounded to nearest even; what passes ±448 becomes ±448,
        infinities too, and NaN stays NaN. 1 by default.
    impl : str
        `auto`, `eager` or `triton`.

    Examples
    --------
    >>> import torch
    >>> k_cache = v_cache = torch.zeros(2, 1, 4, 1)
    >>> new = torch.tensor([5.0, 7.0]).view(2, 1, 1, 1)
    >>> kv_append(k_cache, v_cache, new, new, cache_seqlens=torch.tensor([0, 3]).int())
    >>> k_cache[:, 0, :, 0]
    tensor([[5., 0., 0., 0.],
            [0., 0., 0., 7.]])
    """
    tensors = (k_cache, v_cache, k, v, cache_seqlens, counts, page_table, k_scale, v_scale)
    others = (k_cache, v_cache, *tensors[4:])
    cache_results(_OP, (k, v), others, (impl,), lambda: _checked(*tensors, impl))


def _checked(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    counts: torch.Tensor | None,
    page_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    impl: str,
) -> tuple[()]:
    """Check everything and run the operator, which returns nothing."""
    _check_caches(k_cache, v_cache, page_table)
    batch, heads = check_new(_OP, k_cache, v_cache, k, v, paged=page_table is not None)
    others = {"cache_seqlens": cache_seqlens, "counts": counts, "page_table": page_table}
    for arg, x in others.items():
        if x is None and arg != "cache_seqlens":
            continue
        check_tensor(_OP, arg, x)
        assert x is not None
        check_dtype(_OP, arg, x, [torch.int32])
        if arg == "page_table":
            check_rank(_OP, arg, x, "[B, max_pages]")
            check_shape(_OP, arg, x, (batch, x.shape[1]))
        else:
            check_shape(_OP, arg, x, (batch,))
        check_last_dim_contiguous(_OP, arg, x)
    for arg, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(_OP, arg, scale, k_cache.dtype, heads)
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, **others}
    check_same_device(_OP, {**tensors, "k_scale": k_scale, "v_scale": v_scale})
    if k.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_slots(k_cache, k.shape[2], cache_seqlens, counts, page_table)
    new = (k, v, cache_seqlens, counts, page_table, k_scale, v_scale)
    kv_append_op(k_cache, v_cache, *new, impl)
    return ()


def _check_caches(k_cache: Any, v_cache: Any, page_table: Any) -> None:
    layout = CONTIGUOUS if page_table is None else PAGED
    for arg, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(_OP, arg, x)
        check_dtype(_OP, arg, x, STORED)
        check_rank(_OP, arg, x, layout)
        check_last_dim_contiguous(_OP, arg, x)
    check_same_dtype(_OP, {"k_cache": k_cache, "v_cache": v_cache})
    check_shape(_OP, "v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]))


def check_new(
    op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Any, v: Any, *, paged: bool
) -> tuple[int, int]:
    """Batch and KV heads of k and v, which must fit the caches."""
    allowed = NEW if k_cache.dtype == FP8 else [k_cache.dtype]
    for arg, x in (("k", k), ("v", v)):
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, allowed)
        check_rank(op, arg, x, "[B, Hkv, T, D]")
        check_last_dim_contiguous(op, arg, x)
        if torch.is_grad_enabled() and x.requires_grad:
            expected = "torch.no_grad(), or a detached tensor"
            problem = "requires gradients, which do not flow through a cache"
            raise InvalidInput(message(op, arg, problem, expected, "requires_grad=True"))
    check_same_dtype(op, {"k": k, "v": v})
    batch = k.shape[0] if paged else k_cache.shape[0]
    heads = k_cache.shape[2] if paged else k_cache.shape[1]
    check_shape(op, "k", k, (batch, heads, k.shape[2], k_cache.shape[3]))
    check_shape(op, "v", v, (batch, heads, k.shape[2], v_cache.shape[3]))
    check_same_device(op, {"cache": k_cache, "k": k, "v": v})
    return batch, heads


def _check_slots(
    k_cache: torch.Tensor,
    tokens: int,
    cache_seqlens: torch.Tensor,
    counts: torch.Tensor | None,
    page_table: torch.Tensor | None,
) -> None:
    """Every slot that will be written exists; reads the tensors, so for the CPU only."""
    new = [tokens] * len(cache_seqlens) if counts is None else counts.tolist()
    lengths = cache_seqlens.tolist()
    page_size = 1 if page_table is None else k_cache.shape[1]
    capacity = k_cache.shape[2] if page_table is None else page_table.shape[1] * page_size
    for b, (length, count) in enumerate(zip(lengths, new, strict=True)):
        if not 0 <= count <= tokens:
            got = f"{count} for sequence {b}"
            raise InvalidInput(message(_OP, "counts", "are out of range", f"0 to {tokens}", got))
        if count and not 0 <= length <= capacity - count:
            expected = f"room for {count} more tokens in {capacity} slots"
            got = f"{length} for sequence {b}"
            raise InvalidInput(message(_OP, "cache_seqlens", "leave no room", expected, got))
        if count and page_table is not None:
            pages = page_table[b, length // page_size : (length + count - 1) // page_size + 1]
            wrong = pages[(pages < 0) | (pages >= k_cache.shape[0])]
            if wrong.numel():
                expected, got = f"0 to {k_cache.shape[0] - 1}", f"{int(wrong[0])} for sequence {b}"
                problem = "names a page that does not exist"
                raise InvalidInput(message(_OP, "page_table", problem, expected, got))
