"""The torch operators of block-sparse products: schemas, fakes, and the call each one makes.

`pattern` is [indptr, indices, t_indptr, t_indices, t_perm], the order of `PatternTensors`, or
[indptr, indices] if these may have been written to since the last call: then the operator reads
them. `pairs` has the order of `PairLists`. Results are contiguous. Arguments are not checked here:
the public functions do that. `choice` decides which implementation runs; derivatives are in
`autograd`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..calls.matmul import (
    MatmulCall,
    PairProductsCall,
    PatternTensors,
    SddmmCall,
    UnreadTensors,
    pattern_tensors,
)
from ..core.torch_state import without_autocast
from ..dispatch.operators import Operator, define_op
from ..sparse.product import PairLists
from ..sparse.reading import read_pattern
from .choice import matmul_dispatch, pairs_dispatch, sddmm_dispatch


def _matmul_call(values: torch.Tensor, pattern: list[torch.Tensor], *rest: Any) -> MatmulCall:
    return MatmulCall(values, pattern_tensors(pattern), *rest)


def _sddmm_call(
    a: torch.Tensor, b: torch.Tensor, pattern: list[torch.Tensor], *rest: Any
) -> SddmmCall:
    return SddmmCall(a, b, pattern_tensors(pattern), *rest)


def _pairs_call(
    first: torch.Tensor, second: torch.Tensor, pairs: list[torch.Tensor], *rest: Any
) -> PairProductsCall:
    return PairProductsCall(first, second, PairLists(*pairs), *rest)


def read_call(op: str, call: MatmulCall | SddmmCall, block_shape: Sequence[int]) -> None:
    """Give a call the tensors of its pattern that kernels may read."""
    if isinstance(call.pattern, UnreadTensors):
        (rows, cols), (height, width) = call.shape, block_shape
        reading = read_pattern(op, *call.pattern, (rows, cols), (height, width))
        call.pattern = PatternTensors(*reading.pattern.tensors())


def _matmul(*args: Any) -> torch.Tensor:
    *arguments, impl = args
    call = _matmul_call(*arguments)
    read_call("bsr_matmul", call, call.values.shape[1:])
    with without_autocast(call.values.device):
        out: torch.Tensor = matmul_dispatch.run(impl, call)
    return out


def _sddmm(*args: Any) -> torch.Tensor:
    *arguments, impl = args
    call = _sddmm_call(*arguments)
    read_call("bsr_sddmm", call, call.block_shape)
    with without_autocast(call.a.device):
        blocks: torch.Tensor = sddmm_dispatch.run(impl, call)
    return blocks


def _pair_products(*args: Any) -> torch.Tensor:
    *arguments, impl = args
    call = _pairs_call(*arguments)
    with without_autocast(call.first.device):
        blocks: torch.Tensor = pairs_dispatch.run(impl, call)
    return blocks


def _matmul_fake(*args: Any) -> torch.Tensor:
    return _matmul_call(*args[:-1]).empty_out()


def _sddmm_fake(*args: Any) -> torch.Tensor:
    return _sddmm_call(*args[:-1]).empty_out()


def _pair_products_fake(*args: Any) -> torch.Tensor:
    return _pairs_call(*args[:-1]).empty_out()


bsr_matmul: Operator = define_op(
    "bsr_matmul",
    "(Tensor values, Tensor[] pattern, SymInt[] shape, bool transposed, Tensor dense, "
    "bool dense_left, Tensor? bias, Tensor? residual, str? activation, ScalarType? out_dtype, "
    "str impl) -> Tensor",
    _matmul,
    _matmul_fake,
)
bsr_sddmm: Operator = define_op(
    "bsr_sddmm",
    "(Tensor a, Tensor b, Tensor[] pattern, SymInt[] shape, SymInt[] block_shape, "
    "ScalarType? out_dtype, str impl) -> Tensor",
    _sddmm,
    _sddmm_fake,
)
bsr_pair_products: Operator = define_op(
    "bsr_pair_products",
    "(Tensor first, Tensor second, Tensor[] pairs, bool first_transposed, "
    "bool second_transposed, ScalarType? out_dtype, str impl) -> Tensor",
    _pair_products,
    _pair_products_fake,
)
