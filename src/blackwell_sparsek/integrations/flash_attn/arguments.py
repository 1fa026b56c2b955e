"""What the arguments of flash-attn mean here, and which are refused."""

from typing import Any

import torch

from ...core.checks import check_flag, check_rank, check_tensor, message
from ...core.errors import InvalidInput, Unsupported
from ...core.fp8 import E4M3
from ...decode.inputs import PAGED
from ...masks.packed import check_cu_seqlens
from .append import places_packed
from .factors import Factors, WideQueries, check_factors, check_fp8, head_scale, wide_queries

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, None]
# What to use instead of an argument that is refused.
INSTEAD = {
    "dropout_p": "attention dropout is not available; pass 0.0",
    "qv": "concatenate it to q, and its keys to k",
    "q_descale": "only float8_e4m3fn has factors; fold this one into softmax_scale",
    "k_descale": "only float8_e4m3fn has factors; fold this one into softmax_scale",
    "v_descale": "only float8_e4m3fn has factors; multiply the output",
    "mask_mod": "pass bsk.BlockMask.from_function(mask_mod, ...) to bsk.attention(block_mask=...)",
    "score_mod": "bsk.attention has scale, softcap and sinks",
    "block_sparse_tensors": "build a bsk.BlockMask and call bsk.attention(block_mask=...)",
    "score_mod_bwd": "bsk.attention has scale, softcap and sinks",
    "aux_tensors": "it belongs to mask_mod and score_mod, which are not taken",
    "aux_scalars": "it belongs to mask_mod and score_mod, which are not taken",
    "gather_kv_indices": "use bsk.sparse_attention with a bsk.KeySelection",
    "scheduler_metadata": "work is scheduled on the device; pass None",
}


def refuse(op: str, **given: Any) -> None:
    """Raise for arguments that are given and cannot be honoured."""
    for arg, value in given.items():
        if value is not None and not (arg == "dropout_p" and value == 0.0):
            raise Unsupported(f"{op}: {arg} is not supported; {INSTEAD[arg]}")


def window_of(op: str, window_size: Any) -> tuple[int | None, int | None] | None:
    """flash-attn says -1 (or None) where a side is open, and takes a tensor of two numbers too."""
    if isinstance(window_size, torch.Tensor):
        window_size = window_size.tolist()
    if (
        not isinstance(window_size, (tuple, list))
        or len(window_size) != 2
        or not all(side is None or isinstance(side, (int, torch.SymInt)) for side in window_size)
    ):
        expected = "(left, right), -1 for an open side"
        raise InvalidInput(message(op, "window_size", "is malformed", expected, window_size))
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return None if left is None and right is None else (left, right)


def pages_of(
    op: str, block_table: torch.Tensor | None, page_table: torch.Tensor | None
) -> torch.Tensor | None:
    """The page table under the name of flash-attn 2 or 3."""
    if block_table is not None and page_table is not None:
        expected = "one of the two names"
        raise InvalidInput(
            message(op, "block_table/page_table", "are both given", expected, "both")
        )
    return block_table if page_table is None else page_table


def asks_for_lse(op: str, return_softmax_lse: Any, return_lse: Any) -> bool:
    """flash-attn 2 and 3 call it the first, flash-attn 4 the second."""
    check_flag(op, "return_softmax_lse", return_softmax_lse)
    check_flag(op, "return_lse", return_lse)
    asks: bool = return_softmax_lse or return_lse
    return asks


def returned(out: torch.Tensor, lse: torch.Tensor, probs: bool, with_lse: bool) -> Result:
    """The results that were asked for; probabilities are never among them."""
    if probs:
        return out, lse, None
    return (out, lse) if with_lse else out


def check_packed_over_pages(
    op: str, q: torch.Tensor, offsets: torch.Tensor, caches: dict[str, torch.Tensor]
) -> None:
    """The arguments of `queries_over_cache` for packed queries and paged caches."""
    check_tensor(op, "q", q)
    check_rank(op, "q", q, "[T, H, D]")
    check_cu_seqlens(op, "cu_seqlens_q", offsets, device=q.device)
    for arg, x in caches.items():
        check_tensor(op, arg, x)
        check_rank(op, arg, x, PAGED)


def queries_over_cache(
    op: str,
    q: torch.Tensor,
    offsets: torch.Tensor,
    caches: dict[str, torch.Tensor],
    factors: Factors,
) -> WideQueries:
    """Packed queries with which the kernels read an fp8 cache, and the factors of the cache.

    `caches` are those of keys and of values, by the names of arguments.
    """
    if q.dtype != E4M3:
        refuse(op, q_descale=factors.q)
    heads = next(iter(caches.values())).shape[2]
    check_factors(op, factors, q, heads, offsets.numel() - 1)
    if q.dtype == E4M3:
        check_fp8(op, **caches)
        sequence = places_packed(offsets, q.shape[0]).sequence
        return wide_queries(op, q, factors, heads, sequence)
    k_scale = head_scale(op, "k_descale", factors.k)
    return WideQueries(q, k_scale, head_scale(op, "v_descale", factors.v), None)


def descales_of(
    op: str, q: torch.Tensor, factors: tuple[torch.Tensor | None, ...], others: dict[str, Any]
) -> dict[str, Any]:
    """Factors of fp8 inputs for `bsk.attention`; in flash-attn 3 those of q are per KV head too.

    `others` are arguments that inputs in fp8 do not go with.
    """
    names = ("q_descale", "k_descale", "v_descale")
    given = dict(zip(names, factors, strict=True))
    if not isinstance(q, torch.Tensor) or q.dtype != E4M3:
        refuse(op, **given)
        return {}
    for arg, value in others.items():
        if value is not None:
            raise Unsupported(
                f"{op}: {arg} is not supported with q, k and v in {E4M3}; pass them in 16 bits"
            )
    of_q = given["q_descale"]
    if isinstance(of_q, torch.Tensor) and of_q.dim() == 2 and of_q.shape[1] > 1:
        group = q.shape[-2] // max(of_q.shape[1], 1)
        given["q_descale"] = of_q.repeat_interleave(group, 1)
    return given
