"""Factors of fp8 numbers over a cache: flash-attn 3 has one for each sequence and KV head.

The kernels read an fp8 cache with queries in 16 bits, in which e4m3 is exact, and with factors that
all sequences share. Where sequences have different ones and queries are in fp8, those of q and k
are multiplied into the queries and that of v into the result.
"""

from typing import NamedTuple

import torch

from ...core.checks import check_dtype, check_same_device, check_tensor, message
from ...core.errors import InvalidInput, InvalidType, Unsupported
from ...core.fp8 import E4M3
from ...kv_cache.layout import check_no_gradient


class Factors(NamedTuple):
    """Of queries, keys and values: fp32, one element, `[Hkv]` or `[B, Hkv]`, None for 1."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None


class WideQueries(NamedTuple):
    """Queries `[T, Hq, D]` in bf16, and the factors that are not in them."""

    q: torch.Tensor
    k_scale: torch.Tensor | None
    """For the kernel, as `v_scale`: one element or `[Hkv]`."""
    v_scale: torch.Tensor | None
    of_result: torch.Tensor | None
    """`[T, Hq, 1]`"""

    def finished(self, out: torch.Tensor) -> torch.Tensor:
        """The result of these queries, in place."""
        return out if self.of_result is None else out.mul_(self.of_result)


def check_fp8(op: str, **tensors: torch.Tensor) -> None:
    """Queries in fp8 go with keys and values in fp8, in the cache and new ones."""
    for arg, x in tensors.items():
        check_tensor(op, arg, x)
        if x.dtype != E4M3:
            raise InvalidType(message(op, arg, "has another dtype than q", E4M3, x.dtype))


def check_factors(op: str, factors: Factors, q: torch.Tensor, kv_heads: int, batch: int) -> None:
    """Check them whole: of an expanded factor, the kernels are given a part only."""
    for name, factor in factors._asdict().items():
        if factor is None:
            continue
        arg = f"{name}_descale"
        check_tensor(op, arg, factor)
        check_dtype(op, arg, factor, [torch.float32])
        check_same_device(op, {"q": q, arg: factor})
        rows, heads = (1, 1, *factor.shape)[-2:]
        if factor.dim() > 2 or rows not in (1, batch) or heads not in (1, kv_heads):
            expected = f"one element, [{kv_heads}] or [{batch}, {kv_heads}]"
            raise InvalidInput(message(op, arg, "has a wrong shape", expected, list(factor.shape)))
        check_no_gradient(op, arg, factor)


def wide_queries(
    op: str, q: torch.Tensor, factors: Factors, kv_heads: int, sequence: torch.Tensor
) -> WideQueries:
    """Queries `[T, Hq, D]` of e4m3 in bf16; `sequence` [T] is the one of each, for its factors."""
    group, left = divmod(q.shape[1], max(kv_heads, 1))
    if left:
        expected = f"a multiple of {kv_heads}, those of the keys"
        raise InvalidInput(message(op, "q", "has a wrong number of heads", expected, q.shape[1]))

    def of_tokens(factor: torch.Tensor) -> torch.Tensor:
        rows = 1 if factor.dim() < 2 else factor.shape[0]
        whole = factor.expand(rows, kv_heads).repeat_interleave(group, 1)
        return whole[sequence if rows > 1 else torch.zeros_like(sequence)][..., None]

    wide = q.float()
    if factors.q is not None:
        wide = wide * of_tokens(factors.q)
    k_scale, v_scale = shared_factor(factors.k), shared_factor(factors.v)
    if factors.k is not None and k_scale is None:
        wide = wide * of_tokens(factors.k)
    of_result = None
    if factors.v is not None and v_scale is None:
        of_result = of_tokens(factors.v)
    return WideQueries(wide.bfloat16(), k_scale, v_scale, of_result)


def shared_factor(factor: torch.Tensor | None) -> torch.Tensor | None:
    """A factor as the kernels take it; None where sequences have factors of their own."""
    if factor is None or factor.dim() < 2:
        return factor
    if factor.shape[0] != 1 and factor.stride(0) != 0:
        return None
    # engines expand the factor of a layer to all sequences and heads
    return factor[0, :1] if factor.stride(1) == 0 else factor[0]


def head_scale(op: str, arg: str, factor: torch.Tensor | None) -> torch.Tensor | None:
    """The factor of a cache for queries in 16 bits, which all sequences have to share."""
    shared = shared_factor(factor)
    if factor is not None and shared is None:
        raise Unsupported(
            f"{op}: {arg} per sequence is supported with queries in float8_e4m3fn only; pass one "
            f"element or [Hkv], got {list(factor.shape)}"
        )
    return shared
