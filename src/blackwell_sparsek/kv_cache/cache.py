"""`KVCache`: keys and values of a fixed batch, contiguous for each sequence."""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.checks import check_rank, check_tensor, message
from ..core.errors import InvalidInput
from ..core.torch_state import usable_in_training
from ..core.transfer import aligned_rows, is_capturing, refuse_capture, to_device
from .append import check_new, kv_append
from .copies import check_ints, loaded_tensors, saved_tensors, shallow_copy
from .layout import check_counts, empty_cache, latent_values


class KVCache:
    """Keys and values of `batch` sequences in tensors `[B, Hkv, max_tokens, D]`.

    `append` makes room and writes. Both steps are also separate methods: `reserve` does the
    accounting on the host, which knows all lengths without asking the device, and updates
    `lengths` in place; `write` is device work only, so a CUDA graph may capture it: call `reserve`
    before each replay.

    Deep copies and pickled or saved caches are independent and start from this state. Loading,
    also with `weights_only=True`, checks them. `copy.copy` is refused.

    Parameters
    ----------
    batch, heads_kv, max_tokens, head_dim : int
    head_dim_v : int, optional
        Head dim of the values; `head_dim` by default.
    latent : bool
        For MLA with absorbed weights: the values are the first `head_dim_v` channels of the keys,
        and only the keys are stored and appended. Not for fp8.
    dtype : torch.dtype, optional
        Of the stored values: fp16, bf16, fp32, fp64 or float8_e4m3fn; by default torch's default.
    device : optional
    k_scale, v_scale : float, or fp32 tensor with one element or `[Hkv]`, optional
        For fp8: `x / scale` is stored, saturated at ±448. 1 by default.

    Attributes
    ----------
    k, v : `[B, Hkv, max_tokens, D]`, `[B, Hkv, max_tokens, Dv]`
        In a latent cache, `v` is the view `k[..., :Dv]`.
    latent : bool
    lengths : int32 `[B]` on the device, always the same tensor
    k_scale, v_scale : fp32 tensors for fp8, otherwise None

    Raises
    ------
    InvalidInput
        If sizes, dtypes or scales are wrong, or if tokens do not fit.
    Unsupported
        If a latent cache is to be in fp8.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> cache = bsk.KVCache(2, 4, 100, 64)
    >>> cache.append(torch.randn(2, 4, 7, 64), torch.randn(2, 4, 7, 64), counts=[7, 3])
    >>> cache.lengths
    tensor([7, 3], dtype=torch.int32)
    >>> cache.memory_bytes
    409600

    A latent cache stores and appends keys only:

    >>> cache = bsk.KVCache(2, 1, 100, 576, head_dim_v=512, latent=True)
    >>> cache.append(torch.randn(2, 1, 7, 576))
    >>> cache.v.shape, cache.memory_bytes
    (torch.Size([2, 1, 100, 512]), 460800)
    """

    # a cache made in inference mode could not be written to outside of it
    @usable_in_training
    def __init__(
        self,
        batch: int,
        heads_kv: int,
        max_tokens: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        latent: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ):
        made = empty_cache(
            "KVCache",
            {"batch": batch, "heads_kv": heads_kv, "max_tokens": max_tokens},
            (batch, heads_kv, max_tokens),
            head_dim,
            head_dim_v,
            latent=latent,
            dtype=dtype,
            device=device,
            scales=(k_scale, v_scale),
        )
        self.k: torch.Tensor = made.k
        self.v: torch.Tensor = made.v
        self.k_scale: torch.Tensor | None = made.k_scale
        self.v_scale: torch.Tensor | None = made.v_scale
        self.latent = latent
        self._account([0] * batch, [0] * batch)

    def _account(self, before: list[int], counts: list[int]) -> None:
        """Set the lengths before the last reservation, its counts, and the lengths after it."""
        self._host_lengths = [a + b for a, b in zip(before, counts, strict=True)]
        self._reserved = counts
        rows = aligned_rows([before, counts, self._host_lengths])
        self._state = to_device(rows, torch.int32, self.k.device)
        self._before, self._counts, self._after = (row[: len(counts)] for row in self._state)

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence, int32 `[B]` on the device; `reserve` updates it in place."""
        return self._after

    @property
    def host_lengths(self) -> tuple[int, ...]:
        """The same on the host."""
        return tuple(self._host_lengths)

    @property
    def max_tokens(self) -> int:
        """Capacity of each sequence, in tokens."""
        return self.k.shape[2]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the keys and values, used or not."""
        return self.k.nbytes if self.latent else self.k.nbytes + self.v.nbytes

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        counts: int | Sequence[int] | None = None,
    ) -> None:
        """Add tokens to every sequence.

        Parameters
        ----------
        k, v : `[B, Hkv, T, D]`, `[B, Hkv, T, Dv]`
            Without `v` for a latent cache.
        counts : int or B ints, optional
            How many of the T tokens to take for each sequence, the first ones; all by default.
        """
        op = "KVCache.append"
        check_new(op, self.k, self.v, k, self._values(op, k, v), paged=False)
        tokens = k.shape[2]
        self._reserve(op, check_counts(op, counts, len(self._host_lengths), tokens))
        self.write(k, v)

    def reserve(self, counts: int | Sequence[int]) -> None:
        """Make room for `counts` more tokens, an int for all sequences or one for each.

        `lengths` includes them from now on. Raises, and changes nothing, if there is no room.
        """
        op = "KVCache.reserve"
        self._reserve(op, check_counts(op, counts, len(self._host_lengths), None))

    def _reserve(self, op: str, counts: list[int]) -> None:
        for b, (length, count) in enumerate(zip(self._host_lengths, counts, strict=True)):
            if length + count > self.max_tokens:
                got = f"{length} + {count} for sequence {b}"
                expected = f"at most {self.max_tokens} (max_tokens)"
                raise InvalidInput(message(op, "tokens", "are too many", expected, got))
        self._set(op, self._host_lengths, counts)

    def write(self, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Write the tokens of the last reservation; device work only.

        Parameters
        ----------
        k, v : `[B, Hkv, T, D]`, `[B, Hkv, T, Dv]`, T at least the largest count
            Without `v` for a latent cache.
        """
        op = "KVCache.write"
        check_tensor(op, "k", k)
        check_rank(op, "k", k, "[B, Hkv, T, D]")
        # during a capture, the reservations of the replays are still to come
        if k.shape[2] < max(self._reserved) and not is_capturing(self.k.device):
            expected = f"at least the {max(self._reserved)} tokens that were reserved"
            raise InvalidInput(message(op, "k", "is too short", expected, k.shape[2]))
        kv_append(
            self.k,
            self.v,
            k,
            self._values(op, k, v),
            cache_seqlens=self._before,
            counts=self._counts,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def _values(self, op: str, k: torch.Tensor, v: Any) -> Any:
        """The new values, which are those that were given unless the cache is latent."""
        return latent_values(op, self.v.shape[-1], k, v) if self.latent else v

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Keep only the first `lengths` tokens, for instance the accepted ones of a draft."""
        op = "KVCache.truncate"
        kept = check_counts(op, lengths, len(self._host_lengths), None, arg="lengths")
        for b, (length, keep) in enumerate(zip(self._host_lengths, kept, strict=True)):
            if keep > length:
                got = f"{keep} for sequence {b}"
                raise InvalidInput(
                    message(op, "lengths", "are out of range", f"0 to {length}", got)
                )
        self._set(op, kept, [0] * len(kept))

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        nothing = [0] * len(self._host_lengths)
        self._set("KVCache.reset", nothing, nothing)

    def _set(self, op: str, before: list[int], counts: list[int]) -> None:
        refuse_capture(op, self.k.device)
        after = [a + b for a, b in zip(before, counts, strict=True)]
        rows = aligned_rows([before, counts, after])
        to_device(rows, torch.int32, self.k.device, out=self._state)
        self._host_lengths, self._reserved = after, counts

    def __getstate__(self) -> dict[str, Any]:
        accounts = {"lengths": self._host_lengths, "reserved": self._reserved}
        return {**saved_tensors(self), **accounts}

    @usable_in_training
    def __setstate__(self, state: dict[str, Any]) -> None:
        op = "KVCache"
        tensors = loaded_tensors(op, state, ("lengths", "reserved"), paged=False)
        lengths, counts = state["lengths"], state["reserved"]
        batch, _, most, _ = state["k"].shape
        check_ints(op, "lengths", lengths, batch, range(most + 1))
        check_ints(op, "reserved", counts, batch, range(most + 1))
        before = [a - b for a, b in zip(lengths, counts, strict=True)]
        check_ints(op, "lengths before the reservation", before, batch, range(most + 1))
        self.__dict__.update(tensors)
        self._account(before, counts)

    def __copy__(self) -> "KVCache":
        raise shallow_copy("KVCache")

    def __repr__(self) -> str:
        shape = f"{list(self.k.shape)}, {self.k.dtype}, {self.k.device}"
        return f"KVCache({shape}, {sum(self._host_lengths)} tokens)"


# What `__setstate__` takes is plain data, and all of it is checked.
torch.serialization.add_safe_globals([KVCache])
