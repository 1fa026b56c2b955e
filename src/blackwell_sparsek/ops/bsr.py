"""Operators of block-sparse products: schemas, fakes, dispatch. Derivatives are in `bsr_grad`.

`pattern` is always [indptr, indices, t_indptr, t_indices, t_perm], the order of
`BSRPattern.tensors()`; `pairs` is the order of `formats.bsr_product.PairLists`. Results are
contiguous. The arguments are trusted here: `functional.bsr` checks them.
"""

from typing import Any

import torch

from ..core.arch import arch_of
from ..core.autocast import without_autocast
from ..eager import bsr_matmul as eager
from ..eager import bsr_pairs as eager_pairs
from ..reference import bsr_matmul as reference
from ..tuning.problem_bsr import BsrProblem
from .dispatch import Dispatcher
from .registry import define_op

matmul_dispatch = Dispatcher("bsr_matmul")
sddmm_dispatch = Dispatcher("bsr_sddmm")
pairs_dispatch = Dispatcher("bsr_pair_products")


def _anything(problem: Any) -> str | None:
    return None


for _dispatch, _eager, _reference in (
    (matmul_dispatch, eager.bsr_matmul, reference.bsr_matmul),
    (sddmm_dispatch, eager.bsr_sddmm, reference.bsr_sddmm),
    (pairs_dispatch, eager_pairs.bsr_pair_products, reference.bsr_pair_products),
):
    _dispatch.register("eager", _anything, _eager)
    _dispatch.register("reference", _anything, _reference, in_auto=False)


def _row_major(*tensors: torch.Tensor) -> bool:
    return all(x.stride(-1) == 1 for x in tensors)


def _matmul(
    values: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    transposed: bool,
    dense: torch.Tensor,
    dense_left: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    impl: str,
) -> torch.Tensor:
    block_shape = (values.shape[1], values.shape[2])
    problem = BsrProblem(
        kind="matmul",
        arch=arch_of(values.device),
        dtype=values.dtype,
        out_dtype=out_dtype or dense.dtype,
        shape=(shape[1], shape[0]) if transposed else (shape[0], shape[1]),
        block_shape=block_shape[::-1] if transposed else block_shape,
        nnz_blocks=values.shape[0],
        n=dense.shape[-2 if dense_left else -1],
        batch=dense.shape[:-2].numel(),
        dense_left=dense_left,
        transposed=transposed,
        row_major=_row_major(dense),
        bias=bias is not None,
        residual=residual is not None,
        activation=activation,
    )
    operands = (values, pattern, shape, transposed, dense, dense_left)
    with without_autocast(values.device):
        return matmul_dispatch(impl, problem, *operands, bias, residual, activation, out_dtype)


def _matmul_fake(
    values: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    transposed: bool,
    dense: torch.Tensor,
    dense_left: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    impl: str,
) -> torch.Tensor:
    features = shape[1] if transposed != dense_left else shape[0]
    tail = (dense.shape[-2], features) if dense_left else (features, dense.shape[-1])
    return dense.new_empty((*dense.shape[:-2], *tail), dtype=out_dtype or dense.dtype)


def _sddmm(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    block_shape: list[int],
    out_dtype: torch.dtype | None,
    impl: str,
) -> torch.Tensor:
    problem = BsrProblem(
        kind="sddmm",
        arch=arch_of(a.device),
        dtype=a.dtype,
        out_dtype=out_dtype or a.dtype,
        shape=(shape[0], shape[1]),
        block_shape=(block_shape[0], block_shape[1]),
        nnz_blocks=pattern[1].shape[0],
        n=a.shape[-1],
        batch=a.shape[:-2].numel(),
        row_major=_row_major(a, b),
    )
    with without_autocast(a.device):
        return sddmm_dispatch(impl, problem, a, b, pattern, shape, block_shape, out_dtype)


def _sddmm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    block_shape: list[int],
    out_dtype: torch.dtype | None,
    impl: str,
) -> torch.Tensor:
    return a.new_empty((pattern[1].shape[0], *block_shape), dtype=out_dtype or a.dtype)


def _pair_products(
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: list[torch.Tensor],
    first_transposed: bool,
    second_transposed: bool,
    out_dtype: torch.dtype | None,
    impl: str,
) -> torch.Tensor:
    problem = BsrProblem(
        kind="pairs",
        arch=arch_of(first.device),
        dtype=first.dtype,
        out_dtype=out_dtype or first.dtype,
        shape=(first.shape[1], first.shape[2]),
        block_shape=(first.shape[1], first.shape[2]),
        nnz_blocks=first.shape[0],
        n=second.shape[0],
        batch=pairs[0].shape[0],
    )
    with without_autocast(first.device):
        return pairs_dispatch(
            impl, problem, first, second, pairs, first_transposed, second_transposed, out_dtype
        )


def _pair_products_fake(
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: list[torch.Tensor],
    first_transposed: bool,
    second_transposed: bool,
    out_dtype: torch.dtype | None,
    impl: str,
) -> torch.Tensor:
    rows = first.shape[2] if first_transposed else first.shape[1]
    cols = second.shape[1] if second_transposed else second.shape[2]
    blocks = pairs[4].shape[0] - 1
    return first.new_empty((blocks, rows, cols), dtype=out_dtype or first.dtype)


bsr_matmul = define_op(
    "bsr_matmul",
    "(Tensor values, Tensor[] pattern, SymInt[] shape, bool transposed, Tensor dense, "
    "bool dense_left, Tensor? bias, Tensor? residual, str? activation, ScalarType? out_dtype, "
    "str impl) -> Tensor",
    _matmul,
    _matmul_fake,
)
bsr_sddmm = define_op(
    "bsr_sddmm",
    "(Tensor a, Tensor b, Tensor[] pattern, SymInt[] shape, SymInt[] block_shape, "
    "ScalarType? out_dtype, str impl) -> Tensor",
    _sddmm,
    _sddmm_fake,
)
bsr_pair_products = define_op(
    "bsr_pair_products",
    "(Tensor first, Tensor second, Tensor[] pairs, bool first_transposed, "
    "bool second_transposed, ScalarType? out_dtype, str impl) -> Tensor",
    _pair_products,
    _pair_products_fake,
)

from . import bsr_grad  # noqa: E402, F401  (registers the derivatives of the operators above)
