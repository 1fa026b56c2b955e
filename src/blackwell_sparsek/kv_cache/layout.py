"""Layouts and dtypes of KV caches, their tensors, and the checks of scales and counts."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from ..calls.decode import values_are_keys
from ..core.checks import (
    check_choice,
    check_dtype,
    check_flag,
    check_rank,
    check_tensor,
    message,
    shares_elements,
    wants_gradient,
)
from ..core.errors import InvalidInput, InvalidType, Unsupported
from ..masks.check import check_count

CONTIGUOUS = "[B, Hkv, S, D]"
PAGED = "[pages, page_size, Hkv, D]"
FP8 = torch.float8_e4m3fn
NEW = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STORED = (*NEW, FP8)
INDICES = (torch.int32, torch.int64)


def check_scale(
    op: str, arg: str, scale: torch.Tensor | None, stored: torch.dtype, heads: int
) -> None:
    """A scale goes with fp8 only, and is fp32 with one element or one for each KV head."""
    if scale is None:
        return
    check_tensor(op, arg, scale)
    check_dtype(op, arg, scale, [torch.float32])
    if stored != FP8:
        raise InvalidInput(message(op, arg, "is for fp8 caches only", FP8, stored))
    if scale.dim() > 1 or scale.numel() not in (1, heads):
        expected = f"one element or [{heads}]"
        raise InvalidInput(message(op, arg, "has a wrong shape", expected, list(scale.shape)))
    check_no_gradient(op, arg, scale)


def check_latent(
    op: str, latent: Any, head_dim: int, head_dim_v: int | None, dtype: torch.dtype
) -> None:
    """Check the flag, and the sizes and the dtype if the cache is to be a latent one."""
    check_flag(op, "latent", latent)
    if not latent:
        return
    if head_dim_v is None:
        expected = "how many channels of a key are its value, 512 for MLA"
        raise InvalidInput(message(op, "head_dim_v", "is missing", expected, None))
    if head_dim_v >= head_dim:
        expected = f"less than head_dim, {head_dim}, for a latent cache"
        raise InvalidInput(message(op, "head_dim_v", "is too large", expected, head_dim_v))
    if dtype == FP8:
        expected = ", ".join(map(str, NEW))
        raise Unsupported(message(op, "dtype", "is not for latent caches", expected, dtype))


def latent_values(op: str, head_dim_v: int, k: Any, v: Any) -> torch.Tensor:
    """The values of new keys of a latent cache, for which the caller gives no `v`."""
    if v is not None:
        expected = f"None: the values of a latent cache are k[..., :{head_dim_v}]"
        raise InvalidInput(message(op, "v", "is given", expected, type(v).__name__))
    check_tensor(op, "k", k)
    check_rank(op, "k", k, "[B, Hkv, T, D]")
    values: torch.Tensor = k[..., :head_dim_v]
    return values


def is_latent(
    op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> bool:
    """Whether the cached values are a view of the cached keys; the new ones must be one as well.

    Otherwise keys and values would be written to the same places.
    """
    # addresses are unknown to a compiler; there, both are written
    if torch.compiler.is_compiling() or not values_are_keys(k_cache, v_cache):
        return False
    columns = f"k[..., :{v_cache.shape[-1]}]"
    if k_cache.dtype == FP8:
        problem = "is not for values that are a view of the keys"
        raise Unsupported(message(op, "k_cache", problem, ", ".join(map(str, NEW)), FP8))
    if not values_are_keys(k, v):
        problem = "is not a view of k, as v_cache is of k_cache"
        raise InvalidInput(message(op, "v", problem, columns, "another tensor"))
    return True


def check_places(op: str, arg: str, cache: torch.Tensor) -> None:
    """Refuse a cache with two slots at one place, as in an expanded tensor."""
    if not torch.compiler.is_compiling() and shares_elements(cache):
        expected = "one place in memory for each element"
        raise InvalidInput(message(op, arg, "overlaps itself", expected, list(cache.stride())))


def check_no_gradient(op: str, arg: str, x: torch.Tensor) -> None:
    """Refuse a tensor that wants a gradient, which would silently be missing."""
    if torch.is_grad_enabled() and wants_gradient(x):
        expected = "torch.no_grad(), or a detached tensor"
        problem = "requires gradients, which do not flow through a cache"
        raise InvalidInput(message(op, arg, problem, expected, "requires_grad=True"))


def scale_tensor(
    op: str, arg: str, scale: Any, stored: torch.dtype, heads: int, device: torch.device
) -> torch.Tensor | None:
    """A scale given as a number or a tensor, as fp32 on `device`; 1 by default for fp8."""
    if scale is None:
        return torch.ones((), dtype=torch.float32, device=device) if stored == FP8 else None
    if not isinstance(scale, torch.Tensor):
        if isinstance(scale, bool) or not isinstance(scale, Real):
            got = type(scale).__name__
            raise InvalidType(message(op, arg, "is not a number", "a float or a tensor", got))
        number = float(scale)
        if not 0 < number < math.inf:
            expected = "a finite number above 0"
            raise InvalidInput(message(op, arg, "must be positive", expected, scale))
        scale = torch.full((), number, dtype=torch.float32, device=device)
    scale = scale.to(device)
    check_scale(op, arg, scale, stored, heads)
    return scale


class CacheTensors(NamedTuple):
    """Keys and values of a cache, and the scales of an fp8 one."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def empty_cache(
    op: str,
    sizes: dict[str, int],
    shape: tuple[int, int, int],
    head_dim: int,
    head_dim_v: int | None,
    *,
    latent: bool,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    scales: tuple[Any, Any],
) -> CacheTensors:
    """The tensors of a new cache, full of zeros.

    Parameters
    ----------
    sizes : the sizes to be checked, by the names of arguments; "heads_kv" is among them
    shape : of keys and values without their channels
    scales : of keys and values, as given
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    channels_v = head_dim if head_dim_v is None else head_dim_v
    check_choice(op, "dtype", dtype, STORED)
    for arg, value in {**sizes, "head_dim": head_dim, "head_dim_v": channels_v}.items():
        check_count(op, arg, value, at_least=1)
    check_latent(op, latent, head_dim, head_dim_v, dtype)
    k = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
    v = k[..., :channels_v]
    if not latent:
        v = torch.zeros(*shape, channels_v, dtype=dtype, device=device)
    k_scale, v_scale = (
        scale_tensor(op, arg, scale, dtype, sizes["heads_kv"], k.device)
        for arg, scale in zip(("k_scale", "v_scale"), scales, strict=True)
    )
    return CacheTensors(k, v, k_scale, v_scale)


def check_counts(
    op: str,
    counts: int | Sequence[int] | None,
    sequences: int,
    tokens: int | None,
    *,
    arg: str = "counts",
) -> list[int]:
    """One count for each sequence, none above `tokens`; None means all of them."""
    if counts is None:
        assert tokens is not None
        return [tokens] * sequences
    if isinstance(counts, torch.Tensor):
        expected = "ints on the host (bsk.kv_append takes tensors)"
        raise InvalidType(message(op, arg, "are a tensor", expected, type(counts).__name__))
    if not isinstance(counts, (int, Iterable)):
        expected = f"an int or {sequences}, one for each sequence"
        raise InvalidType(message(op, arg, "are of a wrong type", expected, type(counts).__name__))
    each = [counts] * sequences if isinstance(counts, int) else list(counts)
    if len(each) != sequences:
        expected = f"an int or {sequences}, one for each sequence"
        raise InvalidInput(message(op, arg, "do not match the sequences", expected, len(each)))
    for count in each:
        check_count(op, arg, count, at_least=0)
        if tokens is not None and count > tokens:
            expected = f"0 to {tokens} (T)"
            raise InvalidInput(message(op, arg, "are out of range", expected, count))
    return each
