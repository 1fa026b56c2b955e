"""Who computes gradients of attention: each by its own backward pass, through autograd."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import attention, explain
from ..case import Contender, Peer
from ..problems.attention import AttentionInputs
from ..problems.gradients import WORK, Gradients, check_gradients, upstream_gradient
from .cudnn_frontend import MODULE, blocks_of, supports_blocks
from .flash import FA2, FA4, fa2, fa4, fa4_blocks, window_of
from .importing import load, needs
from .ours import OURS, options_of
from .torch_attention import sdpa, sdpa_cudnn, sdpa_flash

DETERMINISTIC = "bsk_deterministic"
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _through_autograd(
    inputs: AttentionInputs,
    forward: Forward,
    *,
    token_major: bool = False,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    notes: dict[str, Any] | None = None,
) -> Contender:
    """The backward pass alone, its forward pass run once; or both, where the problem says so."""
    leaves = inputs.token_major() if token_major else [inputs.q, inputs.k, inputs.v]
    leaves = [x.detach().requires_grad_() for x in leaves]
    upstream = upstream_gradient(inputs)
    upstream = upstream.transpose(1, 2).contiguous() if token_major else upstream
    together = inputs.problem.forward_too

    def result() -> torch.Tensor:
        with torch.enable_grad(), context():
            out = forward(*leaves)
        first: torch.Tensor = out[0] if isinstance(out, (tuple, list)) else out
        return first

    kept = None if together else result()

    def run() -> Gradients:
        out = result() if kept is None else kept
        with context():
            found = torch.autograd.grad(out, leaves, upstream, retain_graph=not together)
        dq, dk, dv = (x.transpose(1, 2) for x in found) if token_major else found
        return dq, dk, dv

    return Contender(run, check_gradients(inputs), _work(inputs), notes=notes)


def _work(inputs: AttentionInputs) -> float:
    return (WORK + inputs.problem.forward_too) * inputs.flops


def _ours(inputs: AttentionInputs, deterministic: bool = False) -> Contender:
    options = options_of(inputs) | {"deterministic": deterministic}
    decision = explain(attention, inputs.q, inputs.k, inputs.v, **options)
    notes = {"implementation": decision.chosen}
    return _through_autograd(inputs, lambda q, k, v: attention(q, k, v, **options), notes=notes)


def _sdpa(inputs: AttentionInputs, backends: list[SDPBackend]) -> Contender:
    p = inputs.problem

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=p.causal, enable_gqa=bool(p.kv_heads)
        )

    return _through_autograd(inputs, forward, context=lambda: sdpa_kernel(backends))


def _fa2(inputs: AttentionInputs) -> Contender:
    function = load("flash_attn", "flash_attn_func")
    options = {"causal": inputs.problem.causal, "window_size": window_of(inputs, -1)}
    return _through_autograd(inputs, lambda q, k, v: function(q, k, v, **options), token_major=True)


def _fa4(inputs: AttentionInputs) -> Contender:
    function = load("flash_attn.cute", "flash_attn_func")
    options: dict[str, Any] = {"causal": inputs.problem.causal}
    if inputs.problem.window is not None:
        options = {"window_size": window_of(inputs, None)}
    if inputs.keep is not None:
        options["block_sparse_tensors"] = fa4_blocks(inputs)
        options["block_sparse_tensors_bwd"] = fa4_blocks(inputs, transposed=True)
    return _through_autograd(inputs, lambda q, k, v: function(q, k, v, **options), token_major=True)


def _cudnn_blocks(inputs: AttentionInputs) -> Contender:
    forward = load(MODULE, "block_sparse_attention_forward")
    backward = load(MODULE, "block_sparse_attention_backward")
    blocks, upstream = blocks_of(inputs), upstream_gradient(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    made = forward(q, k, v, **blocks)

    def run() -> Gradients:
        found = backward(upstream, q, k, v, made["o_tensor"], made["lse_tensor"], **blocks)
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"]

    return Contender(run, check_gradients(inputs), _work(inputs))


def _like(
    peer: Peer,
    prepare: Callable[[AttentionInputs], Contender],
    supports: Callable[[AttentionInputs], str | None] | None = None,
) -> Peer:
    """The same peer, for its backward pass."""
    supports = supports or peer.supports
    return Peer(peer.name, peer.label, prepare, peer.available, supports, peer.rival)


def _fa4_supports(inputs: AttentionInputs) -> str | None:
    block = inputs.problem.block
    if block is not None and (block[0] % 64 or block[1] != 128):
        return f"has no gradients for blocks of {block[0]}x{block[1]}"
    return fa4.supports(inputs)


CUDNN_BLOCKS = "cudnn_blocks"
BACKWARD = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", _ours),
        Peer(
            DETERMINISTIC,
            "blackwell_sparsek, deterministic",
            lambda inputs: _ours(inputs, deterministic=True),
        ),
        _like(sdpa, lambda inputs: _sdpa(inputs, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])),
        _like(sdpa_cudnn, lambda inputs: _sdpa(inputs, [SDPBackend.CUDNN_ATTENTION])),
        _like(sdpa_flash, lambda inputs: _sdpa(inputs, [SDPBackend.FLASH_ATTENTION])),
        _like(fa2, _fa2),
        _like(fa4, _fa4, _fa4_supports),
        Peer(
            CUDNN_BLOCKS,
            "cuDNN front end, block-sparse",
            _cudnn_blocks,
            needs(MODULE, "block_sparse_attention_backward"),
            supports_blocks,
            True,
        ),
    )
}
ON_BAND = (OURS, DETERMINISTIC, sdpa.name, sdpa_cudnn.name, sdpa_flash.name, FA2, FA4)
ON_WINDOW = (OURS, DETERMINISTIC, FA2, FA4)
ON_BLOCKS = (OURS, DETERMINISTIC, FA4, CUDNN_BLOCKS)
