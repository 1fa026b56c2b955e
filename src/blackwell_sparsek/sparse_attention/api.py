"""`sparse_attention`: attention over the keys that each query token has chosen."""

from typing import Literal, overload

import torch

from ..calls.attention import check_impl_and_lse, returned
from ..masks.key_selection import KeySelection
from .inputs import sparse_call
from .op import attend


@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: KeySelection,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: KeySelection,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: KeySelection,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: KeySelection,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query token over the keys that it selected.

    One softmax covers the selected keys, the window and the sink. A key that is both selected and
    in the window counts once. Query i of Sq has position `i + Sk - Sq`. A query that sees
    nothing has output 0, lse -inf and zero gradients. q, k, v, the sinks and the gate have
    gradients, except with pages; gradients are bitwise reproducible.

    Keys and queries are dense; or packed, with all four of `cu_seqlens_*` and `max_seqlen_*`; or
    queries are dense and keys lie in pages, with `page_table` and `cache_seqlens`.

    Parameters
    ----------
    q : fp16, bf16, fp32 or fp64 `[B, Hq, Sq, D]`, packed `[Tq, Hq, D]`
        Any strides with a contiguous last dimension, as for k and v.
    k : `[B, Hkv, Sk, D]`, packed `[Tk, Hkv, D]`, or pages `[pages, page_size, Hkv, D]`
        Query head h reads KV head `h // (Hq / Hkv)`.
    v : as k, with Dv in place of D
    selection : KeySelection
        Made for Sq queries (all Tq packed ones) and `kv_len` keys: Sk, `max_seqlen_k`, or
        `max_pages * page_size`. Its lists belong to all heads (Hs = 1), KV heads or query heads.
    causal : bool
        Hide the keys after a query's position, chosen or not.
    window : None, int or (left, right)
        Keys near the position of a query that it sees besides the chosen ones, as in `attention`;
        None adds nothing.
    sinks : float `[Hq]`, optional
        One logit per head that is added to the softmax denominator and has no value.
    gate : float `[B, Hs, Tq, K]`, optional
        A factor, at least 0, of exp(score) for the keys of each entry of the selection, in its
        order. An entry with gate 0 is as if it were not chosen, except that its gate still has a
        gradient. Keys of the window count with a factor of 1.
    scale, softcap : as in `attention`
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k : as in `attention_varlen`
    page_table, cache_seqlens : as in `attention_decode`
    out : `[B, Hq, Sq, Dv]` or `[Tq, Hq, Dv]`, dtype of q, optional
        A preallocated output, which must not overlap the inputs. Such a call has no gradients.
    return_lse : bool
        Also return the logarithm of the softmax denominator, sinks and gates included.
    deterministic : bool, optional
        Accepted for symmetry with `attention`: every implementation is deterministic.
    impl : str
        `auto`, `reference`, `eager`, `triton` or `sm90`; a name never falls back. Gradients come
        from the backward of that name; that of `sm90` has head dimensions up to 128, and takes the
        portable kernel for dk and dv where fewer than eight query heads share a list.

    Returns
    -------
    out : `[B, Hq, Sq, Dv]` or `[Tq, Hq, Dv]`, dtype of q
    lse : fp32 `[B, Hq, Sq]` or `[Hq, Tq]`
        Only with `return_lse`. fp64 for fp64 inputs. Differentiable.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Notes
    -----
    `eager` and `reference` check entries, lengths and pages, and wait for the device to do so.
    `triton` does not wait; a number out of range never leads to a read, and the queries that
    depend on it get NaN.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> q, k, v = torch.randn(1, 8, 40, 16), *torch.randn(2, 1, 2, 40, 16)
    >>> indices = torch.zeros(1, 2, 40, 1, dtype=torch.int32)
    >>> chosen = bsk.KeySelection.from_indices(indices, granularity=16, kv_len=40)
    >>> sparse_attention(q, k, v, chosen, window=8).shape
    torch.Size([1, 8, 40, 16])
    """
    op = "sparse_attention"
    check_impl_and_lse(op, impl, return_lse)
    call = sparse_call(
        op,
        q,
        k,
        v,
        selection,
        causal=causal,
        window=window,
        sinks=sinks,
        gate=gate,
        scale=scale,
        softcap=softcap,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        deterministic=deterministic,
        out=out,
    )
    return returned(attend(call, impl), out, return_lse)
