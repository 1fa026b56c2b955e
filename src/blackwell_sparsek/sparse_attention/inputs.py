"""Checks of sparse attention calls, and the `SparseAttentionCall` with its defaults."""

from typing import Any

import torch

from ..attention.inputs import (
    DENSE,
    DTYPES,
    PACKED,
    autocast_qkv,
    check_head_groups,
    check_out,
    check_packed,
    check_qkv,
    check_sinks,
    is_deterministic,
    refuse_gradients_into,
    scale_or_default,
    softcap_or_off,
)
from ..calls.sparse_attention import SparseAttentionCall, SparseAttnSpec
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
from ..decode.inputs import PAGED, check_indices
from ..masks.band import EVERYTHING, Band, band_of
from ..masks.key_selection import KeySelection

# No implementation takes wider heads; latent attention has 576.
MAX_HEAD_DIM = 1024


def sparse_call(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    selection: Any,
    *,
    causal: Any,
    window: Any,
    sinks: Any,
    gate: Any,
    scale: Any,
    softcap: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    page_table: Any,
    cache_seqlens: Any,
    deterministic: Any,
    out: Any,
) -> SparseAttentionCall:
    """Check the arguments against each other and fill in the defaults, without a device sync."""
    packed = _check_together(
        op,
        {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
        },
    )
    paged = _check_together(op, {"page_table": page_table, "cache_seqlens": cache_seqlens})
    if packed and paged:
        got = "both"
        raise InvalidInput(message(op, "cu_seqlens_q/page_table", "exclude each other", "one", got))
    if paged:
        max_q, max_k = _check_pages(op, q, k, v, page_table, cache_seqlens)
        refuse_gradients(op, q, k, v, sinks, gate)
    else:
        check_qkv(op, q, k, v, PACKED if packed else DENSE)
        max_q, max_k = q.shape[-2], k.shape[-2]
    for arg, x in (("q", q), ("k", k), ("v", v)):
        check_derivatives(op, arg, x)
    if packed:
        check_packed(op, q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        max_q, max_k = max_seqlen_q, max_seqlen_k
    for arg, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            got = x.shape[-1]
            raise InvalidInput(
                message(op, arg, "has an unsupported head dim", f"1 to {MAX_HEAD_DIM}", got)
            )
    q, k, v = autocast_qkv(op, q, k, v)
    check_sinks(op, sinks, q)
    heads_kv = k.shape[2] if paged else k.shape[1]
    tokens = q.shape[0] if packed else q.shape[2]
    batch = 1 if packed else q.shape[0]
    _check_selection(op, selection, q, batch, heads_kv, tokens, max_k)
    _check_gate(op, gate, selection, q)
    is_deterministic(op, deterministic)
    if out is not None:
        optional = {"sinks": sinks, "gate": gate}
        others = {arg: x for arg, x in optional.items() if x is not None}
        read = {"q": q, "k": k, "v": v, **others}
        refuse_gradients_into(op, {**read})
        check_out(op, out, [*q.shape[:-1], v.shape[-1]], read)
    spec = SparseAttnSpec(
        scale_or_default(op, scale, q.shape[-1]),
        selection,
        Band(None, 0) if _is_causal(op, causal) else EVERYTHING,
        None if window is None else band_of(op, causal, window),
        softcap_or_off(op, softcap),
        sinks,
        gate,
        cu_seqlens_q,
        cu_seqlens_k,
        max_q,
        max_k,
        page_table,
        cache_seqlens,
    )
    return SparseAttentionCall(q, k, v, spec, out)


def _is_causal(op: str, causal: Any) -> bool:
    band_of(op, causal, None)
    return bool(causal)


def _check_together(op: str, arguments: dict[str, Any]) -> bool:
    """Whether these arguments are given; raises unless all or none are."""
    given = [arg for arg, x in arguments.items() if x is not None]
    if given and len(given) < len(arguments):
        names = ", ".join(arguments)
        got = f"only {', '.join(given)}"
        raise InvalidInput(message(op, names, "belong together", "all or none", got))
    return bool(given)


def _check_pages(
    op: str, q: Any, k: Any, v: Any, page_table: Any, cache_seqlens: Any
) -> tuple[int, int]:
    """Check pages and their tables; return the queries and the capacity of a sequence."""
    tensors = {"q": q, "k": k, "v": v}
    for arg, x in tensors.items():
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, DTYPES)
        check_rank(op, arg, x, DENSE if arg == "q" else PAGED)
        check_last_dim_contiguous(op, arg, x)
    check_same_device(op, {**tensors})
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1]:
        got = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        expected = "one D of q and k, and k and v alike but for the last dimension"
        raise InvalidInput(message(op, "q/k/v", "do not match", expected, got))
    if k.shape[1] == 0:
        raise InvalidInput(
            message(op, "k", "has pages without tokens", "page_size >= 1", list(k.shape))
        )
    check_head_groups(op, q.shape[1], k.shape[2])
    check_indices(op, "page_table", page_table, [q.shape[0], "max_pages"], q)
    check_indices(op, "cache_seqlens", cache_seqlens, [q.shape[0]], q)
    return q.shape[2], page_table.shape[1] * k.shape[1]


def _check_selection(
    op: str,
    selection: Any,
    q: torch.Tensor,
    batch: int,
    heads_kv: int,
    tokens: int,
    max_k: int,
) -> None:
    """Check that a selection fits these sizes and is on the device of q."""
    if not isinstance(selection, KeySelection):
        got = type(selection).__name__
        expected = "KeySelection (KeySelection.from_indices makes one of indices)"
        raise InvalidType(message(op, "selection", "is not a selection of keys", expected, got))
    heads = sorted({1, heads_kv, q.shape[1]})
    made = (selection.batch, selection.heads, selection.q_len, selection.kv_len)
    fits = selection.batch in (1, batch) and selection.heads in heads
    if not fits or made[2:] != (tokens, max_k):
        lists = " or ".join(map(str, heads))
        batches = " or ".join(map(str, sorted({1, batch})))
        expected = f"[{batches}, {lists}, {tokens}, {max_k}]"
        problem = "was made for other sizes [B, Hs, Tq, kv_len]"
        raise InvalidInput(message(op, "selection", problem, expected, list(made)))
    check_same_device(op, {"q": q, "selection": selection.ids})


def _check_gate(op: str, gate: Any, selection: KeySelection, q: torch.Tensor) -> None:
    if gate is None:
        return
    check_tensor(op, "gate", gate)
    check_derivatives(op, "gate", gate)
    check_dtype(op, "gate", gate, DTYPES)
    check_shape(op, "gate", gate, selection.ids.shape)
    check_last_dim_contiguous(op, "gate", gate)
    check_same_device(op, {"q": q, "gate": gate})


def refuse_gradients(op: str, *tensors: Any) -> None:
    """Raise if a gradient through pages is needed, instead of silently cutting the graph."""
    for arg, x in zip(("q", "k", "v", "sinks", "gate"), tensors, strict=True):
        if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and wants_gradient(x):
            raise Unsupported(
                f"{op}: {arg} requires a gradient, which keys in pages do not have; call it under "
                "torch.no_grad(), or pass dense or packed keys"
            )
