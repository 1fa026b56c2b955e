"""`bsk.fp8.quantize`: round tensors to fp8 with scales."""

from typing import Any

import torch

from ..calls.fp8 import BLOCKS, SCALES, QuantizeCall, Quantized
from ..core.checks import (
    check_choice,
    check_derivatives,
    check_dtype,
    check_flag,
    check_last_dim_contiguous,
    check_tensor,
    message,
    wants_gradient,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput
from ..core.fp8 import E4M3, LARGEST
from ..core.torch_state import is_explaining
from ..launch.replay import Cache, record, repeat
from .op import fp8_quantize

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST_ROTATION = 256
# Scales of operands of products, which cut through the channels that a rotation mixes.
_FOR_PRODUCTS = ("1x128", "128x128")
_RECORDED: Cache = {}


def quantize(
    x: torch.Tensor,
    scale: str = "tensor",
    *,
    dtype: torch.dtype = E4M3,
    block: int = 128,
    smooth: bool = False,
    hadamard: bool = False,
    transposed: bool = False,
    impl: str = "auto",
) -> Quantized:
    """Round a tensor to fp8, each group of values by a scale that makes the largest one fit.

    A scale is `amax / 448` (57344 for e5m2) of the finite values that share it, at least 2**-120,
    and 1 where all of them are zero. What is stored is `x * (1 / scale)` in fp32, rounded to
    nearest even; infinities become the largest finite value, NaN stays NaN.

    Parameters
    ----------
    x : fp16, bf16 or fp32 `[S, D]`, `[H, S, D]` or `[B, H, S, D]`
        Tokens by channels; any strides with a contiguous last dimension. No gradient flows
        through the rounding.
    scale : str
        What shares a scale: `tensor` all of x, `head` all tokens of a head, `block` the next
        `block` tokens of a head, `channel` all tokens of a channel of a head, `1x128` 128 channels
        of a token, `128x128` 128 channels of 128 tokens.
    dtype : torch.float8_e4m3fn or torch.float8_e5m2
    block : 16, 32, 64, 128 or 256
        Tokens that share a scale under `scale="block"`.
    smooth : bool
        Subtract the mean over the tokens from every token of a head, and return it. For keys this
        changes all scores of a query by the same number, which softmax cancels. It is the sum of
        the finite values divided by the number of all tokens: NaN and infinities count as zeros.
    hadamard : bool
        Multiply channels by the Hadamard matrix over sqrt(D), which spreads outliers over all
        channels. Products of queries and keys that are both rotated stay the same. D must be a
        power of two up to 256, and not cut by the scales `1x128` and `128x128`.
    transposed : bool
        Lay the result out channel by channel, so that the tokens of a channel are contiguous: as
        the values of fp8 attention on Hopper have to be.
    impl : str
        `auto`, `eager` or `triton`.

    Returns
    -------
    Quantized
        `data` with the shape of x, `descale`, and what `dequantize()` needs besides.

    Raises
    ------
    InvalidInput
        For shapes, dtypes and options that do not fit, and if x requires a gradient.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0, -3.0], [0.0, 448.0]])
    >>> made = quantize(x, "channel")
    >>> made.descale
    tensor([0.0022, 1.0000])
    >>> made.dequantize()
    tensor([[  1.,  -3.],
            [  0., 448.]])
    """
    options = (scale, dtype, block, smooth, hadamard, transposed, impl)
    results = repeat(_RECORDED, options, (x,))
    if results is None:
        _check(x, *options)
        results = record(
            *(_RECORDED, options, (x,), fp8_quantize, x, *options), operands=1, closed=True
        )
    data, descale, mean = results
    return Quantized(data, descale, scale, block, mean if smooth else None, hadamard)


def quantized_operand(
    x: torch.Tensor,
    scale: str,
    *,
    smooth: bool = False,
    hadamard: bool = False,
    transposed: bool = False,
    impl: str,
) -> Quantized:
    """`quantize` as a step of another function.

    `explain` of that function is to report what it does with the result: it gets one that nothing
    was computed for.
    """
    if not is_explaining():
        return quantize(
            x, scale, smooth=smooth, hadamard=hadamard, transposed=transposed, impl=impl
        )
    options = (scale, E4M3, 128, smooth, hadamard, transposed)
    _check(x, *options, impl)
    call = QuantizeCall(x, *options)
    mean = call.empty_mean() if smooth else None
    return Quantized(call.empty_data(), call.empty_descale(), scale, 128, mean, hadamard)


def _check(
    x: Any,
    scale: Any,
    dtype: Any,
    block: Any,
    smooth: Any,
    hadamard: Any,
    transposed: Any,
    impl: Any,
) -> None:
    op = "fp8.quantize"
    _check_values(op, x)
    check_choice(op, "scale", scale, SCALES)
    check_choice(op, "dtype", dtype, tuple(LARGEST))
    check_choice(op, "block", block, BLOCKS)
    check_choice(op, "impl", impl, IMPLS)
    flags = {"smooth": smooth, "hadamard": hadamard, "transposed": transposed}
    for arg, value in flags.items():
        check_flag(op, arg, value)
    channels = x.shape[-1]
    if hadamard and (channels & (channels - 1) or not 1 <= channels <= _WIDEST_ROTATION):
        expected = f"a power of two up to {_WIDEST_ROTATION} channels"
        raise InvalidInput(message(op, "hadamard", "does not exist for x", expected, channels))
    if hadamard and scale in _FOR_PRODUCTS:
        expected = "scale tensor, head, block or channel"
        raise InvalidInput(message(op, "hadamard", "is for attention", expected, repr(scale)))


def _check_values(op: str, x: Any) -> None:
    check_tensor(op, "x", x)
    check_derivatives(op, "x", x)
    check_dtype(op, "x", x, DTYPES)
    if not 2 <= x.dim() <= 4:
        expected = "[S, D], [H, S, D] or [B, H, S, D]"
        raise InvalidInput(message(op, "x", "has a wrong rank", expected, list(x.shape)))
    check_last_dim_contiguous(op, "x", x)
    if torch.is_grad_enabled() and wants_gradient(x):
        problem = "requires gradients, which rounding does not have"
        expected = "torch.no_grad(), or a detached tensor"
        raise InvalidInput(message(op, "x", problem, expected, "requires_grad=True"))
