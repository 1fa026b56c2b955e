"""fp8 tiles read as words: products come out as those of the values, in memory's order."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.core.env import triton_interpreted
from blackwell_sparsek.device.fp8 import as_halves, halves, turned_back, turned_halves
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget


@triton.jit
def _keys_kernel(out_ptr, words_ptr, x_ptr, N: tl.constexpr, D: tl.constexpr):
    """Sums over the columns: [N, D] times [16, D], transposed."""
    rows, columns, others = tl.arange(0, N), tl.arange(0, D), tl.arange(0, 16)
    words = tl.load(words_ptr + rows[:, None] * (D // 4) + tl.arange(0, D // 4)[None, :])
    x = tl.load(x_ptr + others[:, None] * D + columns[None, :])
    product = tl.dot(halves(words), tl.trans(as_halves(x)))
    tl.store(out_ptr + rows[:, None] * 16 + others[None, :], product)


@triton.jit
def _values_kernel(out_ptr, words_ptr, x_ptr, N: tl.constexpr, D: tl.constexpr):
    """Sums over the rows: [N, D] transposed, times [N, 16]."""
    rows, columns, others = tl.arange(0, N), tl.arange(0, D), tl.arange(0, 16)
    words = tl.load(words_ptr + rows[:, None] * (D // 4) + tl.arange(0, D // 4)[None, :])
    x = tl.load(x_ptr + rows[:, None] * 16 + others[None, :])
    product = turned_back(tl.dot(turned_halves(words), x))
    tl.store(out_ptr + columns[:, None] * 16 + others[None, :], product)


class _ValuesOf:
    """What the assembly gives: for each byte of a word the values of all rows."""

    def __init__(self, builder, text, constraints, rows, *options):
        self.results = []
        for byte in range(4):
            for row in rows:
                bits = (row.data.astype(np.uint32) >> (8 * byte)).astype(np.uint8)
                fp8 = torch.from_numpy(bits).view(torch.float8_e4m3fn)
                self.results.append(type(row)(fp8.half().numpy(), tl.float16))

    def get_result(self, i):
        return self.results[i]


@pytest.fixture
def assembly(monkeypatch):
    """The interpreter has no assembly; both pieces take words apart, of one row or of two."""
    if triton_interpreted():
        from triton.runtime.interpreter import interpreter_builder

        monkeypatch.setattr(
            type(interpreter_builder), "create_inline_asm", lambda *args: _ValuesOf(*args)
        )


def _words(rows, columns, seed, device):
    values = normal(rows, columns, seed=seed).to(torch.float8_e4m3fn).to(device)
    return values.double(), values.view(torch.int32)


@pytest.mark.parametrize("rows, columns", [(64, 128), (16, 64), (128, 256)])
def test_products_over_columns(rows, columns, device, assembly):
    values, words = _words(rows, columns, 1, device)
    x = normal(16, columns, seed=2, dtype=torch.float16).to(device)
    out = torch.empty(rows, 16, device=device)
    _keys_kernel[(1,)](out, words, x, rows, columns)
    # tensor cores truncate the running sum after every 16 products, where plain PyTorch rounds it
    plain = values.float() @ x.float().T
    assert_within_budget(out, values @ x.double().T, plain, roundings=columns // 16)


@pytest.mark.parametrize("rows, columns", [(64, 128), (16, 64), (128, 32)])
def test_products_over_rows(rows, columns, device, assembly):
    values, words = _words(rows, columns, 3, device)
    x = normal(rows, 16, seed=4, dtype=torch.float16).to(device)
    out = torch.empty(columns, 16, device=device)
    _values_kernel[(1,)](out, words, x, rows, columns)
    assert_within_budget(out, values.T @ x.double(), values.T.float() @ x.float())
