"""What the choice of a kernel is told about a product."""

import pytest
import torch

from blackwell_sparsek.calls.matmul import MatmulCall, PatternTensors
from blackwell_sparsek.testing.bsr import random_bsr

HALF = torch.float16


def call(dense_left=False, transposed=False, n=16, **changes):
    a = random_bsr((64, 48), (16, 16), seed=1, dtype=HALF, density=1.0)
    pattern = PatternTensors(*a.pattern.tensors())
    inner = 48 if transposed == dense_left else 64
    shape = (n, inner) if dense_left else (inner, n)
    given = {"values": a.storage, "dense": torch.zeros(shape, dtype=HALF)} | changes
    return MatmulCall(
        given["values"],
        pattern,
        (64, 48),
        transposed,
        given["dense"],
        dense_left,
        given.get("bias"),
        out_dtype=given.get("out_dtype"),
    )


def moved(x):
    """The same tensor at an address that is no multiple of 16 bytes."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


VALUES = torch.zeros(12, 16, 16, dtype=HALF)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dense_left", [False, True])
def test_whole_rows_of_16_bytes_suit_tma(dense_left, transposed):
    problem = call(dense_left, transposed).problem
    assert problem.tma and problem.n == 16
    assert problem.shape == ((48, 64) if transposed else (64, 48))


@pytest.mark.parametrize(
    "change",
    [
        {"values": VALUES.mT},
        {"values": moved(VALUES)},
        {"dense": moved(torch.zeros(48, 16, dtype=HALF))},
        {"dense": torch.zeros(48, 20, dtype=HALF)[:, :16]},
        {"dense": torch.zeros(1, 16, dtype=HALF).expand(48, 16)},
        {"n": 12},
        {"n": 12, "out_dtype": torch.float16},
        {"bias": torch.zeros(64, 2, dtype=HALF)[:, 0]},
    ],
    ids=[
        *("values with gaps", "values at an odd address", "operand at an odd address"),
        *("operand with odd rows", "expanded operand", "odd rows", "odd results", "bias with gaps"),
    ],
)
def test_what_does_not_suit_tma(change):
    assert not call(**change).problem.tma


@pytest.mark.parametrize(
    "change",
    [
        {"dense": torch.zeros(48, 24, dtype=HALF)[:, :16]},
        {"dense": torch.zeros(16, 48, dtype=HALF).mT},
        {"dense": torch.zeros(1, 48, 16, dtype=HALF)},
        # rows of one operand are not read, so their stride does not matter
        {"dense": torch.zeros(1, 51, 17, dtype=HALF)[:, :48, :16].contiguous()},
        {"bias": torch.zeros(64, dtype=HALF)},
    ],
    ids=["gaps of 16 bytes", "by columns", "a batch of one", "copied", "bias"],
)
def test_what_suits_tma(change):
    assert call(**change).problem.tma


def test_the_width_of_results_counts_in_their_own_dtype():
    """12 features are 24 bytes in half precision and 48 in single."""
    x = torch.zeros(12, 48, dtype=HALF).mT
    assert not call(dense=x).problem.tma
    assert call(dense=x, out_dtype=torch.float32).problem.tma
