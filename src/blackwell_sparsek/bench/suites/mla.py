"""Decoding over latent caches (MLA with absorbed weights): problem, peers, suite.

Queries have 576 columns, and all heads share one cache whose first 512 columns are the values too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ... import attention_decode, explain
from ...testing.tolerance import assert_within_budget
from ..case import EAGER, GRAPH, Case, Contender, Peer, Suite
from .attention_peers import OURS
from .flash_mla import FLASH_MLA, LatentDecoding, flash_mla_available

KEYS, VALUES = 576, 512
# Keys of DeepSeek-V3 before their weights are absorbed have 128 + 64 columns.
SCALE = 1 / math.sqrt(192)
PLAIN = "torch"
_CHECKED = 8


@dataclass(frozen=True)
class Latent:
    """`batch` sequences of `length` cached tokens; `page_size` 0 is a contiguous cache."""

    batch: int
    length: int
    heads: int = 128
    page_size: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def title(self) -> str:
        """A name for tables."""
        length = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        where = f"pages of {self.page_size}" if self.page_size else "contiguous"
        return f"B{self.batch} S{length} H{self.heads}, {where}"

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        return {
            "batch": self.batch,
            "length": self.length,
            "heads": self.heads,
            "head_dim": KEYS,
            "head_dim_v": VALUES,
            "page_size": self.page_size,
            "dtype": str(self.dtype).split(".")[-1],
        }

    @property
    def flops(self) -> float:
        """FLOPs of both products."""
        return 2.0 * self.batch * self.heads * self.length * (KEYS + VALUES)

    @property
    def cache_bytes(self) -> float:
        """Bytes of the cache, which a call must read once."""
        return float(self.batch * self.length * KEYS * self.dtype.itemsize)

    def build(self, device: torch.device) -> "LatentInputs":
        """Random values, the same at each call; pages in random order."""
        generator = torch.Generator(device).manual_seed(0)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

        q = values(self.batch, self.heads, 1, KEYS)
        lengths = torch.full((self.batch,), self.length, dtype=torch.int32, device=device)
        if not self.page_size:
            return LatentInputs(self, q, values(self.batch, 1, self.length, KEYS), lengths, None)
        each = -(-self.length // self.page_size)
        order = torch.randperm(self.batch * each, generator=generator, device=device)
        table = order.to(torch.int32).view(self.batch, each)
        pages = values(self.batch * each, self.page_size, 1, KEYS)
        return LatentInputs(self, q, pages, lengths, table)


@dataclass(frozen=True)
class LatentInputs:
    """q [B, H, 1, 576], the cache and its page table."""

    problem: Latent
    q: torch.Tensor
    cache: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor | None

    def keys(self, b: int) -> torch.Tensor:
        """The keys [S, 576] of a sequence."""
        if self.table is None:
            return self.cache[b, 0]
        return self.cache[self.table[b].long()].flatten(0, 2)[: self.problem.length]

    def check(self, out: torch.Tensor) -> None:
        """Compare some heads of the last sequence with fp64."""
        b = self.problem.batch - 1
        heads = torch.arange(0, self.problem.heads, -(-self.problem.heads // _CHECKED))
        heads = heads.to(self.q.device)
        keys, queries = self.keys(b), self.q[b, heads, 0]
        made = []
        for dtype in (torch.float64, keys.dtype):
            k, q = keys.to(dtype), queries.to(dtype)
            p = torch.softmax((q @ k.mT) * SCALE, -1)
            made.append(p @ k[:, :VALUES])
        exact, plain = made
        assert_within_budget(out[b, heads, 0], exact, plain, what=f"sequence {b}")


def _contender(inputs: LatentInputs, run: Any, notes: dict[str, Any] | None = None) -> Contender:
    problem = inputs.problem
    bytes_moved = problem.cache_bytes
    return Contender(run, inputs.check, problem.flops, notes=notes, moved_bytes=bytes_moved)


def _ours(inputs: LatentInputs) -> Contender:
    options: dict[str, Any] = {
        "cache_seqlens": inputs.lengths,
        "page_table": inputs.table,
        "scale": SCALE,
    }
    tensors = (inputs.q, inputs.cache, inputs.cache[..., :VALUES])
    decision = explain(attention_decode, *tensors, **options)
    notes = {"implementation": decision.chosen, "why_not": decision.reasons}
    return _contender(inputs, lambda: attention_decode(*tensors, **options), notes)


def _plain(inputs: LatentInputs) -> Contender:
    q, cache = inputs.q[:, :, 0], inputs.cache[:, 0]

    def run() -> torch.Tensor:
        p = torch.softmax(torch.bmm(q, cache.mT) * SCALE, -1)
        return torch.bmm(p, cache[..., :VALUES]).unsqueeze(2)

    return _contender(inputs, run)


def _flash_mla(inputs: LatentInputs) -> Contender:
    assert inputs.table is not None
    attend = LatentDecoding(inputs.lengths, inputs.table, VALUES, SCALE)
    q = inputs.q.transpose(1, 2)
    return _contender(inputs, lambda: attend(q, inputs.cache).transpose(1, 2))


def _is_contiguous(inputs: LatentInputs) -> str | None:
    return None if inputs.table is None else "reads contiguous caches only"


def _has_pages_of_64(inputs: LatentInputs) -> str | None:
    if not inputs.q.is_cuda:
        return "needs a CUDA GPU"
    return None if inputs.problem.page_size == 64 else "reads pages of 64 only"


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", _ours),
        Peer(PLAIN, "two products and a softmax of torch", _plain, supports=_is_contiguous),
        Peer(
            FLASH_MLA,
            "FlashMLA",
            _flash_mla,
            flash_mla_available,
            _has_pages_of_64,
            True,
        ),
    )
}


def mla(tiny: bool = False) -> Iterator[Case]:
    """Latent caches of MLA, 16 to 128 heads, contiguous and in pages of 64."""
    if tiny:
        for page_size in (0, 16):
            yield _case(Latent(2, 48, 16, page_size, torch.float32))
        return
    for page_size in (0, 64):
        for length in (8192, 32768):
            for batch in (1, 16, 64):
                yield _case(Latent(batch, length, page_size=page_size))
    for heads in (16, 32, 64):
        yield _case(Latent(16, 8192, heads, 64))


def _case(problem: Latent) -> Case:
    peers, modes = tuple(PEERS), (EAGER, GRAPH)
    return Case(problem.title, problem.describe(), problem.build, peers, problem.flops, modes)


SUITES = [Suite("mla", mla.__doc__ or "", mla, PEERS, OURS, PLAIN, unit="us")]
