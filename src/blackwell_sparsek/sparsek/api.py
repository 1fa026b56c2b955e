"""`sparsek` and `sparsek_causal`: weights that choose about k entries, and their thresholds."""

from typing import Any, Literal, overload

import torch

from ..attention.inputs import DTYPES
from ..calls.attention import compute_dtype
from ..core.checks import (
    check_choice,
    check_derivatives,
    check_dtype,
    check_last_dim_contiguous,
    check_same_device,
    check_tensor,
    message,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput, InvalidType
from ..launch.replay import record, repeat
from .op import causal_op, sparsek_op

# Launches of earlier calls, for `repeat`.
_RECORDED: dict[Any, Any] = {}


@overload
def sparsek(
    z: torch.Tensor,
    k: float | torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    return_threshold: Literal[False] = False,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def sparsek(
    z: torch.Tensor,
    k: float | torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    return_threshold: Literal[True],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sparsek(
    z: torch.Tensor,
    k: float | torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    return_threshold: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def sparsek(
    z: torch.Tensor,
    k: float | torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    return_threshold: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Weights between 0 and 1 that add up to k in each row, nearest to the scores: SparseK.

    `p = clip(z - tau, 0, 1)`, with one threshold tau for a row: a top-k whose result is
    differentiable and whose k is any real number. Scores that differ by more than 1 give weights of
    0 and 1; those nearer to the threshold share, so more than k weights may be above 0. Nothing is
    sorted. The gradient of z is that of the weights between 0 and 1, less its mean.

    Rows that have at most k entries get weights of 1, and a threshold of -inf. An entry of -inf
    does not exist: its weight is 0. NaN or inf in a row make the row NaN. So does a k that is NaN
    or negative on a GPU; it is refused where it can be read without waiting.

    Parameters
    ----------
    z : fp16, bf16, fp32 or fp64 `[..., n]`
        Contiguous in the last dimension.
    k : float, or float tensor `[...]`
        How much the weights of a row add up to, at least 0; a tensor is broadcast to the rows and
        has a gradient.
    lengths : int32 `[...]`, optional
        Entries of each row, 0 to n; those past them have weight 0.
    return_threshold : bool
        Also return tau, which is differentiable too.
    impl : str
        `auto`, `reference`, `eager` or `triton`; a name never falls back.

    Returns
    -------
    p : `[..., n]`, dtype of z
    tau : fp32 `[...]`, fp64 for fp64 scores
        The smallest threshold that gives these weights; only with `return_threshold`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> sparsek(torch.tensor([3.0, 0.5, 0.25, -2.0]), 2)
    tensor([1.0000, 0.6250, 0.3750, 0.0000])
    """
    op = "sparsek"
    rows = k if isinstance(k, torch.Tensor) else None
    options, inputs = (impl, k if rows is None else None), (z, rows, lengths)
    results = repeat(_RECORDED, options, inputs)
    if results is not None:
        p, tau = results
        return (p, tau) if return_threshold else p
    _check_scores(op, "z", z)
    _check_k(op, k, z)
    if lengths is not None:
        check_tensor(op, "lengths", lengths)
        check_dtype(op, "lengths", lengths, [torch.int32])
        check_same_device(op, {"z": z, "lengths": lengths})
        _check_broadcast(op, "lengths", lengths, z)
        _check_range(op, "lengths", lengths, 0, z.shape[-1])
    check_choice(op, "impl", impl, IMPLS)
    limits = (None, float(k)) if rows is None else (rows.expand(z.shape[:-1]), 0.0)
    given = (z, *limits, lengths, impl)
    # a copy of strides that the kernel does not take is made by each call: `closed`
    p, tau = record(_RECORDED, options, inputs, sparsek_op, *given, operands=0, closed=True)
    return (p, tau) if return_threshold else p


def sparsek_causal(u: torch.Tensor, k: float | torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Thresholds of SparseK for each prefix of a row: tau[t] belongs to u[..., :t + 1].

    Token t gives token j <= t the weight `clip(u[j] - tau[t], 0, 1)`. Thresholds never fall, so a
    token whose weight has become 0 stays without weight and may be dropped from a cache. The first
    k of them are -inf, or as many as there are whole tokens in k.

    Parameters
    ----------
    u : fp16, bf16, fp32 or fp64 `[..., n]`
        Contiguous in the last dimension.
    k : float, or float tensor `[...]`
        How much the weights of a token add up to, at least 0; a tensor is broadcast to the rows and
        has a gradient.
    impl : str
        `auto`, `reference`, `eager` or `triton`; a name never falls back.

    Returns
    -------
    tau : fp32 `[..., n]`, fp64 for fp64 scores
        Differentiable.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> sparsek_causal(torch.tensor([1.0, 0.5, 3.0, 0.0]), 2)
    tensor([  -inf,   -inf, 0.2500, 0.2500])
    """
    op = "sparsek_causal"
    _check_scores(op, "u", u)
    _check_k(op, k, u)
    check_choice(op, "impl", impl, IMPLS)
    if not isinstance(k, torch.Tensor):
        k = torch.full((), float(k), dtype=compute_dtype(u.dtype), device=u.device)
    tau: torch.Tensor = causal_op(u, k.expand(u.shape[:-1]), impl)
    return tau


def _check_scores(op: str, arg: str, x: Any) -> None:
    check_tensor(op, arg, x)
    check_derivatives(op, arg, x)
    check_dtype(op, arg, x, DTYPES)
    if x.dim() < 1:
        raise InvalidInput(message(op, arg, "has a wrong rank", "[..., n]", list(x.shape)))
    check_last_dim_contiguous(op, arg, x)


def _check_k(op: str, k: Any, z: torch.Tensor) -> None:
    """A number, or a tensor that broadcasts to the rows of z."""
    if isinstance(k, torch.Tensor):
        check_tensor(op, "k", k)
        check_derivatives(op, "k", k)
        check_dtype(op, "k", k, DTYPES)
        check_same_device(op, {"z": z, "k": k})
        _check_broadcast(op, "k", k, z)
        _check_range(op, "k", k, 0, None)
        return
    if isinstance(k, bool) or not isinstance(k, (int, float, torch.SymInt, torch.SymFloat)):
        got = type(k).__name__
        raise InvalidType(message(op, "k", "is not a number", "a float or a tensor", got))
    if not k >= 0:
        raise InvalidInput(message(op, "k", "is negative or NaN", "a number >= 0", k))


def _check_broadcast(op: str, arg: str, x: torch.Tensor, z: torch.Tensor) -> None:
    rows = z.shape[:-1]
    sizes = zip(reversed(x.shape), reversed(rows), strict=False)
    if x.dim() > len(rows) or any(own not in (1, size) for own, size in sizes):
        expected = f"one that broadcasts to {list(rows)}"
        raise InvalidInput(message(op, arg, "has a wrong shape", expected, list(x.shape)))


def _check_range(op: str, arg: str, x: torch.Tensor, low: int, high: int | None) -> None:
    """Check values on the host, where that does not wait for a device."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return
    wrong = ~(x >= low) if high is None else (x < low) | (x > high)
    if not bool(wrong.any()):
        return
    place = tuple(int(i) for i in wrong.nonzero()[0])
    name = f"{arg}[{', '.join(map(str, place))}]" if place else arg
    expected = f"at least {low}" if high is None else f"{low} to {high}"
    raise InvalidInput(message(op, name, "is out of range", expected, x[place].item()))
