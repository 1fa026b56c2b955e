"""Tests of block-sparse products: awkward matrices, and results against the oracle."""

import torch

from ..matmul.api import matmul, sddmm
from ..sparse.matrix import BSRMatrix
from .inputs import block_pattern, integers, normal
from .layouts import different_layouts
from .poison import poisoned_empty
from .tolerance import assert_within_budget

# (op(A), dense on the left): the four products of one stored matrix.
ORDERS = ("A@X", "A.T@X", "X@A", "X@A.T")


def random_bsr(
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    *,
    seed: int,
    density: float = 0.5,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    whole: bool = False,
) -> BSRMatrix:
    """A matrix with an empty block row and, if it has three or more, a full one.

    With `whole`, values are whole numbers, whose products are exact.
    """
    rows_b, cols_b = (-(-n // b) for n, b in zip(shape, block_shape, strict=True))
    keep = block_pattern(rows_b, cols_b, density=density, seed=seed)
    if rows_b > 2:
        keep[rows_b // 2] = True
    draw = integers if whole else normal
    x = draw(*shape, seed=seed + 1, dtype=dtype)
    return BSRMatrix.from_mask(x.to(device), keep.to(device), block_shape)


def operand_for(
    a: BSRMatrix,
    order: str,
    n: int,
    *,
    seed: int,
    batch: tuple[int, ...] = (),
    whole: bool = False,
) -> torch.Tensor:
    """A dense operand for a product of `a` in this order, with `n` free rows or columns."""
    inner = a.shape[0] if order in ("X@A", "A.T@X") else a.shape[1]
    shape = (*batch, n, inner) if order.startswith("X") else (*batch, inner, n)
    draw = integers if whole else normal
    return draw(*shape, seed=seed, dtype=a.dtype).to(a.device)


def product(a: BSRMatrix, order: str, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """The product of `a` and `x` in this order."""
    a = a.T if "A.T" in order else a
    operands = (x, a) if order.startswith("X") else (a, x)
    return matmul(*operands, **kwargs)  # type: ignore[call-overload,no-any-return]


def assert_product(
    a: BSRMatrix, order: str, x: torch.Tensor, *, impl: str, layouts: int = 0, **kwargs: object
) -> torch.Tensor:
    """Run a product in poisoned memory and check its error budget; return it.

    With `layouts`, the operand and the residual get different strides.
    """
    residual = kwargs.get("residual")
    if layouts:
        given = [x] if residual is None else [x, residual]
        given = different_layouts(*given, start=layouts)
        x = given[0]
        kwargs |= {"residual": given[1]} if residual is not None else {}
    with poisoned_empty():
        actual = product(a, order, x, impl=impl, **kwargs)
    plain = product(a, order, x, impl="eager", **kwargs)
    exact = product(a, order, x, impl="reference", **(kwargs | {"out_dtype": torch.float64}))
    assert_within_budget(actual, exact, plain, what=f"{order} {a} {list(x.shape)}")
    return actual


def assert_sddmm(a: torch.Tensor, b: torch.Tensor, pattern: BSRMatrix, *, impl: str) -> BSRMatrix:
    """Run a sampled product in poisoned memory and check its error budget; return it."""
    with poisoned_empty():
        actual = sddmm(a, b, pattern, impl=impl)
    plain = sddmm(a, b, pattern, impl="eager")
    exact = sddmm(a.double(), b.double(), pattern, impl="reference")
    what = f"sddmm {list(a.shape)} {list(b.shape)} {pattern}"
    assert_within_budget(actual.data, exact.data, plain.data, what=what)
    actual.validate()
    return actual
