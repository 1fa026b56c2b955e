"""Writing the keys and values of a packed batch to the slots that a mapping names, in place.

The part of `kv_append` with `slot_mapping`: checks, `bsk::kv_append_slots`, rotary embedding, and
the implementation in plain PyTorch; the Triton kernels are in `slots_kernel.py`.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from ..calls.cache import CacheProblem, SlotsCall, keys_hold_values
from ..calls.decode import values_are_keys, values_lie_as_in_keys
from ..core.checks import (
    check_choice,
    check_dtype,
    check_flag,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensor,
    message,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput, InvalidType, Unsupported
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only
from ..dispatch.machine import why_not_portable
from ..dispatch.operators import Operator, define_op
from ..launch.replay import Cache, Tensors, record, repeat
from .layout import (
    FP8,
    INDICES,
    NEW,
    PAGED,
    STORED,
    check_no_gradient,
    check_places,
    check_scale,
    is_latent,
)

_OP = "kv_append"
E4M3_MAX = 448.0
# Launches of earlier calls, for `repeat`.
_RECORDED: Cache = {}


class Rotary(NamedTuple):
    """Rotary embedding of the first R of the D numbers of a key or query at position p.

    Pairs (a, b) become (a cos - b sin, b cos + a sin), computed in fp32 and rounded to the dtype of
    the key or query, with row p of `cos` and `sin`.

    Parameters
    ----------
    cos, sin : fp16, bf16 or fp32 `[positions, R / 2]`
    interleaved : bool
        Pairs are numbers 2i and 2i + 1 (GPT-J); otherwise i and i + R / 2 (GPT-NeoX, Llama).

    Examples
    --------
    >>> import torch
    >>> angles = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1]))
    >>> Rotary(angles.cos(), angles.sin()).cos.shape
    torch.Size([4, 2])
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


def append_to_slots(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    slot_mapping: Any,
    rotary: Any,
    positions: Any,
    q: Any,
    k_scale: Any,
    v_scale: Any,
    impl: str,
) -> torch.Tensor | None:
    """Write to the slots and return the rotated queries; arguments as for `kv_append`."""
    cos, sin, interleaved = (None, None, False) if rotary is None else _parts(rotary)
    options: tuple[Any, ...] = (impl, interleaved)
    tensors = (slot_mapping, cos, sin, positions, q, k_scale, v_scale)
    inputs: tuple[Any, ...] = (k, v, k_cache, v_cache, *tensors)
    results = repeat(_RECORDED, options, inputs)
    if results is None:
        check_choice(_OP, "impl", impl, IMPLS)
        _check(k_cache, v_cache, k, v, slot_mapping, cos, sin, positions, q, k_scale, v_scale)
        call = SlotsCall(
            k_cache,
            v_cache,
            k,
            v,
            slot_mapping,
            cos,
            sin,
            interleaved,
            positions,
            q,
            None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format),
            k_scale,
            v_scale,
        )
        if k.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_values(call)
        results = append_recorded(_RECORDED, options, call, tensors, _append, impl)
    return results[0] if results else None


def append_recorded(
    cache: Cache,
    options: tuple[Any, ...],
    call: Any,
    tensors: tuple[Any, ...],
    append: Callable[[Any, str], Tensors],
    impl: str,
) -> Tensors:
    """Return `append(call, impl)`: replayed for a latent cache, otherwise recorded if possible.

    Parameters
    ----------
    cache, options : as for `repeat`, which found nothing for this call
    call : AppendCall or SlotsCall, checked
    tensors : the inputs of `repeat` after keys, values and their caches
    """
    k, v, k_cache, v_cache = call.k, call.v, call.k_cache, call.v_cache
    if is_latent(_OP, k_cache, v_cache, k, v):
        # a recording has each tensor once; of these calls, under a key of their own
        options, inputs = (*options, v.shape[-1]), (k, None, k_cache, None, *tensors)
        results = repeat(cache, options, inputs)
        if results is None:
            results = record(cache, options, inputs, append, call, impl, operands=1)
        return results
    if not torch.compiler.is_compiling() and values_lie_as_in_keys(k_cache, v_cache):
        # a recording would be replayed, without these checks, for latent caches of these sizes
        return append(call, impl)
    inputs = (k, v, k_cache, v_cache, *tensors)
    return record(cache, options, inputs, append, call, impl, operands=2)


def _parts(rotary: Any) -> tuple[Any, Any, bool]:
    if not isinstance(rotary, Rotary):
        got = type(rotary).__name__
        raise InvalidType(message(_OP, "rotary", "is of a wrong class", "bsk.Rotary", got))
    cos, sin, interleaved = rotary
    check_flag(_OP, "rotary.interleaved", interleaved)
    if cos is None or sin is None:  # from here on, None is a call without rotary embedding
        check_tensor(_OP, "rotary.cos" if cos is None else "rotary.sin", None)
    return cos, sin, interleaved


def _check(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    slot_mapping: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    q: Any,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Raise `InvalidInput` if the tensors of a call do not go together; never waits."""
    for arg, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(_OP, arg, x)
        check_dtype(_OP, arg, x, STORED)
        check_rank(_OP, arg, x, PAGED)
        check_last_dim_contiguous(_OP, arg, x)
        check_places(_OP, arg, x)
    check_same_dtype(_OP, {"k_cache": k_cache, "v_cache": v_cache}, autocasts=False)
    check_shape(_OP, "v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]))
    new = {"k": k, "v": v} if q is None else {"k": k, "v": v, "q": q}
    for arg, x in new.items():
        check_tensor(_OP, arg, x)
        check_dtype(_OP, arg, x, NEW if k_cache.dtype == FP8 else [k_cache.dtype])
        check_rank(_OP, arg, x, "[T, H, D]")
        check_last_dim_contiguous(_OP, arg, x)
        check_no_gradient(_OP, arg, x)
    check_same_dtype(_OP, new, autocasts=False)
    tokens, heads = k.shape[0], k_cache.shape[2]
    check_shape(_OP, "k", k, (tokens, heads, k_cache.shape[3]))
    check_shape(_OP, "v", v, (tokens, heads, v_cache.shape[3]))
    if slot_mapping is None:
        expected = "slots, which rotary, positions and q go with"
        raise InvalidInput(message(_OP, "slot_mapping", "is missing", expected, None))
    tables = {"slot_mapping": slot_mapping}
    if (cos is None) != (positions is None):
        arg = "positions" if positions is None else "rotary"
        expected = "both of rotary and positions, or none"
        raise InvalidInput(message(_OP, arg, "is missing", expected, None))
    if q is not None and cos is None:
        raise InvalidInput(message(_OP, "q", "goes with rotary", "None without it", "a tensor"))
    if positions is not None:
        tables["positions"] = positions
    for arg, x in tables.items():
        check_tensor(_OP, arg, x)
        check_dtype(_OP, arg, x, INDICES)
        check_shape(_OP, arg, x, (tokens,))
        check_last_dim_contiguous(_OP, arg, x)
    if cos is not None:
        _check_rotary(cos, sin, k.shape[2])
    if q is not None:
        check_shape(_OP, "q", q, (tokens, q.shape[1], k.shape[2]))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for arg, scale in scales.items():
        check_scale(_OP, arg, scale, k_cache.dtype, heads)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    check_same_device(_OP, {**caches, **new, **tables, **scales, "cos": cos, "sin": sin})


def _check_rotary(cos: Any, sin: Any, head_dim: int) -> None:
    for arg, x in (("rotary.cos", cos), ("rotary.sin", sin)):
        check_tensor(_OP, arg, x)
        check_dtype(_OP, arg, x, NEW[:3])
        check_rank(_OP, arg, x, "[positions, R / 2]")
        check_last_dim_contiguous(_OP, arg, x)
        check_no_gradient(_OP, arg, x)
    check_same_dtype(_OP, {"rotary.cos": cos, "rotary.sin": sin}, autocasts=False)
    check_shape(_OP, "rotary.sin", sin, cos.shape)
    if not 1 <= cos.shape[1] <= head_dim // 2:
        expected = f"1 to {head_dim // 2} columns, half of what is rotated"
        raise InvalidInput(message(_OP, "rotary.cos", "is too wide", expected, cos.shape[1]))


def _check_values(call: SlotsCall) -> None:
    """Check that every slot and position exists; reads the tensors, so for the CPU only."""
    slots = call.k_cache.shape[0] * call.k_cache.shape[1]
    numbers = [("slot_mapping", call.slot_mapping, -1, slots - 1)]
    if call.cos is not None and call.positions is not None:
        numbers.append(("positions", call.positions, 0, call.cos.shape[0] - 1))
    for arg, x, least, most in numbers:
        wrong = ((x < least) | (x > most)).nonzero().flatten()
        if wrong.numel():
            t = int(wrong[0])
            expected = f"{least} to {most}"
            raise InvalidInput(message(_OP, f"{arg}[{t}]", "is out of range", expected, int(x[t])))


def rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Rows [T, H, D] rotated; NaN where a position has no row in `cos` and `sin`."""
    half = cos.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    known = (positions >= 0) & (positions < cos.shape[0])
    row = torch.where(known, positions, 0).long()
    # an empty table has no row to stand in
    cos, sin = (
        torch.where(known[:, None], y.to(dtype)[row] if y.shape[0] else torch.nan, torch.nan)
        for y in (cos, sin)
    )
    cos, sin = (y.expand(len(row), half)[:, None, :] for y in (cos, sin))
    of_pairs, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    if interleaved:
        a, b = of_pairs[..., 0::2], of_pairs[..., 1::2]
    else:
        a, b = of_pairs[..., :half], of_pairs[..., half:]
    a, b = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([pairs.to(x.dtype), rest], -1)


def append_eager(call: SlotsCall) -> None:
    """Write k and v to their slots, without waiting for the device."""
    k, q = call.k, call.q
    if call.cos is not None and call.sin is not None and call.positions is not None:
        how = (call.cos, call.sin, call.positions, call.interleaved)
        k = rotated(k, *how)
        if q is not None and call.q_out is not None:
            call.q_out.copy_(rotated(q, *how))
    pages, page_size = call.k_cache.shape[:2]
    if call.k.shape[0] == 0 or pages * page_size == 0 or call.k.shape[1] == 0:
        return
    slot = call.slot_mapping.long()
    live = (slot >= 0) & (slot < pages * page_size)
    slot = torch.where(live, slot, 0)
    tensors = ((call.k_cache, k, call.k_scale), (call.v_cache, call.v, call.v_scale))
    for cache, new, scale in tensors[:1] if keys_hold_values(call) else tensors:
        rows = as_stored(new.unsqueeze(2), scale, cache.dtype).squeeze(2)
        if cache.dtype == FP8:
            cache = cache.view(torch.uint8)
        put_tokens(cache, slot // page_size, slot % page_size, live, rows)


def put_tokens(
    slots: torch.Tensor,
    outer: torch.Tensor,
    slot: torch.Tensor,
    live: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """`slots[outer, slot] = rows` where `live`.

    Selecting the live rows would wait for the device. Instead, the other rows repeat a harmless
    write: that of the first live row, or of an old value if no row is live.
    """
    anchor = live.int().argmax(keepdim=True)
    to_outer, to_slot = outer[anchor], slot[anchor]
    kept = torch.where(live[anchor].view(1, 1, 1), rows[anchor], slots[to_outer, to_slot])
    at = (torch.where(live, outer, to_outer), torch.where(live, slot, to_slot))
    slots.index_put_(at, torch.where(live.view(-1, 1, 1), rows, kept))


def as_stored(new: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Values [B, Hkv, T, D] as a cache of `dtype` stores them; fp8 as uint8, saturated at 448."""
    if dtype != FP8:
        return new
    x = new.float()
    if scale is not None:
        x = x * scale.float().reciprocal().view(1, -1, 1, 1)
    # drop the sign of NaN, as the conversion instruction of the GPU does
    x = torch.where(x.isnan(), torch.nan, x.clamp(-E4M3_MAX, E4M3_MAX))
    return x.to(dtype).view(torch.uint8)


FIELDS = tuple(field.name for field in fields(SlotsCall))


def _append(call: SlotsCall, impl: str) -> tuple[torch.Tensor, ...]:
    """Run a checked call through the operator; return what it allocated."""
    kv_append_slots(*(getattr(call, name) for name in FIELDS), impl)
    return () if call.q_out is None else (call.q_out,)


def why_not_triton(problem: CacheProblem) -> str | None:
    """Why the cache kernels cannot run this problem, or None when they can."""
    return why_not_portable(problem.arch, problem.dtype)


def _kv_append_slots(*args: Any) -> None:
    *values, impl = args
    call = SlotsCall(*values)
    # here, where a compiled call comes by as well: compilers know no addresses
    if call.cos is not None and values_are_keys(call.k_cache, call.v_cache):
        problem = "rotates the first channels of a key, which are its value in a latent cache"
        expected = "None, and keys with the rotation applied to their last channels"
        raise Unsupported(message(_OP, "rotary", problem, expected, "bsk.Rotary"))
    with without_autocast(call.k.device), torch.no_grad():
        slots_dispatch.run(impl, call)


slots_dispatch: Dispatcher = Dispatcher("kv_append_slots")
slots_dispatch.register(
    "triton",
    why_not_triton,
    "blackwell_sparsek.kv_cache.slots_kernel:append",
    auto_passes=interpreted_only,
)
slots_dispatch.register("eager", every_problem, append_eager)

kv_append_slots: Operator = define_op(
    "kv_append_slots",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slot_mapping, "
    "Tensor? cos, Tensor? sin, bool interleaved, Tensor? positions, Tensor? q, Tensor(c!)? q_out, "
    "Tensor? k_scale, Tensor? v_scale, str impl) -> ()",
    _kv_append_slots,
    lambda *args: None,
)
