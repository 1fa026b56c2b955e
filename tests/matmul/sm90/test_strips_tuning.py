"""Which products of narrow blocks are made in strips, and how."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.calls.matmul import BsrProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.matmul.choice import sm90_passed_over
from blackwell_sparsek.matmul.estimate import sparse_seconds
from blackwell_sparsek.matmul.sm90 import tuning as bsr_strips
from blackwell_sparsek.matmul.sm90.tuning import strips_config

H200 = Arch("cuda", 90, 132, 232448, False)


@pytest.fixture(autouse=True)
def some_triton(monkeypatch):
    """As with the release that builds the kernel."""
    monkeypatch.setattr(bsr_strips, "warps_may_part", lambda: True)
    strips_config.cache_clear()
    yield
    strips_config.cache_clear()


def problem(rows=28672, cols=4096, block=(16, 16), n=16, density=0.22, **changes):
    """x @ A.T for A of so many rows."""
    blocks = round(density * -(-rows // block[0]) * -(-cols // block[1]))
    base = BsrProblem(
        *("matmul", H200, torch.float16, torch.float16, (cols, rows), block[::-1], blocks, n),
        dense_left=True,
        transposed=True,
        tma=True,
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    "rows, cols, n, warps, k_tiles",
    [
        (28672, 4096, 16, 1, 1),
        (28672, 4096, 1, 1, 2),
        (28672, 4096, 32, 2, 1),
        (16384, 4096, 16, 2, 1),
        (8192, 28672, 16, 4, 1),
        (6144, 4096, 16, 4, 2),
        (4096, 4096, 16, 4, 2),
        (4096, 4096, 32, 8, 1),
        (4096, 14336, 16, 8, 1),
        (16, 14336, 9, 8, 1),
    ],
)
def test_warps(rows, cols, n, warps, k_tiles):
    config = strips_config(problem(rows, cols, n=n))
    assert (warps, k_tiles) == (config.WARPS, config.K_TILES)
    assert n <= config.TILE_N and config.strips == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 0},
        {"n": 33},
        {"block": (128, 16), "n": 17},
        {"block": (16, 32)},
        {"block": (24, 16)},
        {"cols": 4088},
        {"density": 0.0},
        {"dtype": torch.float32},
        {"dense_left": False},
        {"transposed": False},
        {"row_major": False},
        {"tma": False},
        {"arch": Arch("cuda", 100, 148, 232448, False)},
    ],
)
def test_not_for_strips(changes):
    assert strips_config(problem(**changes)) is None


def test_other_tritons_are_not_given_them(monkeypatch):
    monkeypatch.setattr(bsr_strips, "warps_may_part", lambda: False)
    strips_config.cache_clear()
    assert strips_config(problem()) is None


# Graphs of cold weights on an H200, microseconds.
MEASURED = {
    (28672, 4096, 16): 23.1,
    (6144, 4096, 16): 7.0,
    (4096, 4096, 16): 6.2,
    (4096, 14336, 16): 13.7,
    (8192, 28672, 16): 40.1,
    (28672, 4096, 1): 18.3,
    (28672, 4096, 32): 35.6,
}


@pytest.mark.parametrize("rows, cols, n", MEASURED)
def test_strips_take_what_was_measured(rows, cols, n):
    estimate_us = sparse_seconds(problem(rows, cols, n=n), "sm90") * 1e6
    assert estimate_us == pytest.approx(MEASURED[rows, cols, n], rel=0.1)


def test_auto_takes_them():
    assert sm90_passed_over(problem()) is None
    assert sm90_passed_over(problem(n=4, batch=4)) is None
    assert "portable" in sm90_passed_over(problem(rows=4096, n=1))
    assert sm90_passed_over(problem(density=0.5)) is None
