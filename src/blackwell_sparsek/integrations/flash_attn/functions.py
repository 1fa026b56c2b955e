"""The functions of flash-attn: their arguments, and which call of this package they are."""

from typing import Any

import torch

from ...attention.api import attention
from ...attention.inputs import DTYPES
from ...core.checks import (
    check_dtype,
    check_flag,
    check_rank,
    check_same_device,
    check_tensor,
    message,
)
from ...core.errors import InvalidInput, Unsupported
from ...core.fp8 import E4M3
from ...core.torch_state import cast_operand
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
from .factors import Factors, WideQueries, check_factors, check_fp8, head_scale, wide_queries
from .gradients import attached, want_gradients, without_gradients
from .naming import OF_ATTENTION, OF_CACHES, OF_ROTARY, named_as
from .packing import DENSE, check_one_batch, every, flattened, packed_sequences

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, None]
# What to use instead of an argument that is refused.
INSTEAD = {
    "dropout_p": "attention dropout is not available; pass 0.0",
    "qv": "concatenate it to q, and its keys to k",
    "q_descale": "only float8_e4m3fn has factors; fold this one into softmax_scale",
    "k_descale": "only float8_e4m3fn has factors; fold this one into softmax_scale",
    "v_descale": "only float8_e4m3fn has factors; multiply the output",
    "mask_mod": "pass bsk.BlockMask.from_function(mask_mod, ...) to bsk.attention(block_mask=...)",
    "score_mod": "bsk.attention has scale, softcap and sinks",
    "block_sparse_tensors": "build a bsk.BlockMask and call bsk.attention(block_mask=...)",
    "score_mod_bwd": "bsk.attention has scale, softcap and sinks",
    "aux_tensors": "it belongs to mask_mod and score_mod, which are not taken",
    "aux_scalars": "it belongs to mask_mod and score_mod, which are not taken",
    "gather_kv_indices": "use bsk.sparse_attention with a bsk.KeySelection",
    "scheduler_metadata": "work is scheduled on the device; pass None",
}


def _refuse(op: str, **given: Any) -> None:
    for arg, value in given.items():
        if value is not None and not (arg == "dropout_p" and value == 0.0):
            raise Unsupported(f"{op}: {arg} is not supported; {INSTEAD[arg]}")


def _window(op: str, window_size: Any) -> tuple[int | None, int | None] | None:
    """flash-attn says -1 (or None) where a side is open, and takes a tensor of two numbers too."""
    if isinstance(window_size, torch.Tensor):
        window_size = window_size.tolist()
    if (
        not isinstance(window_size, (tuple, list))
        or len(window_size) != 2
        or not all(side is None or isinstance(side, (int, torch.SymInt)) for side in window_size)
    ):
        expected = "(left, right), -1 for an open side"
        raise InvalidInput(message(op, "window_size", "is malformed", expected, window_size))
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return None if left is None and right is None else (left, right)


def _pages(
    op: str, block_table: torch.Tensor | None, page_table: torch.Tensor | None
) -> torch.Tensor | None:
    """The page table under the name of flash-attn 2 or 3."""
    if block_table is not None and page_table is not None:
        expected = "one of the two names"
        raise InvalidInput(
            message(op, "block_table/page_table", "are both given", expected, "both")
        )
    return block_table if page_table is None else page_table


def _asks_for_lse(op: str, return_softmax_lse: Any, return_lse: Any) -> bool:
    """flash-attn 2 and 3 call it the first, flash-attn 4 the second."""
    check_flag(op, "return_softmax_lse", return_softmax_lse)
    check_flag(op, "return_lse", return_lse)
    asks: bool = return_softmax_lse or return_lse
    return asks


def _returned(out: torch.Tensor, lse: torch.Tensor, probs: bool, with_lse: bool) -> Result:
    if probs:
        return out, lse, None
    return (out, lse) if with_lse else out


@named_as("flash_attn_func", {"attention": OF_ATTENTION, "attention_varlen": OF_ATTENTION})
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    learnable_sink: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    mask_mod: Any = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    gather_kv_indices: Any = None,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
) -> Result:
    """Attention of q `[B, Sq, Hq, D]` over k `[B, Sk, Hkv, D]` and v `[B, Sk, Hkv, Dv]`.

    Gradients as in `bsk.attention`; none of `alibi_slopes`. With `attention_chunk` a backward
    raises. float8_e4m3fn must not require gradients.

    Parameters
    ----------
    q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic :
        As in flash-attn; -1 or None is an open side of the window, a softcap of 0 is off.
    q_descale, k_descale, v_descale : fp32, one element or `[B, Hkv]`, optional
        Factors of the numbers in q, k and v that are all float8_e4m3fn; the output is bf16.
    attention_chunk : int
        Keys are visible within chunks of so many positions; 0 is off.
    learnable_sink : `[Hq]`, optional
        A logit per head that joins the denominator.
    return_attn_probs : bool
        Return `(out, lse, None)`; probabilities are never returned.
    return_softmax_lse, return_lse : bool
        Return `(out, lse)`; the names of flash-attn 3 and 4.
    num_splits, pack_gqa, sm_margin :
        Accepted without effect.
    dropout_p, qv, mask_mod, score_mod, score_mod_bwd, block_sparse_tensors, aux_tensors :
        Refused unless absent, like the next two.
    aux_scalars, gather_kv_indices :
        See above.

    Returns
    -------
    out : `[B, Sq, Hq, Dv]`
    lse : fp32 `[B, Hq, Sq]`

    Raises
    ------
    Unsupported
        For an argument that cannot be honoured; the message names it.

    Examples
    --------
    >>> import torch
    >>> q = k = v = torch.randn(2, 30, 4, 16)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 30, 4, 16])
    """
    op = "flash_attn_func"
    _refuse(
        op,
        dropout_p=dropout_p,
        qv=qv,
        mask_mod=mask_mod,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        gather_kv_indices=gather_kv_indices,
    )
    for arg, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, arg, x)
        check_rank(op, arg, x, DENSE)
    not_in_fp8 = {"attention_chunk": attention_chunk or None, "alibi_slopes": alibi_slopes}
    descales = _descales(op, q, (q_descale, k_descale, v_descale), not_in_fp8)
    window = _window(op, window_size)
    with_lse = _asks_for_lse(op, return_softmax_lse, return_lse)
    learned = (q, k, v, learnable_sink)
    # the kernels for caches know slopes too, but no gradients
    if not attention_chunk and (alibi_slopes is None or want_gradients(*learned)):
        out, lse = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            causal=causal,
            window=window,
            scale=softmax_scale,
            softcap=softcap or None,
            sinks=learnable_sink,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic or None,
            return_lse=True,
            **descales,
        )
        return _returned(out.transpose(1, 2), lse, return_attn_probs, with_lse)
    batch, sq = q.shape[:2]
    sk = k.shape[1]

    def in_chunks() -> tuple[torch.Tensor, torch.Tensor]:
        return attention_varlen(
            q.reshape(batch * sq, *q.shape[2:]),
            # passed as a cache, which autocast leaves alone
            cast_operand(k).transpose(1, 2),
            cast_operand(v).transpose(1, 2),
            every(batch, sq, q.device),
            max_seqlen_q=sq,
            cache_seqlens=torch.full((batch,), sk, dtype=torch.int32, device=q.device),
            causal=causal,
            window=window,
            chunk=attention_chunk or None,
            scale=softmax_scale,
            softcap=softcap or None,
            sinks=learnable_sink,
            alibi_slopes=alibi_slopes,
            return_lse=True,
            **descales,
        )

    out, lse = attached(f"{op}: attention_chunk has no gradient", in_chunks, *learned)
    out, lse = out.view(batch, sq, *out.shape[1:]), lse.view(q.shape[2], batch, sq).transpose(0, 1)
    return _returned(out, lse, return_attn_probs, with_lse)


@named_as(
    "flash_attn_varlen_func",
    {"attention_varlen": {**OF_ATTENTION, "cache_seqlens": "seqused_k"}},
)
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    learnable_sink: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    mask_mod: Any = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    gather_kv_indices: Any = None,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    min_seqlen_k: int | None = None,
    seqlen_k_per_split: int | None = None,
    scheduler_metadata: Any = None,
    disable_scheduler_metadata: bool = False,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention within packed sequences; see `flash_attn_func` for the options.

    Gradients as in `bsk.attention_varlen`: with pages, `seqused_q`, `seqused_k` or
    `attention_chunk` a backward raises, and with `out` the call does.

    Parameters
    ----------
    q, k, v : `[Tq, Hq, D]`, `[Tk, Hkv, D]`, `[Tk, Hkv, Dv]`
        Without their `cu_seqlens`, `[B, Sq, Hq, D]` and `[B, Sk, Hkv, D | Dv]`, with one sequence
        after another. With a page table k and v are `[pages, page_size, Hkv, D | Dv]`.
    cu_seqlens_q, cu_seqlens_k : int32 `[B + 1]`, optional
        See q. Pages need one of `cu_seqlens_k` and `seqused_k`.
    max_seqlen_q, max_seqlen_k : int, optional
        At least the longest length; all tokens by default. A close number takes less time.
    block_table, page_table : int32 `[B, max_pages]`, optional
        The same under the names of flash-attn 2 and 3.
    seqused_q, seqused_k : int32 `[B]`, optional
        How many queries and keys of each sequence are used.
    out : as q, with Dv in place of D, optional
        Where to write the output.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic :
        As in `flash_attn_func`, like all others.
    return_attn_probs, qv, q_descale, k_descale, v_descale, attention_chunk, learnable_sink :
        See above.
    num_splits, pack_gqa, sm_margin, mask_mod, score_mod, score_mod_bwd, block_sparse_tensors :
        See above.
    aux_tensors, aux_scalars, gather_kv_indices, return_softmax_lse, return_lse :
        See above.
    scheduler_metadata :
        Refused unless absent.
    min_seqlen_k, seqlen_k_per_split, disable_scheduler_metadata :
        Accepted without effect: they tune kernels of flash-attn.

    Returns
    -------
    out : as q, with Dv in place of D
    lse : fp32 `[Hq, Tq]`, or `[B, Hq, Sq]` for queries that are not packed

    Raises
    ------
    Unsupported
        For an argument that cannot be honoured; the message names it.

    Examples
    --------
    >>> import torch
    >>> q = k = v = torch.randn(10, 4, 16)
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([10, 4, 16])
    """
    op = "flash_attn_varlen_func"
    _refuse(
        op,
        dropout_p=dropout_p,
        qv=qv,
        mask_mod=mask_mod,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        gather_kv_indices=gather_kv_indices,
        scheduler_metadata=scheduler_metadata,
    )
    pages = _pages(op, block_table, page_table)
    cache_seqlens = None
    if pages is not None:
        if seqused_k is None and cu_seqlens_k is None:
            expected = "cu_seqlens_k or seqused_k, which tell the keys in the pages"
            raise InvalidInput(message(op, "seqused_k", "is missing", expected, None))
        cache_seqlens = seqused_k
        if seqused_k is None:
            assert cu_seqlens_k is not None
            check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k)
            cache_seqlens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    factors = Factors(q_descale, k_descale, v_descale)
    window = _window(op, window_size)
    with_lse = _asks_for_lse(op, return_softmax_lse, return_lse)
    queries = packed_sequences(
        op,
        {"q": q},
        ("cu_seqlens_q", cu_seqlens_q),
        ("max_seqlen_q", max_seqlen_q),
        seqused_q,
    )
    (packed_q,) = queries.tensors
    if pages is None:
        keys = packed_sequences(
            op,
            {"k": k, "v": v},
            ("cu_seqlens_k", cu_seqlens_k),
            ("max_seqlen_k", max_seqlen_k),
            seqused_k,
        )
        packed_k, packed_v = keys.tensors
        cu_seqlens_k, max_seqlen_k = keys.offsets, keys.longest
        check_one_batch(op, queries, keys)
    else:
        packed_k, packed_v, cu_seqlens_k = k, v, None
    into = out
    if out is not None and queries.batch is not None:
        check_tensor(op, "out", out)
        check_rank(op, "out", out, DENSE)
        into = flattened(op, "out", out)

    def packed() -> tuple[torch.Tensor, torch.Tensor]:
        wide = WideQueries(packed_q, None, None, None)
        if pages is None:
            chunk = attention_chunk or None
            not_in_fp8 = {"attention_chunk": chunk, "alibi_slopes": alibi_slopes}
            not_in_fp8 |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
            given = _descales(op, packed_q, factors, not_in_fp8)
        else:
            caches = {"k": k, "v": v}
            _check_packed(op, packed_q, queries.offsets, caches)
            wide = _wide(op, packed_q, queries.offsets, caches, factors)
            given = {"k_scale": wide.k_scale, "v_scale": wide.v_scale}
        made, lse = attention_varlen(
            wide.q,
            packed_k,
            packed_v,
            queries.offsets,
            cu_seqlens_k,
            max_seqlen_q=queries.longest,
            max_seqlen_k=max_seqlen_k,
            cache_seqlens=cache_seqlens,
            page_table=pages,
            seqused_q=seqused_q,
            seqused_k=None if pages is not None else seqused_k,
            causal=causal,
            window=window,
            chunk=attention_chunk or None,
            scale=softmax_scale,
            softcap=softcap or None,
            sinks=learnable_sink,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic or None,
            out=into,
            return_lse=True,
            **given,
        )
        return wide.finished(made), lse

    without = {
        "a page table": pages,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "attention_chunk": attention_chunk or None,
    }
    named = [name for name, value in without.items() if value is not None]
    # a result in `out` cannot be attached: `attention_varlen` refuses inputs that want gradients
    if named and out is None:
        learned = (q, k, v, learnable_sink)
        result, lse = attached(f"{op}: {named[0]} has no gradient", packed, *learned)
    else:
        result, lse = packed()
    result, lse = queries.unpacked(result, lse)
    return _returned(result if out is None else out, lse, return_attn_probs, with_lse)


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
    _refuse(op, qv=qv, scheduler_metadata=scheduler_metadata)
    if attention_chunk and cache_leftpad is not None:
        raise Unsupported(
            f"{op}: attention_chunk does not go with cache_leftpad, from which flash-attn counts "
            "chunks; bsk.attention_varlen(chunk=, leftpad_k=) counts them from slot 0"
        )
    pages = _pages(op, block_table, page_table)
    for arg, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(op, arg, x)
    ragged = cu_seqlens_q is not None
    check_rank(op, "q", q, "[T, H, D]" if ragged else DENSE)
    for arg, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(op, arg, x, DENSE if pages is None else "[pages, page_size, Hkv, D]")
    check_dtype(op, "q", q, (*DTYPES, E4M3))
    if q.shape[-1] != k_cache.shape[-1]:
        got = f"{list(q.shape)} and {list(k_cache.shape)}"
        raise InvalidInput(message(op, "q/k_cache", "have different head dims", "one", got))
    if (max_seqlen_q is None) is ragged:
        problem = "is missing" if ragged else "goes with cu_seqlens_q"
        expected = "an int" if ragged else "None without cu_seqlens_q"
        raise InvalidInput(message(op, "max_seqlen_q", problem, expected, max_seqlen_q))
    if cu_seqlens_k_new is not None and k is None and v is None:
        problem, expected = "goes with k and v", "None without them"
        raise InvalidInput(message(op, "cu_seqlens_k_new", problem, expected, "a tensor"))
    with_lse = _asks_for_lse(op, return_softmax_lse, False)
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, device=q.device)
        batch = cu_seqlens_q.numel() - 1
    lengths = lengths_of(op, cache_seqlens, batch, q.device, k_cache, pages, k)
    others = {"rotary_seqlens": rotary_seqlens, "cache_leftpad": cache_leftpad}
    check_numbers(op, q, batch, {"cache_seqlens": lengths, **others}, pages, cache_batch_idx)
    window = _window(op, window_size)
    if pages is not None and cache_batch_idx is not None:
        pages, cache_batch_idx = rows_of_table(pages, cache_batch_idx), None
    if cu_seqlens_q is not None and max_seqlen_q is not None:
        queries, offsets, longest = q, cu_seqlens_q, max_seqlen_q
    else:
        longest = q.shape[1]
        queries = q.reshape(batch * longest, *q.shape[2:])
        offsets = every(batch, longest, q.device)
    factors = Factors(q_descale, k_descale, v_descale)
    wide = _wide(op, queries, offsets, {"k_cache": k_cache, "v_cache": v_cache}, factors)
    queries = wide.q
    if k is not None or v is not None or rotary_cos is not None or rotary_sin is not None:
        if k is None or v is None:
            missing = "k" if k is None else "v"
            expected = "both of k and v, also for rotary"
            raise InvalidInput(message(op, missing, "is missing", expected, None))
        check_new(op, batch, k, v, cu_seqlens_k_new)
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
    return _returned(out, lse, False, with_lse)


def _check_packed(
    op: str, q: torch.Tensor, offsets: torch.Tensor, caches: dict[str, torch.Tensor]
) -> None:
    """The arguments of `_wide` for packed queries and paged caches."""
    check_tensor(op, "q", q)
    check_rank(op, "q", q, "[T, H, D]")
    check_cu_seqlens(op, "cu_seqlens_q", offsets, device=q.device)
    for arg, x in caches.items():
        check_tensor(op, arg, x)
        check_rank(op, arg, x, "[pages, page_size, Hkv, D]")


def _wide(
    op: str,
    q: torch.Tensor,
    offsets: torch.Tensor,
    caches: dict[str, torch.Tensor],
    factors: Factors,
) -> WideQueries:
    """Packed queries with which the kernels read an fp8 cache, and the factors of the cache.

    `caches` are those of keys and of values, by the names of arguments.
    """
    if q.dtype != E4M3:
        _refuse(op, q_descale=factors.q)
    heads = next(iter(caches.values())).shape[2]
    check_factors(op, factors, q, heads, offsets.numel() - 1)
    if q.dtype == E4M3:
        check_fp8(op, **caches)
        sequence = places_packed(offsets, q.shape[0]).sequence
        return wide_queries(op, q, factors, heads, sequence)
    k_scale = head_scale(op, "k_descale", factors.k)
    return WideQueries(q, k_scale, head_scale(op, "v_descale", factors.v), None)


def _descales(
    op: str, q: torch.Tensor, factors: tuple[torch.Tensor | None, ...], others: dict[str, Any]
) -> dict[str, Any]:
    """Factors of fp8 inputs for `bsk.attention`; in flash-attn 3 those of q are per KV head too.

    `others` are arguments that inputs in fp8 do not go with.
    """
    names = ("q_descale", "k_descale", "v_descale")
    given = dict(zip(names, factors, strict=True))
    if not isinstance(q, torch.Tensor) or q.dtype != E4M3:
        _refuse(op, **given)
        return {}
    for arg, value in others.items():
        if value is not None:
            raise Unsupported(
                f"{op}: {arg} is not supported with q, k and v in {E4M3}; pass them in 16 bits"
            )
    of_q = given["q_descale"]
    if isinstance(of_q, torch.Tensor) and of_q.dim() == 2 and of_q.shape[1] > 1:
        group = q.shape[-2] // max(of_q.shape[1], 1)
        given["q_descale"] = of_q.repeat_interleave(group, 1)
    return given
