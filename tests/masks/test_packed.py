"""Checks of cu_seqlens: what each refuses, and what stands at the boundary."""

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks.packed import (
    check_cu_seqlens,
    check_cu_seqlens_values,
    check_same_batch,
    max_sequence_length,
    sequence_lengths,
)

CPU = torch.device("cpu")


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("cu", [offsets(0), offsets(0, 5), offsets(0, 0, 3, 3)])
def test_host_check_accepts(cu):
    check_cu_seqlens("op", "cu_seqlens_q", cu, device=CPU)
    check_cu_seqlens("op", "cu_seqlens_q", cu)


@pytest.mark.parametrize(
    ("cu", "error", "text"),
    [
        ([0, 3], InvalidType, r"^op: cu_seqlens_q is not a tensor; .* got list$"),
        (offsets(0, 3).long(), InvalidType, r"unsupported dtype; .*torch.int32, got torch.int64$"),
        (
            offsets(0, 3).view(1, 2),
            InvalidInput,
            r"wrong shape; .* \[B \+ 1\], got \[1, 2\]$",
        ),
        (offsets(), InvalidInput, r"wrong shape; .*got \[0\]$"),
        (torch.tensor(0, dtype=torch.int32), InvalidInput, r"wrong shape; .*got \[\]$"),
        (offsets(0, 9, 3, 9, 6)[::2], InvalidInput, r"is not contiguous; .*got stride 2$"),
        (
            offsets(0, 3).to("meta"),
            InvalidInput,
            r"different device; .*int32 on cpu, got meta",
        ),
    ],
)
def test_host_check_refuses(cu, error, text):
    with pytest.raises(error, match=text):
        check_cu_seqlens("op", "cu_seqlens_q", cu, device=CPU)


def test_host_check_reads_no_value():
    check_cu_seqlens("op", "cu_seqlens_q", torch.empty(4, dtype=torch.int32, device="meta"))


def test_same_batch():
    check_same_batch("op", offsets(0, 1), offsets(0, 7))
    with pytest.raises(InvalidInput, match=r"different lengths; .*got \[2\] and \[3\]$"):
        check_same_batch("op", offsets(0, 1), offsets(0, 1, 2))


@pytest.mark.parametrize(
    ("cu", "total", "longest"),
    [(offsets(0), 0, None), (offsets(0, 0), 0, 0), (offsets(0, 3, 3, 8), 8, 5)],
)
def test_value_check_accepts(cu, total, longest):
    check_cu_seqlens_values("op", "cu", cu, total, longest)


@pytest.mark.parametrize(
    ("cu", "total", "longest", "text"),
    [
        (offsets(1, 3), 3, None, r"^op: cu\[0\] is wrong; expected 0, got 1$"),
        (offsets(0, 4, 3, 2, 8), 8, None, r"cu\[2\] falls; expected at least 4, got 3$"),
        (offsets(0, -1), -1, None, r"cu\[1\] falls; expected at least 0, got -1$"),
        (offsets(0, 3, 8), 9, None, r"cu\[2\] is not the number of tokens; expected 9, got 8$"),
        (offsets(0, 3, 8), 8, 4, r"cu\[2\] ends a sequence longer .*at most 4 tokens, got 5$"),
    ],
)
def test_value_check_refuses(cu, total, longest, text):
    with pytest.raises(InvalidInput, match=text):
        check_cu_seqlens_values("op", "cu", cu, total, longest)


def test_lengths():
    cu = offsets(0, 3, 3, 8)
    assert sequence_lengths(cu).tolist() == [3, 0, 5]
    assert sequence_lengths(cu).dtype == torch.int32
    assert max_sequence_length(cu) == 5
    assert sequence_lengths(offsets(0)).tolist() == []
    assert max_sequence_length(offsets(0)) == 0
