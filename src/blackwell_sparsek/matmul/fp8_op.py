"""`bsk::bsr_matmul_fp8`: products of e4m3 operands with scales, and implementations by name."""

from typing import Any

import torch

from ..calls.fp8 import SCALE_CHANNELS, Fp8MatmulCall
from ..calls.matmul import BsrProblem, MatmulCall, pattern_tensors
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.machine import why_not_portable
from ..dispatch.operators import Operator, define_op
from ..reference.fp8 import matmul as reference
from . import eager
from .op import read_call
from .sm90.tuning import why_not_fp8_sm90
from .triton.tuning import spmm_sizes, why_not_blocks

_PACKAGE = __name__.rpartition(".")[0]


def why_not_triton(problem: BsrProblem) -> str | None:
    """Why the portable kernels cannot run this product, or None when they can."""
    reason = why_not_portable(problem.arch, problem.out_dtype) or why_not_blocks(problem)
    return reason or why_not_width(problem)


def why_not_width(problem: BsrProblem) -> str | None:
    """Why kernels that scale whole steps of a block cannot, or None."""
    width = spmm_sizes(problem).block_w
    if SCALE_CHANNELS % width and width % SCALE_CHANNELS:
        return (
            f"needs blocks whose side along the sum divides {SCALE_CHANNELS}, the channels that "
            f"share a scale, or is a multiple of it; got {width}"
        )
    return None


fp8_matmul_dispatch: Dispatcher = Dispatcher("bsr_matmul_fp8")
fp8_matmul_dispatch.register(
    "sm90",
    why_not_fp8_sm90,
    f"{_PACKAGE}.sm90.fp8_launch:matmul",
)
fp8_matmul_dispatch.register(
    "triton",
    why_not_triton,
    f"{_PACKAGE}.triton.spmm:matmul_fp8",
    auto_passes=interpreted_only,
)
fp8_matmul_dispatch.register("eager", every_problem, eager.matmul_fp8)
fp8_matmul_dispatch.register("reference", every_problem, reference, auto_passes=only_asked)


def _call_of(
    descale: torch.Tensor,
    x_descale: torch.Tensor,
    values: torch.Tensor,
    pattern: list[torch.Tensor],
    *rest: Any,
) -> Fp8MatmulCall:
    given = MatmulCall(values, pattern_tensors(pattern), *rest)
    return Fp8MatmulCall(given, descale, x_descale)


def _matmul(*args: Any) -> torch.Tensor:
    *arguments, impl = args
    call = _call_of(*arguments)
    read_call("bsr_matmul_fp8", call.given, call.given.values.shape[1:])
    with without_autocast(call.given.values.device), torch.no_grad():
        out: torch.Tensor = fp8_matmul_dispatch.run(impl, call)
    return out


def _matmul_fake(*args: Any) -> torch.Tensor:
    return _call_of(*args[:-1]).given.empty_out()


bsr_matmul_fp8: Operator = define_op(
    "bsr_matmul_fp8",
    "(Tensor descale, Tensor x_descale, Tensor values, Tensor[] pattern, SymInt[] shape, "
    "bool transposed, Tensor dense, bool dense_left, Tensor? bias, Tensor? residual, "
    "str? activation, ScalarType? out_dtype, str impl) -> Tensor",
    _matmul,
    _matmul_fake,
)
