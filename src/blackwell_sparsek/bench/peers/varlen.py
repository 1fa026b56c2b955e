"""Who computes attention over packed sequences: packed as they are, or padded to the longest."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import attention, attention_varlen, explain
from ..case import Contender, Peer
from ..problems.varlen import VarlenInputs
from .flash import call_by_name, fa3_available, fa3_operator, fa3_options
from .flashinfer import workspace
from .importing import load, needs, why_missing
from .ours import OURS

PADDED, SDPA_PADDED, TORCH = "bsk_padded", "sdpa_padded", "torch_varlen"
_FA3 = ("flash_attn_interface", "flash_attn_varlen_func")


def _packed(
    inputs: VarlenInputs, call: Callable[..., Any], notes: dict[str, Any] | None = None
) -> Contender:
    """A contender whose `call(q, k, v)` takes and gives packed tensors, alone or first of many."""

    def run() -> torch.Tensor:
        out = call(inputs.q, inputs.k, inputs.v)
        first: torch.Tensor = out[0] if isinstance(out, (tuple, list)) else out
        return first

    return Contender(run, inputs.check, inputs.problem.flops, notes=notes)


def _offsets(inputs: VarlenInputs) -> dict[str, Any]:
    longest, starts = inputs.longest, inputs.starts
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _ours(inputs: VarlenInputs) -> Contender:
    options = _offsets(inputs) | {"causal": inputs.problem.causal}
    decision = explain(attention_varlen, inputs.q, inputs.k, inputs.v, **options)
    notes = {"implementation": decision.chosen, "why_not": dict(decision.reasons)}
    return _packed(inputs, partial(attention_varlen, **options), notes)


def _padded(inputs: VarlenInputs, call: Callable[..., Any]) -> Contender:
    """`call` on padded tensors. What lies behind a sequence is invisible to it when causal."""
    tensors = inputs.padded()
    return Contender(
        lambda: call(*tensors),
        lambda out: inputs.check(inputs.packed(out)),
        inputs.problem.flops,
    )


def _ours_padded(inputs: VarlenInputs) -> Contender:
    return _padded(inputs, partial(attention, causal=True))


def _sdpa_padded(inputs: VarlenInputs) -> Contender:
    backend = SDPBackend.CUDNN_ATTENTION if inputs.q.is_cuda else SDPBackend.MATH

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return _padded(inputs, call)


def _torch(inputs: VarlenInputs) -> Contender:
    function = load("torch.nn.attention.varlen", "varlen_attn")
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {}
    if inputs.problem.causal:
        options = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if inputs.problem.kv_heads:
        if "enable_gqa" not in known:
            raise NotImplementedError("has no GQA in this version of torch")
        options["enable_gqa"] = True
    place = (inputs.starts, inputs.starts, inputs.longest, inputs.longest)
    return _packed(inputs, lambda q, k, v: function(q, k, v, *place, **options))


def _fa3(inputs: VarlenInputs) -> Contender:
    p = inputs.problem
    if why_missing(*_FA3) is None:
        function = load(*_FA3)
        return _packed(inputs, partial(function, **_offsets(inputs), causal=p.causal))
    operator = fa3_operator()
    options = _offsets(inputs) | fa3_options(p.head_dim, p.causal)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return call_by_name(operator, {"q": q, "k": k, "v": v} | options)

    return _packed(inputs, call, {"build": "vLLM's library"})


def _fa4(inputs: VarlenInputs) -> Contender:
    function = load("flash_attn.cute", "flash_attn_varlen_func")
    return _packed(inputs, partial(function, **_offsets(inputs), causal=inputs.problem.causal))


def _flashinfer(inputs: VarlenInputs) -> Contender:
    p, device = inputs.problem, inputs.q.device
    wrapper = load("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")(workspace(device), "NHD")
    wrapper.plan(
        inputs.starts,
        inputs.starts,
        p.heads,
        p.kv_heads or p.heads,
        p.head_dim,
        causal=p.causal,
        window_left=-1,
        q_data_type=p.dtype,
        kv_data_type=p.dtype,
    )
    return _packed(inputs, wrapper.run)


def _on_gpu(inputs: VarlenInputs) -> str | None:
    return None if inputs.q.is_cuda else "needs a CUDA GPU"


def _causal_only(inputs: VarlenInputs) -> str | None:
    return None if inputs.problem.causal else "padding would be visible"


VARLEN = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", _ours),
        Peer(PADDED, "blackwell_sparsek, padded", _ours_padded, supports=_causal_only),
        Peer(SDPA_PADDED, "SDPA, cuDNN, padded", _sdpa_padded, supports=_causal_only, rival=True),
        Peer(
            TORCH,
            "torch varlen_attn",
            _torch,
            needs("torch.nn.attention.varlen", "varlen_attn"),
            _on_gpu,
            True,
        ),
        Peer("fa3", "FlashAttention 3", _fa3, fa3_available, _on_gpu, True),
        Peer(
            "fa4",
            "FlashAttention 4 (CuTe)",
            _fa4,
            needs("flash_attn.cute", "flash_attn_varlen_func"),
            _on_gpu,
            True,
        ),
        Peer(
            "flashinfer",
            "FlashInfer",
            _flashinfer,
            needs("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper"),
            _on_gpu,
            True,
        ),
    )
}
