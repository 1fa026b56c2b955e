"""Checks and defaults that the public attention functions share."""

import math
from typing import Any

import torch
from torch.autograd import forward_ad

from ..calls.attention import AttentionCall, AttnSpec
from ..core.checks import (
    check_dtype,
    check_finite,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tangent,
    check_tensor,
    is_differentiated_by_func,
    message,
    shares_elements,
    wants_gradient,
)
from ..core.errors import InvalidInput, InvalidType, Unsupported
from ..core.fp8 import E4M3
from ..core.torch_state import autocast_dtype, cast_operand
from ..masks.band import Band
from ..masks.block_mask import BlockMask
from ..masks.packed import check_cu_seqlens, check_same_batch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
# Types of tensors that a replayed call may have.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

DENSE = "[B, H, S, D]"
PACKED = "[T, H, D]"
# Batches as flash-attn has them; they are transposed before anything is computed.
TOKENS_FIRST = "[B, S, H, D]"
_RANKS = {DENSE: 4, PACKED: 3, TOKENS_FIRST: 4}
_HEAD_AXES = {DENSE: -3, PACKED: -2, TOKENS_FIRST: -2}


def check_qkv(
    op: str, q: Any, k: Any, v: Any, layout: str, names: tuple[str, str, str] = ("q", "k", "v")
) -> None:
    """Check type, layout, dtype, device and shape of q, k and v, in that order; host only."""
    if clearly_valid(q, k, v, layout):
        return
    tensors = dict(zip(names, (q, k, v), strict=True))
    for arg, x in tensors.items():
        check_tensor(op, arg, x)
        check_tangent(op, arg, x)
        if x.dtype == E4M3 and q.dtype in DTYPES:
            expected = f"{E4M3} for all of {', '.join(names)}, or for none"
            raise InvalidType(
                message(op, arg, f"is in fp8 and {names[0]} is not", expected, x.dtype)
            )
        check_dtype(op, arg, x, DTYPES)
        check_rank(op, arg, x, layout)
        check_last_dim_contiguous(op, arg, x)
    check_same_device(op, {**tensors})
    check_qkv_shapes(op, tensors, layout)


def check_qkv_shapes(op: str, tensors: dict[str, torch.Tensor], layout: str) -> None:
    """Check that the shapes of q, k and v fit together; `tensors` maps their names to them.

    With PACKED some of them may be `[B, S, H, D]`: only the dimensions from the heads on count.
    """
    names = tuple(tensors)
    q, k, v = tensors.values()
    if layout != PACKED and not q.shape[0] == k.shape[0] == v.shape[0]:
        _raise_mismatch(op, tensors, "have different batch sizes", "one batch size")
    if k.shape[-1] != q.shape[-1]:
        _raise_mismatch(op, tensors, "have different head dims", "q and k alike")
    if k.shape[:-1] != v.shape[:-1]:
        _raise_mismatch(op, tensors, "do not match", "k and v alike but for the last dimension")
    axis = _HEAD_AXES[layout]
    check_head_groups(op, q.shape[axis], k.shape[axis], names[0], names[1])


def check_head_groups(
    op: str, heads_q: int, heads_kv: int, arg_q: str = "q", arg_k: str = "k"
) -> None:
    """Check that the query heads can be divided among the KV heads."""
    if heads_q % heads_kv if heads_kv else heads_q:
        expected = f"a multiple of the heads of {arg_k}"
        got = f"{heads_q} query heads not divisible by {heads_kv} kv heads"
        raise InvalidInput(message(op, arg_q, "has a wrong number of heads", expected, got))


def check_packed(op: str, q: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> None:
    """Check the offsets and the maximum lengths of packed sequences."""
    check_tensor(op, "q", q)
    check_cu_seqlens(op, "cu_seqlens_q", cu_q, device=q.device)
    check_cu_seqlens(op, "cu_seqlens_k", cu_k, device=q.device)
    check_same_batch(op, cu_q, cu_k)
    for arg, value in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise InvalidType(message(op, arg, "is not an int", "int", type(value).__name__))
        if value < 0:
            raise InvalidInput(message(op, arg, "is negative", "an int >= 0", value))


def clearly_valid(q: Any, k: Any, v: Any, layout: str) -> bool:
    """The fast path of `check_qkv`: True if all its checks pass, False if they have to run."""
    if not (type(q) is type(k) is type(v) is torch.Tensor) or _is_transformed():
        return False
    # layout first: a nested or sparse tensor raises when asked for its strides or shape
    for x in (q, k, v):
        if x.layout is not torch.strided or x.is_nested or x.dtype not in DTYPES:
            return False
        if x.stride()[-1:] != (1,):
            return False
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == _RANKS[layout]:
        return False
    axis = _HEAD_AXES[layout]
    heads_q, heads_kv = shape_q[axis], shape_k[axis]
    return (
        shape_k[:-1] == shape_v[:-1]
        and shape_q[-1] == shape_k[-1]
        and (layout == PACKED or shape_q[0] == shape_k[0])
        and heads_kv > 0
        and heads_q % heads_kv == 0
        and q.device == k.device == v.device
    )


def _is_transformed() -> bool:
    """Whether forward-mode derivatives, a transform of torch.func or a compiler may be active."""
    return (
        forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    )


def _raise_mismatch(op: str, tensors: dict[str, torch.Tensor], problem: str, expected: str) -> None:
    got = ", ".join(f"{arg} {list(x.shape)}" for arg, x in tensors.items())
    raise InvalidInput(message(op, "/".join(tensors), problem, expected, got))


def check_head_dims(op: str, q: torch.Tensor, v: torch.Tensor, largest: int = MAX_HEAD_DIM) -> None:
    """Check that head dims are between 1 and `largest`."""
    for arg, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= largest:
            problem, expected = "has an unsupported head dim", f"1 to {largest}"
            raise InvalidInput(message(op, arg, problem, expected, x.shape[-1]))


def autocast_qkv(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast to autocast's dtype if autocast is on (fp64 stays); then all dtypes must agree."""
    if autocast_dtype(q.device) is not None:
        q, k, v = cast_operand(q), cast_operand(k), cast_operand(v)
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    check_same_dtype(op, {"q": q, "k": k, "v": v})
    return q, k, v


def _number(op: str, arg: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        raise InvalidType(message(op, arg, "is not a number", "a float", type(value).__name__))
    number = float(value)
    check_finite(op, arg, number)
    return number


def scale_or_default(op: str, scale: Any, head_dim: int) -> float:
    """`scale`, by default 1/sqrt(D)."""
    return 1.0 / math.sqrt(max(head_dim, 1)) if scale is None else _number(op, "scale", scale)


def softcap_or_off(op: str, softcap: Any) -> float:
    """`softcap` as operators carry it: 0 is off."""
    if softcap is None:
        return 0.0
    value = _number(op, "softcap", softcap)
    if value <= 0:
        raise InvalidInput(message(op, "softcap", "is not positive", "None or > 0", softcap))
    return value


def check_sinks(op: str, sinks: Any, q: torch.Tensor) -> None:
    """Check that there is one sink per query head."""
    if sinks is None:
        return
    check_tensor(op, "sinks", sinks)
    check_tangent(op, "sinks", sinks)
    check_dtype(op, "sinks", sinks, DTYPES)
    check_shape(op, "sinks", sinks, [q.shape[1]])
    check_same_device(op, {"q": q, "sinks": sinks})


def fitted_mask(block_mask: Any, sq: Any, sk: Any) -> Any:
    """A mask made without lengths, set to these if its grid of blocks fits them; others as is."""
    if isinstance(block_mask, BlockMask) and block_mask._fits(sq, sk):
        return block_mask.for_lengths(sq, sk)
    return block_mask


def check_slopes(op: str, slopes: Any, q: torch.Tensor, batch: int) -> None:
    """Check ALiBi slopes: one per query head, or one per sequence and query head."""
    if slopes is None:
        return
    arg = "alibi_slopes"
    check_tensor(op, arg, slopes)
    check_tangent(op, arg, slopes)
    check_dtype(op, arg, slopes, [torch.float32])
    shape = [q.shape[1]] if slopes.dim() == 1 else [batch, q.shape[1]]
    check_shape(op, arg, slopes, shape)
    check_last_dim_contiguous(op, arg, slopes)
    check_same_device(op, {"q": q, arg: slopes})
    _refuse_gradient(op, arg, slopes)


def check_bias(op: str, bias: Any, q: torch.Tensor, sk: int) -> None:
    """Check a bias of the scores of q [B, Hq, Sq, D]; it may broadcast over batch and heads."""
    if bias is None:
        return
    check_tensor(op, "bias", bias)
    check_tangent(op, "bias", bias)
    check_dtype(op, "bias", bias, DTYPES)
    check_rank(op, "bias", bias, "[B or 1, Hq or 1, Sq, Sk]")
    batch, heads, sq, _ = q.shape
    if not (
        bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads) and bias.shape[2:] == (sq, sk)
    ):
        expected = f"[{batch} or 1, {heads} or 1, {sq}, {sk}] (expand takes no memory)"
        raise InvalidInput(message(op, "bias", "has a wrong shape", expected, list(bias.shape)))
    check_same_device(op, {"q": q, "bias": bias})
    _refuse_gradient(op, "bias", bias)


def _refuse_gradient(op: str, arg: str, x: torch.Tensor) -> None:
    """Raise if slopes or a bias need a gradient: it is not computed."""
    if (torch.is_grad_enabled() and wants_gradient(x)) or is_differentiated_by_func(x):
        raise Unsupported(
            f"{op}: {arg} requires a gradient, which is not computed; pass {arg}.detach(), or use "
            "torch's own attention to train it"
        )


def check_block_mask(
    op: str,
    block_mask: Any,
    q: torch.Tensor,
    batch: int,
    sq: int,
    sk: int,
    kv_heads: int | None = None,
) -> None:
    """Check that a mask fits these sizes and is on the device of q.

    It may have one mask per KV head only if `kv_heads` is given.
    """
    if block_mask is None:
        return
    if not isinstance(block_mask, BlockMask):
        kind = type(block_mask)
        expected, got = "BlockMask", kind.__name__
        if got == expected:
            # FlexAttention's has the same name
            expected = f"blackwell_sparsek.{expected} (BlockMask.from_flex converts)"
            got = f"{kind.__module__}.{got}"
        raise InvalidType(message(op, "block_mask", "is not a block mask", expected, got))
    heads = kv_heads if kv_heads == block_mask.heads else q.shape[1]
    block_mask.check_problem(op, batch, heads, sq, sk)
    check_same_device(op, {"q": q, "block_mask": block_mask.bits})


def check_out(op: str, out: Any, shape: list[int], inputs: dict[str, torch.Tensor]) -> None:
    """Check a preallocated output, which must not share memory with `inputs`; they include q."""
    q = inputs["q"]
    check_tensor(op, "out", out)
    check_dtype(op, "out", out, [q.dtype])
    check_shape(op, "out", out, shape)
    check_last_dim_contiguous(op, "out", out)
    check_same_device(op, {"q": q, "out": out})
    if out.requires_grad:
        expected = "a tensor that needs no gradient"
        raise InvalidInput(message(op, "out", "requires a gradient", expected, "requires_grad"))
    if torch.compiler.is_compiling():
        return
    if shares_elements(out):
        expected = "one place in memory for each element"
        raise InvalidInput(message(op, "out", "overlaps itself", expected, list(out.stride())))
    for arg, x in inputs.items():
        if _may_overlap(out, x):
            raise InvalidInput(message(op, "out", f"overlaps {arg}", "memory of its own", arg))


def refuse_gradients_into(op: str, tensors: dict[str, torch.Tensor | None]) -> None:
    """Raise if an input needs a gradient: a call that writes to `out` has none."""
    for arg, x in tensors.items():
        if x is None:
            continue
        if (torch.is_grad_enabled() and wants_gradient(x)) or is_differentiated_by_func(x):
            raise Unsupported(
                f"{op}: {arg} requires a gradient, which a result in out does not have; call it "
                "under torch.no_grad(), or without out"
            )


def overlaps(out: Any, *inputs: Any) -> bool:
    """Whether `out` may share memory with an input; for replays, which skip `check_out`.

    False for anything but plain tensors, which are not replayed.
    """
    tensors = (out, *inputs)
    if torch.compiler.is_compiling() or any(type(x) not in _PLAIN for x in tensors):
        return False
    return any(x.is_cuda and out.is_cuda and _may_overlap(out, x) for x in inputs)


def _may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges from the first to the last element intersect."""
    if a.numel() == 0 or b.numel() == 0 or a.device.type == "meta":
        return False
    # tensors inside torch.vmap have no memory of their own
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (a, b))):
        return False
    ends = []
    for x in (a, b):
        steps = ((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        ends.append(x.data_ptr() + (sum(steps) + 1) * x.element_size())
    return a.data_ptr() < ends[1] and b.data_ptr() < ends[0]


def is_deterministic(op: str, deterministic: Any) -> bool:
    """`deterministic`, by default as `torch.use_deterministic_algorithms` says."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        got = type(deterministic).__name__
        raise InvalidType(message(op, "deterministic", "is not a bool", "bool or None", got))
    return deterministic


def checked_call(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    band: Band,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool | None = None,
    max_q: int,
    max_k: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> AttentionCall:
    """Check the remaining options, and build the call."""
    check_sinks(op, sinks, q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    check_slopes(op, alibi_slopes, q, batch)
    check_bias(op, bias, q, max_k)
    if out is not None:
        tensors = {"q": q, "k": k, "v": v}
        optional = {"sinks": sinks, "alibi_slopes": alibi_slopes, "bias": bias}
        others = {arg: x for arg, x in optional.items() if x is not None}
        refuse_gradients_into(op, {**tensors, **others})
        check_out(op, out, [*q.shape[:-1], v.shape[-1]], {**tensors, **others})
    spec = AttnSpec(
        scale_or_default(op, scale, q.shape[-1]),
        band,
        block_mask,
        softcap_or_off(op, softcap),
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        max_q,
        max_k,
        alibi_slopes,
        bias,
    )
    return AttentionCall(q, k, v, spec, is_deterministic(op, deterministic), out)
