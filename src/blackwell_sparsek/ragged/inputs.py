"""Checks of calls with packed queries, and the `RaggedCall` with its defaults.

`ragged_call` checks shapes, dtypes and layouts and never waits for the device; `lengths` has the
checks of values, which do.
"""

from typing import Any

import torch

from ..attention.inputs import (
    DENSE,
    PACKED,
    check_out,
    check_sinks,
    check_slopes,
    scale_or_default,
    softcap_or_off,
)
from ..calls.attention import empty_lse, empty_out
from ..calls.ragged import RaggedCall
from ..core.checks import (
    check_choice,
    check_derivatives,
    check_flag,
    check_shape,
    check_tensor,
    message,
    wants_gradient,
)
from ..core.errors import InvalidInput, InvalidType, Unsupported
from ..decode.inputs import (
    PAGED,
    TABLES,
    check_cache_scale,
    check_indices,
    check_keys,
    checked_block_size,
    raise_mismatch,
)
from ..masks.band import band_of
from ..masks.packed import check_cu_seqlens

ALIGNMENTS = ("bottom_right", "top_left")


def ragged_call(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    cache_seqlens: Any = None,
    page_table: Any = None,
    kv_blocks: Any = None,
    kv_block_size: Any = None,
    cache_batch_idx: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    causal: Any = False,
    window: Any = None,
    chunk: Any = None,
    align: Any = "bottom_right",
    scale: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    batch_invariant: Any = False,
    out: Any = None,
) -> RaggedCall:
    """Check the arguments of a call against each other, fill in defaults, allocate results."""
    _check_kind(op, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, seqused_k)
    packed = cu_seqlens_k is not None
    paged = page_table is not None
    check_tensor(op, "q", q)
    check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, device=q.device)
    batch = cu_seqlens_q.numel() - 1
    owned = not (packed or paged or cache_batch_idx is not None)
    layout = PACKED if packed else PAGED if paged else DENSE
    heads = check_keys(op, {"q": q, "k": k, "v": v}, PACKED, layout)
    if owned and k.shape[0] != batch:
        expected = f"{batch}, the sequences of cu_seqlens_q, or cache_batch_idx"
        raise_mismatch(op, "k", "has a wrong batch size", expected, k.shape[0])
    max_q = checked_maximum(op, "max_seqlen_q", max_seqlen_q)
    most = 2**30 - 1 if max_seqlen_k is None else checked_maximum(op, "max_seqlen_k", max_seqlen_k)
    if packed:
        check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, device=q.device)
        check_shape(op, "cu_seqlens_k", cu_seqlens_k, [batch + 1])
    lengths = {
        "cache_seqlens": cache_seqlens,
        "seqused_k": seqused_k,
        "seqused_q": seqused_q,
        "leftpad_k": leftpad_k,
        "cache_batch_idx": cache_batch_idx,
    }
    for arg, x in lengths.items():
        if x is not None:
            check_indices(op, arg, x, [batch], q)
    if paged:
        check_indices(op, "page_table", page_table, [batch, "max_pages"], q, TABLES)
    if kv_blocks is not None:
        check_indices(op, "kv_blocks", kv_blocks, [batch, heads, "n"], q)
    check_sinks(op, sinks, q)
    if sinks is not None:
        check_derivatives(op, "sinks", sinks)
    check_slopes(op, alibi_slopes, q, batch)
    for arg, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_cache_scale(op, arg, factor, heads, k)
    check_choice(op, "align", align, ALIGNMENTS)
    check_flag(op, "batch_invariant", batch_invariant)
    if out is not None:
        shape = [*q.shape[:2], v.shape[-1]]
        optional = {"sinks": sinks, "alibi_slopes": alibi_slopes}
        optional |= {"k_scale": k_scale, "v_scale": v_scale}
        others = {arg: x for arg, x in optional.items() if x is not None}
        check_out(op, out, shape, {"q": q, "k": k, "v": v, **others})
    page_size = k.shape[1] if paged else None
    return RaggedCall(
        empty_out(q, v.shape[-1]) if out is None else out,
        empty_lse(q),
        q,
        k,
        v,
        cu_seqlens_q,
        max_q,
        most,
        scale_or_default(op, scale, q.shape[-1]),
        seqlens_k=cache_seqlens if seqused_k is None else seqused_k,
        cu_seqlens_k=cu_seqlens_k,
        page_table=page_table,
        slabs=cache_batch_idx,
        seqused_q=seqused_q,
        first_key=leftpad_k,
        kv_blocks=kv_blocks,
        kv_block_size=checked_block_size(op, kv_block_size, kv_blocks is not None, page_size),
        band=band_of(op, causal, window),
        chunk=0 if chunk is None else checked_maximum(op, "chunk", chunk, least=1),
        top_left=align == "top_left",
        softcap=softcap_or_off(op, softcap),
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        batch_invariant=batch_invariant,
    )


def _check_kind(
    op: str,
    cu_seqlens_k: Any,
    cache_seqlens: Any,
    page_table: Any,
    cache_batch_idx: Any,
    seqused_k: Any,
) -> None:
    """Keys are packed or in a cache, and only a contiguous cache has rows to choose from."""
    if (cu_seqlens_k is None) == (cache_seqlens is None):
        expected = "one of the two: offsets of packed keys, or lengths in a cache"
        got = "neither" if cache_seqlens is None else "both"
        raise InvalidInput(
            message(op, "cu_seqlens_k/cache_seqlens", "must name the keys", expected, got)
        )
    cached_only = {"page_table": page_table, "cache_batch_idx": cache_batch_idx}
    for arg, x in cached_only.items():
        if cu_seqlens_k is not None and x is not None:
            problem = "goes with cache_seqlens"
            raise InvalidInput(message(op, arg, problem, "None for packed keys", "a tensor"))
    if page_table is not None and cache_batch_idx is not None:
        expected = "None with page_table, whose rows can be selected instead"
        problem = "is for contiguous caches"
        raise InvalidInput(message(op, "cache_batch_idx", problem, expected, "a tensor"))
    if cu_seqlens_k is None and seqused_k is not None:
        expected = "None with cache_seqlens, which are the keys in use"
        raise InvalidInput(message(op, "seqused_k", "is for packed keys", expected, "a tensor"))


def checked_maximum(op: str, arg: str, value: Any, *, least: int = 0) -> int:
    """An int from `least` on."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise InvalidType(message(op, arg, "is not an int", "int", type(value).__name__))
    if value < least:
        raise InvalidInput(message(op, arg, "is too small", f"an int >= {least}", value))
    return int(value)


def refuse_gradients(op: str, call: RaggedCall, why: str) -> None:
    """Raise if a gradient is needed, which must not be cut off silently."""
    if not torch.is_grad_enabled():
        return
    inputs = {"q": call.q, "k": call.k, "v": call.v, "sinks": call.sinks}
    factors = {"alibi_slopes": call.alibi_slopes, "k_scale": call.k_scale, "v_scale": call.v_scale}
    for arg, x in {**inputs, **factors}.items():
        if x is not None and wants_gradient(x):
            raise Unsupported(
                f"{op}: {arg} requires a gradient, which {why} does not have; call it under "
                "torch.no_grad(), or pass packed keys with cu_seqlens_k and without that option"
            )
