"""A cache for decoding with SparseK: tokens that have lost their weight are dropped."""

from typing import Any

import torch

from ..attention.inputs import DTYPES
from ..core.checks import check_dtype, check_same_device, check_tensor, message
from ..core.errors import InvalidInput, InvalidType
from .api import sparsek


class SparsekCache:
    """Keys and values of the tokens that SparseK still gives a weight, for decoding.

    Thresholds never decrease, so a token at or below one has no weight from then on. `append` adds
    tokens and raises the threshold. When half of the places hold such tokens, they are dropped,
    which makes the host wait for the device. Attend with
    `attention(q, cache.k, cache.v, key_gate=cache.gate)`: the results are those of attention with
    `sparsek_causal` over all tokens so far.

    Parameters
    ----------
    k : float
        Sum of the weights, at least 0; as in `sparsek`.

    Attributes
    ----------
    k, v : `[B, Hkv, places, D]`, `[B, Hkv, places, Dv]`
        None before the first token.
    u : `[B, Hkv, places]`
        Scores; -inf at places of a head that hold no token.
    tau : fp32 `[B, Hkv, 1]`
        Thresholds of the latest token.

    Raises
    ------
    InvalidInput
        If `k` is negative or NaN, or if appended tensors do not fit.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> cache = bsk.SparsekCache(4)
    >>> for step in range(64):
    ...     k, v = torch.randn(2, 1, 2, 1, 16)
    ...     cache.append(k, v, torch.full((1, 2, 1), float(step)))
    >>> q = torch.randn(1, 8, 1, 16)
    >>> bsk.attention(q, cache.k, cache.v, key_gate=cache.gate).shape
    torch.Size([1, 8, 1, 16])
    >>> cache.k.shape[2] < 16, cache.tokens
    (True, 64)
    """

    def __init__(self, k: float):
        if isinstance(k, bool) or not isinstance(k, (int, float)):
            got = type(k).__name__
            raise InvalidType(message("SparsekCache", "k", "is not a number", "a float", got))
        if not k >= 0:
            raise InvalidInput(
                message("SparsekCache", "k", "is negative or NaN", "a number >= 0", k)
            )
        self.weight: float = float(k)
        self.tokens: int = 0
        """Tokens that were appended, kept or not."""
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.u: torch.Tensor | None = None
        self.tau: torch.Tensor | None = None
        self._at_last_drop = 0

    @property
    def gate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`key_gate` of a query at the place of the latest token."""
        if self.u is None or self.tau is None:
            raise InvalidInput(
                message(
                    "SparsekCache", "gate", "needs a token", "append() before", "an empty cache"
                )
            )
        return self.u, self.tau

    @torch.no_grad()
    def append(self, k: torch.Tensor, v: torch.Tensor, u: torch.Tensor) -> None:
        """Add tokens: k `[B, Hkv, n, D]`, v `[B, Hkv, n, Dv]`, scores u `[B, Hkv, n]`, n >= 1."""
        op = "SparsekCache.append"
        for arg, x in (("k", k), ("v", v), ("u", u)):
            _check_tokens(op, arg, x, self)
        shapes, tokens = {k.shape[:3], v.shape[:3], u.shape}, u.shape[-1]
        if len(shapes) != 1 or u.dim() != 3 or u.shape[2] == 0:
            expected = "k [B, Hkv, n, D], v [B, Hkv, n, Dv] and u [B, Hkv, n] with n >= 1"
            got = f"k {list(k.shape)}, v {list(v.shape)}, u {list(u.shape)}"
            raise InvalidInput(message(op, "k/v/u", "do not match", expected, got))
        check_same_device(op, {"k": k, "v": v, "u": u})
        check_dtype(op, "u", u, DTYPES)
        u = u.contiguous()
        if self.k is not None and self.v is not None and self.u is not None:
            k = torch.cat([self.k, k], 2)
            v = torch.cat([self.v, v], 2)
            u = torch.cat([self.u, u], 2)
        # dropped tokens lie at or below every later threshold: the sum is over those that are left
        _, tau = sparsek(u, self.weight, return_threshold=True)
        tau = tau[..., None]
        # only now, so that scores which are refused leave the cache as it was
        self.k, self.v, self.u = k, v, u
        self.tokens += tokens
        self.tau = tau if self.tau is None else torch.maximum(self.tau, tau)
        if u.shape[2] >= 2 * self._at_last_drop:
            self._drop()

    def _drop(self) -> None:
        """Move the tokens that have a weight to the front, and drop places that no head needs."""
        assert self.k is not None and self.v is not None
        u, tau = self.gate
        live = u > tau
        size = max(int(live.sum(-1).max()), 1)
        order = (~live).to(torch.int8).sort(dim=-1, stable=True).indices[..., :size]
        kept = live.gather(-1, order)
        self.u = u.gather(-1, order).masked_fill(~kept, -torch.inf)
        self.k = _taken(self.k, order)
        self.v = _taken(self.v, order)
        self._at_last_drop = max(size, 8)

    @property
    def memory_bytes(self) -> int:
        """Bytes of keys, values and scores."""
        held = (self.k, self.v, self.u, self.tau)
        return sum(x.nbytes for x in held if x is not None)


def _taken(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(2, order[..., None].expand(*order.shape, x.shape[-1]))


def _check_tokens(op: str, arg: str, x: Any, cache: SparsekCache) -> None:
    """Check that a tensor matches the tensors of the cache."""
    check_tensor(op, arg, x)
    held = getattr(cache, arg)
    if held is None:
        return
    check_dtype(op, arg, x, [held.dtype])
    check_same_device(op, {"cache": held, arg: x})
    if x.dim() != held.dim() or (x.shape[:2], x.shape[3:]) != (held.shape[:2], held.shape[3:]):
        expected = f"{[*held.shape[:2], 'n', *held.shape[3:]]}"
        raise InvalidInput(message(op, arg, "has a wrong shape", expected, list(x.shape)))
