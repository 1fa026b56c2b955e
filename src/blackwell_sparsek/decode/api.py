"""`attention_decode`: new queries over a cache of keys and values."""

from typing import Any, Literal, overload

import torch

from ..attention.inputs import overlaps
from ..calls.attention import check_impl_and_lse, returned
from ..calls.decode import values_are_keys
from ..launch.replay import record, repeat
from .inputs import autocast_queries, check_decode_values, decode_call, refuse_gradients
from .op import decode

# Launches of earlier calls, for `repeat`.
_RECORDED: dict[Any, Any] = {}


@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[True],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the latest few queries of each sequence over its KV cache.

    Query i of Sq has position `cache_seqlens[b] - Sq + i`: the keys and values of the queries must
    already be in the cache. Lengths, tables and lists are read on the device and the host never
    waits, so you can replay a CUDA graph after changing them. Results are bitwise reproducible.
    There are no gradients.

    Use it for 1 to 16 queries: the cache is read once for every 64 rows (queries times query heads
    per KV head). Longer chunks of a prompt run faster as
    `bsk.attention(q, k_cache[:, :, :n], v_cache[:, :, :n], causal=True)` on a contiguous cache.

    The workspace takes at most `4 * SMs * 64 * (Dv + 2)` floats, whatever the lengths. Each stream
    keeps up to 8 MiB of it for later calls.

    Parameters
    ----------
    q : fp16, bf16 or fp32 `[B, Hq, Sq, D]`
        Any strides with a contiguous last dimension, as for all tensors here. D and Dv from 1 to
        576. fp64 runs on `eager` and `reference` only.
    k_cache : `[B, Hkv, S, D]`, or pages `[pages, page_size, Hkv, D]` with `page_table`
        dtype of q, or float8_e4m3fn. Slots past the lengths are not read.
    v_cache : as k_cache, with Dv in place of D
        Its strides can differ from those of k_cache; both can be views of one tensor. For a latent
        cache (MLA with absorbed weights) it is `k_cache[..., :512]` of keys with D 576, as in
        `PagedKVCache(..., latent=True)`.
    cache_seqlens : int32 `[B]`
        Keys of each sequence, at most S or `max_pages * page_size`. 0 gives output 0, and an lse of
        -inf, or of the sink.
    page_table : int32 or int64 `[B, max_pages]`, optional
        Page j of sequence b is `k_cache[page_table[b, j]]`. Entries that are past the length,
        before a window or not listed are not read. Page sizes that divide 64 or are a multiple of
        it are fastest.
    kv_blocks : int32 `[B, Hkv, n]`, optional
        Sparse decoding: the blocks to read, in any order; -1 for none. Block j holds the positions
        from `j * kv_block_size` on: with pages, page j of the sequence. Length, causal and window
        also apply within blocks. A block that is listed twice counts twice.
    kv_block_size : int, optional
        Tokens per block of a contiguous cache; with pages, a block is a page.
    causal : bool
        Hide the keys after a query's position.
    window : None, int or (left, right)
        As in `attention`; keys before it are not read.
    scale, softcap, sinks : as in `attention`
    k_scale, v_scale : fp32 scalar tensor or `[Hkv]`, optional
        Factors of the values stored in an fp8 cache; 1 by default.
    alibi_slopes : fp32 `[Hq]` or `[B, Hq]`, optional
        `slope * |position - key|` is subtracted from the scores, after softcap.
    out : `[B, Hq, Sq, Dv]`, optional
        A preallocated output, which must not overlap the inputs.
    return_lse : bool
        Also return the log-sum-exp of the scores, sinks included; see `merge_states`.
    impl : str
        `auto`, `reference`, `eager`, `triton` or `sm90`; a named implementation never falls back.

    Returns
    -------
    out : `[B, Hq, Sq, Dv]`, dtype of q
    lse : fp32 `[B, Hq, Sq]`
        Only with `return_lse`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Notes
    -----
    An out-of-range length, page or block is never read. `triton` cannot raise from
    the device, so it sets the outputs and lse that depend on it to NaN. `eager` and `reference`,
    which wait for the device anyway, raise `InvalidInput`, and so does `check_decode_inputs`.

    Examples
    --------
    >>> import torch
    >>> q = torch.randn(2, 8, 1, 64)
    >>> k_cache, v_cache = torch.randn(2, 2, 2, 100, 64)
    >>> lengths = torch.tensor([7, 100], dtype=torch.int32)
    >>> attention_decode(q, k_cache, v_cache, cache_seqlens=lengths).shape
    torch.Size([2, 8, 1, 64])
    """
    op = "attention_decode"
    tensors = (cache_seqlens, page_table, kv_blocks, sinks, k_scale, v_scale, alibi_slopes, out)
    inputs: tuple[Any, ...] = (q, k_cache, v_cache, *tensors)
    options: tuple[Any, ...] = (return_lse, kv_block_size, causal, window, scale, softcap, impl)
    others = (x for x in (sinks, k_scale, v_scale, alibi_slopes) if x is not None)
    fits = out is None or not overlaps(out, q, k_cache, v_cache, *others)
    results = repeat(_RECORDED, options, inputs) if fits else None
    if results is None:
        check_impl_and_lse(op, impl, return_lse)
        call = decode_call(
            op,
            autocast_queries(op, q),
            k_cache,
            v_cache,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            kv_blocks=kv_blocks,
            kv_block_size=kv_block_size,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            alibi_slopes=alibi_slopes,
            out=out,
        )
        refuse_gradients(op, call)
        if not torch.compiler.is_compiling() and values_are_keys(k_cache, v_cache):
            # one tensor in two roles: a recording has it once, under a key of its own
            inputs, options = (q, k_cache, None, *tensors), (*options, v_cache.shape[-1])
            results = repeat(_RECORDED, options, inputs)
            if results is not None:
                return returned(results, out, return_lse)
        if sinks is None or sinks.is_contiguous():
            wanted = (out is None) + bool(return_lse)
            results = record(
                _RECORDED, options, inputs, decode, call, impl, operands=1, wanted=wanted
            )
        else:
            # these sinks are copied, and a replay would read this call's copy
            results = decode(call, impl)
    return returned(results, out, return_lse)


def check_decode_inputs(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
) -> None:
    """Raise `InvalidInput` if the arguments of `attention_decode` are invalid.

    Besides shapes and dtypes this checks the values: lengths are within the cache, the pages and
    blocks that would be read are within range, and no block is listed twice for one KV head. It
    copies them to the host and waits for the device, so use it for debugging and for untrusted
    tables, not in every step.

    Parameters
    ----------
    q, k_cache, v_cache, cache_seqlens, page_table, kv_blocks, kv_block_size, causal, window :
        as in `attention_decode`

    Examples
    --------
    >>> import torch
    >>> q, pages = torch.randn(1, 4, 1, 16), torch.randn(3, 16, 2, 16)
    >>> lengths = torch.tensor([20], dtype=torch.int32)
    >>> table = torch.tensor([[0, 3]], dtype=torch.int32)
    >>> check_decode_inputs(q, pages, pages, cache_seqlens=lengths, page_table=table)
    Traceback (most recent call last):
    ...
    blackwell_sparsek.core.errors.InvalidInput: check_decode_inputs: page_table[0, 1] is out of
    range; expected 0 to 2, got 3
    """
    op = "check_decode_inputs"
    call = decode_call(
        op,
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        kv_blocks=kv_blocks,
        kv_block_size=kv_block_size,
        causal=causal,
        window=window,
    )
    check_decode_values(op, call, duplicates=True)
