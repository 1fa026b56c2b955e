"""Gradients of attention, with and without the forward pass: problem, peers, suites."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import attention, explain
from ...testing.tolerance import assert_within_budget
from ..case import EAGER, SUSTAINED, Case, Contender, Peer, Suite
from .attention import HIDDEN, PROBLEMS, TINY, TOKENS, case_of, dtype_of
from .attention_peers import (
    FA2,
    FA4,
    MODULE,
    OURS,
    blocks_of,
    fa2,
    fa4,
    fa4_blocks,
    load,
    needs,
    options_of,
    sdpa,
    sdpa_cudnn,
    sdpa_flash,
    supports_blocks,
    window_of,
)
from .attention_problem import Attention, AttentionInputs, attend

# The gradient of a key needs every query, so one KV head is checked in full, in chunks of queries.

# Elements of fp64 scores held at once.
_SCORES = 2**26


class Gradients(NamedTuple):
    """The gradients of q, k and v."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class _Expected(NamedTuple):
    """A batch, its KV head and query heads, and their gradients in fp64 and by plain PyTorch."""

    b: int
    kv: int
    heads: range
    exact: Gradients
    plain: Gradients


def upstream_gradient(inputs: AttentionInputs) -> torch.Tensor:
    """The gradient of the output, random and the same at each call."""
    generator = torch.Generator(inputs.q.device).manual_seed(1)
    q, shape = inputs.q, (*inputs.q.shape[:-1], inputs.v.shape[-1])
    return torch.randn(shape, generator=generator, device=q.device, dtype=q.dtype)


def check_gradients(inputs: AttentionInputs) -> Callable[[Gradients], None]:
    """Compare dq, dk and dv, `[B, H, S, D]` each, with fp64 on the middle KV head."""

    def compare(found: Gradients) -> None:
        b, kv, heads, exact, plain = _expected(inputs)
        dq, dk, dv = found
        got = (dq[b, heads.start : heads.stop], dk[b, kv], dv[b, kv])
        for name, x, right, usual in zip(("dq", "dk", "dv"), got, exact, plain, strict=True):
            what = f"{name} of key head {kv} of batch {b}"
            # in fp32, base-2 exponents round once more than the formula; that is the whole error
            factor = 3.0 if x.dtype == torch.float32 else 2.0
            assert_within_budget(x, right, usual.to(x.dtype), factor=factor, what=what)

    return compare


# all peers of a case share one expected result; the next case replaces it
@lru_cache(maxsize=1)
def _expected(inputs: AttentionInputs) -> _Expected:
    p = inputs.problem
    kv_heads = p.kv_heads or p.heads
    group = p.heads // kv_heads
    b, kv = divmod(p.batch * kv_heads // 2, kv_heads)
    heads = range(kv * group, (kv + 1) * group)
    upstream = upstream_gradient(inputs)
    exact = _gradients(inputs, upstream, b, kv, heads, torch.float64)
    plain = _gradients(inputs, upstream, b, kv, heads, inputs.k.dtype)
    return _Expected(b, kv, heads, exact, plain)


def _gradients(
    inputs: AttentionInputs,
    upstream: torch.Tensor,
    b: int,
    kv: int,
    heads: range,
    dtype: torch.dtype,
) -> Gradients:
    """Gradients of a KV head and its query heads, computed in `dtype` in chunks of queries."""
    length = inputs.problem.length
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    k, v = (x[b, kv].detach().to(dtype) for x in (inputs.k, inputs.v))
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    dq = []
    step = max(1, _SCORES // length)
    for h in heads:
        parts = []
        for start in range(0, length, step):
            rows = torch.arange(start, min(start + step, length), device=k.device)
            keys = inputs.keys_of(start, start + len(rows) - 1)
            q, dout = (x[b, h, rows].detach().to(dtype) for x in (inputs.q, upstream))
            step_of = _recomputed if dtype == torch.float32 else _by_autograd
            got = step_of(q, k[keys], v[keys], inputs.visible(h, rows)[:, keys], dout)
            parts.append(got.dq)
            dk[keys] += got.dk
            dv[keys] += got.dv
        dq.append(torch.cat(parts))
    return Gradients(torch.stack(dq), dk, dv)


def _by_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, dout: torch.Tensor
) -> Gradients:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out = attend(q, k, v, seen)
    return Gradients(*torch.autograd.grad(out, (q, k, v), dout))


def _recomputed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, dout: torch.Tensor
) -> Gradients:
    """Gradients by way of an lse in the same dtype: every fused backward rounds it like this."""
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    p = torch.where(seen, torch.exp(scores - lse), 0.0)
    delta = (p @ v * dout).sum(-1, keepdim=True)
    ds = p * (dout @ v.mT - delta) * scale
    return Gradients(ds @ k, ds.mT @ q, p.mT @ dout)


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
    """The backward pass after a forward pass that ran once, or both passes with `forward_too`."""
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
        return Gradients(dq, dk, dv)

    return Contender(run, check_gradients(inputs), _work(inputs), notes=notes)


def _work(inputs: AttentionInputs) -> float:
    return (inputs.problem.backward_work + inputs.problem.forward_too) * inputs.flops


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
        return Gradients(found["dq_tensor"], found["dk_tensor"], found["dv_tensor"])

    return Contender(run, check_gradients(inputs), _work(inputs))


def _like(
    peer: Peer,
    prepare: Callable[[AttentionInputs], Contender],
    supports: Callable[[AttentionInputs], str | None] | None = None,
) -> Peer:
    """The same peer with the `prepare` of its backward pass."""
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


def backward(tiny: bool = False) -> Iterator[Case]:
    """Gradients: full, causal, window and block masks; ours also deterministic."""
    dtype = dtype_of(tiny)
    tokens, hidden = (256, 128) if tiny else (TOKENS, HIDDEN)
    for head_dim in (128, 64):
        for length in (128,) if tiny else (4096, 16384):
            for causal in (False, True):
                shape = (tokens // length, hidden // head_dim, length, head_dim)
                yield _case(Attention(*shape, dtype=dtype, causal=causal), ON_BAND)
    for side in (128, 64):
        for heads, length, density in TINY if tiny else PROBLEMS:
            problem = Attention(
                1, heads, length, 128, dtype=dtype, block=(side, side), density=density
            )
            yield _case(problem, ON_BLOCKS)
    heads, width = (2, 64) if tiny else (16, 2048)
    for length in (256,) if tiny else (32768, 131072):
        window = Attention(1, heads, length, 128, dtype=dtype, causal=True, window=width)
        yield _case(window, ON_WINDOW)


def wide(tiny: bool = False) -> Iterator[Case]:
    """Gradients of D256 with 16:8 heads and of D192/128 with 16, 8k tokens, causal."""
    heads, kv_heads, length = (4, 2, 128) if tiny else (16, 8, 8192)
    dtype = dtype_of(tiny)
    yield _case(Attention(1, heads, length, 256, kv_heads, dtype, causal=True), ON_BAND)
    problem = Attention(1, heads, length, 192, dtype=dtype, causal=True, head_dim_v=128)
    yield _case(problem, ON_BAND)


def small(tiny: bool = False) -> Iterator[Case]:
    """Gradients of 28:4 heads, of D96, and of four sequences of 512 tokens."""
    dtype = dtype_of(tiny)
    for length in (128,) if tiny else (2048, 4096):
        problem = Attention(1, 28, length, 128, 4, dtype, causal=True)
        yield _case(problem, ON_BAND)
    yield _case(Attention(2, 16, 64 if tiny else 8192, 96, dtype=dtype, causal=True), ON_BAND)
    short = Attention(4, 12, 64 if tiny else 512, 64, dtype=dtype, causal=True)
    # calls that follow each other take as long on the host as on the GPU, or longer
    yield replace(_case(short, ON_BAND), modes=(EAGER, SUSTAINED))


def training(tiny: bool = False) -> Iterator[Case]:
    """Forward and backward pass of the attention in a layer of Llama 3 8B, one sequence."""
    heads, kv_heads = (4, 2) if tiny else (32, 8)
    for length in (128,) if tiny else (8192, 32768):
        problem = Attention(1, heads, length, 128, kv_heads, dtype_of(tiny), causal=True)
        yield _case(replace(problem, forward_too=True), ON_BAND)


def _case(problem: Attention, peers: tuple[str, ...]) -> Case:
    case = case_of(problem, peers)
    work = problem.backward_work + problem.forward_too
    return replace(case, dense_flops=work * case.dense_flops)


SUITES = [
    Suite("backward", backward.__doc__ or "", backward, BACKWARD, OURS),
    Suite("backward_wide", wide.__doc__ or "", wide, BACKWARD, OURS),
    Suite("backward_small", small.__doc__ or "", small, BACKWARD, OURS),
    Suite("training", training.__doc__ or "", training, BACKWARD, OURS),
]
