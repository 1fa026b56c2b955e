"""Who decodes: this package, SDPA on a contiguous cache, FlashAttention 3, FlashInfer."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import attention_decode, explain
from ..case import Contender, Peer
from ..problems.decode import Call, DecodeInputs
from .flash import call_by_name, fa3_available, fa3_operator, fa3_options
from .flashinfer import workspace
from .importing import load, needs, why_missing
from .ours import OURS, OURS_DENSE


def _contender(inputs: DecodeInputs, call: Call, notes: dict[str, Any] | None = None) -> Contender:
    p = inputs.problem
    replicas = tuple(partial(call, x) for x in inputs.others)
    bound = float(p.cache_bytes)
    return Contender(partial(call, inputs), inputs.check, p.flops, replicas, notes, bound)


def _ours(inputs: DecodeInputs) -> Contender:
    def call(x: DecodeInputs) -> torch.Tensor:
        out = attention_decode(
            x.q, x.k, x.v, cache_seqlens=x.lengths, page_table=x.table, kv_blocks=x.blocks
        )
        assert isinstance(out, torch.Tensor)  # a pair only with return_lse
        return out

    decision = explain(call, inputs)
    notes = {"implementation": decision.chosen, "why_not": dict(decision.reasons)}
    return _contender(inputs, call, notes)


def _ours_dense(inputs: DecodeInputs) -> Contender:
    """The same cache, all of it."""
    return _ours(replace(inputs, problem=replace(inputs.problem, kept=1.0), blocks=None))


def _sdpa(inputs: DecodeInputs, backends: list[SDPBackend]) -> Contender:
    def call(x: DecodeInputs) -> torch.Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=True)

    return _contender(inputs, call)


def _fa3(inputs: DecodeInputs) -> Contender:
    if why_missing("flash_attn_interface", "flash_attn_with_kvcache") is None:
        function = load("flash_attn_interface", "flash_attn_with_kvcache")

        def call(x: DecodeInputs) -> torch.Tensor:
            k, v = _token_major(x)
            q = x.q.transpose(1, 2)
            out: Any = function(q, k, v, cache_seqlens=x.lengths, page_table=x.table, causal=True)
            first: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return first.transpose(1, 2)

        return _contender(inputs, call)
    operator, p = fa3_operator(), inputs.problem
    options = fa3_options(p.head_dim, causal=True) | {
        "cu_seqlens_q": torch.arange(p.batch + 1, device=inputs.q.device, dtype=torch.int32),
        "max_seqlen_q": 1,
        "max_seqlen_k": p.length,
    }

    def call_library(x: DecodeInputs) -> torch.Tensor:
        k, v = _token_major(x)
        values = {"q": x.q[:, :, 0], "k": k, "v": v, "seqused_k": x.lengths, "page_table": x.table}
        out: torch.Tensor = call_by_name(operator, values | options)[0]
        return out[:, :, None]

    return _contender(inputs, call_library, {"build": "vLLM's library"})


def _token_major(x: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages as they are; a contiguous cache as `[B, S, Hkv, D]`, a view."""
    return (x.k, x.v) if x.table is not None else (x.k.transpose(1, 2), x.v.transpose(1, 2))


def _flashinfer(inputs: DecodeInputs) -> Contender:
    p, table, device = inputs.problem, inputs.table, inputs.q.device
    assert table is not None
    used = [-(-length // p.page_size) for length in p.lengths]
    starts = torch.tensor([0, *used]).cumsum(0).to(device, torch.int32)
    full = (n - 1 for n in used)
    last = [n - pages * p.page_size for n, pages in zip(p.lengths, full, strict=True)]
    make = load("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")
    indices = torch.cat([row[:n] for row, n in zip(table, used, strict=True)])
    wrapper = make(
        workspace(device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(starts),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty(p.batch, dtype=torch.int32, device=device),
    )
    wrapper.plan(
        starts,
        indices,
        torch.tensor(last, dtype=torch.int32, device=device),
        p.heads,
        p.kv_heads,
        p.head_dim,
        p.page_size,
        q_data_type=p.dtype,
        kv_data_type=p.dtype,
    )

    def call(x: DecodeInputs) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(x.q[:, :, 0], (x.k, x.v))
        return out[:, :, None]

    return _contender(inputs, call)


def _contiguous(inputs: DecodeInputs) -> str | None:
    if inputs.problem.shortest:
        return "takes equal lengths"
    return _plain(inputs) or (None if inputs.table is None else "has no paged cache")


def _plain(inputs: DecodeInputs) -> str | None:
    """Why peers that read a whole cache of the queries' dtype do not take part, or None."""
    if inputs.blocks is not None:
        return "reads all pages"
    return "measured without fp8" if inputs.problem.is_fp8 else None


def _contiguous_on_gpu(inputs: DecodeInputs) -> str | None:
    return _on_gpu(inputs) or _contiguous(inputs)


def _on_gpu(inputs: DecodeInputs) -> str | None:
    return None if inputs.q.is_cuda else "needs a CUDA GPU"


def _paged_on_gpu(inputs: DecodeInputs) -> str | None:
    reason = _whole_on_gpu(inputs)
    return reason or ("measured with a paged cache" if inputs.table is None else None)


def _whole_on_gpu(inputs: DecodeInputs) -> str | None:
    return _on_gpu(inputs) or _plain(inputs)


DECODE = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", _ours),
        Peer(
            OURS_DENSE,
            "blackwell_sparsek, all pages",
            _ours_dense,
            supports=lambda x: "is the case itself" if x.blocks is None else None,
        ),
        Peer(
            "sdpa",
            "SDPA, torch's choice",
            partial(_sdpa, backends=[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
            supports=lambda x: _contiguous(x) or ("measured as cuDNN" if x.q.is_cuda else None),
            rival=True,
        ),
        Peer(
            "sdpa_cudnn",
            "SDPA, cuDNN",
            partial(_sdpa, backends=[SDPBackend.CUDNN_ATTENTION]),
            supports=_contiguous_on_gpu,
            rival=True,
        ),
        Peer(
            "fa3",
            "FlashAttention 3",
            _fa3,
            available=fa3_available,
            supports=_whole_on_gpu,
            rival=True,
        ),
        Peer(
            "flashinfer",
            "FlashInfer, tensor cores",
            _flashinfer,
            available=needs("flashinfer", "BatchDecodeWithPagedKVCacheWrapper"),
            supports=_paged_on_gpu,
            rival=True,
        ),
    )
}
