"""FlashInfer: dense and window attention through its ragged wrapper, block masks by head."""

import torch

from ..case import Contender, Peer
from ..problems.attention import AttentionInputs
from .flash import token_major_contender
from .importing import load, needs
from .torch_attention import contender_of, on_gpu

FLASHINFER = "flashinfer"
_WORKSPACE_BYTES = 256 * 2**20


def workspace(device: torch.device) -> torch.Tensor:
    """Memory for the partial results of a wrapper."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _prepare(inputs: AttentionInputs) -> Contender:
    return _band(inputs) if inputs.keep is None else _blocks(inputs, inputs.keep)


def _band(inputs: AttentionInputs) -> Contender:
    p, device = inputs.problem, inputs.q.device
    wrapper = load("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")(workspace(device), "NHD")
    starts = torch.arange(p.batch + 1, device=device, dtype=torch.int32) * p.length
    wrapper.plan(
        starts,
        starts,
        p.heads,
        p.kv_heads or p.heads,
        p.head_dim,
        causal=p.causal,
        window_left=-1 if p.window is None else p.window - 1,
        q_data_type=p.dtype,
        kv_data_type=p.dtype,
    )

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        return out.view(q.shape)

    return token_major_contender(inputs, call)


def _blocks(inputs: AttentionInputs, keep: torch.Tensor) -> Contender:
    p, device = inputs.problem, inputs.q.device
    assert p.block is not None
    wrapper = load("flashinfer.sparse", "VariableBlockSparseAttentionWrapper")(workspace(device))
    sizes = [
        torch.full(keep.shape[:2], p.block[0]),
        torch.full((p.heads, keep.shape[2]), p.block[1]),
    ]
    rows, columns = (size.to(device, torch.int32) for size in sizes)
    wrapper.plan(keep, rows, columns, p.heads, p.heads, p.head_dim, q_data_type=p.dtype)

    def call(x: AttentionInputs) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(x.q[0], x.k[0], x.v[0])
        return out[None]

    return contender_of(inputs, call)


def _supports(inputs: AttentionInputs) -> str | None:
    p = inputs.problem
    if (reason := on_gpu(inputs)) is not None:
        return reason
    if p.window is not None and not p.causal:
        return "has windows to the left only"
    if inputs.keep is not None and (p.batch > 1 or p.kv_heads):
        return "takes block masks for one sequence with as many key as query heads"
    return None


flashinfer = Peer(
    FLASHINFER,
    "FlashInfer",
    _prepare,
    available=needs("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper"),
    supports=_supports,
    rival=True,
)
