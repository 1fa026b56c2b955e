"""Packed sequences: checks of `cu_seqlens`, the offsets of sequences laid end to end."""

from itertools import pairwise

import torch

from ..core.checks import check_dtype, check_tensor, message
from ..core.errors import InvalidInput


def check_cu_seqlens(
    op: str, arg: str, cu_seqlens: torch.Tensor, *, device: torch.device | None = None
) -> None:
    """Check what the host knows without waiting: type, dtype, rank, length and device.

    Parameters
    ----------
    op, arg : str
        Names for messages.
    cu_seqlens : int32 `[B + 1]`
        Offsets of B sequences; `check_cu_seqlens_values` checks the numbers themselves.
    device : torch.device, optional
        Where the packed tokens live.
    """
    check_tensor(op, arg, cu_seqlens)
    check_dtype(op, arg, cu_seqlens, [torch.int32])
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise InvalidInput(
            message(op, arg, "has a wrong shape", "int32 [B + 1]", list(cu_seqlens.shape))
        )
    if not cu_seqlens.is_contiguous():
        stride = f"stride {cu_seqlens.stride(0)}"
        raise InvalidInput(message(op, arg, "is not contiguous", "stride 1", stride))
    if device is not None and cu_seqlens.device != device:
        raise InvalidInput(
            message(op, arg, "is on a different device", f"int32 on {device}", cu_seqlens.device)
        )


def check_same_batch(op: str, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
    """Queries and keys must hold the same number of sequences."""
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise InvalidInput(
            message(
                op,
                "cu_seqlens_q/cu_seqlens_k",
                "have different lengths",
                "[B + 1] both",
                f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}",
            )
        )


def check_cu_seqlens_values(
    op: str, arg: str, cu_seqlens: torch.Tensor, total: int, max_seqlen: int | None = None
) -> None:
    """Check the numbers: from 0, never falling, to `total`; no sequence exceeds `max_seqlen`.

    Waits for the device once. The message names the first index at fault.

    >>> cu_seqlens = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    >>> check_cu_seqlens_values("attention_varlen", "cu_seqlens_q", cu_seqlens, total=8)
    """
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise InvalidInput(message(op, f"{arg}[0]", "is wrong", 0, offsets[0]))
    for i, (start, end) in enumerate(pairwise(offsets), start=1):
        if end < start:
            raise InvalidInput(message(op, f"{arg}[{i}]", "falls", f"at least {start}", end))
        if max_seqlen is not None and end - start > max_seqlen:
            raise InvalidInput(
                message(
                    op,
                    f"{arg}[{i}]",
                    "ends a sequence longer than the given maximum",
                    f"at most {max_seqlen} tokens",
                    end - start,
                )
            )
    if offsets[-1] != total:
        last = len(offsets) - 1
        raise InvalidInput(
            message(op, f"{arg}[{last}]", "is not the number of tokens", total, offsets[-1])
        )


def sequence_lengths(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Length of each sequence, int32 `[B]`; does not wait for the device.

    >>> sequence_lengths(torch.tensor([0, 3, 3, 8], dtype=torch.int32))
    tensor([3, 0, 5], dtype=torch.int32)
    """
    return cu_seqlens[1:] - cu_seqlens[:-1]


def max_sequence_length(cu_seqlens: torch.Tensor) -> int:
    """Length of the longest sequence, 0 without sequences. Waits for the device.

    >>> max_sequence_length(torch.tensor([0, 3, 3, 8], dtype=torch.int32))
    5
    """
    if cu_seqlens.numel() < 2:
        return 0
    return int(sequence_lengths(cu_seqlens).max())
