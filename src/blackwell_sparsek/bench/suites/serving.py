"""A step of a serving engine, attention over pages and writing keys: problems, peers, suites."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ... import attention_decode, attention_varlen, explain, kv_append
from ...kv_cache.slots import Rotary
from ...testing.tolerance import assert_within_budget
from ..case import EAGER, GRAPH, Case, Contender, Peer, Suite
from .attention_peers import (
    OURS,
    call_by_name,
    fa3_available,
    fa3_operator,
    fa3_options,
    load,
    why_missing,
)
from .attention_problem import attend

_FA3 = ("flash_attn_interface", "flash_attn_varlen_func")
_CHECKED = 4
"""Queries that are compared with fp64, of each of as many sequences."""


@dataclass(frozen=True)
class Step:
    """`decodes` sequences with one new token each, and `prefills` prompts, over pages."""

    decodes: int
    decode_length: int
    prefills: int
    prefill_length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def title(self) -> str:
        """A name for tables."""
        parts = []
        if self.decodes:
            parts.append(f"{self.decodes} decodes at {_short(self.decode_length)}")
        if self.prefills:
            parts.append(f"{self.prefills} prefills of {_short(self.prefill_length)}")
        return f"{' + '.join(parts)}, H{self.heads}:{self.kv_heads} D{self.head_dim}"

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        return {**vars(self), "dtype": str(self.dtype).split(".")[-1]}

    @property
    def q_lens(self) -> list[int]:
        """Queries of each sequence."""
        return [1] * self.decodes + [self.prefill_length] * self.prefills

    @property
    def kv_lens(self) -> list[int]:
        """Keys of each sequence."""
        return [self.decode_length] * self.decodes + [self.prefill_length] * self.prefills

    @property
    def flops(self) -> float:
        """FLOPs: two products over the query-key pairs that are seen."""
        prompt = self.prefill_length * (self.prefill_length + 1) // 2
        pairs = self.decodes * self.decode_length + self.prefills * prompt
        return 4.0 * self.heads * self.head_dim * pairs

    def build(self, device: torch.device) -> "StepInputs":
        """Random values, the same at each call; pages in random order."""
        generator = torch.Generator(device).manual_seed(0)
        random: dict[str, Any] = {"generator": generator, "device": device}
        each = -(-max(self.kv_lens) // self.page_size)
        pages = len(self.kv_lens) * each
        shape = (pages, self.page_size, self.kv_heads, self.head_dim)
        k, v = (torch.randn(shape, dtype=self.dtype, **random) for _ in range(2))
        q = torch.randn(sum(self.q_lens), self.heads, self.head_dim, dtype=self.dtype, **random)
        table = torch.randperm(pages, **random).to(torch.int32).view(-1, each)
        offsets = torch.tensor([0, *self.q_lens]).cumsum(0).to(device, torch.int32)
        lengths = torch.tensor(self.kv_lens, device=device, dtype=torch.int32)
        return StepInputs(self, q, k, v, offsets, lengths, table)


@dataclass(frozen=True)
class StepInputs:
    """q `[T, H, D]`, pages and table as `bsk.attention_varlen` takes them."""

    problem: Step
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    offsets: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor

    def sequence(self, pages: torch.Tensor, b: int) -> torch.Tensor:
        """Keys or values `[keys, Hkv, D]` of one sequence."""
        return pages[self.table[b].long()].flatten(0, 1)[: self.problem.kv_lens[b]]

    def check(self, out: torch.Tensor) -> None:
        """Compare `[T, H, D]` with fp64 on sampled queries."""
        if out.shape != self.q.shape:
            raise AssertionError(f"expected {list(self.q.shape)}, got {list(out.shape)}")
        places, exact, plain = self._expected
        assert_within_budget(out[places], exact, plain, what="sampled queries")

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of q, and their results in fp64 and by plain PyTorch."""
        p, group = self.problem, self.problem.heads // self.problem.kv_heads
        places: list[int] = []
        exact: list[torch.Tensor] = []
        plain: list[torch.Tensor] = []
        batch = len(p.q_lens)
        for b in range(0, batch, max(1, batch // _CHECKED)):
            k, v = (self.sequence(x, b).repeat_interleave(group, 1) for x in (self.k, self.v))
            for i in {0, p.q_lens[b] // 3, p.q_lens[b] - 1}:
                place = int(self.offsets[b]) + i
                seen = p.kv_lens[b] - p.q_lens[b] + i + 1
                mask = torch.ones(1, seen, dtype=torch.bool, device=k.device)
                q = self.q[place]
                for found, dtype in ((exact, torch.float64), (plain, q.dtype)):
                    rows = []
                    for h in range(p.heads):
                        one, keys, values = q[h : h + 1], k[:seen, h], v[:seen, h]
                        rows.append(attend(one.to(dtype), keys.to(dtype), values.to(dtype), mask))
                    found.append(torch.cat(rows))
                places.append(place)
        index = torch.tensor(places, device=self.q.device)
        return index, torch.stack(exact), torch.stack(plain)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


# Peers of attention: this package by `auto`, each of its kernels, its own calls for decoding steps
# and for prompts, and FlashAttention 3 as vLLM calls it.


def _contender(inputs: StepInputs, call: Callable[[], Any], **notes: Any) -> Contender:
    return Contender(call, inputs.check, inputs.problem.flops, (), notes or None)


def _ours(inputs: StepInputs, impl: str) -> Contender:
    def call() -> Any:
        return attention_varlen(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.offsets,
            max_seqlen_q=max(inputs.problem.q_lens),
            cache_seqlens=inputs.lengths,
            page_table=inputs.table,
            causal=True,
            impl=impl,
        )

    decision = explain(call)
    notes = {"implementation": decision.chosen, "why_not": dict(decision.reasons)}
    return _contender(inputs, call, **notes)


def _own_decode(inputs: StepInputs) -> Contender:
    q = inputs.q[:, :, None]

    def call() -> Any:
        out: Any = attention_decode(
            q, inputs.k, inputs.v, cache_seqlens=inputs.lengths, page_table=inputs.table
        )
        return out[:, :, 0]

    return _contender(inputs, call)


def _own_forward(inputs: StepInputs) -> Contender:
    """Over packed keys, without pages."""
    p = inputs.problem
    k, v = (
        torch.cat([inputs.sequence(x, b) for b in range(p.prefills)]) for x in (inputs.k, inputs.v)
    )
    sizes: dict[str, Any] = {"max_seqlen_q": p.prefill_length, "max_seqlen_k": p.prefill_length}

    def call() -> Any:
        offsets = inputs.offsets
        return attention_varlen(inputs.q, k, v, offsets, offsets, **sizes, causal=True)

    return _contender(inputs, call)


def _fa3(inputs: StepInputs) -> Contender:
    p = inputs.problem
    lengths: dict[str, Any] = {"max_seqlen_q": max(p.q_lens), "max_seqlen_k": max(p.kv_lens)}
    lengths["cu_seqlens_q"] = inputs.offsets
    if why_missing(*_FA3) is None:
        function = load(*_FA3)
        pages = {"seqused_k": inputs.lengths, "block_table": inputs.table, "causal": True}

        def call() -> Any:
            out: Any = function(inputs.q, inputs.k, inputs.v, **lengths, cu_seqlens_k=None, **pages)
            return out[0] if isinstance(out, tuple) else out

        return _contender(inputs, call)
    operator = fa3_operator()
    values = fa3_options(p.head_dim, causal=True) | lengths
    values |= {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    values |= {"seqused_k": inputs.lengths, "page_table": inputs.table}
    return _contender(inputs, lambda: call_by_name(operator, values)[0], build="vLLM's library")


def _on_gpu(inputs: StepInputs) -> str | None:
    return None if inputs.q.is_cuda else "needs a CUDA GPU"


STEPS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", partial(_ours, impl="auto")),
        Peer("sm90", "blackwell_sparsek, impl sm90", partial(_ours, impl="sm90"), supports=_on_gpu),
        Peer(
            "triton",
            "blackwell_sparsek, impl triton",
            partial(_ours, impl="triton"),
            supports=_on_gpu,
        ),
        Peer(
            "own_decode",
            "blackwell_sparsek, attention_decode",
            _own_decode,
            supports=lambda x: "has prompts" if x.problem.prefills else None,
        ),
        Peer(
            "own_forward",
            "blackwell_sparsek, packed keys",
            _own_forward,
            supports=lambda x: "has decoding steps" if x.problem.decodes else None,
        ),
        Peer(
            "fa3", "FlashAttention 3", _fa3, available=fa3_available, supports=_on_gpu, rival=True
        ),
    )
}


def serving(tiny: bool = False) -> Iterator[Case]:
    """Steps of an engine over pages of 16: decoding and prompts together, and each alone."""
    if tiny:
        steps = [Step(3, 70, 2, 40, 4, 2, 64, 16, torch.float32)]
        steps += [Step(3, 70, 0, 0, 4, 2, 64, 16, torch.float32)]
        steps += [Step(0, 0, 2, 40, 4, 2, 64, 16, torch.float32)]
    else:
        steps = [Step(32, 8192, 2, 4096), Step(32, 8192, 0, 0), Step(0, 0, 2, 4096)]
    for step in steps:
        yield Case(
            step.title, step.describe(), step.build, tuple(STEPS), step.flops, (EAGER, GRAPH)
        )


# Writing the keys and values of a step.


@dataclass(frozen=True)
class Append:
    """`tokens` new tokens, rotated and written to random slots."""

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def title(self) -> str:
        """A name for tables."""
        return f"{_short(self.tokens)} tokens, H{self.heads}:{self.kv_heads} D{self.head_dim}"

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        return {**vars(self), "dtype": str(self.dtype).split(".")[-1]}

    @property
    def moved_bytes(self) -> float:
        """Queries, keys and values, read and written."""
        numbers = self.tokens * (self.heads + 2 * self.kv_heads) * self.head_dim
        return 2.0 * numbers * self.dtype.itemsize

    def build(self, device: torch.device) -> "AppendInputs":
        """Random values, the same at each call."""
        random: dict[str, Any] = {
            "generator": torch.Generator(device).manual_seed(0),
            "device": device,
        }
        q = torch.randn(self.tokens, self.heads, self.head_dim, dtype=self.dtype, **random)
        shape = (self.tokens, self.kv_heads, self.head_dim)
        k, v = (torch.randn(shape, dtype=self.dtype, **random) for _ in range(2))
        slots = torch.randperm(2 * self.tokens, **random)[: self.tokens]
        positions = torch.arange(self.tokens, device=device)
        angles = torch.rand(self.tokens, self.head_dim // 2, **random)
        return AppendInputs(self, q, k, v, slots, positions, angles.cos(), angles.sin())


@dataclass(frozen=True)
class AppendInputs:
    """New tokens `[T, H, D]`, their slots, and the tables of the rotary embedding."""

    problem: Append
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def check(self, result: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Compare rotated queries and the written keys with fp64."""
        q, pages = result
        keys = pages.flatten(0, 1)[self.slots]
        for what, got, given in (("queries", q, self.q), ("keys", keys, self.k)):
            exact, plain = (
                self._rotated(given.to(dtype)) for dtype in (torch.float64, torch.float32)
            )
            assert_within_budget(got, exact, plain.to(got.dtype), what=what)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (t.to(x.dtype)[:, None] for t in (self.cos, self.sin))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _append(inputs: AppendInputs) -> Contender:
    pages = [torch.zeros(2 * len(inputs.k) // 16, 16, *inputs.k.shape[1:]) for _ in range(2)]
    k_pages, v_pages = (x.to(inputs.k) for x in pages)
    rotary = Rotary(inputs.cos, inputs.sin)

    def call() -> Any:
        q = kv_append(
            k_pages,
            v_pages,
            inputs.k,
            inputs.v,
            slot_mapping=inputs.slots,
            rotary=rotary,
            positions=inputs.positions,
            q=inputs.q,
        )
        return q, k_pages

    moved = inputs.problem.moved_bytes
    return Contender(call, inputs.check, moved_bytes=moved)


def _copy(inputs: AppendInputs) -> Contender:
    """As many bytes, copied by torch."""
    source = torch.cat([x.flatten() for x in (inputs.q, inputs.k, inputs.v)])
    target = torch.empty_like(source)

    def check(result: torch.Tensor) -> None:
        if not result.equal(source):
            raise AssertionError("a copy differs")

    return Contender(lambda: target.copy_(source), check, moved_bytes=inputs.problem.moved_bytes)


APPENDS = {
    OURS: Peer(OURS, "blackwell_sparsek, kv_append with rotary", _append),
    "copy": Peer("copy", "torch.Tensor.copy_ of as many bytes", _copy),
}


def append(tiny: bool = False) -> Iterator[Case]:
    """Rotating new tokens and writing them to cache slots, compared with a plain copy."""
    problems = [Append(32), Append(8192), Append(65536)]
    if tiny:
        problems = [Append(48, 4, 2, 64, torch.float32)]
    for problem in problems:
        yield Case(
            problem.title, problem.describe(), problem.build, tuple(APPENDS), 0.0, (EAGER, GRAPH)
        )


SUITES = [
    Suite("serving", serving.__doc__ or "", serving, STEPS, OURS, unit="us"),
    Suite("append", append.__doc__ or "", append, APPENDS, OURS, unit="us"),
]
