"""`bsk::fp8_quantize`, and its implementations by name."""

from typing import Any

import torch

from ..calls.fp8 import QuantizeCall, QuantizeProblem
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only
from ..dispatch.machine import why_not_portable
from ..dispatch.operators import Operator, define_op

# Elements that one program rounds at least, and the most programs of a launch.
_FEWEST_ELEMENTS, _MOST_PROGRAMS = 16 * 16, 2**31 - 1


def _why_not_triton(problem: QuantizeProblem) -> str | None:
    if (reason := why_not_portable(problem.arch, problem.dtype)) is not None:
        return reason
    if problem.elements // _FEWEST_ELEMENTS > _MOST_PROGRAMS:
        return f"needs at most {_MOST_PROGRAMS * _FEWEST_ELEMENTS} elements"
    return None


quantize_dispatch: Dispatcher = Dispatcher("fp8_quantize")
quantize_dispatch.register(
    "triton",
    _why_not_triton,
    "blackwell_sparsek.fp8.triton:quantize",
    auto_passes=interpreted_only,
)
quantize_dispatch.register("eager", every_problem, "blackwell_sparsek.fp8.eager:quantize")


def _quantize(*args: Any) -> tuple[torch.Tensor, ...]:
    *given, impl = args
    call = QuantizeCall(*given)
    with without_autocast(call.x.device), torch.no_grad():
        results: tuple[torch.Tensor, ...] = quantize_dispatch.run(impl, call)
    return results


def _quantize_fake(*args: Any) -> tuple[torch.Tensor, ...]:
    *given, _ = args
    call = QuantizeCall(*given)
    return call.empty_data(), call.empty_descale(), call.empty_mean()


fp8_quantize: Operator = define_op(
    "fp8_quantize",
    "(Tensor x, str scale, ScalarType dtype, SymInt block, bool smooth, bool hadamard, "
    "bool transposed, str impl) -> (Tensor data, Tensor descale, Tensor mean)",
    _quantize,
    _quantize_fake,
)
