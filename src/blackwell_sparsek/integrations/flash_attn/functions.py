"""`flash_attn_func` and `flash_attn_varlen_func`, and which calls of this package they are."""

from typing import Any

import torch

from ...attention.api import attention
from ...attention.inputs import TOKENS_FIRST
from ...core.checks import check_rank, check_shape, check_tensor, message
from ...core.errors import InvalidInput
from ...core.torch_state import cast_operand
from ...decode.inputs import PAGED
from ...masks.packed import check_cu_seqlens
from ...ragged.api import attention_varlen
from .arguments import (
    Result,
    asks_for_lse,
    check_packed_over_pages,
    descales_of,
    pages_of,
    queries_over_cache,
    refuse,
    returned,
    window_of,
)
from .factors import Factors, WideQueries
from .gradients import attached, want_gradients
from .naming import OF_ATTENTION, named_as
from .packing import (
    check_batches,
    check_given,
    check_one_batch,
    every,
    flattened,
    packed_sequences,
)


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
    refuse(
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
    check_batches(op, q, k, v)
    not_in_fp8 = {"attention_chunk": attention_chunk or None, "alibi_slopes": alibi_slopes}
    descales = descales_of(op, q, (q_descale, k_descale, v_descale), not_in_fp8)
    window = window_of(op, window_size)
    with_lse = asks_for_lse(op, return_softmax_lse, return_lse)
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
        return returned(out.transpose(1, 2), lse, return_attn_probs, with_lse)
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
    return returned(out, lse, return_attn_probs, with_lse)


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
    refuse(
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
    pages = pages_of(op, block_table, page_table)
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
    window = window_of(op, window_size)
    with_lse = asks_for_lse(op, return_softmax_lse, return_lse)
    queries = packed_sequences(
        op,
        {"q": q},
        ("cu_seqlens_q", cu_seqlens_q),
        ("max_seqlen_q", max_seqlen_q),
        seqused_q,
    )
    (packed_q,) = queries.tensors
    keys = None
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
    if keys is not None and queries.batch is not None and keys.batch is not None:
        check_batches(op, q, k, v)
    elif queries.batch is not None or (keys is not None and keys.batch is not None):
        layout_k = PAGED if keys is None else keys.layout
        check_given(op, (q, queries.layout), (k, layout_k), (v, layout_k))
    into = out
    if out is not None and queries.batch is not None:
        check_tensor(op, "out", out)
        check_rank(op, "out", out, TOKENS_FIRST)
        check_shape(op, "out", out, (*q.shape[:-1], v.shape[-1]))
        into = flattened(op, "out", out)

    def packed() -> tuple[torch.Tensor, torch.Tensor]:
        wide = WideQueries(packed_q, None, None, None)
        if pages is None:
            chunk = attention_chunk or None
            not_in_fp8 = {"attention_chunk": chunk, "alibi_slopes": alibi_slopes}
            not_in_fp8 |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
            given = descales_of(op, packed_q, factors, not_in_fp8)
        else:
            caches = {"k": k, "v": v}
            check_packed_over_pages(op, packed_q, queries.offsets, caches)
            wide = queries_over_cache(op, packed_q, queries.offsets, caches, factors)
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
    return returned(result if out is None else out, lse, return_attn_probs, with_lse)
