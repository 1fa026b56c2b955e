"""`bsk.fp8.attention`: 16-bit tensors in and out, fp8 inside, gradients in 16 bits."""

from typing import Any, Literal, overload

import torch

from ..attention.inputs import DENSE, autocast_qkv, check_qkv
from ..calls.attention import check_impl_and_lse
from ..core.checks import check_derivatives, check_dtype, check_tensor, message
from ..core.errors import InvalidInput, InvalidType
from ..masks.block_mask import BlockMask
from .api import DTYPES
from .autograd import OP, Choice, attend


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    smooth_k: bool | None = None,
    hadamard: bool = False,
    return_lse: Literal[False] = False,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    smooth_k: bool | None = None,
    hadamard: bool = False,
    return_lse: Literal[True],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    smooth_k: bool | None = None,
    hadamard: bool = False,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    smooth_k: bool | None = None,
    hadamard: bool = False,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention computed in e4m3: `bsk.attention` on rounded queries, keys and values.

    Queries and keys have a scale for every 128 tokens of a head, values one for every channel.
    Gradients are those of `bsk.attention` on the tensors as given, which a backward pass computes
    again without fp8.

    A finite key or value that no query sees does not reach the output itself, but it has a part in
    the scale that it shares with visible ones, and a key in the mean that is subtracted.

    Parameters
    ----------
    q, k, v : fp16, bf16 or fp32, one dtype, shapes as in `bsk.attention`
        Under `torch.autocast` they are cast to its dtype.
    causal, window, scale, softcap, sinks : as in `bsk.attention`
    block_mask : BlockMask, optional
        As in `bsk.attention`, but with 1 or Hq masks along the heads, not Hkv.
    smooth_k : bool, optional
        Subtract the mean over the tokens from the keys before rounding, which softmax cancels. It
        would not with softcap or sinks, where True is refused. By default wherever it is exact.
    hadamard : bool
        Rotate queries and keys before rounding, which spreads outliers over all channels. D must be
        a power of two up to 256. This helps where outliers are scattered, and harms where a few
        channels are large throughout: docs/numerics.md has figures.
    return_lse : bool
        Also return the log-sum-exp of the scores; no gradient flows through it.
    impl : str
        As in `bsk.attention`.

    Returns
    -------
    out : `[B, Hq, Sq, Dv]`, dtype of q
    lse : fp32 `[B, Hq, Sq]`
        Only with `return_lse`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> import blackwell_sparsek as bsk
    >>> q = torch.randn(1, 8, 100, 64)
    >>> k = v = torch.randn(1, 2, 100, 64)
    >>> exact = bsk.attention(q, k, v, causal=True)
    >>> float((bsk.fp8.attention(q, k, v, causal=True) - exact).norm() / exact.norm()) < 0.05
    True
    """
    for arg, x in {"q": q, "k": k, "v": v}.items():
        check_tensor(OP, arg, x)
        check_derivatives(OP, arg, x)
        check_dtype(OP, arg, x, DTYPES)
    check_qkv(OP, q, k, v, DENSE)
    # mixed dtypes could be rounded, but the backward pass has no attention for them
    q, k, v = autocast_qkv(OP, q, k, v)
    check_impl_and_lse(OP, impl, return_lse)
    options = {"causal": causal, "window": window, "block_mask": block_mask, "scale": scale}
    options["softcap"] = softcap
    exact = softcap is None and sinks is None
    choice = Choice(_smoothed(smooth_k, exact), hadamard, impl, return_lse)
    out, lse = attend(q, k, v, sinks, options, choice)
    return (out, lse) if return_lse else out


def _smoothed(asked: Any, exact: bool) -> bool:
    """Whether to smooth the keys: by default if that is exact; raises if asked for otherwise."""
    if asked is None:
        return exact
    if not isinstance(asked, bool):
        got = type(asked).__name__
        raise InvalidType(message(OP, "smooth_k", "is not a bool", "bool or None", got))
    if asked and not exact:
        expected = "None or False with softcap and sinks"
        raise InvalidInput(message(OP, "smooth_k", "would change the result", expected, asked))
    return asked
