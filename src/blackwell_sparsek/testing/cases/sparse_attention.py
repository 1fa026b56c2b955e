"""Compile cases of sparse attention."""

from collections.abc import Iterator
from typing import Any

import torch

from ...calls.attention import empty_lse
from ...calls.sparse_attention import (
    SparseAttentionCall,
    SparseAttnGradients,
    SparseAttnSpec,
    SparseBackwardCall,
)
from ...masks.band import Band
from ...masks.key_selection import KeySelection
from ...sparse_attention.triton.backward import (
    _sparse_attn_dkdv_kernel,
    _sparse_attn_dq_kernel,
    backward,
)
from ...sparse_attention.triton.forward import forward
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Query heads, KV heads, D, entries, their keys: MSA, QSA, NSA, and small ones.
GEOMETRIES = {
    "msa": (BRAIN, 64, 4, 128, 16, 128),
    "qsa": (BRAIN, 24, 2, 256, 512, 4),
    "nsa": (HALF, 64, 4, 128, 16, 64),
    "tokens": (BRAIN, 16, 1, 64, 2048, 1),
    "float32": (FLOAT, 6, 2, 80, 7, 32),
}
TOKENS = 4099


def _int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _selection(lists: int, entries: int, size: int) -> KeySelection:
    ids = _int32(1, lists, TOKENS, entries)
    return KeySelection._from_tensors(ids, _int32(1, lists, TOKENS), size, TOKENS)


def _call(name: str, options: str = "") -> SparseAttentionCall:
    """A call of a geometry; `options` is "", "gated" or "packed"."""
    dtype, heads, kv_heads, dim, entries, size = GEOMETRIES[name]
    chosen = _selection(kv_heads, entries, size)
    more: dict[str, Any] = {}
    by_head = (heads, kv_heads, kv_heads)
    shapes = [[1, n, TOKENS, dim] for n in by_head]
    if options == "gated":
        more["gate"] = meta(*chosen.ids.shape, dtype=torch.float32)
        more["sinks"] = meta(heads, dtype=torch.float32)
        more["softcap"] = 30.0
    if options == "packed":
        shapes = [[TOKENS, n, dim] for n in by_head]
        more |= {"cu_seqlens_q": _int32(4), "cu_seqlens_k": _int32(4)}
    q, k, v = (meta(*shape, dtype=dtype) for shape in shapes)
    spec = SparseAttnSpec(
        0.1, chosen, Band(None, 0), Band(127, 0), max_q=TOKENS, max_k=TOKENS, **more
    )
    return SparseAttentionCall(q, k, v, spec)


def _paged() -> SparseAttentionCall:
    """One query of each of two sequences over pages."""
    ids = _int32(2, 4, 1, 16)
    chosen = KeySelection._from_tensors(ids, _int32(2, 4, 1), 64, 64 * 16)
    spec = SparseAttnSpec(
        0.1, chosen, max_q=1, max_k=1024, page_table=_int32(2, 64), cache_seqlens=_int32(2)
    )
    k, v = (meta(99, 16, 4, 128) for _ in range(2))
    return SparseAttentionCall(meta(2, 32, 1, 128), k, v, spec)


def _backward(call: SparseAttentionCall) -> SparseBackwardCall:
    out, lse = torch.empty_like(call.q), empty_lse(call.q)
    spec = call.spec
    wanted = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    others = (None if x is None else torch.empty_like(x) for x in (spec.sinks, spec.gate))
    return SparseBackwardCall(call, out, None, out, lse, SparseAttnGradients(*wanted, *others))


@compile_cases
def sparse_attention_cases() -> Iterator[CompileCase]:
    """Geometries of models, gates, packed keys and pages."""
    variants = [*((name, "") for name in GEOMETRIES), ("nsa", "gated"), ("qsa", "gated")]
    for name, options in (*variants, ("nsa", "packed")):
        label = f"{name}-{options}" if options else name
        yield launched_case(f"sparse_attn_fwd/{label}", forward, _call(name, options))
        if options == "packed":
            # lists of packed sequences are made by torch, whose meta device has no values
            continue
        call = _backward(_call(name, options))
        for kind, kernel in (("dq", _sparse_attn_dq_kernel), ("dkdv", _sparse_attn_dkdv_kernel)):
            yield launched_case(f"sparse_attn_{kind}/{label}", backward, call, kernel=kernel)
    yield launched_case("sparse_attn_fwd/paged", forward, _paged())
