"""`torch.nn.functional.scaled_dot_product_attention` replaced for a while."""

import threading
from collections import Counter
from contextvars import ContextVar, Token
from typing import Any

import torch

from ...attention.sdpa import scaled_dot_product_attention
from ...core.errors import BskError

_original = torch.nn.functional.scaled_dot_product_attention
_lock = threading.RLock()
# Patches that are on, over all threads; torch's function is back when none is.
_patches: list["patch_sdpa"] = []
_current: ContextVar["patch_sdpa | None"] = ContextVar("bsk_patch_sdpa", default=None)


class patch_sdpa:
    """Run calls of `torch.nn.functional.scaled_dot_product_attention` with this package.

    A context manager. Calls by this thread (and what autograd recomputes for it) are taken, those
    by other threads are not. What cannot be computed here goes to torch's own kernels and is
    counted, with the reason; nothing is lost silently. Code that took the function out of
    `torch.nn.functional` before is not reached, nor are torch's C++ modules.

    A bool mask makes a call wait for the device, see `bsk.scaled_dot_product_attention`.

    Parameters
    ----------
    strict : bool
        Raise instead of leaving a call to torch.

    Attributes
    ----------
    taken : int
        Calls computed by this package.
    left : Counter of str
        Calls left to torch, by reason.

    Examples
    --------
    >>> import torch
    >>> import torch.nn.functional as F
    >>> x = torch.randn(1, 2, 8, 4)
    >>> with patch_sdpa() as patch:
    ...     y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    ...     z = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    >>> patch.taken, list(patch.left.values())
    (1, [1])
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.taken = 0
        self.left: Counter[str] = Counter()
        self._tokens: list[Token[Any]] = []

    def __enter__(self) -> "patch_sdpa":
        with _lock:
            _patches.append(self)
            torch.nn.functional.scaled_dot_product_attention = _routed
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._tokens.pop())
        with _lock:
            _patches.remove(self)
            if not _patches:
                torch.nn.functional.scaled_dot_product_attention = _original

    def __repr__(self) -> str:
        return f"patch_sdpa(taken={self.taken}, left={dict(self.left)})"

    def call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attention here, or by torch where that cannot be."""
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        try:
            if isinstance(mask, torch.Tensor) and mask.dtype != torch.bool and not self.strict:
                return self._leave("attn_mask is a bias, not a mask", args, kwargs)
            out = scaled_dot_product_attention(*args, **kwargs)
        except BskError as error:
            if self.strict:
                raise
            return self._leave(str(error).splitlines()[0], args, kwargs)
        if not torch.compiler.is_compiling():
            self.taken += 1
        return out

    def _leave(self, reason: str, args: Any, kwargs: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.left[reason] += 1
        return _original(*args, **kwargs)


def _routed(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand for torch's function while a patch is on somewhere."""
    patch = _patch_of_this_thread()
    return _original(*args, **kwargs) if patch is None else patch.call(*args, **kwargs)


def _patch_of_this_thread() -> "patch_sdpa | None":
    if torch.compiler.is_compiling():
        # the function was found here while it was traced; its identity is guarded
        return _patches[-1] if _patches else None
    patch = _current.get()
    if patch is None and torch._C._current_graph_task_id() != -1:
        # a checkpoint is recomputed in a thread of the autograd engine
        return _patches[-1] if _patches else None
    return patch
