"""Routes torch's `scaled_dot_product_attention` through this package, on request.

`patch_sdpa` temporarily replaces the function itself. `register_flash_attention` replaces the CUDA
kernels behind `SDPBackend.FLASH_ATTENTION` and `torch.nn.attention.varlen`, with pages, lengths
and outputs that are given, through torch's interface for this. Calls that this package cannot
compute (dropout, debug masks; slopes and used lengths of batches that are not packed) stay with
torch's kernels.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch.jit._builtins import _register_builtin

from ..attention.inputs import scale_or_default
from ..attention.op import attn_bwd, attn_fwd
from ..attention.sdpa import is_bottom_right, is_causal_bias, sdpa_or_reason
from ..core.checks import message
from ..core.errors import BskError, InvalidInput, Unsupported
from ..masks.band import Band
from ..ragged.api import attention_varlen

__all__ = ["FLASH_NAME", "patch_sdpa", "register_flash_attention"]


_original = torch.nn.functional.scaled_dot_product_attention
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEFAULT_RULES = (
    vars(torch.Tensor)["__torch_function__"].__func__,
    torch._C._disabled_torch_function_impl,
)
_lock = threading.RLock()
# Active patches of all threads; torch's function is restored when there are none.
_patches: list["patch_sdpa"] = []
_current: ContextVar["patch_sdpa | None"] = ContextVar("bsk_patch_sdpa", default=None)


class patch_sdpa:
    """Compute calls of `torch.nn.functional.scaled_dot_product_attention` with this package.

    A context manager. It takes calls by this thread (and those that autograd recomputes for it),
    not by other threads. Calls that this package cannot compute go to torch's own kernels and are
    counted with the reason, so that no fallback is silent. Code that imported the function from
    `torch.nn.functional` earlier is not reached, nor are torch's C++ modules and TorchScript:
    what `torch.jit.script` compiles inside calls torch's own kernels.

    Under torch's `context_parallel`, calls over shards of a sequence stay with torch. A patch
    cannot be entered inside of it; `bsk.distributed.attention` computes over shards.

    A bool mask makes a call wait for the device; see `bsk.scaled_dot_product_attention`.

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
        self.taken: int = 0
        self.left: Counter[str] = Counter()
        self._tokens: list[Token[Any]] = []

    def __enter__(self) -> "patch_sdpa":
        _refuse_context_parallel()
        with _lock:
            _patches.append(self)
            torch.nn.functional.scaled_dot_product_attention = _sdpa_or_original
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
        """Compute attention with this package, or leave the call to torch."""
        mask = kwargs.get("attn_mask", next(iter(args[3:4]), None))
        causal_bias = is_causal_bias(mask)
        original = _original_with_causal_bias if causal_bias else _original
        try:
            if (kind := _class_with_own_rules(*args, *kwargs.values())) is not None:
                raise Unsupported(f"an argument is a {kind}, which has its own __torch_function__")
            out = sdpa_or_reason(*args, **kwargs)
            if isinstance(out, str):
                raise Unsupported(out)
        except BskError as error:
            if self.strict:
                raise
            return self._leave(str(error).splitlines()[0], original, args, kwargs)
        if not torch.compiler.is_compiling():
            self.taken += 1
        return out

    def _leave(
        self, reason: str, original: Callable[..., torch.Tensor], args: Any, kwargs: Any
    ) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.left[reason] += 1
        return original(*args, **kwargs)


def _sdpa_or_original(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Replaces torch's function while a patch is active in any thread."""
    patch = _patch_of_this_thread()
    return _original(*args, **kwargs) if patch is None else patch.call(*args, **kwargs)


# torch's context_parallel wraps a function and stores the wrapper under this name
_sdpa_or_original.__name__ = _original.__name__

# TorchScript resolves functions through this table and cannot compile a Python function that
# takes any arguments.
_register_builtin(_sdpa_or_original, "aten::scaled_dot_product_attention")


def _refuse_context_parallel() -> None:
    """Raise if torch's function is replaced by one that computes over shards of a sequence.

    Replacing that would leave each rank with its own keys only.
    """
    current = torch.nn.functional.scaled_dot_product_attention
    if current.__module__.startswith("torch.distributed.tensor.experimental"):
        expected = (
            "patch_sdpa around it, which leaves these calls to torch, or "
            "blackwell_sparsek.distributed.attention in the model"
        )
        problem = "cannot replace attention over shards while context_parallel is active"
        raise Unsupported(message("patch_sdpa", "the patch", problem, expected, "it inside"))


def _class_with_own_rules(*arguments: Any) -> str | None:
    """The name of the first class of an argument that replaces torch's functions by its own."""
    for x in arguments:
        if type(x) in _PLAIN or not isinstance(x, torch.Tensor) or is_causal_bias(x):
            continue
        rules: Any = type(x).__torch_function__
        if getattr(rules, "__func__", rules) not in _DEFAULT_RULES:
            return type(x).__name__
    return None


def _original_with_causal_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """torch's function with a `CausalBias`.

    The bias recognises the call by comparing the function with the one in `torch.nn.functional`,
    which a patch has replaced, and would be taken for a float mask.
    """
    if is_causal:
        raise InvalidInput("CausalBias should not be used with is_causal=True")
    mask = None
    if is_bottom_right(attn_mask, query, key):
        sq, sk = query.shape[-2], key.shape[-2]
        mask = torch.ones(sq, sk, dtype=torch.bool, device=query.device).tril(sk - sq)
    return _original(query, key, value, mask, dropout_p, mask is None, **options)


def _patch_of_this_thread() -> "patch_sdpa | None":
    if torch.compiler.is_compiling():
        # the tracer reached this function, so a patch is active; it guards the function's identity
        return _patches[-1] if _patches else None
    patch = _current.get()
    if patch is None and torch._C._current_graph_task_id() != -1:
        # the autograd engine recomputes a checkpoint in one of its threads
        return _patches[-1] if _patches else None
    return patch


FLASH_NAME = "blackwell_sparsek"
OP = "flash_attention"


def register_flash_attention() -> str:
    """Offer this package to `torch.nn.attention.activate_flash_attention_impl`.

    Nothing changes until that is called; `restore_flash_attention_impl()` restores torch's kernels.
    Needs a build of torch with CUDA.

    Returns
    -------
    str
        The name to activate.

    Raises
    ------
    Unsupported
        If this torch has no registry of flash implementations.

    Examples
    --------
    >>> import torch
    >>> name = register_flash_attention()
    >>> name in torch.nn.attention.list_flash_attention_impls()
    True
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise Unsupported(f"{OP}: this torch has no register_flash_attention_impl")
    register(FLASH_NAME, register_fn=_install)
    return FLASH_NAME


class _Handle:
    """Keeps the kernels registered until torch asks to remove them."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        """Restore torch's kernels."""
        self._library._destroy()


def _install() -> _Handle:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel("aten::_flash_attention_forward", "CUDA"):
        raise Unsupported(f"{OP}: this build of torch has no flash attention for CUDA")
    # asked for the kernel of an operator that it does not have, torch raises
    routes = {
        name: route
        for name, route in _ROUTES.items()
        if hasattr(torch.ops.aten, name) and has_kernel(f"aten::{name}", "CUDA")
    }
    originals = {name: torch.library.get_kernel(f"aten::{name}", "CUDA") for name in routes}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # replacing a kernel is intended here; no warning is needed
        warnings.simplefilter("ignore")
        for name, route in routes.items():
            library.impl(name, _routed(route, originals[name]), "CUDA", with_keyset=True)
    return _Handle(library)


def _routed(route: Callable[..., Any], original: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        result = route(*args, **kwargs)
        return original.call_boxed(keyset, *args, **kwargs) if result is None else result

    return kernel


def _sides(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """The band of flash attention's arguments, where None and -1 mean unbounded."""
    left, right = (None if side is None or side < 0 else int(side) for side in (left, right))
    return Band(left, 0 if is_causal else right).scalars()


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """`aten::_scaled_dot_product_flash_attention`; None leaves the call to torch.

    query `[B, Hq, Sq, D]`; key, value `[B, Hkv, Sk, D]`
    """
    if dropout_p != 0.0 or return_debug_mask:
        return None
    left, right = _sides(is_causal, None, None)
    out, lse = _forward(
        query, key, value, None, None, query.shape[2], key.shape[2], left, right, scale
    )
    empty = query.new_empty(0)
    rng = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    # the offsets are for packed sequences; torch's own kernel also returns None for them
    return out, lse, None, None, query.shape[2], key.shape[2], rng, unused, empty


def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> Any:
    """`aten::_scaled_dot_product_flash_attention_backward`; None leaves the call to torch."""
    if dropout_p != 0.0:
        return None
    left, right = _sides(is_causal, None, None)
    sizes = (query.shape[2], key.shape[2])
    return _backward(
        grad_out, query, key, value, out, logsumexp, None, None, *sizes, left, right, scale
    )


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """`aten::_flash_attention_forward`; None leaves the call to torch.

    query `[B, Sq, Hq, D]`, or packed `[Tq, Hq, D]` with offsets
    """
    if dropout_p != 0.0 or return_debug_mask:
        return None
    left, right = _sides(is_causal, window_size_left, window_size_right)
    options = (seqused_k, alibi_slopes, block_table)
    # one split is how torch asks for results that do not depend on the batch
    if any(x is not None for x in options) or (num_splits == 1 and cum_seq_q is not None):
        if cum_seq_q is None:
            return None
        out, lse = _over_cache(
            None, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, (left, right), scale,
            seqused_k, alibi_slopes, block_table, num_splits,
        )  # fmt: skip
    else:
        q, k, v = _heads_first(cum_seq_q, query, key, value)
        out, lse = _forward(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, left, right, scale)
        (out,) = _heads_first(cum_seq_q, out)
    rng = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, rng, unused, query.new_empty(0)


def flash_forward_into(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """`aten::_flash_attention_forward_no_dropout_inplace`; None leaves the call to torch."""
    if dropout_p != 0.0 or return_debug_mask or cum_seq_q is None:
        return None
    sides = _sides(is_causal, window_size_left, window_size_right)
    _, lse = _over_cache(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, sides, scale, seqused_k,
        alibi_slopes, block_table, num_splits,
    )  # fmt: skip
    return lse


def _over_cache(
    out: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    sides: tuple[int, int],
    scale: float | None,
    seqused_k: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    block_table: torch.Tensor | None,
    num_splits: int | None,
) -> Any:
    """Output and lse of packed queries, over packed keys or pages."""
    keys: dict[str, Any] = {"cache_seqlens": seqused_k, "page_table": block_table}
    if block_table is None:
        keys = {"cu_seqlens_k": cu_k, "seqused_k": seqused_k, "max_seqlen_k": max_k}
    # this runs below an operator that has its own derivative
    with torch.no_grad():
        return attention_varlen(
            query,
            key,
            value,
            cu_q,
            max_seqlen_q=max_q,
            window=sides,
            scale=scale,
            alibi_slopes=alibi_slopes,
            out=out,
            batch_invariant=num_splits == 1,
            return_lse=True,
            **keys,
        )


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """`aten::_flash_attention_backward`; None leaves the call to torch."""
    if dropout_p != 0.0:
        return None
    left, right = _sides(is_causal, window_size_left, window_size_right)
    do, q, k, v, o = _heads_first(cum_seq_q, grad_out, query, key, value, out)
    offsets = (cum_seq_q, cum_seq_k, max_q, max_k)
    gradients = _backward(do, q, k, v, o, logsumexp, *offsets, left, right, scale)
    return tuple(_heads_first(cum_seq_q, *gradients))


def _heads_first(offsets: torch.Tensor | None, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Swap heads and tokens of dense tensors; packed ones have the same order in both."""
    return [x if offsets is not None else x.transpose(1, 2) for x in tensors]


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    factor = scale_or_default(OP, scale, q.shape[-1])
    out, lse = attn_fwd(
        *(q, k, v, cu_q, cu_k, max_q, max_k, [], [], left, right, factor, 0.0, None, None, None),
        *(False, "auto"),
    )
    return out, lse


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if lse.dtype != torch.float32:
        raise Unsupported(message(OP, "logsumexp", "has a wrong dtype", "float32", lse.dtype))
    deterministic = torch.are_deterministic_algorithms_enabled()
    factor = scale_or_default(OP, scale, q.shape[-1])
    dq, dk, dv, _ = attn_bwd(
        *(grad_out, None, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, [], [], left, right),
        *(factor, 0.0, None, None, None, deterministic, [True, True, True, False], "auto"),
    )
    return dq, dk, dv


_ROUTES: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    # since torch 2.12
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
}
