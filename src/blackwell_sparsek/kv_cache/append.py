"""`kv_append`: append new keys and values to a cache, in place.

The public function, its checks, `bsk::kv_append`, and the implementation in plain PyTorch; the
Triton kernel is in `append_kernel.py`.
"""

from typing import Any

import torch

from ..calls.cache import AppendCall, keys_hold_values
from ..core.checks import (
    check_choice,
    check_dtype,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensor,
    message,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only
from ..dispatch.operators import Operator, define_op
from ..launch.replay import Cache, repeat
from .layout import (
    CONTIGUOUS,
    FP8,
    INDICES,
    NEW,
    PAGED,
    STORED,
    check_no_gradient,
    check_places,
    check_scale,
)
from .slots import Rotary, append_recorded, append_to_slots, as_stored, put_tokens, why_not_triton

_OP = "kv_append"
# Launches of earlier calls, for `repeat`.
_RECORDED: Cache = {}


def kv_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    positions: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor | None:
    """Write new keys and values to a cache, after the tokens that it holds or to given slots.

    - With `cache_seqlens`: token t of sequence b goes to slot `cache_seqlens[b] + t` of its cache.
    - With `slot_mapping`: token t of a packed batch goes to slot `slot_mapping[t]` of all slots,
      page after page: slot s is token `s % page_size` of page `s // page_size`. -1 skips a token.

    Lengths and tables are read on the device without waiting for it, so a CUDA graph with this
    call writes to the slots that they name at each replay. `cache_seqlens` is not advanced. A slot
    that does not exist (past the capacity, a negative length, a page id out of range) is not
    written. On CPU tensors, where the check is free, it raises `InvalidInput`.

    Parameters
    ----------
    k_cache : fp16, bf16, fp32, fp64 or float8_e4m3fn `[B, Hkv, S, D]`
        With `page_table` or `slot_mapping`: `[pages, page_size, Hkv, D]`; pages with heads
        outermost are `pages.transpose(1, 2)`. Any strides with a contiguous last dimension, which
        may differ between tensors.
    v_cache : the same with Dv in place of D
        Can be a view of the keys, `k_cache[..., :Dv]` (a latent cache), except in fp8 and with
        `rotary`. Then v must be `k[..., :Dv]`, and only the keys are written.
    k, v : `[B, Hkv, T, D]`, `[B, Hkv, T, Dv]`; with `slot_mapping` `[T, Hkv, D]`, `[T, Hkv, Dv]`
        The dtype of the caches; any float dtype for fp8 caches. No gradient flows through a cache.
    cache_seqlens : int32 `[B]`
        Tokens that each sequence holds before this call.
    counts : int32 `[B]`, optional
        Append only the first `counts[b]` of the T tokens.
    page_table : int32 or int64 `[B, max_pages]`, optional
        Pages of each sequence in their order; -1 where there is none.
    slot_mapping : int32 or int64 `[T]`, optional
        Takes the place of `cache_seqlens`, `counts` and `page_table`; no slot twice.
    rotary : Rotary, optional
        Rotates keys as they are written, and `q`; with `slot_mapping`.
    positions : int32 or int64 `[T]`
        The position of each token in its sequence, for `rotary`.
    q : `[T, Hq, D]`, optional
        Queries to be rotated too.
    k_scale, v_scale : fp32, one element or `[Hkv]`, optional
        fp8 caches hold `x * (1 / scale)`, rounded to nearest even; values beyond ±448, infinities
        included, become ±448, and NaN stays NaN. 1 by default.
    impl : str
        `auto`, `eager` or `triton`.

    Returns
    -------
    The rotated queries, a new tensor; None without `q`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> k_cache = v_cache = torch.zeros(2, 1, 4, 1)
    >>> new = torch.tensor([5.0, 7.0]).view(2, 1, 1, 1)
    >>> kv_append(k_cache, v_cache, new, new, cache_seqlens=torch.tensor([0, 3]).int())
    >>> k_cache[:, 0, :, 0]
    tensor([[5., 0., 0., 0.],
            [0., 0., 0., 7.]])

    Three tokens into pages of two, the second of them skipped:

    >>> pages = torch.zeros(2, 2, 1, 1)
    >>> new = torch.tensor([5.0, 6.0, 7.0]).view(3, 1, 1)
    >>> kv_append(pages, pages.clone(), new, new, slot_mapping=torch.tensor([3, -1, 0]))
    >>> pages[:, :, 0, 0]
    tensor([[7., 0.],
            [0., 5.]])
    """
    if slot_mapping is not None or rotary is not None or positions is not None or q is not None:
        others = {"cache_seqlens": cache_seqlens, "counts": counts, "page_table": page_table}
        for arg, x in others.items():
            if x is not None:
                expected = "None with slot_mapping, rotary, positions and q"
                raise InvalidInput(message(_OP, arg, "says another slot", expected, "a tensor"))
        return append_to_slots(
            k_cache, v_cache, k, v, slot_mapping, rotary, positions, q, k_scale, v_scale, impl
        )
    tensors = (cache_seqlens, counts, page_table, k_scale, v_scale)
    inputs: tuple[Any, ...] = (k, v, k_cache, v_cache, *tensors)
    if repeat(_RECORDED, (impl,), inputs) is not None:
        return None
    if cache_seqlens is None:
        expected = "lengths, or slot_mapping"
        raise InvalidInput(message(_OP, "cache_seqlens", "is missing", expected, None))
    call = AppendCall(k_cache, v_cache, k, v, cache_seqlens, counts, page_table, k_scale, v_scale)
    check_choice(_OP, "impl", impl, IMPLS)
    _check(call)
    append_recorded(_RECORDED, (impl,), call, tensors, _append, impl)
    return None


def _check(call: AppendCall) -> None:
    """Raise `InvalidInput` if the tensors of a call are invalid."""
    k_cache, page_table = call.k_cache, call.page_table
    _check_caches(k_cache, call.v_cache, page_table)
    paged = page_table is not None
    batch, heads = check_new(_OP, k_cache, call.v_cache, call.k, call.v, paged=paged)
    tables = {"cache_seqlens": call.cache_seqlens, "counts": call.counts, "page_table": page_table}
    for arg, x in tables.items():
        if x is None and arg != "cache_seqlens":
            continue
        check_tensor(_OP, arg, x)
        assert x is not None
        check_dtype(_OP, arg, x, INDICES if arg == "page_table" else [torch.int32])
        if arg == "page_table":
            check_rank(_OP, arg, x, "[B, max_pages]")
            check_shape(_OP, arg, x, (batch, x.shape[1]))
        else:
            check_shape(_OP, arg, x, (batch,))
        check_last_dim_contiguous(_OP, arg, x)
    scales = {"k_scale": call.k_scale, "v_scale": call.v_scale}
    for arg, scale in scales.items():
        check_scale(_OP, arg, scale, k_cache.dtype, heads)
    tensors = {"k_cache": k_cache, "v_cache": call.v_cache, "k": call.k, "v": call.v}
    check_same_device(_OP, {**tensors, **tables, **scales})
    if call.k.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_slots(call)


def _check_caches(k_cache: Any, v_cache: Any, page_table: Any) -> None:
    layout = CONTIGUOUS if page_table is None else PAGED
    for arg, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(_OP, arg, x)
        check_dtype(_OP, arg, x, STORED)
        check_rank(_OP, arg, x, layout)
        check_last_dim_contiguous(_OP, arg, x)
        check_places(_OP, arg, x)
    check_same_dtype(_OP, {"k_cache": k_cache, "v_cache": v_cache}, autocasts=False)
    check_shape(_OP, "v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]))


def check_new(
    op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Any, v: Any, *, paged: bool
) -> tuple[int, int]:
    """Check that k and v fit the caches; return their batch and KV heads."""
    allowed = NEW if k_cache.dtype == FP8 else [k_cache.dtype]
    for arg, x in (("k", k), ("v", v)):
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, allowed)
        check_rank(op, arg, x, "[B, Hkv, T, D]")
        check_last_dim_contiguous(op, arg, x)
        check_no_gradient(op, arg, x)
    check_same_dtype(op, {"k": k, "v": v}, autocasts=False)
    batch = k.shape[0] if paged else k_cache.shape[0]
    heads = k_cache.shape[2] if paged else k_cache.shape[1]
    check_shape(op, "k", k, (batch, heads, k.shape[2], k_cache.shape[3]))
    check_shape(op, "v", v, (batch, heads, k.shape[2], v_cache.shape[3]))
    check_same_device(op, {"cache": k_cache, "k": k, "v": v})
    return batch, heads


def _check_slots(call: AppendCall) -> None:
    """Check that every slot to be written exists; reads the tensors, so for the CPU only."""
    k_cache, page_table, tokens = call.k_cache, call.page_table, call.k.shape[2]
    lengths = call.cache_seqlens.tolist()
    new = [tokens] * len(lengths) if call.counts is None else call.counts.tolist()
    page_size = 1 if page_table is None else k_cache.shape[1]
    capacity = k_cache.shape[2] if page_table is None else page_table.shape[1] * page_size
    for b, (length, count) in enumerate(zip(lengths, new, strict=True)):
        if not 0 <= count <= tokens:
            got = f"{count} for sequence {b}"
            raise InvalidInput(message(_OP, "counts", "are out of range", f"0 to {tokens}", got))
        if count and not 0 <= length <= capacity - count:
            expected = f"room for {count} more tokens in {capacity} slots"
            got = f"{length} for sequence {b}"
            raise InvalidInput(message(_OP, "cache_seqlens", "leave no room", expected, got))
        if count and page_table is not None:
            pages = page_table[b, length // page_size : (length + count - 1) // page_size + 1]
            wrong = pages[(pages < 0) | (pages >= k_cache.shape[0])]
            if wrong.numel():
                expected, got = f"0 to {k_cache.shape[0] - 1}", f"{int(wrong[0])} for sequence {b}"
                problem = "names a page that does not exist"
                raise InvalidInput(message(_OP, "page_table", problem, expected, got))


def append_eager(call: AppendCall) -> None:
    """Write k and v from slot `cache_seqlens` on, without waiting for the device.

    Slots that do not exist are not written.
    """
    k, page_table = call.k, call.page_table
    batch, tokens = k.shape[0], k.shape[2]
    if k.numel() == 0 and call.v.numel() == 0:
        return
    token = torch.arange(tokens, device=k.device)
    first = call.cache_seqlens.long().unsqueeze(1)
    slot = first + token
    live = (first >= 0).expand_as(slot)
    if call.counts is not None:
        live = live & (token < call.counts.unsqueeze(1))
    if page_table is None:
        k_slots, v_slots = call.k_cache.transpose(1, 2), call.v_cache.transpose(1, 2)
        outer = torch.arange(batch, device=k.device).unsqueeze(1).expand_as(slot)
    else:
        k_slots, v_slots = call.k_cache, call.v_cache
        page_size = k_slots.shape[1]
        ordinal, slot = slot // page_size, slot % page_size
        live = live & (ordinal < page_table.shape[1])
        if page_table.shape[1] == 0:
            return
        outer = page_table.long().gather(1, ordinal.clamp(0, page_table.shape[1] - 1))
    live = live & (outer >= 0) & (outer < k_slots.shape[0]) & (slot < k_slots.shape[1])
    if k_slots.shape[0] == 0 or k_slots.shape[1] == 0:
        return
    outer = outer.clamp(0, k_slots.shape[0] - 1).flatten()
    slot = slot.clamp(0, k_slots.shape[1] - 1).flatten()
    tensors = ((k_slots, k, call.k_scale), (v_slots, call.v, call.v_scale))
    for slots, new, scale in tensors[:1] if keys_hold_values(call) else tensors:
        rows = as_stored(new, scale, slots.dtype).transpose(1, 2).flatten(0, 1)
        if slots.dtype == FP8:
            slots = slots.view(torch.uint8)
        put_tokens(slots, outer, slot, live.flatten(), rows)


def _append(call: AppendCall, impl: str) -> tuple[()]:
    """Run a checked call through the operator, which returns nothing."""
    kv_append_op(
        call.k_cache,
        call.v_cache,
        call.k,
        call.v,
        call.cache_seqlens,
        call.counts,
        call.page_table,
        call.k_scale,
        call.v_scale,
        impl,
    )
    return ()


def _kv_append(*args: Any) -> None:
    *tensors, impl = args
    call = AppendCall(*tensors)
    with without_autocast(call.k.device), torch.no_grad():
        append_dispatch.run(impl, call)


append_dispatch: Dispatcher = Dispatcher(_OP)
append_dispatch.register(
    "triton",
    why_not_triton,
    "blackwell_sparsek.kv_cache.append_kernel:append",
    auto_passes=interpreted_only,
)
append_dispatch.register("eager", every_problem, append_eager)

kv_append_op: Operator = define_op(
    "kv_append",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor? counts, Tensor? page_table, Tensor? k_scale, Tensor? v_scale, str impl) -> ()",
    _kv_append,
    lambda *args: None,
)
