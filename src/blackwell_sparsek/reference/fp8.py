"""The oracle of fp8: the nearest value to a number, and the number a stored value represents."""

from dataclasses import replace

import torch

from ..calls.fp8 import Fp8AttentionCall, Fp8MatmulCall
from .attention import attention
from .matmul import matmul as exact_matmul

_GROUPS = {"head": (None, None), "channel": (None, 1), "1x128": (1, 128), "128x128": (128, 128)}


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 `x` as the nearest finite value of `dtype`, the one with an even mantissa in a tie."""
    every = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    values = every[every.isfinite()].to(x.device)
    middle = (values[1:] + values[:-1]) / 2
    index = torch.searchsorted(middle, x.abs().contiguous())
    # values are in the order of their bits, so that the even mantissas have even places
    tie = (index < len(middle)) & (x.abs() == middle[index.clamp_max(len(middle) - 1)])
    found = values[torch.where(tie & (index % 2 == 1), index + 1, index)]
    return torch.where(x.isnan(), torch.nan, torch.where(x.signbit(), -found, found))


def scale_places(shape: torch.Size, scale: str, block: int) -> torch.Tensor:
    """Which entry of the flattened scales belongs to each value of a tensor of this shape."""
    if scale == "tensor":
        return torch.zeros(shape, dtype=torch.int64)
    *outer, tokens, channels = shape
    by_token, by_channel = (block, None) if scale == "block" else _GROUPS[scale]
    rows, columns = torch.arange(tokens)[:, None], torch.arange(channels)[None, :]
    row, column, height, width = rows * 0, columns * 0, 1, 1
    if by_token is not None:
        row, height = rows // by_token, -(-tokens // by_token)
    if by_channel is not None:
        column, width = columns // by_channel, -(-channels // by_channel)
    head = torch.arange(torch.Size(outer).numel()).view(*outer, 1, 1)
    return (head * height + row) * width + column


def hadamard(channels: int) -> torch.Tensor:
    """The Hadamard matrix of this power of two over its root, fp64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < channels:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.div(channels**0.5)


def forward(call: Fp8AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of attention over what the stored values stand for, in fp64."""
    given, spec = call.given, call.given.spec
    given.check_lengths()
    scales = (call.q_descale, call.k_descale, call.v_descale)
    tensors = (given.q, given.k, given.v)
    ends = (spec.cu_seqlens_q, spec.cu_seqlens_k, spec.cu_seqlens_k)
    # by the role: keys and values may be one tensor
    by_channel = (False, False, True)
    q, k, v = map(_meant, tensors, scales, ends, by_channel)
    exact, lse = attention(q, k, v, spec)
    out, _ = call.empty_results()
    return out.copy_(exact), lse.float()


def _meant(
    x: torch.Tensor, scale: torch.Tensor | None, ends: torch.Tensor | None, by_channel: bool
) -> torch.Tensor:
    """fp64 [B, H, S, D] or [T, H, D]: the scale of a token is found by its place."""
    exact = x.double()
    if scale is None:
        return exact
    tokens = x.shape[0] if ends is not None else x.shape[2]
    each = torch.arange(tokens, device=x.device)
    every = scale.double().expand(-1, x.shape[1], -1)
    if ends is not None:
        sequence = (each[:, None] >= ends[None, 1:]).sum(1)
        return exact * every.expand(len(ends) - 1, -1, -1)[sequence]
    if by_channel:
        return exact * every[:, :, None, :]
    block = each // 128 if scale.shape[2] > 1 else each * 0
    return exact * every[:, :, block, None]


def matmul(call: Fp8MatmulCall) -> torch.Tensor:
    """The product of what the stored values stand for, in fp64."""
    given = call.given
    group = torch.arange(given.dense.shape[-1], device=given.dense.device) // 128
    x = given.dense.double() * call.x_descale.double()[..., group]
    values = given.values.double() * call.descale.double().view(-1, 1, 1)
    return exact_matmul(replace(given, values=values, dense=x, out_dtype=given.out_dtype))
