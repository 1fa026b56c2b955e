"""The transposing copy."""

import pytest
import torch

from blackwell_sparsek.matmul.sm90.layouts import launch_transpose


@pytest.mark.parametrize("size", [(1, 1), (15, 64), (64, 65), (129, 3)])
def test_is_the_transpose(size, device):
    x = torch.randn(size, dtype=torch.float32, device=device).half()
    wide = torch.full((size[0], size[1] + 8), float("nan"), dtype=x.dtype, device=device)
    wide[:, : size[1]] = x
    out = torch.full(size[::-1], float("nan"), dtype=x.dtype, device=device)
    launch_transpose(out, wide[:, : size[1]])
    assert torch.equal(out, x.T)
