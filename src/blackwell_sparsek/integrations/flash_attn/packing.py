"""Tensors in the layouts of flash-attn: batches with tokens before heads, and packed sequences.

Calls for packed sequences take both kinds, as in flash-attn 4. The functions inside get other
shapes than the caller passed, so what could fail there because of a shape is checked here before.
"""

from typing import Any, NamedTuple

import torch

from ...attention.inputs import PACKED, TOKENS_FIRST, check_qkv_shapes, clearly_valid
from ...calls.fp8 import is_turned
from ...core.checks import (
    check_last_dim_contiguous,
    check_rank,
    check_shape,
    check_tensor,
    message,
)
from ...core.errors import InvalidInput
from ...core.fp8 import E4M3
from ...masks.packed import check_cu_seqlens
from ...ragged.inputs import checked_maximum


class Sequences(NamedTuple):
    """Packed tensors `[T, H, D]` of sequences that begin at `offsets`."""

    tensors: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    longest: int
    """At least the longest length."""
    batch: int | None
    """How many sequences of one length there are; None if the tensors came packed."""

    @property
    def layout(self) -> str:
        """The layout in which the tensors came."""
        return PACKED if self.batch is None else TOKENS_FIRST

    def unpacked(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of these queries in the layout in which they came."""
        if self.batch is None:
            return out, lse
        out = out.unflatten(0, (self.batch, self.longest))
        return out, lse.unflatten(1, (self.batch, self.longest)).transpose(0, 1)


def check_batches(op: str, q: Any, k: Any, v: Any) -> None:
    """Check that q, k and v `[B, S, H, D]` go together."""
    if clearly_valid(q, k, v, TOKENS_FIRST):
        return
    tensors = {"q": q, "k": k, "v": v}
    for arg, x in tensors.items():
        check_tensor(op, arg, x)
        check_rank(op, arg, x, TOKENS_FIRST)
        if not (arg == "v" and x.dtype == E4M3 and is_turned(x.transpose(1, 2))):
            check_last_dim_contiguous(op, arg, x)
    check_qkv_shapes(op, tensors, TOKENS_FIRST)


def check_given(op: str, q: tuple[Any, str], k: tuple[Any, str], v: tuple[Any, str]) -> None:
    """Check that q, k and v go together as the caller gave them, each with its layout."""
    given = {"q": q, "k": k, "v": v}
    for arg, (x, layout) in given.items():
        check_tensor(op, arg, x)
        check_rank(op, arg, x, layout)
        check_last_dim_contiguous(op, arg, x)
    check_qkv_shapes(op, {arg: x for arg, (x, _) in given.items()}, PACKED)


def every(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Offsets of sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def packed_sequences(
    op: str,
    tensors: dict[str, Any],
    offsets: tuple[str, torch.Tensor | None],
    longest: tuple[str, Any],
    used: torch.Tensor | None,
) -> Sequences:
    """Sequences as packed ones: without offsets, tensors have one row of tokens for each.

    Offsets and the longest length come with the names of their arguments. `used` are the lengths
    in use, if they differ.
    """
    arg, given = offsets
    arg_longest, maximum = longest
    first, *_ = tensors.values()
    if given is not None:
        # flash-attn 4 allows for one sequence that has all tokens
        known = len(first) if maximum is None and isinstance(first, torch.Tensor) else maximum
        return Sequences(tuple(tensors.values()), given, known, None)
    for name, x in tensors.items():
        check_tensor(op, name, x)
        if x.dim() == 3:
            expected = f"int32 [B + 1] for packed {name} {PACKED}, or {name} {TOKENS_FIRST}"
            raise InvalidInput(message(op, arg, "is missing", expected, None))
        check_rank(op, name, x, TOKENS_FIRST)
        if x is not first:
            check_shape(op, name, x, (*first.shape[:2], *x.shape[2:]))
    batch, length = first.shape[:2]
    if maximum is not None and checked_maximum(op, arg_longest, maximum) < length and used is None:
        expected = f"at least {length}, the length of the sequences, or None"
        raise InvalidInput(message(op, arg_longest, "is too small", expected, maximum))
    flat = tuple(flattened(op, name, x) for name, x in tensors.items())
    return Sequences(flat, every(batch, length, first.device), length, batch)


def check_one_batch(op: str, queries: Sequences, keys: Sequences) -> None:
    """Queries and keys are of as many sequences; where both are packed, it is checked later."""
    if keys.batch is None and queries.batch is None:
        return
    batches = []
    for arg, sequences in (("q", queries), ("k", keys)):
        check_cu_seqlens(op, f"cu_seqlens_{arg}", sequences.offsets)
        batches.append(sequences.offsets.numel() - 1)
    if batches[0] != batches[1]:
        raise InvalidInput(message(op, "q/k", "have different batch sizes", "one", batches))


def flattened(op: str, arg: str, x: torch.Tensor) -> torch.Tensor:
    """Batched tokens as packed ones, without a copy."""
    batch, length = x.shape[:2]
    if batch > 1 and length > 1 and x.stride(0) != length * x.stride(1):
        expected = f"sequences one after another (call .contiguous()), or packed {PACKED}"
        got = f"strides {x.stride()}"
        raise InvalidInput(message(op, arg, "has gaps between sequences", expected, got))
    return x.flatten(0, 1)
