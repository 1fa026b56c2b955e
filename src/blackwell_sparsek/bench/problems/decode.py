"""Inputs of decoding: one query per sequence against a cache, contiguous or in shuffled pages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...testing.tolerance import assert_within_budget
from .attention import attend

_CACHES_BYTES = 160 * 2**20
_MOST_REPLICAS = 64
_CHECKED = 16


@dataclass(frozen=True)
class Decode:
    """`batch` sequences of `length` cached tokens; `page_size` 0 is a contiguous cache."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    kept: float = 1.0
    """Share of the pages that are read, others for each sequence and KV head."""
    is_fp8: bool = False
    """Whether the cache stores float8_e4m3fn."""
    shortest: int = 0
    """Where not 0, lengths grow from this to `length` by the same factor from one to the next."""

    @property
    def title(self) -> str:
        """A name for tables."""
        length = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        length = f"{self.shortest}..{length}" if self.shortest else length
        where = f"pages of {self.page_size}" if self.page_size else "contiguous"
        where += f", {self.kept:.0%} of them" if self.kept < 1 else ""
        where += ", fp8" if self.is_fp8 else ""
        return f"B{self.batch} S{length} H{self.heads}:{self.kv_heads} D{self.head_dim}, {where}"

    def describe(self) -> dict[str, Any]:
        """As it stands in the results."""
        found = {
            "batch": self.batch,
            "length": self.length,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "dtype": str(self.dtype).split(".")[-1],
            "kept": self.kept,
            "cache_dtype": str(self.cache_dtype).split(".")[-1],
        }
        return found | {"lengths": self.lengths} if self.shortest else found

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each sequence, in an order that is neither up nor down.

        Examples
        --------
        >>> Decode(4, 800, shortest=100).lengths
        [100, 400, 200, 800]
        """
        if not self.shortest:
            return [self.length] * self.batch
        grown = self.length / self.shortest
        steps = [index / max(1, self.batch - 1) for index in range(self.batch)]
        lengths = [round(self.shortest * grown**step) for step in steps]
        return lengths[::2] + lengths[1::2]

    @property
    def cache_dtype(self) -> torch.dtype:
        """What the cache stores."""
        return torch.float8_e4m3fn if self.is_fp8 else self.dtype

    @property
    def flops(self) -> float:
        """Executed work: two products over the pairs that are read."""
        return 4.0 * self.kept * self.heads * sum(self.lengths) * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """Keys and values that a call must read."""
        elements = 2 * self.kv_heads * sum(self.lengths) * self.head_dim
        return round(elements * self.cache_dtype.itemsize * self.kept)

    def build(self, device: torch.device) -> "DecodeInputs":
        """Random values, the same at each call; pages in random order."""
        generator = torch.Generator(device).manual_seed(0)

        def values(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
            return made.to(self.cache_dtype)

        q = values(self.batch, self.heads, 1, self.head_dim).to(self.dtype)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        if not self.page_size:
            shape = (self.batch, self.kv_heads, self.length, self.head_dim)
            return DecodeInputs(self, q, values(*shape), values(*shape), lengths)
        each = -(-self.length // self.page_size)
        order = torch.randperm(self.batch * each, generator=generator, device=device)
        table = order.to(torch.int32).view(self.batch, each)
        shape = (self.batch * each, self.page_size, self.kv_heads, self.head_dim)
        blocks = None
        if self.kept < 1:
            scores = torch.rand(self.batch, self.kv_heads, each, generator=generator, device=device)
            blocks = scores.topk(max(1, round(self.kept * each))).indices.to(torch.int32)
        return DecodeInputs(self, q, values(*shape), values(*shape), lengths, table, blocks)


@dataclass(frozen=True)
class DecodeInputs:
    """q `[B, H, 1, D]`, caches and page table as `bsk.attention_decode` takes them."""

    problem: Decode
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    """Pages of each sequence and KV head that are read, int32 `[B, Hkv, n]`; None for all."""

    @cached_property
    def others(self) -> list["DecodeInputs"]:
        """These and copies, more than caches hold; none where one outgrows them."""
        size = self.problem.cache_bytes
        if size > _CACHES_BYTES or self.q.device.type != "cuda":
            return []
        count = max(2, min(_MOST_REPLICAS, -(-_CACHES_BYTES // size)))
        fixed = (self.lengths, self.table, self.blocks)
        copies = (
            DecodeInputs(self.problem, self.q.clone(), self.k.clone(), self.v.clone(), *fixed)
            for _ in range(count - 1)
        )
        return [self, *copies]

    def sequence(self, cache: torch.Tensor, b: int, kv_head: int) -> torch.Tensor:
        """Keys or values `[keys, D]` of one sequence and head that are read."""
        dtype, length = self.problem.dtype, self.problem.lengths[b]
        if self.table is None:
            return cache[b, kv_head, :length].to(dtype)
        if self.blocks is None:
            pages = cache[self.table[b].long(), :, kv_head]
            return pages.flatten(0, 1)[:length].to(dtype)
        listed = self.blocks[b, kv_head].long()
        size = self.problem.page_size
        position = (listed[:, None] * size + torch.arange(size, device=cache.device)).flatten()
        values = cache[self.table[b][listed].long(), :, kv_head].flatten(0, 1)
        return values[position < length].to(dtype)

    def check(self, out: torch.Tensor) -> None:
        """Compare `[B, H, 1, D]` with fp64 on the queries of sampled key heads."""
        if out.shape != self.q.shape:
            raise AssertionError(f"expected {list(self.q.shape)}, got {list(out.shape)}")
        heads, exact, plain = self._expected
        group = self.problem.heads // self.problem.kv_heads
        got = torch.cat([out[b, kv * group : (kv + 1) * group, 0] for b, kv in heads])
        assert_within_budget(got, exact, plain, what="queries of sampled key heads")

    @cached_property
    def _expected(self) -> tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]:
        """Sampled key heads, and what their queries give in fp64 and by plain PyTorch."""
        p = self.problem
        total, group = p.batch * p.kv_heads, p.heads // p.kv_heads
        numbers = range(0, total, max(1, total // _CHECKED))
        heads = [divmod(number, p.kv_heads) for number in numbers]
        exact, plain = [], []
        for b, kv in heads:
            q = self.q[b, kv * group : (kv + 1) * group, 0]
            k, v = (self.sequence(x, b, kv) for x in (self.k, self.v))
            seen = torch.ones(group, len(k), dtype=torch.bool, device=k.device)
            exact.append(attend(q.double(), k.double(), v.double(), seen))
            plain.append(attend(q, k, v, seen))
        return heads, torch.cat(exact), torch.cat(plain)


Call = Callable[[DecodeInputs], torch.Tensor]
