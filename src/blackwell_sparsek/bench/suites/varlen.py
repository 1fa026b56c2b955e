"""Attention over packed sequences of unequal lengths: the problem and its peers."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import attention, attention_varlen, explain
from ..case import Contender, Peer
from .attention_peers import (
    OURS,
    call_by_name,
    fa3_available,
    fa3_operator,
    fa3_options,
    load,
    needs,
    why_missing,
    workspace,
)
from .attention_problem import Attention, AttentionInputs


@dataclass(frozen=True)
class Varlen:
    """Sequences of `lengths`, packed end to end."""

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    kv_heads: int = 0
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False

    @property
    def title(self) -> str:
        """A name for tables."""
        heads = f"{self.heads}:{self.kv_heads}" if self.kv_heads else f"{self.heads}"
        parts = [f"{len(self.lengths)} sequences of {min(self.lengths)}..{max(self.lengths)}"]
        parts += [f"H{heads} D{self.head_dim}", "causal" if self.causal else "full"]
        if self.dtype != torch.bfloat16:
            parts.append(str(self.dtype).split(".")[-1])
        return " ".join(parts)

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        return {
            "lengths": list(self.lengths),
            "heads": self.heads,
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim,
            "dtype": str(self.dtype).split(".")[-1],
            "causal": self.causal,
        }

    def sequence(self, index: int) -> Attention:
        """One sequence as a separate problem."""
        shape = (1, self.heads, self.lengths[index], self.head_dim)
        return Attention(*shape, self.kv_heads, self.dtype, self.causal)

    @property
    def flops(self) -> float:
        """FLOPs: two products over the visible pairs."""
        pairs = sum(self.sequence(i).band_pairs() for i in range(len(self.lengths)))
        return 4.0 * self.heads * self.head_dim * pairs

    def build(self, device: torch.device) -> "VarlenInputs":
        """Random values, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)

        def values(heads: int) -> torch.Tensor:
            shape = (sum(self.lengths), heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

        kv_heads = self.kv_heads or self.heads
        starts = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        return VarlenInputs(self, values(self.heads), values(kv_heads), values(kv_heads), starts)


@dataclass(frozen=True)
class VarlenInputs:
    """q, k and v `[tokens, heads, D]` and the offsets of the sequences, int32 `[B + 1]`."""

    problem: Varlen
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor

    @property
    def longest(self) -> int:
        """The longest length."""
        return max(self.problem.lengths)

    def padded(self) -> list[torch.Tensor]:
        """q, k and v as `[B, H, longest, D]`, shorter sequences padded with zeros."""
        made = []
        for x in (self.q, self.k, self.v):
            whole = x.new_zeros(len(self.problem.lengths), x.shape[1], self.longest, x.shape[2])
            for index, length in enumerate(self.problem.lengths):
                begin, end = self._ends(index)
                whole[index, :, :length] = x[begin:end].transpose(0, 1)
            made.append(whole)
        return made

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """`[B, H, longest, D]` as `[tokens, H, D]`, without the padding."""
        lengths = self.problem.lengths
        rows = (x[:, :n].transpose(0, 1) for x, n in zip(padded, lengths, strict=True))
        return torch.cat(list(rows))

    def check(self, out: torch.Tensor) -> None:
        """Compare `[tokens, H, D]` with fp64 on sampled rows and heads of a few sequences."""
        if out.shape != self.q.shape:
            raise AssertionError(f"expected {list(self.q.shape)}, got {list(out.shape)}")
        for index, inputs in self._sampled:
            begin, end = self._ends(index)
            inputs.check()(out[begin:end].transpose(0, 1)[None])

    @cached_property
    def _sampled(self) -> list[tuple[int, AttentionInputs]]:
        """The first, middle, longest and last sequence."""
        lengths = self.problem.lengths
        chosen = {0, len(lengths) // 2, lengths.index(max(lengths)), len(lengths) - 1}
        found = []
        for index in sorted(chosen):
            begin, end = self._ends(index)
            q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
            found.append((index, AttentionInputs(self.problem.sequence(index), q, k, v, None)))
        return found

    def _ends(self, index: int) -> tuple[int, int]:
        begin = sum(self.problem.lengths[:index])
        return begin, begin + self.problem.lengths[index]


PADDED, SDPA_PADDED, TORCH = "bsk_padded", "sdpa_padded", "torch_varlen"
_FA3 = ("flash_attn_interface", "flash_attn_varlen_func")


def _packed(
    inputs: VarlenInputs, call: Callable[..., Any], notes: dict[str, Any] | None = None
) -> Contender:
    """A contender whose `call` takes and returns packed tensors, the output alone or in a tuple."""

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
    """`call` on padded tensors; with causal, a sequence does not see the padding after it."""
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
