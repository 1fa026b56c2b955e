"""Calls in fp8: quantization, with its groups and its result, attention, and products."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..core.arch import Arch, arch_of
from ..core.checks import (
    check_choice,
    check_dtype,
    check_flag,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput
from ..core.fp8 import LARGEST
from ..core.sizes import SCALE_CHANNELS as SCALE_CHANNELS
from .attention import AttentionCall, AttnProblem, empty_lse, empty_out, tma_takes
from .matmul import BsrProblem, MatmulCall

# Tokens and channels that share a scale; 0 is all of them. "tensor" has one scale for everything.
_GROUPS = {"tensor": (0, 0), "head": (0, 0), "channel": (0, 1), "1x128": (1, 128)}
_GROUPS |= {"128x128": (128, 128)}
SCALES = ("tensor", "head", "block", "channel", "1x128", "128x128")
# Tokens that may share a scale under "block".
BLOCKS = (16, 32, 64, 128, 256)
# Tokens of transposed results are padded to this many, because TMA takes strides of 16 bytes.
TOKEN_PADDING = 16


class Group(NamedTuple):
    """Tokens and channels that share a scale; 0 is all of them."""

    tokens: int
    channels: int


@dataclass(frozen=True)
class QuantizeProblem:
    """One call without its data."""

    arch: Arch
    dtype: torch.dtype
    to: torch.dtype
    scale: str
    channels: int
    elements: int

    def __str__(self) -> str:
        return (
            f"rounding on {self.arch}, {self.dtype} -> {self.to}, {self.elements} elements, "
            f"{self.channels} channels, scales {self.scale!r}"
        )


@dataclass(frozen=True, eq=False)
class QuantizeCall:
    """Values [..., S, D] to be rounded; see `bsk.fp8.quantize`."""

    x: torch.Tensor
    scale: str
    dtype: torch.dtype
    block: int
    """Tokens that share a scale under "block"."""
    smooth: bool
    hadamard: bool
    transposed: bool

    @cached_property
    def problem(self) -> QuantizeProblem:
        """The properties that the choice of an implementation depends on."""
        x = self.x
        arch = arch_of(x.device)
        return QuantizeProblem(arch, x.dtype, self.dtype, self.scale, x.shape[-1], x.numel())

    @property
    def group(self) -> Group:
        """The tokens and channels that share a scale."""
        return group_of(self.scale, self.block)

    def empty_data(self) -> torch.Tensor:
        """The result's values; transposed, tokens are contiguous and padded in memory."""
        x = self.x
        if not self.transposed:
            # in the order of x: attention lays its output out as the queries are
            return torch.empty_like(x, dtype=self.dtype)
        return empty_turned(x, self.dtype)

    def empty_descale(self) -> torch.Tensor:
        """The result's scales."""
        shape = descale_shape(self.x.shape, self.scale, self.block)
        return self.x.new_empty(shape, dtype=torch.float32)

    def empty_mean(self) -> torch.Tensor:
        """The means that are subtracted, fp32 [..., D]; no elements without smoothing."""
        shape = (*self.x.shape[:-2], self.x.shape[-1]) if self.smooth else (0,)
        return self.x.new_empty(shape, dtype=torch.float32)


def group_of(scale: str, block: int) -> Group:
    """The tokens and channels that share a scale."""
    return Group(block, 0) if scale == "block" else Group(*_GROUPS[scale])


def descale_shape(shape: torch.Size, scale: str, block: int) -> tuple[int, ...]:
    """Shape of the scales of a tensor of this shape."""
    if scale == "tensor":
        return ()
    *outer, tokens, channels = shape
    group = group_of(scale, block)
    kept = [-(-n // size) for n, size in zip((tokens, channels), group, strict=True) if size]
    return (*outer, *kept)


class Quantized(NamedTuple):
    """Values in fp8 with their scales, from `bsk.fp8.quantize`.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> made = bsk.fp8.quantize(torch.tensor([[1.0, 2.0]]), "tensor")
    >>> made.data.dtype, made.dequantize()
    (torch.float8_e4m3fn, tensor([[1., 2.]]))
    """

    data: torch.Tensor
    """fp8 [..., S, D]"""
    descale: torch.Tensor
    """fp32: what stored values are multiplied with. `[]` for one scale, [...] for one per head,
    [..., blocks], [..., D], or [..., S or blocks, blocks of channels]."""
    scale: str
    """The kind of group that shares a scale: an entry of `SCALES`."""
    block: int
    """Tokens that share a scale under "block"."""
    mean: torch.Tensor | None
    """fp32 [..., D]: what was subtracted from every token, None without smoothing."""
    hadamard: bool
    """Whether channels were rotated, after the mean was subtracted."""

    def stored(self) -> torch.Tensor:
        """`data * descale` in fp32: smoothed and rotated, if that was asked for."""
        return self.data.float() * expanded_scales(
            self.descale, self.data.shape, self.scale, self.block
        )

    def dequantize(self) -> torch.Tensor:
        """The values that were rounded, in fp32, up to the rounding."""
        x = self.stored()
        if self.hadamard:
            # the rotation is its own inverse
            x = rotated(x)
        return x if self.mean is None else x + self.mean.unsqueeze(-2)

    def __reduce__(self) -> tuple[Any, ...]:
        """Store fp8 as bytes, because torch does not unpickle fp8 tensors."""
        if self.data.dtype not in LARGEST:
            return Quantized, tuple(self)
        return restored, (self.data.view(torch.uint8), self.data.dtype, *self[1:])


def restored(
    stored: Any, dtype: Any, descale: Any, scale: Any, block: Any, mean: Any, hadamard: Any
) -> Quantized:
    """The inverse of `Quantized.__reduce__`; checks everything, as it may come from a file."""
    op = "Quantized"
    check_tensor(op, "data", stored)
    check_dtype(op, "data", stored, (torch.uint8,))
    check_choice(op, "dtype", dtype, tuple(LARGEST))
    check_choice(op, "scale", scale, SCALES)
    check_choice(op, "block", block, BLOCKS)
    check_flag(op, "hadamard", hadamard)
    if stored.dim() < 2:
        expected = "[..., tokens, channels]"
        raise InvalidInput(message(op, "data", "has a wrong rank", expected, list(stored.shape)))
    *outer, _, channels = stored.shape
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "descale": (descale, descale_shape(stored.shape, scale, block))
    }
    if mean is not None:
        shapes["mean"] = (mean, (*outer, channels))
    for arg, (x, shape) in shapes.items():
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, (torch.float32,))
        check_shape(op, arg, x, shape)
        check_same_device(op, {"data": stored, arg: x})
    return Quantized(stored.view(dtype), descale, scale, block, mean, hadamard)


# safe to unpickle: it takes plain data and checks all of it
torch.serialization.add_safe_globals([restored])


def expanded_scales(
    descale: torch.Tensor, shape: torch.Size, scale: str, block: int
) -> torch.Tensor:
    """Scales that broadcast to a tensor of this shape."""
    if scale == "tensor":
        return descale
    tokens, channels = shape[-2:]
    group = group_of(scale, block)
    if not group.channels:
        descale = descale.unsqueeze(-1)
    if not group.tokens:
        descale = descale.unsqueeze(-2)
    if group.channels > 1:
        descale = descale.repeat_interleave(group.channels, -1)[..., :channels]
    if group.tokens > 1:
        descale = descale.repeat_interleave(group.tokens, -2)[..., :tokens, :]
    return descale


def rotated(x: torch.Tensor) -> torch.Tensor:
    """fp32 rows times the Hadamard matrix of their length, a power of two, divided by its root."""
    channels = x.shape[-1]
    for _ in range(channels.bit_length() - 1):
        # combines the lowest bit of the channel and moves it to the top: after all, each is back
        even, odd = x.unflatten(-1, (channels // 2, 2)).unbind(-1)
        x = torch.cat((even + odd, even - odd), -1)
    return x * channels**-0.5


# Attention.

# Queries or keys that share a scale where scales have a third dimension.
SCALE_TOKENS = 128


@dataclass(frozen=True)
class Fp8AttnProblem(AttnProblem):
    """One attention call in fp8, without its data."""

    out_dtype: torch.dtype = torch.bfloat16
    turned_values: bool = False
    """Whether the tokens of a channel of v are contiguous."""


@dataclass(eq=False)
class Fp8AttentionCall:
    """Attention over e4m3 queries, keys and values, checked.

    Each stored value represents itself times its scale; a scale of None is 1.
    """

    given: AttentionCall
    q_descale: torch.Tensor | None
    """fp32 [B or 1, Hq or 1, blocks or 1], one for each SCALE_TOKENS queries."""
    k_descale: torch.Tensor | None
    """The same for keys."""
    v_descale: torch.Tensor | None
    """fp32 [B or 1, Hkv or 1, Dv or 1]"""
    out_dtype: torch.dtype

    @cached_property
    def problem(self) -> Fp8AttnProblem:
        """The properties that the choice of an implementation and of tiles depends on."""
        q, k, v, spec = self.given.q, self.given.k, self.given.v, self.given.spec
        problem = Fp8AttnProblem.of(q, k, v, spec)
        assert isinstance(problem, Fp8AttnProblem)
        turned = is_turned(v)
        return replace(
            problem,
            out_dtype=self.out_dtype,
            turned_values=turned,
            tma=tma_takes(q) and tma_takes(k) and tma_takes(v.mT if turned else v),
        )

    def empty_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse to be filled."""
        q = self.given.q
        return empty_out(q, self.given.v.shape[-1], self.out_dtype), empty_lse(q)


def empty_turned(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for values of this shape, with the tokens of a channel contiguous and padded."""
    *outer, tokens, channels = like.shape
    padded = -(-tokens // TOKEN_PADDING) * TOKEN_PADDING
    return like.new_empty((*outer, channels, padded), dtype=dtype)[..., :tokens].mT


def is_turned(v: torch.Tensor) -> bool:
    """Whether the tokens of a channel of values [B, H, S, D] are contiguous in memory."""
    return v.dim() == 4 and v.stride(-1) != 1 and v.stride(-2) == 1


# Products.


@dataclass(eq=False)
class Fp8MatmulCall:
    """activation(x @ op(A) + bias) + residual, with x and the blocks of A in e4m3.

    Each stored value represents itself times its scale. `given` has the dense operand, x, on the
    left, and names the dtype of the result.
    """

    given: MatmulCall
    descale: torch.Tensor
    """fp32 [nnzb], one for each block as stored."""
    x_descale: torch.Tensor
    """fp32 [..., T, groups], one for each SCALE_CHANNELS channels of a token."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `bsk::bsr_matmul_fp8` before `impl`."""
        return (self.descale, self.x_descale, *self.given.arguments)

    @property
    def problem(self) -> BsrProblem:
        """The properties that the choice of an implementation and of tiles depends on."""
        return self.given.problem
