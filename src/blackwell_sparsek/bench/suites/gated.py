"""Attention whose keys have a gate: the problem, its peers, the suite."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ... import BlockMask, attention, explain, sparsek_causal
from ...attention.gated.live_blocks import BLOCK, live_blocks
from ...calls.attention import AttentionCall, AttnSpec
from ...calls.gated_attention import GatedCall, KeyGate
from ...masks.band import Band
from ...testing.tolerance import assert_within_budget
from ..case import EAGER, Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import OURS

HOPPER, UNGATED = "bsk_sm90", "bsk_ungated"
# Heads and queries whose results are compared with fp64.
_CHECKED = 3
# Keys whose scores are high or low together, as those of a passage are.
_PASSAGE = 64


@dataclass(frozen=True)
class Gated:
    """Causal attention in which a query keeps about `keep` keys, those of the same passages."""

    heads: int
    kv_heads: int
    length: int
    keep: float
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        dtype = str(self.dtype).split(".")[-1]
        return {
            **{"heads": self.heads, "kv_heads": self.kv_heads, "length": self.length},
            **{"keep": self.keep, "head_dim": self.head_dim, "dtype": dtype},
        }

    def build(self, device: torch.device) -> "GatedInputs":
        """Random values, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        shape = (self.length, self.head_dim)
        q, k, v = (
            normal(1, heads, *shape).to(self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        passages = normal(1, self.kv_heads, -(-self.length // _PASSAGE))
        u = passages.repeat_interleave(_PASSAGE, -1)[..., : self.length]
        u = (4 * u + 0.1 * normal(1, self.kv_heads, self.length)).contiguous()
        return GatedInputs(self, q, k, v, KeyGate(u, sparsek_causal(u, self.keep)))


@dataclass(frozen=True)
class GatedInputs:
    """q, k and v [1, H, S, D], scores of keys and thresholds of queries [1, Hkv, S]."""

    problem: Gated
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: KeyGate

    @cached_property
    def mask(self) -> BlockMask:
        """The blocks that have a weight."""
        spec = AttnSpec(self.problem.head_dim**-0.5, Band(None, 0))
        return live_blocks(GatedCall(AttentionCall(self.q, self.k, self.v, spec), self.gate))

    @property
    def flops(self) -> float:
        """FLOPs in blocks that have a weight and a key that some query sees."""
        kept = self.mask.to_dense().expand(1, self.problem.heads, -1, -1)
        first_keys = torch.arange(kept.shape[-1], device=kept.device) * BLOCK[1]
        last_queries = torch.arange(1, kept.shape[-2] + 1, device=kept.device) * BLOCK[0] - 1
        seen = kept & (first_keys <= last_queries[:, None])
        return 4.0 * self.problem.head_dim * BLOCK[0] * BLOCK[1] * int(seen.sum())

    def check(self, has_gate: bool, out: torch.Tensor) -> None:
        """Compare some rows with fp64: by their weights, or by the blocks alone."""
        p = self.problem
        rows = torch.linspace(0, p.length - 1, _CHECKED).long().to(self.q.device)
        blocks = self.mask.to_dense().expand(1, p.heads, -1, -1)
        for head in torch.linspace(0, p.heads - 1, _CHECKED).long().tolist():
            own = head * p.kv_heads // p.heads
            weights = _weights(self.gate, own, rows)
            if not has_gate:
                kept = blocks[0, head, rows // BLOCK[0]]
                weights = kept.repeat_interleave(BLOCK[1], -1)[:, : p.length].double()
            exact, plain = (
                _attend(self.q[0, head, rows], self.k[0, own], self.v[0, own], weights, rows, dtype)
                for dtype in (torch.float64, torch.float32)
            )
            assert_within_budget(out[0, head, rows], exact, plain.to(out.dtype), what="out")


def _weights(gate: KeyGate, head: int, rows: torch.Tensor) -> torch.Tensor:
    return (gate.u[0, head].double() - gate.tau[0, head, rows, None].double()).clamp(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of one head, from the formula."""
    s = q.to(dtype) @ k.to(dtype).T * q.shape[-1] ** -0.5 + weights.to(dtype).log()
    hidden = torch.arange(len(k), device=q.device) > rows[:, None]
    weights_of_keys: torch.Tensor = s.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights_of_keys.nan_to_num(0.0) @ v.to(dtype)


def _gated(inputs: GatedInputs, impl: str) -> Contender:
    tensors = (inputs.q, inputs.k, inputs.v)
    options: dict[str, Any] = {"causal": True, "key_gate": inputs.gate, "impl": impl}
    notes = {"implementation": explain(attention, *tensors, **options).chosen}
    run = partial(attention, *tensors, **options)
    return Contender(run, partial(inputs.check, True), inputs.flops, notes=notes)


def _ungated(inputs: GatedInputs) -> Contender:
    run = partial(attention, inputs.q, inputs.k, inputs.v, causal=True, block_mask=inputs.mask)
    return Contender(run, partial(inputs.check, False), inputs.flops)


PEERS = {
    OURS: Peer(OURS, "blackwell_sparsek, impl auto", partial(_gated, impl="auto")),
    UNGATED: Peer(UNGATED, "blackwell_sparsek, the same blocks without a gate", _ungated),
    HOPPER: Peer(HOPPER, "blackwell_sparsek, impl sm90", partial(_gated, impl="sm90")),
}


def gated_attention(tiny: bool = False) -> Iterator[Case]:
    """Causal attention with SparseK's gate, compared with the same blocks without a gate."""
    sizes = [Gated(2, 1, 200, 40.0, 16, dtype_of(tiny))]
    if not tiny:
        sizes = [Gated(32, 8, 8192, 2048.0), Gated(32, 8, 32768, 4096.0)]
    for problem in sizes:
        name = f"H{problem.heads}:{problem.kv_heads} S{problem.length} keep {problem.keep:g}"
        yield Case(name, problem.describe(), problem.build, tuple(PEERS), modes=(EAGER,))


SUITES = [
    Suite("gated_attention", gated_attention.__doc__ or "", gated_attention, PEERS, OURS),
]
