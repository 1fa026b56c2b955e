"""`scaled_dot_product_attention`: torch's signature and torch's semantics."""

import math
from typing import Any

import torch
from torch._subclasses import FakeTensor

from ..calls.attention import AttentionCall
from ..core.checks import (
    check_dtype,
    check_tensor,
    is_batched,
    is_differentiated_by_func,
    message,
)
from ..core.errors import InvalidInput, Unsupported
from ..core.torch_state import autocast_dtype, is_explaining
from ..masks.band import Band
from ..masks.block_mask import BlockMask
from ..masks.segments import every_block, every_key_block, segments
from .autograd import attend
from .inputs import DENSE, autocast_qkv, check_qkv, checked_call
from .op import forward_dispatch

OP = "scaled_dot_product_attention"
NAMES = ("query", "key", "value")


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`.

    Two things differ from `attention`: `is_causal` aligns to the top left (query i sees keys up
    to i), and masks are tensors. A bool mask is converted to a block mask on every call, which
    reads it once and waits for the device (except under `torch.compile` or CUDA graph capture,
    where all blocks are listed instead); if that matters, keep a `BlockMask` and call `attention`.
    A float mask is a bias on every score, see `attention`; torch's own kernels run where it
    requires a gradient, and on GPUs for which this package has no kernel that adds one. Inputs
    whose last dimension is not contiguous are copied, as torch does.

    Parameters
    ----------
    query : `[..., Hq, L, E]`
    key : `[..., H, S, E]`
    value : `[..., H, S, Ev]`
    attn_mask : bool or float, broadcastable to `[..., Hq, L, S]`, or CausalBias, optional
        True where a query sees a key; or a bias added to the scores. A `CausalBias` of
        `torch.nn.attention.bias` costs no memory, whichever corner it is aligned to.
    dropout_p : float
        Must be 0.
    is_causal : bool
        Together with a mask, both apply.
    scale : float, optional
        By default `1 / sqrt(E)`.
    enable_gqa : bool
        Whether H may be a divisor of Hq.

    Returns
    -------
    `[..., Hq, L, Ev]`; rows that see nothing are 0.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        For dropout.

    Examples
    --------
    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 4, 20, 16)
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 20, 16])
    """
    options = (dropout_p, is_causal, scale, enable_gqa)
    made = sdpa_or_reason(query, key, value, attn_mask, *options)
    if isinstance(made, torch.Tensor):
        return made
    # not torch.nn.functional, whose function `patch_sdpa` may have replaced by this one
    return torch._C._nn.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def sdpa_or_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | str:
    """The result of `scaled_dot_product_attention`, or why torch's kernels should run instead."""
    if dropout_p != 0.0:
        raise Unsupported(message(OP, "dropout_p", "asks for dropout", 0.0, dropout_p))
    to_bottom_right = is_bias = False
    if is_causal_bias(attn_mask):
        if is_causal:
            problem, expected = "is a CausalBias", "is_causal=False"
            raise InvalidInput(message(OP, "attn_mask", problem, expected, "is_causal=True"))
        to_bottom_right = is_bottom_right(attn_mask, query, key)
        attn_mask, is_causal = None, not to_bottom_right
    if attn_mask is not None:
        check_tensor(OP, "attn_mask", attn_mask)
        check_dtype(OP, "attn_mask", attn_mask, _mask_dtypes(query))
        is_bias = attn_mask.dtype != torch.bool
    for arg, x in zip(NAMES, (query, key, value), strict=True):
        check_tensor(OP, arg, x)
        if x.dim() < 2:
            raise InvalidInput(message(OP, arg, "has a wrong rank", "[..., S, E]", list(x.shape)))
    q, k, v, lead = _as_dense(query, key, value, enable_gqa)
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous() for x in (q, k, v))
    check_qkv(OP, q, k, v, DENSE, NAMES)
    sq, sk = q.shape[2], k.shape[2]
    mask = None if attn_mask is None else _mask_in_4d(attn_mask, lead, q, sk)
    if is_bias and _is_trained(attn_mask):
        return "attn_mask is a bias that requires a gradient"
    if mask is not None and not is_bias and is_batched(mask):
        # how many blocks are visible would differ from one mask of torch.vmap to the next
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -math.inf)
        is_bias = True
    band = Band(None, 0 if to_bottom_right else None)
    if is_causal:
        # no query sees a key past the last query; without those keys, top left is a plain shift
        sk = min(sk, sq)
        k, v = k[:, :, :sk], v[:, :, :sk]
        mask = None if mask is None else mask[..., :sk]
        band = Band(None, sq - sk)
    q, k, v = autocast_qkv(OP, q, k, v)
    options: dict[str, Any] = {"band": band, "scale": scale, "max_q": sq, "max_k": sk}
    if is_bias and mask is not None:
        call = checked_call(OP, q, k, v, bias=mask.expand(-1, -1, sq, -1), **options)
        if not runs_kernels(call):
            return "attn_mask is a bias, which no kernel here adds on this GPU"
    else:
        block_mask = None if mask is None else block_mask_of(mask, sq)
        call = checked_call(OP, q, k, v, block_mask=block_mask, **options)
    out, _ = attend(call, "auto")
    return out.reshape(*lead, *out.shape[-2:])


def _is_trained(mask: torch.Tensor) -> bool:
    return (torch.is_grad_enabled() and mask.requires_grad) or is_differentiated_by_func(mask)


def runs_kernels(call: AttentionCall) -> bool:
    """Whether `auto` takes a kernel for a call on a GPU; elsewhere there is nothing faster."""
    if not call.q.is_cuda or is_explaining():
        return True
    chosen = forward_dispatch.choose("auto", call.problem)
    return chosen is not None and chosen.name in ("sm90", "triton")


def is_causal_bias(mask: Any) -> bool:
    """Whether `mask` is torch's `CausalBias`.

    By name, because importing its module takes seconds, and whoever has such a mask has paid that.
    """
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def is_bottom_right(bias: Any, query: Any, key: Any) -> bool:
    """Whether the last query is aligned with the last key, rather than the first with the first.

    As torch does, the sizes of a bias are ignored unless it aligns to the bottom right.
    """
    for arg, x in zip(NAMES, (query, key), strict=False):
        check_tensor(OP, arg, x)
    if bias.variant.name != "LOWER_RIGHT" or bias.seq_len_q == bias.seq_len_kv:
        return False
    expected, got = [query.shape[-2], key.shape[-2]], [bias.seq_len_q, bias.seq_len_kv]
    if got != expected:
        problem = "is a CausalBias of other sizes"
        raise InvalidInput(message(OP, "attn_mask", problem, expected, got))
    return True


def _mask_dtypes(query: Any) -> list[torch.dtype]:
    check_tensor(OP, "query", query)
    floats = {torch.float32, query.dtype}
    if autocast_dtype(query.device) is not None:
        # torch casts masks as well as q, k and v; a bias is added in fp32 whatever its dtype
        floats |= {torch.float16, torch.bfloat16}
    return [torch.bool, *floats]


def _as_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:
    """q, k and v as [B, H, S, D], and the leading dimensions of the output, heads included."""
    try:
        if enable_gqa:
            batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
            lead = torch.Size((*batch, *q.shape[-3:-2]))
            leads = [torch.Size((*batch, *x.shape[-3:-2])) for x in (q, k, v)]
        else:
            lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
            leads = [lead] * 3
    except RuntimeError:
        got = ", ".join(str(list(x.shape)) for x in (q, k, v))
        expected = "leading dimensions that broadcast (enable_gqa=True for grouped heads)"
        raise InvalidInput(message(OP, "/".join(NAMES), "do not match", expected, got)) from None
    # the batch in numbers, because -1 is ambiguous for tensors without elements
    dense = (
        x.expand(*whole, *x.shape[-2:]).reshape(
            math.prod(whole[:-1]), *(whole[-1:] or (1,)), *x.shape[-2:]
        )
        for x, whole in zip((q, k, v), leads, strict=True)
    )
    q, k, v = dense
    return q, k, v, lead


def _mask_in_4d(mask: torch.Tensor, lead: torch.Size, q: torch.Tensor, sk: int) -> torch.Tensor:
    """`mask` as bool [B or 1, H or 1, L or 1, S]; one row stands for all queries."""
    sq = q.shape[2]
    expected = (*lead, sq, sk)
    if mask.dim() > len(expected):
        problem, most = "has too many dimensions", f"at most {list(expected)}"
        raise InvalidInput(message(OP, "attn_mask", problem, most, list(mask.shape)))
    try:
        fits = torch.broadcast_shapes(mask.shape, expected) == expected
    except RuntimeError:
        fits = False
    if not fits:
        raise InvalidInput(
            message(OP, "attn_mask", "does not broadcast", list(expected), list(mask.shape))
        )
    # counted from the last: the first of four may belong to the middle of a larger batch
    while mask.dim() < max(4, len(expected)):
        mask = mask.unsqueeze(0)
    mask = mask.expand(*mask.shape[:-1], sk)
    if mask.dim() == 4:
        return mask
    # more leading dimensions than a batch: flatten them all
    *batch, own, rows, _ = mask.shape
    if any(n != 1 for n in batch):
        batch = list(lead[:-1])
    return mask.expand(*batch, own, rows, sk).reshape(math.prod(batch), own, rows, sk)


# Block masks from bool masks.


def block_mask_of(mask: torch.Tensor, sq: int) -> BlockMask:
    """The block mask of bool `[B or 1, H or 1, Sq or 1, Sk]`.

    A single row for all queries, as for padding, takes no memory of Sq x Sk. Waits for the device
    if `may_wait`; otherwise, and where there is nothing to read, the mask lists all its blocks.
    """
    sk = mask.shape[3]
    side = 64 if min(sq, sk) >= 64 else 16
    block = (side, max(side, 32))
    same_keys = mask.shape[2] == 1 and mask.shape[1] == 1 and sq > 1
    if may_wait(mask.device) and not _is_without_data(mask):
        if same_keys:
            keys = mask[:, 0, 0].int() - 1
            return segments(keys.new_zeros(keys.shape[0], sq), keys, block)
        return BlockMask.from_element_mask(mask.expand(-1, -1, sq, -1), block)
    if same_keys:
        return every_key_block(mask[:, 0, 0], sq, block)
    return every_block(mask.expand(-1, -1, sq, -1), block)


def _is_without_data(x: torch.Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def may_wait(device: torch.device) -> bool:
    """Whether the host may read back from `device`: not in a compiler or a capture."""
    if torch.compiler.is_compiling():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
