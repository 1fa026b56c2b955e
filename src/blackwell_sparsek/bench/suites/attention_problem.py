"""Inputs of attention, its FLOPs, and the check of results on samples.

A check computes a few rows of a few heads in fp64, so that it needs little time and memory at any
length. It derives the visible keys of a row from positions and kept blocks alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ... import BlockMask
from ...testing.tolerance import assert_within_budget

# Replicas together are larger than any current L2 cache.
_CACHES_BYTES = 160 * 2**20
_MOST_REPLICAS = 128
_CHECKED_HEADS, _CHECKED_ROWS = 4, 64


@dataclass(frozen=True)
class Attention:
    """`softmax(q k^T) v` for `batch` x `heads` heads; see `bsk.attention` for causal and window."""

    batch: int
    heads: int
    length: int
    head_dim: int
    kv_heads: int = 0
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: int | None = None
    block: tuple[int, int] | None = None
    """Query and KV block sizes of a random block mask, which differs between heads."""
    density: float = 1.0
    forward_too: bool = False
    """Whether gradients are timed together with their forward pass."""
    head_dim_v: int = 0
    """Head dim of the values; 0 is that of the keys."""

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        found = {
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads or self.heads,
            "length": self.length,
            "head_dim": self.head_dim,
            "dtype": str(self.dtype).split(".")[-1],
            "causal": self.causal,
        }
        if self.head_dim_v:
            found["head_dim_v"] = self.head_dim_v
        if self.window is not None:
            found["window"] = self.window
        if self.block is not None:
            found |= {"block": list(self.block), "density": self.density}
        return found | {"forward_too": True} if self.forward_too else found

    @property
    def title(self) -> str:
        """A name for tables."""
        heads = f"{self.heads}:{self.kv_heads}" if self.kv_heads else f"{self.heads}"
        length = f"{self.length // 1024}k" if self.length % 1024 == 0 else f"{self.length}"
        dims = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v else f"{self.head_dim}"
        parts = [f"B{self.batch} H{heads} S{length} D{dims}"]
        parts += ["causal"] if self.causal else ["full"] if self.block is None else []
        parts += [f"window {self.window}"] if self.window is not None else []
        if self.block is not None:
            parts.append(f"blocks {self.block[0]}x{self.block[1]} at {self.density:.0%}")
        if self.dtype != torch.bfloat16:
            parts.append(str(self.dtype).split(".")[-1])
        return " ".join(parts)

    @property
    def value_dim(self) -> int:
        """Head dim of the values and of the output."""
        return self.head_dim_v or self.head_dim

    @property
    def backward_work(self) -> float:
        """FLOPs of a backward pass over those of a forward pass.

        Scores, dk and dq are as wide as keys, dp and dv as wide as values.
        """
        dims = self.head_dim, self.value_dim
        return (3 * dims[0] + 2 * dims[1]) / sum(dims)

    def dense(self) -> "Attention":
        """The same without window and block mask."""
        return replace(self, window=None, block=None, density=1.0)

    def band_pairs(self) -> float:
        """Query-key pairs of one head within causal and window."""
        at = torch.arange(self.length, dtype=torch.float64)
        last = at if self.causal else torch.full_like(at, self.length - 1)
        first = torch.zeros_like(at)
        if self.window is not None:
            first = (at - (self.window - 1)).clamp(min=0)
            last = last.minimum(at + (0 if self.causal else self.window - 1))
        return float((last - first + 1).sum())

    def build(self, device: torch.device) -> "AttentionInputs":
        """Random values and a random mask of exactly this density, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)
        kv_heads = self.kv_heads or self.heads

        def values(heads: int, dim: int) -> torch.Tensor:
            shape = (self.batch, heads, self.length, dim)
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

        keep = None
        if self.block is not None:
            rows, columns = (-(-self.length // side) for side in self.block)
            keep = _random_blocks(self.heads, rows, columns, self.density, generator, device)
        q, k = values(self.heads, self.head_dim), values(kv_heads, self.head_dim)
        v = values(kv_heads, self.value_dim)
        return AttentionInputs(self, q, k, v, keep)


def _random_blocks(
    heads: int,
    rows: int,
    columns: int,
    density: float,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """The same number of blocks in every row, at least one: bool `[heads, rows, columns]`."""
    count = max(1, round(density * columns))
    scores = torch.rand(heads, rows, columns, generator=generator, device=device)
    keep = torch.zeros(heads, rows, columns, dtype=torch.bool, device=device)
    return keep.scatter_(2, scores.topk(count, dim=2).indices, True)


@dataclass(frozen=True)
class AttentionInputs:
    """The tensors of an `Attention`."""

    problem: Attention
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keep: torch.Tensor | None
    """Kept blocks, bool `[heads, query blocks, key blocks]`."""

    @cached_property
    def mask(self) -> BlockMask | None:
        """The kept blocks as a block mask of this package."""
        if self.keep is None or self.problem.block is None:
            return None
        return BlockMask.from_dense(
            self.keep[None], self.problem.block, (self.problem.length, self.problem.length)
        )

    @cached_property
    def pairs(self) -> float:
        """Visible query-key pairs, over batch and heads."""
        p = self.problem
        if self.keep is None or p.block is None:
            return p.batch * p.heads * p.band_pairs()
        elements = self.keep.sum().item() * p.block[0] * p.block[1]
        return float(p.batch * elements)

    @property
    def flops(self) -> float:
        """FLOPs of a forward pass: two products over the visible pairs."""
        return 2.0 * (self.problem.head_dim + self.problem.value_dim) * self.pairs

    @property
    def shown(self) -> str:
        """The kind of mask, for peers that support few kinds: blocks, window or band."""
        if self.keep is not None:
            return "blocks"
        return "window" if self.problem.window is not None else "band"

    def token_major(self) -> list[torch.Tensor]:
        """q, k and v as contiguous `[B, S, H, D]`, the layout of flash_attn and its relatives."""
        return [x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v)]

    def others(self) -> list["AttentionInputs"]:
        """These inputs and copies that outgrow the caches; empty if one alone outgrows them."""
        size = sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v))
        if size > _CACHES_BYTES or self.q.device.type != "cuda":
            return []
        count = max(2, min(_MOST_REPLICAS, -(-_CACHES_BYTES // size)))
        return [self, *(self._copy() for _ in range(count - 1))]

    def _copy(self) -> "AttentionInputs":
        q, k, v = (x.clone() for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def visible(self, head: int, rows: torch.Tensor) -> torch.Tensor:
        """The keys that `rows` of a head see: bool `[len(rows), length]`."""
        p = self.problem
        key = torch.arange(p.length, device=rows.device)
        seen = torch.ones(len(rows), p.length, dtype=torch.bool, device=rows.device)
        if p.causal:
            seen &= key <= rows[:, None]
        if p.window is not None:
            seen &= (key - rows[:, None]).abs() < p.window
        if self.keep is not None and p.block is not None:
            blocks = self.keep[head][rows // p.block[0]]
            seen &= blocks.repeat_interleave(p.block[1], 1)[:, : p.length]
        return seen

    def keys_of(self, first: int, last: int) -> slice:
        """The smallest range that holds all keys within the band of rows `first` to `last`."""
        p = self.problem
        before = 0 if p.window is None else max(0, first - p.window + 1)
        after = p.length if p.window is None else min(p.length, last + p.window)
        return slice(before, last + 1 if p.causal else after)

    def check(self) -> Callable[[torch.Tensor], None]:
        """Compare `[B, H, S, Dv]` with fp64 on the first, middle and last rows of a few heads."""

        def compare(out: torch.Tensor) -> None:
            shape = (*self.q.shape[:-1], self.v.shape[-1])
            if out.shape != shape:
                raise AssertionError(f"expected {list(shape)}, got {list(out.shape)}")
            rows, heads, exact, plain = self._expected
            got = torch.stack([out[b, h, rows] for b, h in heads])
            what = f"sampled rows of (batch, head) {heads}"
            assert_within_budget(got, exact, plain, what=what)

        return compare

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, list[tuple[int, int]], torch.Tensor, torch.Tensor]:
        """Sampled rows and heads with their fp64 and plain PyTorch results, shared by all peers."""
        p, device = self.problem, self.q.device
        rows = _sampled(p.length, _CHECKED_ROWS * 3, device)
        numbers = _sampled(p.batch * p.heads, _CHECKED_HEADS, device).tolist()
        heads = [divmod(number, p.heads) for number in numbers]
        exact, plain = [], []
        for b, h in heads:
            q, k, v = self.q[b, h, rows], *self._kv(b, h)
            seen = self.visible(h, rows)
            exact.append(attend(q.double(), k.double(), v.double(), seen))
            plain.append(attend(q, k, v, seen))
        return rows, heads, torch.stack(exact), torch.stack(plain)

    def _kv(self, b: int, h: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.problem.heads // (self.problem.kv_heads or self.problem.heads)
        return self.k[b, h // group], self.v[b, h // group]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention of `[rows, D]` to `[keys, D | Dv]`; rows that see nothing are 0.

    Examples
    --------
    >>> import torch
    >>> q = k = v = torch.ones(2, 3)
    >>> attend(q, k, v, torch.tensor([[True, False], [False, False]]))
    tensor([[1., 1., 1.],
            [0., 0., 0.]])
    """
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.where(seen.any(1, keepdim=True), weights.nan_to_num(), 0) @ v


def _sampled(size: int, count: int, device: torch.device) -> torch.Tensor:
    """Up to `count` indices: runs at both ends, and evenly spaced ones between."""
    if size <= count:
        return torch.arange(size, device=device)
    third = max(1, count // 3)
    even = torch.linspace(third, size - third - 1, count - 2 * third).round().long()
    ends = torch.cat([torch.arange(third), even, torch.arange(size - third, size)])
    places = sorted(set(ends.tolist()))
    return torch.tensor(places, device=device)
