"""Inputs of a product with a block-sparse matrix, and how its results are checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import BSRMatrix
from ...testing.tolerance import assert_within_budget

# Replicas of a narrow product read at least this much before memory is met again.
_CACHES_BYTES = 160 * 2**20
_MOST_REPLICAS = 16
_CHECKED_ROWS, _CHECKED_COLUMNS = 256, 64


@dataclass(frozen=True)
class Product:
    """`W @ x` [M, N] of a weight [M, K], or `x @ W.T` [N, M], the order of a layer: `linear`."""

    rows: int
    inner: int
    n: int
    block: tuple[int, int]
    density: float
    dtype: torch.dtype = torch.float16
    linear: bool = False

    @property
    def dense_flops(self) -> float:
        """Work without sparsity."""
        return 2.0 * self.rows * self.inner * self.n

    def describe(self) -> dict[str, Any]:
        """As it stands in the results."""
        return {
            "order": "x @ W.T" if self.linear else "W @ x",
            "weight": [self.rows, self.inner],
            "n": self.n,
            "block": list(self.block),
            "density": self.density,
            "dtype": str(self.dtype).split(".")[-1],
            "pattern": "random, exact density",
        }

    def build(self, device: torch.device, *, replicated: bool = False) -> "ProductInputs":
        """Random values and a random pattern with exactly the density, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)
        grid = (self.rows // self.block[0], self.inner // self.block[1])
        blocks = grid[0] * grid[1]
        keep = torch.zeros(blocks, dtype=torch.bool, device=device)
        order = torch.randperm(blocks, generator=generator, device=device)
        keep[order[: round(self.density * blocks)]] = True
        keep = keep.view(grid)
        options: Any = {"generator": generator, "device": device, "dtype": self.dtype}
        dense = torch.randn(self.rows, self.inner, **options)
        by_blocks = dense.view(grid[0], self.block[0], grid[1], self.block[1])
        by_blocks.mul_(keep[:, None, :, None])
        x = torch.randn(*((self.n, self.inner) if self.linear else (self.inner, self.n)), **options)
        return ProductInputs(self, dense, BSRMatrix.from_mask(dense, keep), x, replicated)


@dataclass(frozen=True)
class ProductInputs:
    """The tensors of a `Product`."""

    product: Product
    dense: torch.Tensor
    sparse: BSRMatrix
    x: torch.Tensor
    replicated: bool

    @property
    def stored(self) -> int:
        """Elements of the stored blocks."""
        return self.sparse.storage.numel()

    def replicas(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """`weight` and copies of it, more than caches hold; none for a product that is wide."""
        if not self.replicated:
            return []
        size = max(weight.numel() * weight.element_size(), 1)
        count = max(2, min(_MOST_REPLICAS, -(-_CACHES_BYTES // size)))
        return [weight, *(weight.clone() for _ in range(count - 1))]

    def check(
        self, weight: torch.Tensor | None = None, x: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], None]:
        """Compare with fp64 on sampled rows of the weight and columns of its result."""
        weight = self.dense if weight is None else weight
        x = self.x if x is None else x
        x = x.mT if self.product.linear else x
        rows = _sample(weight.shape[0], _CHECKED_ROWS, weight.device)
        columns = _sample(x.shape[1], _CHECKED_COLUMNS, weight.device)

        def compare(out: torch.Tensor) -> None:
            out = out.mT if self.product.linear else out
            some_rows, some_columns = weight[rows], x[:, columns]
            exact = some_rows.double() @ some_columns.double()
            plain = plain_product(some_rows, some_columns, exact)
            assert_within_budget(out[rows][:, columns], exact, plain, what="sampled rows")

        return compare


def _sample(size: int, count: int, device: torch.device) -> torch.Tensor:
    """Up to `count` places from first to last, evenly."""
    return torch.linspace(0, size - 1, min(size, count), device=device).round().long()


def plain_product(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The less exact of two plain products: at once, and column by column.

    Libraries cut long sums of a large product into parts, which makes fp32 sums more exact than
    those of the same terms in a smaller product.
    """
    products = [a @ b, torch.stack([a @ column for column in b.unbind(1)], 1)]
    return max(products, key=lambda product: (product.double() - exact).abs().max().item())
