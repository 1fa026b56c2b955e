"""Inputs of attention over packed sequences of unequal lengths."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .attention import Attention, AttentionInputs


@dataclass(frozen=True)
class Varlen:
    """Sequences of `lengths`, one behind the other without gaps."""

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
        """As it stands in the results."""
        return {
            "lengths": list(self.lengths),
            "heads": self.heads,
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim,
            "dtype": str(self.dtype).split(".")[-1],
            "causal": self.causal,
        }

    def sequence(self, index: int) -> Attention:
        """One sequence as a problem of its own."""
        shape = (1, self.heads, self.lengths[index], self.head_dim)
        return Attention(*shape, self.kv_heads, self.dtype, self.causal)

    @property
    def flops(self) -> float:
        """Executed work: two products over the visible pairs."""
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
        """q, k and v as `[B, H, longest, D]`, zeros behind the shorter sequences."""
        made = []
        for x in (self.q, self.k, self.v):
            whole = x.new_zeros(len(self.problem.lengths), x.shape[1], self.longest, x.shape[2])
            for index, length in enumerate(self.problem.lengths):
                begin, end = self._ends(index)
                whole[index, :, :length] = x[begin:end].transpose(0, 1)
            made.append(whole)
        return made

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """`[B, H, longest, D]` as `[tokens, H, D]`, what lies behind the sequences left out."""
        lengths = self.problem.lengths
        rows = (x[:, :n].transpose(0, 1) for x, n in zip(padded, lengths, strict=True))
        return torch.cat(list(rows))

    def check(self, out: torch.Tensor) -> None:
        """Compare `[tokens, H, D]` with fp64 on rows and heads of the first and other sequences."""
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
