"""Checks of layers: they pass what is right and nothing else."""

import pytest
import torch

from blackwell_sparsek.testing import bsr_layers
from blackwell_sparsek.testing.bsr_layers import check_layer, layer_weight


def _layer():
    torch.manual_seed(0)
    a = layer_weight(40, 56, (16, 16), torch.float16, device="cpu")
    x, bias, residual = (torch.randn(*shape).half() for shape in ((5, 56), (40,), (5, 40)))
    return a, x, {"bias": bias, "residual": residual, "activation": "silu"}


def test_first_row_is_empty_and_last_one_full():
    a, _, _ = _layer()
    lengths = torch.diff(a.indptr)
    assert lengths[0] == 0 and lengths[-1] == 4 and a.shape == (40, 56)


def test_right_products_pass():
    a, x, options = _layer()
    assert check_layer(a, x, impl="eager").shape == (5, 40)
    check_layer(a, x, impl="eager", **options)
    assert check_layer(a, x, impl="eager", out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("wrong", [1.02, float("nan")])
def test_wrong_products_do_not(monkeypatch, wrong):
    a, x, options = _layer()
    right = bsr_layers.matmul
    monkeypatch.setattr(bsr_layers, "matmul", lambda *args, **kw: right(*args, **kw) * wrong)
    with pytest.raises(AssertionError):
        check_layer(a, x, impl="eager", **options)
