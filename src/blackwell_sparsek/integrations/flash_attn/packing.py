"""Tensors of a call for packed sequences that are not packed: flash-attn 4 takes both kinds."""

from typing import Any, NamedTuple

import torch

from ...core.checks import check_rank, check_shape, check_tensor, message
from ...core.errors import InvalidInput
from ...masks.packed import check_cu_seqlens
from ...ragged.inputs import checked_maximum

DENSE, PACKED = "[B, S, H, D]", "[T, H, D]"


class Sequences(NamedTuple):
    """Packed tensors `[T, H, D]` of sequences that begin at `offsets`."""

    tensors: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    longest: int
    """At least the longest length."""
    batch: int | None
    """How many sequences of one length there are; None if the tensors came packed."""

    def unpacked(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of these queries in the layout in which they came."""
        if self.batch is None:
            return out, lse
        out = out.unflatten(0, (self.batch, self.longest))
        return out, lse.unflatten(1, (self.batch, self.longest)).transpose(0, 1)


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
            expected = f"int32 [B + 1] for packed {name} {PACKED}, or {name} {DENSE}"
            raise InvalidInput(message(op, arg, "is missing", expected, None))
        check_rank(op, name, x, DENSE)
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
