"""Checks of a layer's product with few rows and a block-sparse weight: x @ A.T."""

from collections.abc import Callable
from typing import Any

import torch

from ..matmul.api import matmul
from ..sparse.matrix import BSRMatrix
from .poison import poisoned_empty
from .tolerance import assert_within_budget


def layer_weight(
    rows: int,
    cols: int,
    block: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    density: float = 0.4,
    device: str = "cuda",
) -> BSRMatrix:
    """A random weight whose first block row is empty and whose last one is full."""
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    keep = torch.rand(grid, device=device) < density
    keep[0], keep[-1] = False, True
    return BSRMatrix.from_mask(torch.randn(rows, cols, device=device, dtype=dtype), keep, block)


def check_layer(a: BSRMatrix, x: torch.Tensor, impl: str = "sm90", **options: Any) -> torch.Tensor:
    """Return x @ A.T with its epilogue, computed into poisoned memory; check its error budget."""
    dense = a.to_dense()
    bias, residual = options.get("bias"), options.get("residual")

    def plain(
        x: torch.Tensor, dense: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        out = x @ dense.mT
        if bias is not None:
            out = out + convert(bias)
        if options.get("activation"):
            out = getattr(torch.nn.functional, options["activation"])(out)
        return out if residual is None else out + convert(residual)

    with poisoned_empty():
        got = matmul(x, a.T, impl=impl, **options)
    exact = plain(x.double(), dense.double(), torch.Tensor.double)
    same = plain(x, dense, lambda t: t).to(got.dtype)
    assert_within_budget(got, exact, same)
    return got


def check_chain_in_graph(block: tuple[int, int], n: int) -> None:
    """Check that products under PDL do not read what the kernel ahead has not written yet."""
    torch.manual_seed(0)
    # the last block row is full and may be split; the others keep less than half of their blocks
    a = layer_weight(1024, 1024, block)
    fresh = a.data * 0.05
    a = a.with_data(torch.empty_like(fresh))
    x = torch.randn(n, 1024, device="cuda", dtype=torch.bfloat16)

    def chain(wait: Callable[[], None] = lambda: None) -> torch.Tensor:
        y = x
        for _ in range(10):
            a.data.fill_(float("nan"))
            a.data.copy_(fresh)
            wait()
            y = matmul(y, a.T, impl="sm90")
            wait()
            y = matmul(y, a.T, impl="sm90")
            wait()
        return y

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(10):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)
        assert torch.equal(chain(), expected)
