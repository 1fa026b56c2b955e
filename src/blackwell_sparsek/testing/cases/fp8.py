"""Compile cases of the kernels that round to fp8."""

from collections.abc import Iterator

import torch

from ...calls.fp8 import E4M3, E5M2, QuantizeCall
from ...fp8.triton import (
    MIN_SM_CONVERTS_FP8,
    _amax_kernel,
    _quantize_kernel,
    launch_quantize,
    launch_sums,
)
from ..captured_launches import launched_case, meta
from ..compile_cases import ALL_ARCHS, CompileCase, compile_cases

_CONVERTING = tuple(sm for sm in ALL_ARCHS if sm >= MIN_SM_CONVERTS_FP8)


def _call(scale: str, channels: int, dtype: torch.dtype = E4M3, **options: bool) -> QuantizeCall:
    given = {"smooth": False, "hadamard": False, "transposed": False, **options}
    return QuantizeCall(meta(2, 8, 1000, channels), scale, dtype, 128, **given)


def quantize_case(
    name: str, call: QuantizeCall, *, amax: bool = False, converts: bool = False
) -> CompileCase:
    """The launch that rounds, or the one that finds the maxima."""
    results = (call.empty_data(), call.empty_descale(), call.empty_mean() if call.smooth else None)
    return launched_case(
        f"{'fp8_amax' if amax else 'fp8_quantize'}/{name}",
        launch_quantize,
        call,
        *results,
        converts_fp8=converts,
        kernel=_amax_kernel if amax else _quantize_kernel,
        archs=_CONVERTING if converts else ALL_ARCHS,
    )


@compile_cases
def quantize_cases() -> Iterator[CompileCase]:
    """Queries, keys and values of attention, activations and weights of products."""
    keys = _call("block", 128, smooth=True, hadamard=True)
    values = _call("channel", 128, transposed=True)
    yield quantize_case("keys-d128", keys)
    yield quantize_case("keys-converted-d128", keys, converts=True)
    wide = _call("block", 256, smooth=True, hadamard=True)
    yield quantize_case("keys-converted-d256", wide, converts=True)
    yield quantize_case("values-d128", values)
    yield quantize_case("values-converted-d128", values, converts=True)
    yield quantize_case("values-d128", values, amax=True)
    yield quantize_case("tensor-d64", _call("tensor", 64, hadamard=True), amax=True)
    yield quantize_case("tensor-e5m2-d64", _call("tensor", 64, E5M2, hadamard=True))
    yield quantize_case("1x128-converted", _call("1x128", 4096), converts=True)
    yield quantize_case("128x128-converted", _call("128x128", 4096), converts=True)
    sums = meta(16, 2, 128, dtype=torch.float32)
    yield launched_case("fp8_sums/d128", launch_sums, keys, sums)
