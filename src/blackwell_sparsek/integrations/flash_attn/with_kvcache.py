"""`flash_attn_with_kvcache`: append to a cache, then attend over it."""

import torch

from ...attention.inputs import DTYPES, PACKED, TOKENS_FIRST
from ...core.checks import (
    check_dtype,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_tensor,
    message,
)
from ...core.errors import InvalidInput, Unsupported
from ...core.fp8 import E4M3
from ...decode.inputs import PAGED
from ...kv_cache.slots import rotated
from ...masks.packed import check_cu_seqlens
from ...ragged.api import attention_varlen
from .append import (
    append_new,
    check_new,
    check_numbers,
    lengths_of,
    places_alike,
    places_packed,
    rows_of_table,
)
from .arguments import (
    Result,
    asks_for_lse,
    pages_of,
    queries_over_cache,
    refuse,
    returned,
    window_of,
)
from .factors import Factors, check_fp8
from .gradients import without_gradients
from .naming import OF_ATTENTION, OF_CACHES, OF_ROTARY, named_as
from .packing import every


@named_as(
    "flash_attn_with_kvcache",
    {"attention_varlen": {**OF_ATTENTION, **OF_CACHES}, "kv_append": OF_ROTARY},
)
@without_gradients("flash_attn_with_kvcache: what is read from a KV cache has no gradient")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    attention_chunk: int = 0,
    learnable_sink: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Result:
    """Append to a KV cache in place, then attend over it. A backward raises.

    Parameters
    ----------
    q : `[B, Sq, Hq, D]`, or `[Tq, Hq, D]` with `cu_seqlens_q` and `max_seqlen_q`
    k_cache, v_cache : `[B, S, Hkv, D | Dv]`, or pages `[pages, page_size, Hkv, D | Dv]`
        dtype of q, or float8_e4m3fn. Queries in fp8 need a cache in fp8; the result is in bf16.
    k, v : `[B, T, Hkv, D]`, `[B, T, Hkv, Dv]`, optional
        New keys and values; they are written from slot `cache_seqlens` on. With `cu_seqlens_k_new`
        they are packed, `[Tk, Hkv, D | Dv]`.
    rotary_cos, rotary_sin : `[positions, R / 2]`, optional
        Rotate q and k: new keys from position `cache_seqlens` on; queries too if `causal` or with a
        window, otherwise all at position `cache_seqlens`. `cache_leftpad` does not move positions.
    rotary_seqlens : int32 `[B]`, optional
        Positions for the rotation in place of `cache_seqlens`; without `rotary_cos` there is none.
    cache_seqlens : int or int32 `[B]`
        Keys in the cache before this call; by default all of it, where nothing is appended.
    cache_batch_idx : int32 `[B]`, optional
        Which row of the cache, or of the page table, holds a sequence.
    cache_leftpad : int32 `[B]`, optional
        The first key of each sequence; not with `attention_chunk`.
    block_table, page_table : int32 `[B, max_pages]`, optional
        The same under the names of flash-attn 2 and 3.
    rotary_interleaved : bool
        Whether numbers 2i and 2i + 1 are rotated together, otherwise i and i + R / 2.
    q_descale, k_descale, v_descale : fp32, one element, `[Hkv]` or `[B, Hkv]`, optional
        Factors of numbers in fp8. With queries in 16 bits there is none for q, and those of an fp8
        cache are the same for all sequences.
    softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk, learnable_sink :
        As in `flash_attn_func`.
    return_softmax_lse : bool
        Return `(out, lse)`.
    num_splits, pack_gqa, sm_margin :
        Accepted without effect.
    cu_seqlens_q, max_seqlen_q :
        See q.
    cu_seqlens_k_new : int32 `[B + 1]`, optional
        See k.
    qv, scheduler_metadata :
        Refused unless absent.

    Returns
    -------
    out : as q, with Dv in place of D
    lse : fp32 `[B, Hq, Sq]`, or `[Hq, Tq]`

    Raises
    ------
    Unsupported
        For an argument that cannot be honoured; the message names it.

    Examples
    --------
    >>> import torch
    >>> k_cache, v_cache = torch.zeros(2, 1, 32, 2, 16)
    >>> q, k, v = torch.randn(1, 1, 4, 16), *torch.randn(2, 1, 1, 2, 16)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5, causal=True).shape
    torch.Size([1, 1, 4, 16])
    """
    op = "flash_attn_with_kvcache"
    refuse(op, qv=qv, scheduler_metadata=scheduler_metadata)
    if attention_chunk and cache_leftpad is not None:
        raise Unsupported(
            f"{op}: attention_chunk does not go with cache_leftpad, from which flash-attn counts "
            "chunks; bsk.attention_varlen(chunk=, leftpad_k=) counts them from slot 0"
        )
    pages = pages_of(op, block_table, page_table)
    for arg, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(op, arg, x)
    ragged = cu_seqlens_q is not None
    check_rank(op, "q", q, PACKED if ragged else TOKENS_FIRST)
    for arg, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(op, arg, x, TOKENS_FIRST if pages is None else PAGED)
        if pages is None:
            # it is transposed below, and an error behind that would tell other strides
            check_last_dim_contiguous(op, arg, x)
    check_dtype(op, "q", q, (*DTYPES, E4M3))
    if q.shape[-1] != k_cache.shape[-1]:
        got = f"{list(q.shape)} and {list(k_cache.shape)}"
        raise InvalidInput(message(op, "q/k_cache", "have different head dims", "one", got))
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        expected = "all but the last dimension alike"
        got = f"{list(k_cache.shape)} and {list(v_cache.shape)}"
        raise InvalidInput(message(op, "k_cache/v_cache", "do not match", expected, got))
    if (max_seqlen_q is None) is ragged:
        problem = "is missing" if ragged else "goes with cu_seqlens_q"
        expected = "an int" if ragged else "None without cu_seqlens_q"
        raise InvalidInput(message(op, "max_seqlen_q", problem, expected, max_seqlen_q))
    if cu_seqlens_k_new is not None and k is None and v is None:
        problem, expected = "goes with k and v", "None without them"
        raise InvalidInput(message(op, "cu_seqlens_k_new", problem, expected, "a tensor"))
    with_lse = asks_for_lse(op, return_softmax_lse, False)
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, device=q.device)
        batch = cu_seqlens_q.numel() - 1
    lengths = lengths_of(op, cache_seqlens, batch, q.device, k_cache, pages, k)
    others = {"rotary_seqlens": rotary_seqlens, "cache_leftpad": cache_leftpad}
    check_numbers(op, q, batch, {"cache_seqlens": lengths, **others}, pages, cache_batch_idx)
    window = window_of(op, window_size)
    if pages is not None and cache_batch_idx is not None:
        pages, cache_batch_idx = rows_of_table(pages, cache_batch_idx), None
    if cu_seqlens_q is not None and max_seqlen_q is not None:
        queries, offsets, longest = q, cu_seqlens_q, max_seqlen_q
    else:
        longest = q.shape[1]
        queries = q.reshape(batch * longest, *q.shape[2:])
        offsets = every(batch, longest, q.device)
    factors = Factors(q_descale, k_descale, v_descale)
    wide = queries_over_cache(
        op, queries, offsets, {"k_cache": k_cache, "v_cache": v_cache}, factors
    )
    queries = wide.q
    if k is not None or v is not None or rotary_cos is not None or rotary_sin is not None:
        if k is None or v is None:
            missing = "k" if k is None else "v"
            expected = "both of k and v, also for rotary"
            raise InvalidInput(message(op, missing, "is missing", expected, None))
        check_new(op, batch, {"k": k, "v": v}, {"k": k_cache, "v": v_cache}, cu_seqlens_k_new)
        check_same_device(op, {"q": q, "k_cache": k_cache, "k": k, "v": v})
        if q.dtype == E4M3:
            check_fp8(op, k=k, v=v)
            # they are as they will be in the cache, and exact in bf16
            k, v = k.bfloat16(), v.bfloat16()
        if cu_seqlens_k_new is None:
            new_tokens = places_alike(batch, k.shape[1], k.device)
            added: int | torch.Tensor = k.shape[1]
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        else:
            new_tokens = places_packed(cu_seqlens_k_new, k.shape[0])
            added = cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1]
        same = not ragged and cu_seqlens_k_new is None and k.shape[0] == queries.shape[0]
        # queries that see all keys have no order, and all are at the first position
        moving = causal or window is not None
        turned = append_new(
            op,
            (queries, k_cache, v_cache, k, v),
            (new_tokens, lengths, rotary_seqlens),
            (rotary_cos, rotary_sin, rotary_interleaved),
            (pages, cache_batch_idx),
            (None, None) if q.dtype == E4M3 else (wide.k_scale, wide.v_scale),
            fused=same and moving,
        )
        if turned is None and rotary_cos is not None and rotary_sin is not None:
            places = (
                places_packed(offsets, queries.shape[0])
                if ragged
                else places_alike(batch, longest, q.device)
            )
            first = lengths if rotary_seqlens is None else rotary_seqlens
            at = first.long()[places.sequence] + (places.ordinal if moving else 0)
            turned = rotated(queries, rotary_cos, rotary_sin, at, rotary_interleaved)
        queries = queries if turned is None else turned
        lengths = lengths + added
    paged = pages is not None
    out, lse = attention_varlen(
        queries,
        k_cache if paged else k_cache.transpose(1, 2),
        v_cache if paged else v_cache.transpose(1, 2),
        offsets,
        max_seqlen_q=longest,
        cache_seqlens=lengths,
        page_table=pages,
        cache_batch_idx=cache_batch_idx,
        leftpad_k=cache_leftpad,
        causal=causal,
        window=window,
        chunk=attention_chunk or None,
        scale=softmax_scale,
        softcap=softcap or None,
        sinks=learnable_sink,
        alibi_slopes=alibi_slopes,
        k_scale=wide.k_scale,
        v_scale=wide.v_scale,
        return_lse=True,
    )
    out = wide.finished(out)
    if not ragged:
        out = out.view(batch, longest, *out.shape[1:])
        lse = lse.view(queries.shape[1], batch, longest).transpose(0, 1)
    return returned(out, lse, False, with_lse)
