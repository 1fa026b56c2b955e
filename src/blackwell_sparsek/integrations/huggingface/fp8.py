"""Caches of transformers that hold keys and values in e4m3, and attention over them."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...attention.api import attention
from ...calls.fp8 import empty_turned
from ...core.checks import message
from ...core.errors import InvalidInput, InvalidType, Unsupported
from ...core.fp8 import E4M3, within_range
from ...core.transfer import is_capturing
from ...fp8.api import quantize
from ...masks.device_build import untraced
from .visible_keys import OP


@dataclass(frozen=True)
class Fp8:
    """Keys and values in e4m3, for `register(fp8=...)` and the cache that goes with it.

    What is stored is `x / scale`, rounded to nearest even; beyond 448 it is 448. e4m3 is a
    floating-point format, so that 1 serves wherever values stay within its range, 2**-9 to 448.

    Parameters
    ----------
    k_scale, v_scale : float above 0
        Factors of the stored keys and values, in all layers.

    Raises
    ------
    InvalidInput
        If a scale is not above 0.

    Examples
    --------
    >>> from blackwell_sparsek.integrations.huggingface import Fp8
    >>> fp8 = Fp8(v_scale=0.5)
    >>> cache = fp8.cache(model.config)  # doctest: +SKIP
    >>> model.generate(**inputs, past_key_values=cache)  # doctest: +SKIP
    """

    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        for arg in ("k_scale", "v_scale"):
            value = getattr(self, arg)
            if isinstance(value, bool) or not isinstance(value, int | float):
                got = type(value).__name__
                raise InvalidType(message("Fp8", arg, "is not a number", "float", got))
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(message("Fp8", arg, "is out of range", "above 0", value))

    def cache(self, config: Any) -> Any:
        """A `DynamicCache` for a model of this configuration that rounds what it is given.

        Half the memory of a 16-bit cache. Its keys and values are for attention that was registered
        with this object.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=config)
        if not cache.layers:
            problem = "describes no layers"
            raise InvalidInput(message("Fp8.cache", "config", problem, "that of a model", config))
        layers: Any = cache.layers
        for layer in layers:
            kind: type = type(layer)
            layer.__class__ = rounding_layer(kind)
            layer.rounding = self
        return cache


@lru_cache(maxsize=64)
def rounding_layer(base: type) -> type:
    """A class of cache layers that round keys and values before `base` stores them."""

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kw: Any) -> Any:
        fp8: Fp8 = self.rounding
        stored = (rounded(keys, fp8.k_scale), rounded(values, fp8.v_scale))
        keys, values = base.update(self, *stored, *args, **kw)  # type: ignore[attr-defined]
        if not torch.compiler.is_compiling():
            # transformers passes nothing but tensors on to the attention
            keys.rounding = fp8  # type: ignore[attr-defined]
        return keys, values

    def reduce(self: Any, protocol: Any) -> Any:
        return _restored_layer, (base,), self.__dict__

    # such a class has no name to find it by, so that saving and copying make it again
    content = {"update": update, "__reduce_ex__": reduce, "__module__": __name__}
    return type(f"Fp8{base.__name__}", (base,), content)


def _restored_layer(base: type) -> Any:
    kind: Any = rounding_layer(base)
    return kind.__new__(kind)


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in e4m3, saturating."""
    return within_range(x.float() / scale, E4M3).to(E4M3)


def scalar(value: float, device: torch.device) -> torch.Tensor:
    """A scale on a device; kept, because every layer needs it."""
    # what is made while a call is traced only stands for a tensor, and what is made during a
    # capture belongs to the graph: neither must reach other calls
    if untraced() and not is_capturing(device):
        return _kept_scalar(value, device)
    return torch.full((), value, dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def _kept_scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def decode_scales(fp8: Fp8 | None, key: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of `attention_decode` for a cache; none for one in 16 bits."""
    if key.dtype != E4M3:
        return {}
    fp8 = registered(fp8)
    return {
        "k_scale": scalar(fp8.k_scale, key.device),
        "v_scale": scalar(fp8.v_scale, key.device),
    }


def check_scales(fp8: Fp8 | None, key: torch.Tensor) -> None:
    """Raise if keys come from a cache with other scales than the attention was registered with."""
    made = getattr(key, "rounding", fp8)
    if made != fp8:
        raise Unsupported(
            f"{OP}: the cache was made by {made}; use register(fp8=...) with it, this one has {fp8}"
        )


def registered(fp8: Fp8 | None) -> Fp8:
    """The options that the attention was registered with; raises if there are none."""
    if fp8 is None:
        raise Unsupported(f"{OP}: keys are in fp8; use register(fp8=...) with what made the cache")
    return fp8


def refuse_in_fp8(key: torch.Tensor, what: str | None) -> None:
    """Raise if keys are in fp8 and a call asks for what is not computed with them."""
    if key.dtype == E4M3 and what is not None:
        raise Unsupported(f"{OP}: {what} over a cache in fp8; use a cache in 16 bits")


def attend_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    fp8: Fp8 | None,
    **options: Any,
) -> torch.Tensor:
    """Attention of queries `[B, Hq, Sq, D]`, which are rounded as well if keys are in fp8."""
    if key.dtype == E4M3:
        fp8 = registered(fp8)
        differentiable = torch.is_grad_enabled() and query.requires_grad
        refuse_in_fp8(key, "gradients" if differentiable else None)
        q = quantize(query, "block")
        if value.is_cuda:
            # WGMMA multiplies e4m3 along contiguous tokens; a copy costs far less than products
            value = empty_turned(value, E4M3).copy_(value)
        options |= {"q_descale": q.descale, "out_dtype": query.dtype}
        options["k_descale"] = scalar(fp8.k_scale, key.device)
        options["v_descale"] = scalar(fp8.v_scale, key.device)
        query = q.data
    out = attention(query, key, value, **options)
    assert isinstance(out, torch.Tensor)
    return out
