"""Checks of calls with a `key_gate`, and the `GatedCall` with its defaults."""

from typing import Any

import torch

from ...calls.gated_attention import GatedCall, KeyGate
from ...core.checks import (
    check_derivatives,
    check_dtype,
    check_last_dim_contiguous,
    check_same_device,
    check_tensor,
    message,
)
from ...core.errors import InvalidInput, InvalidType, Unsupported
from ...masks.band import band_of
from ..fp8_inputs import is_fp8_call
from ..inputs import (
    DENSE,
    DTYPES,
    autocast_qkv,
    check_block_mask,
    check_head_dims,
    check_qkv,
    checked_call,
)


def gated_call(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    key_gate: Any,
    *,
    causal: Any,
    window: Any,
    block_mask: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    deterministic: Any,
    others: dict[str, Any],
) -> GatedCall:
    """Check the arguments against each other and fill in the defaults, without a device sync.

    `others` are options of attention that a call with a gate must leave at None.
    """
    for arg, value in others.items():
        if value is not None:
            got = type(value).__name__
            raise InvalidInput(message(op, arg, "does not go with key_gate", "None", got))
    if is_fp8_call(q):
        raise Unsupported(f"{op}: key_gate does not go with fp8 tensors; expected None")
    check_qkv(op, q, k, v, DENSE)
    check_head_dims(op, q, v)
    for arg, x in (("q", q), ("k", k), ("v", v)):
        check_derivatives(op, arg, x)
    band = band_of(op, causal, window)
    check_block_mask(op, block_mask, q, q.shape[0], q.shape[2], k.shape[2])
    gate = _checked_gate(op, key_gate, q, k)
    q, k, v = autocast_qkv(op, q, k, v)
    call = checked_call(
        *(op, q, k, v),
        band=band,
        block_mask=block_mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        deterministic=deterministic,
        max_q=q.shape[2],
        max_k=k.shape[2],
    )
    return GatedCall(call, gate)


def _checked_gate(op: str, key_gate: Any, q: torch.Tensor, k: torch.Tensor) -> KeyGate:
    if not isinstance(key_gate, (tuple, list)) or len(key_gate) != 2:
        expected = "(u, tau), scores of keys and thresholds of queries"
        got = type(key_gate).__name__
        raise InvalidType(message(op, "key_gate", "is not a pair", expected, got))
    gate = KeyGate(*key_gate)
    heads = sorted({1, k.shape[1], q.shape[1]})
    for arg, x, length in (("u", gate.u, k.shape[2]), ("tau", gate.tau, q.shape[2])):
        name = f"key_gate ({arg})"
        check_tensor(op, name, x)
        check_derivatives(op, name, x)
        check_dtype(op, name, x, DTYPES)
        fits = x.dim() == 3 and x.shape[0] in (1, q.shape[0]) and x.shape[1] in heads
        if not fits or x.shape[2] != length:
            batches = " or ".join(map(str, sorted({1, q.shape[0]})))
            expected = f"[{batches}, {' or '.join(map(str, heads))}, {length}]"
            raise InvalidInput(message(op, name, "has a wrong shape", expected, list(x.shape)))
        check_last_dim_contiguous(op, name, x)
        check_same_device(op, {"q": q, name: x})
    if gate.u.shape[:2] != gate.tau.shape[:2]:
        got = f"u {list(gate.u.shape)}, tau {list(gate.tau.shape)}"
        expected = "one batch and one number of heads"
        raise InvalidInput(message(op, "key_gate", "has parts that differ", expected, got))
    return gate
