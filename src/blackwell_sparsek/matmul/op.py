"""Operators of block-sparse products: schemas, fakes, dispatch. Derivatives are in `bsr_grad`.

`pattern` is always [indptr, indices, t_indptr, t_indices, t_perm], the order of
`BSRPattern.tensors()`; `pairs` is the order of `formats.bsr_product.PairLists`. Results are
contiguous. The arguments are trusted here: `functional.bsr` checks them.
"""

from typing import Any

import torch

from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, interpreted_only, only_asked
from ..dispatch.operators import define_op
from ..reference import matmul as reference
from . import dense as bsr_dense
from . import dense as eager_dense
from . import eager as eager
from . import eager as eager_pairs
from .problem import matmul_problem, pairs_problem, sddmm_problem
from .sm90 import route as bsr_sm90
from .triton import route as bsr_triton

matmul_dispatch = Dispatcher("bsr_matmul")
sddmm_dispatch = Dispatcher("bsr_sddmm")
pairs_dispatch = Dispatcher("bsr_pair_products")


def _anything(problem: Any) -> str | None:
    return None


matmul_dispatch.register(
    "sm90", bsr_sm90.why_not, bsr_sm90.bsr_matmul, auto_passes=bsr_dense.sm90_passed_over
)
matmul_dispatch.register(
    "triton",
    bsr_triton.why_not,
    bsr_triton.bsr_matmul,
    auto_passes=bsr_dense.triton_passed_over,
)
matmul_dispatch.register(
    "eager", _anything, eager.bsr_matmul, auto_passes=bsr_dense.passed_for_dense("eager")
)
# last: reached where each of the others has been passed over for it
matmul_dispatch.register(
    "dense", _anything, bsr_dense.bsr_matmul, auto_passes=bsr_dense.dense_passed_over
)
matmul_dispatch.register("reference", _anything, reference.bsr_matmul, auto_passes=only_asked)

sddmm_dispatch.register(
    "triton", bsr_triton.why_not, bsr_triton.bsr_sddmm, auto_passes=interpreted_only
)
sddmm_dispatch.register("eager", _anything, eager.bsr_sddmm)
sddmm_dispatch.register("dense", _anything, eager_dense.bsr_sddmm, auto_passes=only_asked)
sddmm_dispatch.register("reference", _anything, reference.bsr_sddmm, auto_passes=only_asked)

pairs_dispatch.register(
    "triton",
    bsr_triton.why_not,
    bsr_triton.bsr_pair_products,
    auto_passes=interpreted_only,
)
pairs_dispatch.register("eager", _anything, eager_pairs.bsr_pair_products)
pairs_dispatch.register("reference", _anything, reference.bsr_pair_products, auto_passes=only_asked)


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
    problem = matmul_problem(
        values, shape, transposed, dense, dense_left, bias, residual, activation, out_dtype
    )
    operands = (values, pattern, shape, transposed, dense, dense_left)
    with without_autocast(values.device):
        return matmul_dispatch(impl, problem, *operands, bias, residual, activation, out_dtype)


def _matmul_fake(*args: Any) -> torch.Tensor:
    _, _, shape, transposed, dense, dense_left, *_, out_dtype, _ = args
    features = shape[1] if transposed != dense_left else shape[0]
    tail = (dense.shape[-2], features) if dense_left else (features, dense.shape[-1])
    made: torch.Tensor = dense.new_empty((*dense.shape[:-2], *tail), dtype=out_dtype or dense.dtype)
    return made


def _sddmm(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: list[torch.Tensor],
    shape: list[int],
    block_shape: list[int],
    out_dtype: torch.dtype | None,
    impl: str,
) -> torch.Tensor:
    problem = sddmm_problem(a, b, pattern, shape, block_shape, out_dtype)
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
    problem = pairs_problem(first, second, pairs, first_transposed, second_transposed, out_dtype)
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
