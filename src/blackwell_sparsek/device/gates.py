# mypy: ignore-errors
"""Key gates: the weight of a key for a query, from the gate score of the key and a threshold.

    w[i, j] = clip(u[j] - tau[i], 0, 1)          0 where u[j] is -inf: there is no such key

The caller passes `u` and `tau` with axes that broadcast.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .masks import exists


class KeyGates(NamedTuple):
    """Pointers to gate scores and thresholds, contiguous along tokens, and strides of rows."""

    u: Any
    tau: Any
    u_batch: Any
    u_head: Any
    tau_batch: Any
    tau_head: Any
    heads_per_gate: Any
    """Query heads that share a row."""


class GateRow(NamedTuple):
    """Scores and thresholds of one (batch, head): pointers, or the values of a tile."""

    u: Any
    tau: Any


@triton.jit
def gate_row(gates, batch, q_head):
    """Where the `GateRow` of a query head lies."""
    head = tl.cast(q_head // gates.heads_per_gate, tl.int64)
    u = gates.u + tl.cast(batch, tl.int64) * gates.u_batch + head * gates.u_head
    tau = gates.tau + tl.cast(batch, tl.int64) * gates.tau_batch + head * gates.tau_head
    return GateRow(u, tau)


@triton.jit
def load_gate_terms(ptr, tokens, limit, missing):
    """u or tau of some tokens in fp32; `missing` for those at or past `limit`, if it is given."""
    if limit is None:
        terms = tl.load(ptr + tokens)
    else:
        terms = tl.load(ptr + tokens, mask=exists(tokens, limit), other=missing)
    return terms.to(tl.float32)


@triton.jit
def gate_weights(u, tau):
    """The weights; NaN in a score or a threshold propagates to them."""
    over = u - tau
    clipped = tl.minimum(tl.maximum(over, 0.0), 1.0)
    # minimum and maximum drop NaN
    weights = tl.where(over == over, clipped, over)
    return tl.where(u == -float("inf"), 0.0, weights)


@triton.jit
def add_gates(exponents, weights):
    """Base-2 exponents with the logarithm of their weights; -inf where the weight is 0."""
    logs = tl.log2(tl.where(weights == 0.0, 1.0, weights))
    return tl.where(weights == 0.0, -float("inf"), exponents + logs)


@triton.jit
def gate_gradients(p, weights, dp, delta):
    """Gradients of weights that are neither 0 nor 1, from probabilities `p` without the gates."""
    between = (weights > 0.0) & (weights < 1.0)
    return tl.where(between, p * (dp - delta), 0.0)
