"""Gradients of activation and bias in one pass."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.core.activations import activate
from blackwell_sparsek.matmul.rows import feature_views
from blackwell_sparsek.matmul.triton import epilogue_gradients
from blackwell_sparsek.matmul.triton.epilogue_gradients import launch_epilogue_gradients
from blackwell_sparsek.testing.inputs import integers, normal
from blackwell_sparsek.testing.poison import nan_like
from blackwell_sparsek.testing.tolerance import assert_within_budget


def by_torch(dy, pre, activation, dtype):
    """Gradients by torch's own derivative in `dtype`."""
    leaf = pre.detach().to(dtype).requires_grad_()
    (before,) = torch.autograd.grad(activate(leaf, activation), leaf, dy.to(dtype))
    return before, before.sum(1, dtype=dtype if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("shape", [(1, 1), (65, 130), (3, 700)])
@pytest.mark.parametrize("left", [False, True])
def test_gradients_keep_the_budget(device, activation, shape, left):
    dtype = torch.float16
    dy, pre = (3 * normal(*shape, seed=i).to(device) for i in (1, 2))
    dy, pre = dy.to(dtype), pre.to(dtype)
    if left:
        dy, pre = (x.mT.contiguous().mT for x in (dy, pre))
    before, d_bias = nan_like(pre), nan_like(dy[:, 0].contiguous())
    launch_epilogue_gradients(before, d_bias, dy, pre, activation)
    exact, exact_sums = by_torch(dy, pre, activation, torch.float64)
    plain, plain_sums = by_torch(dy, pre, activation, dtype)
    assert_within_budget(before, exact, plain, what="before")
    assert_within_budget(d_bias, exact_sums, plain_sums.to(dtype), what="bias")


@pytest.mark.parametrize("shares", [1, 3])
def test_sums_alone_are_exact_for_whole_numbers(device, shares, monkeypatch):
    monkeypatch.setattr(epilogue_gradients, "PROGRAMS_PER_SM", 2 * shares)
    dy = integers(70, 333, seed=3).to(device)
    d_bias = nan_like(dy[:, 0].contiguous())
    launch_epilogue_gradients(None, d_bias, dy, None, None)
    assert torch.equal(d_bias, dy.sum(1))


def test_a_gradient_that_has_no_bias(device):
    dy, pre = normal(5, 9, seed=4).to(device), normal(5, 9, seed=5).to(device)
    before = nan_like(pre)
    launch_epilogue_gradients(before, None, dy, pre, "relu")
    assert torch.equal(before, dy * (pre > 0))


def test_views_of_results():
    x = torch.empty(2, 3, 5)
    views = feature_views(True, x, x)
    assert views.grad.shape == views.pre.shape == (5, 6)
    assert feature_views(True, x[:, ::2], None) is None or x[:, ::2].is_contiguous()
    assert feature_views(False, x, None) is None
    assert feature_views(False, x[0], None).grad.shape == (3, 5)
    assert feature_views(True, x[:0], None) is None
    assert feature_views(True, x.transpose(0, 1), None) is None
