"""Sums of shares, and blocks cut out of a dense product."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.matmul.triton.sample import launch_sample
from blackwell_sparsek.matmul.triton.shares import add_shares
from blackwell_sparsek.testing.guard import guarded
from blackwell_sparsek.testing.inputs import integers, normal
from blackwell_sparsek.testing.poison import nan_like


@pytest.mark.parametrize("shares", [1, 2, 5])
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 7, 5), (5, 32, 48)])
def test_shares_are_added_in_order(device, shares, shape):
    parts = normal(shares, *shape, seed=1).to(device)
    expected = torch.zeros(shape, device=device)
    for part in parts:
        expected = expected + part
    out = nan_like(expected)
    add_shares(out, parts)
    assert torch.equal(out, expected)
    rounded = nan_like(expected.half())
    add_shares(rounded, parts)
    assert torch.equal(rounded, expected.half())


@pytest.mark.parametrize("side", ["left", "right"])
def test_sums_touch_nothing_outside(interpreted, side):
    parts = integers(3, 2, 7, 5, seed=2)
    out = guarded(nan_like(parts[0]), side)
    add_shares(out, guarded(parts, side))
    assert torch.equal(out, parts.sum(0))


@pytest.mark.parametrize("block", [(16, 16), (48, 80), (8, 24), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_blocks_of_a_product(device, block, dtype):
    bh, bw = block
    m, n = 3 * bh - 5, 2 * bw + 3
    product = normal(m, n, seed=3).to(device)
    rows = torch.tensor([2, 0, 1, 2], dtype=torch.int32, device=device)
    cols = torch.tensor([0, 1, 2, 2], dtype=torch.int32, device=device)
    out = nan_like(torch.empty(4, bh, bw, dtype=dtype, device=device))
    launch_sample(out, product, rows, cols)
    whole = torch.zeros(3 * bh, 3 * bw, device=device)
    whole[:m, :n] = product
    for block_out, row, col in zip(out, rows.tolist(), cols.tolist(), strict=True):
        expected = whole[row * bh : (row + 1) * bh, col * bw : (col + 1) * bw]
        assert torch.equal(block_out, expected.to(dtype))


def test_nothing_to_cut_or_add(device):
    none = torch.empty(0, 16, 16, device=device)
    lists = torch.empty(0, dtype=torch.int32, device=device)
    launch_sample(none, torch.zeros(16, 16, device=device), lists, lists)
    add_shares(none, torch.empty(2, 0, 16, 16, device=device))
