"""Checks of decode calls, and the `DecodeCall` with its defaults.

`decode_call` checks shapes, dtypes and layouts and never waits for the device;
`check_decode_values` reads lengths, page tables and block lists, so it does wait.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..attention.inputs import (
    DENSE,
    DTYPES,
    MAX_HEAD_DIM,
    check_head_dims,
    check_head_groups,
    check_out,
    check_sinks,
    check_slopes,
    scale_or_default,
    softcap_or_off,
)
from ..calls.decode import DecodeCall
from ..core.checks import (
    check_derivatives,
    check_dtype,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    message,
    wants_gradient,
)
from ..core.errors import InvalidInput, InvalidType, Unsupported
from ..core.torch_state import cast_operand
from ..masks.band import band_of, kv_range
from .portable_tuning import LARGEST_HEAD_DIM

FP8 = torch.float8_e4m3fn
PAGED = "[pages, page_size, Hkv, D]"
TABLES = (torch.int32, torch.int64)


def decode_call(
    op: str,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    page_table: Any,
    kv_blocks: Any,
    kv_block_size: Any,
    causal: Any,
    window: Any,
    scale: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    alibi_slopes: Any = None,
    out: Any = None,
) -> DecodeCall:
    """Check the arguments of a call against each other and fill in its defaults."""
    paged = page_table is not None
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    heads = check_keys(op, tensors, DENSE, PAGED if paged else DENSE, LARGEST_HEAD_DIM)
    if not paged and q.shape[0] != k_cache.shape[0]:
        shapes = (list(q.shape), list(k_cache.shape))
        raise_mismatch(op, "q/k_cache", "have different batch sizes", "one", *shapes)
    check_indices(op, "cache_seqlens", cache_seqlens, [q.shape[0]], q)
    if page_table is not None:
        check_indices(op, "page_table", page_table, [q.shape[0], "max_pages"], q, TABLES)
    page_size = None if page_table is None else k_cache.shape[1]
    if kv_blocks is not None:
        check_indices(op, "kv_blocks", kv_blocks, [q.shape[0], heads, "n"], q)
    check_sinks(op, sinks, q)
    if sinks is not None:
        check_derivatives(op, "sinks", sinks)
    check_slopes(op, alibi_slopes, q, q.shape[0])
    for arg, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_cache_scale(op, arg, factor, heads, k_cache)
    if out is not None:
        shape = [*q.shape[:3], v_cache.shape[-1]]
        optional = {"sinks": sinks, "alibi_slopes": alibi_slopes}
        optional |= {"k_scale": k_scale, "v_scale": v_scale}
        others = {arg: x for arg, x in optional.items() if x is not None}
        check_out(op, out, shape, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **others})
    return DecodeCall(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        scale=scale_or_default(op, scale, q.shape[-1]),
        page_table=page_table,
        kv_blocks=kv_blocks,
        kv_block_size=checked_block_size(op, kv_block_size, kv_blocks is not None, page_size),
        band=band_of(op, causal, window),
        softcap=softcap_or_off(op, softcap),
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        out=out,
    )


def check_keys(
    op: str, tensors: dict[str, Any], layout_q: str, layout: str, largest: int = MAX_HEAD_DIM
) -> int:
    """Check queries, and keys and values that may be in fp8; return the KV heads.

    Parameters
    ----------
    tensors : q, keys and values, under the names of these arguments
    layout_q, layout : of queries, and of keys and values: DENSE, PACKED or PAGED
    largest : the largest head dim
    """
    (arg_q, q), (arg_k, k), (arg_v, v) = tensors.items()
    for arg, x in tensors.items():
        check_tensor(op, arg, x)
        check_derivatives(op, arg, x)
        check_dtype(op, arg, x, DTYPES if arg == arg_q else (*DTYPES, FP8))
        check_rank(op, arg, x, layout_q if arg == arg_q else layout)
        check_last_dim_contiguous(op, arg, x)
    check_same_device(op, {**tensors})
    both = f"{arg_k}/{arg_v}"
    if k.dtype != v.dtype:
        raise_mismatch(op, both, "have different dtypes", "one", k.dtype, v.dtype)
    if k.dtype not in (q.dtype, FP8):
        expected = f"that of q, {q.dtype}, or {FP8}"
        raise_mismatch(op, arg_k, "has a dtype that q does not go with", expected, k.dtype)
    if k.shape[-1] != q.shape[-1]:
        shapes = [*q.shape], [*k.shape]
        raise_mismatch(op, f"{arg_q}/{arg_k}", "have different head dims", "one", *shapes)
    if k.shape[:-1] != v.shape[:-1]:
        expected = "all but the last dimension alike"
        raise_mismatch(op, both, "do not match", expected, [*k.shape], [*v.shape])
    check_head_dims(op, q, v, largest)
    if layout == PAGED and k.shape[1] == 0:
        raise_mismatch(op, arg_k, "has pages without tokens", "page_size >= 1", [*k.shape])
    heads: int = k.shape[2 if layout == PAGED else 1]
    check_head_groups(op, q.shape[1], heads, arg_q, arg_k)
    return heads


def raise_mismatch(op: str, arg: str, problem: str, expected: object, *got: object) -> None:
    """Raise for an argument, or several, that do not go together."""
    kind = InvalidType if "dtype" in problem else InvalidInput
    raise kind(message(op, arg, problem, expected, " and ".join(str(x) for x in got)))


def check_indices(
    op: str,
    arg: str,
    x: Any,
    shape: list[int | str],
    q: torch.Tensor,
    dtypes: Sequence[torch.dtype] = (torch.int32,),
) -> None:
    """Integers on the device of q; a word in `shape` stands for any size."""
    check_tensor(op, arg, x)
    check_dtype(op, arg, x, dtypes)
    fits = x.dim() == len(shape) and all(
        isinstance(n, str) or n == m for n, m in zip(shape, x.shape, strict=True)
    )
    if not fits:
        expected = f"[{', '.join(str(n) for n in shape)}]"
        raise InvalidInput(message(op, arg, "has a wrong shape", expected, list(x.shape)))
    check_last_dim_contiguous(op, arg, x)
    check_same_device(op, {"q": q, arg: x})


def check_cache_scale(op: str, arg: str, scale: Any, heads: int, cache: torch.Tensor) -> None:
    """One number for all heads, or one for each; only an fp8 cache has scales."""
    if scale is None:
        return
    check_tensor(op, arg, scale)
    check_derivatives(op, arg, scale)
    check_dtype(op, arg, scale, [torch.float32])
    if cache.dtype != FP8:
        raise InvalidInput(message(op, arg, "scales a cache that is not", FP8, cache.dtype))
    if scale.numel() != 1 or scale.dim() > 1:
        check_shape(op, arg, scale, [heads])
    if scale.dim():
        check_last_dim_contiguous(op, arg, scale)
    check_same_device(op, {"cache": cache, arg: scale})


def checked_block_size(op: str, size: Any, listed: bool, page_size: int | None) -> int:
    """Tokens of a listed block: the page size, or `size` without pages; 0 without lists."""
    arg = "kv_block_size"
    if not listed:
        if size is not None:
            raise InvalidInput(message(op, arg, "goes with kv_blocks", "None without them", size))
        return 0
    if page_size is not None:
        if size not in (None, page_size):
            expected = f"None or the page size {page_size}"
            raise InvalidInput(message(op, arg, "differs from the page size", expected, size))
        return page_size
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        got = type(size).__name__
        expected = "an int with kv_blocks of a contiguous cache"
        raise InvalidType(message(op, arg, "is not an int", expected, got))
    if size < 1:
        raise InvalidInput(message(op, arg, "is not positive", "an int >= 1", size))
    return int(size)


def autocast_queries(op: str, q: torch.Tensor) -> torch.Tensor:
    """Queries in autocast's dtype if autocast is on (fp64 stays); caches are never cast."""
    check_tensor(op, "q", q)
    return cast_operand(q)


def refuse_gradients(op: str, call: DecodeCall) -> None:
    """Raise if a gradient is needed: decoding has none, and must not cut the graph silently."""
    if not torch.is_grad_enabled():
        return
    tensors = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, "sinks": call.sinks}
    for arg, x in {**tensors, "k_scale": call.k_scale, "v_scale": call.v_scale}.items():
        if x is not None and wants_gradient(x):
            raise Unsupported(
                f"{op}: {arg} requires a gradient, which decoding does not have; call it under "
                "torch.no_grad(), or use bsk.attention on the keys of the cache"
            )


def check_decode_values(op: str, call: DecodeCall, *, duplicates: bool = False) -> None:
    """Raise `InvalidInput` for the first length, block or page that is out of range.

    Waits for the device. Checks only entries that a call reads: those of pages past the length,
    before a window, or not listed may be any number. `duplicates` also refuses blocks that are
    listed twice.
    """
    lengths: list[int] = call.cache_seqlens.tolist()
    most = call.capacity
    for b, length in enumerate(lengths):
        if not 0 <= length <= most:
            arg, expected = f"cache_seqlens[{b}]", f"0 to {most}, what the cache holds"
            raise InvalidInput(message(op, arg, "is out of range", expected, length))
    if call.kv_blocks is not None:
        _check_blocks(op, call.kv_blocks.tolist(), -(-most // call.kv_block_size), duplicates)
    if call.page_table is not None:
        _check_pages(op, call, lengths)


def _check_blocks(op: str, lists: list[list[list[int]]], blocks: int, duplicates: bool) -> None:
    for b, heads in enumerate(lists):
        for h, entries in enumerate(heads):
            for i, block in enumerate(entries):
                arg = f"kv_blocks[{b}, {h}, {i}]"
                if not -1 <= block < blocks:
                    expected = f"-1 to {blocks - 1}"
                    raise InvalidInput(message(op, arg, "is out of range", expected, block))
                if duplicates and block >= 0 and block in entries[:i]:
                    raise InvalidInput(
                        message(op, arg, "is listed twice", "each block once", block)
                    )


def _check_pages(op: str, call: DecodeCall, lengths: list[int]) -> None:
    assert call.page_table is not None
    pages, page_size = call.k_cache.shape[:2]
    q_len = call.q.shape[2]
    table: list[list[int]] = call.page_table.tolist()
    lists = None if call.kv_blocks is None else call.kv_blocks.tolist()
    for b, length in enumerate(lengths):
        lo, hi = kv_range(call.band, 0, q_len, q_len, length)
        read = range(lo // page_size, -(-hi // page_size))
        listed = read if lists is None else {page for head in lists[b] for page in head}
        for i in read:
            if i in listed and not 0 <= table[b][i] < pages:
                raise InvalidInput(
                    message(
                        op,
                        f"page_table[{b}, {i}]",
                        "is out of range",
                        f"0 to {pages - 1}",
                        table[b][i],
                    )
                )
