"""Attention whose keys have a gate, in plain PyTorch: only keys with a weight are computed.

A tile of queries gathers the keys whose score is above the smallest of its thresholds, so that work
and memory are in proportion to these, and computes their softmax as `attention.eager` does. Which
keys these are is read by the host.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...calls.attention import compute_dtype, empty_lse, empty_out, fill_gradients
from ...calls.gated_attention import GatedBackwardCall, GatedCall
from ...masks.algebra import ABSENT, FULL, block_table
from ...masks.band import kv_range
from ..eager.operands import Operands, may_be_nonfinite, operands
from ..eager.softmax import (
    LOG2_E,
    finish,
    hide,
    lse_for_backward,
    start,
    step,
    visible_product,
)
from ..eager.visits import Extent, band_visible

# Queries of a tile, whose keys are gathered together, and keys of one step.
TILE_Q = 128
KEYS = 1024


class Tile(NamedTuple):
    """Queries of some heads that have a gate in common, and the keys that may have a weight.

    `batch_heads` are (batch, KV head) pairs, of which each has R query heads.
    """

    batch_heads: slice
    members: slice
    """Query heads of each KV head."""
    queries: slice
    sinks: torch.Tensor | None
    """[batch_heads, R * queries, 1], base 2."""
    row: tuple[int, int]
    """Batch and head of the gate."""


class Step(NamedTuple):
    """Some keys of a tile."""

    keys: torch.Tensor
    """int64 [n]."""
    weights: torch.Tensor
    """[queries, n]."""
    visible: torch.Tensor
    """bool [R * queries, n] or [batch_heads, R * queries, n]: whose weight is not 0."""


def _tiles(call: GatedCall, ops: Operands) -> Iterator[Tile]:
    batch, heads, q_len, _ = call.attention.q.shape
    batches, gates = call.gate.u.shape[:2]
    kv_heads = call.attention.k.shape[1]
    group = heads // kv_heads
    for b in range(batch):
        for gate in range(gates):
            first = gate * call.heads_per_gate
            batch_heads = slice(
                b * kv_heads + first // group,
                b * kv_heads + (first + call.heads_per_gate - 1) // group + 1,
            )
            members = slice(first % group, first % group + min(call.heads_per_gate, group))
            for begin in range(0, q_len, TILE_Q):
                queries = slice(begin, min(begin + TILE_Q, q_len))
                sinks = ops.sinks_log2
                if sinks is not None:
                    count = queries.stop - begin
                    sinks = sinks[batch_heads, members, None].expand(-1, -1, count)
                    sinks = sinks.reshape(len(sinks), -1, 1)
                yield Tile(batch_heads, members, queries, sinks, (b if batches > 1 else 0, gate))


def weights_of(u: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """clip(u - tau, 0, 1), and 0 for keys that do not exist, whose u is -inf."""
    return torch.where(u == -torch.inf, 0.0, (u - tau).clamp(0, 1))


class _Gates:
    """The keys of each tile, step by step."""

    def __init__(self, call: GatedCall):
        given = call.attention
        dtype = compute_dtype(given.q.dtype)
        self.call, self.spec = call, given.spec
        self.u, self.tau = (x.to(dtype) for x in call.gate)
        self.extent = Extent(given.q.shape[2], given.k.shape[2])
        self.table = None
        if given.spec.block_mask is not None:
            batch, heads = given.q.shape[:2]
            self.table = block_table(given.spec.block_mask, batch, heads)

    def steps(self, tile: Tile) -> Iterator[Step]:
        """Keys of a tile that some of its queries may give a weight, a few at a time."""
        b, gate = tile.row
        queries, band = tile.queries, self.spec.band
        lo, hi = kv_range(band, queries.start, queries.stop, *self.extent[:2])
        tau = self.tau[b, gate, queries]
        own = self.u[b, gate, lo:hi]
        # NaN compares as false, and its weight shows it
        keys = (~(own <= tau.amin())).nonzero().flatten() + lo
        positions = torch.arange(queries.start, queries.stop, device=keys.device)
        for begin in range(0, len(keys), KEYS):
            part = keys[begin : begin + KEYS]
            weights = weights_of(self.u[b, gate, part], tau[:, None])
            visible = band_visible(band, positions[:, None], part, self.extent) & (weights != 0)
            heads = tile.members.stop - tile.members.start
            if self.table is None:
                yield Step(part, weights, visible.repeat(heads, 1))
            else:
                shown = self._masked(tile, positions, part)
                shown = (shown & visible).flatten(1, 2)
                yield Step(part, weights, shown)

    def _masked(self, tile: Tile, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool [batch_heads, R, queries, keys]: what the block mask shows."""
        mask, table = self.spec.block_mask, self.table
        assert mask is not None and table is not None
        bq, bk = mask.block_size
        heads, kv_heads = table.shape[1], self.call.attention.k.shape[1]
        by_batch_head = table.unflatten(1, (kv_heads, heads // kv_heads)).flatten(0, 1)
        rows = by_batch_head[tile.batch_heads, tile.members][:, :, positions // bq]
        entries = rows[..., keys // bk]
        shown = entries == FULL
        partial = (entries != FULL) & (entries != ABSENT)
        if mask.bits.shape[0]:
            column = keys % bk
            words = mask.bits[entries.clamp(min=0), (positions % bq)[:, None], column // 32]
            shown |= partial & ((words >> (column % 32)) & 1 == 1)
        return shown


def forward(call: GatedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of a call."""
    given = call.attention
    q, k, v = given.q, given.k, given.v
    out, lse = empty_out(q, v.shape[-1]), empty_lse(q)
    if 0 in q.shape[:-1]:
        return out, lse
    extent = Extent(q.shape[2], k.shape[2])
    ops = operands(q, k, v, given.spec, extent, may_be_nonfinite(q, k, v))
    made = ops.q.new_empty((*ops.q.shape[:3], v.shape[3]))
    made_lse = ops.q.new_empty(ops.q.shape[:3])
    gates = _Gates(call)
    for tile in _tiles(call, ops):
        rows = _rows(ops.q, tile)
        state = start(rows.shape[0], rows.shape[1], v.shape[3], rows, tile.sinks)
        for keys, weights, visible in gates.steps(tile):
            scores = ops.scores.finish(torch.bmm(rows, ops.kt[tile.batch_heads][:, :, keys]))
            by_head = scores.view(len(scores), -1, *weights.shape)
            by_head.add_(torch.log2(weights))
            hide(scores, visible)
            step(state, scores, ops.v[tile.batch_heads, keys], visible if ops.guarded else None)
        tile_out, tile_lse = finish(state)
        shape = (len(rows), -1, tile.queries.stop - tile.queries.start)
        made[tile.batch_heads, tile.members, tile.queries] = tile_out.view(*shape, v.shape[3])
        made_lse[tile.batch_heads, tile.members, tile.queries] = tile_lse.view(shape)
    out.copy_(made.view(out.shape))
    return out, lse.copy_(made_lse.view(lse.shape))


def _rows(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The rows [batch_heads, R * queries, D] of a tile, of x [n, G, Sq, D]."""
    rows = x[tile.batch_heads, tile.members, tile.queries]
    return rows.reshape(len(rows), -1, x.shape[3])


def backward(call: GatedBackwardCall) -> None:
    """Fill the gradients that are asked for."""
    given = call.forward.attention
    q, k, v, spec = given.q, given.k, given.v, given.spec
    if 0 in q.shape[:-1]:
        for gradient in call.gradients:
            if gradient is not None:
                gradient.zero_()
        return
    dtype = compute_dtype(q.dtype)
    dout = call.dout.to(dtype)
    extent = Extent(q.shape[2], k.shape[2])
    ops = operands(q, k, v, spec, extent, may_be_nonfinite(q, k, v, dout))
    n, group, q_len, _ = ops.q.shape
    lse_log2, factor = (x.reshape(n, group, q_len, 1) for x in lse_for_backward(call.lse, dtype))
    delta = (call.out.to(dtype) * dout).sum(-1)
    if call.dlse is not None:
        delta = delta - call.dlse.to(dtype)
    # an empty row has no gradient, whatever gradient arrives for its lse of -inf
    delta = delta.masked_fill(call.lse == -torch.inf, 0.0).reshape(n, group, q_len, 1) * factor
    do = dout.reshape(n, group, q_len, v.shape[3]) * factor
    dq = torch.zeros_like(ops.q)
    dk = ops.q.new_zeros((n, k.shape[2], k.shape[3]))
    dv = torch.zeros_like(ops.v, memory_format=torch.contiguous_format)
    du, dtau = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in call.forward.gate)
    gates = _Gates(call.forward)
    for tile in _tiles(call.forward, ops):
        rows, given_rows, shift, means = (_rows(x, tile) for x in (ops.q, do, lse_log2, delta))
        dq_rows = torch.zeros_like(rows)
        for keys, weights, visible in gates.steps(tile):
            kt, values = ops.kt[tile.batch_heads][:, :, keys], ops.v[tile.batch_heads, keys]
            products = torch.bmm(rows, kt)
            slope = ops.scores.bend(products)
            # without the gates: at a weight of 0 that may be inf, and is not visible
            p = ops.scores.finish(products).sub_(shift).exp2_()
            p = torch.where(visible, p, 0.0)
            change = torch.bmm(given_rows, values.mT).sub_(means).mul_(p)
            change = torch.where(visible, change, 0.0)
            by_query = change.view(-1, *weights.shape).sum(0)
            by_query = torch.where((weights > 0) & (weights < 1), by_query, 0.0)
            b, gate = tile.row
            du[b, gate].index_add_(0, keys, by_query.sum(0))
            dtau[b, gate, tile.queries] -= by_query.sum(1)
            for x in (p, change):
                x.view(len(x), -1, *weights.shape).mul_(weights)
            ds = change if slope is None else torch.where(visible, change * slope, 0.0)
            shown = visible.expand(p.shape) if ops.guarded else None
            dq_rows += _product(ds, kt.mT, shown)
            turned = None if shown is None else shown.mT
            dk[tile.batch_heads].index_add_(1, keys, _product(ds.mT, rows, turned))
            dv[tile.batch_heads].index_add_(1, keys, _product(p.mT, given_rows, turned))
        count = tile.queries.stop - tile.queries.start
        dq[tile.batch_heads, tile.members, tile.queries] = dq_rows.view(
            len(rows), -1, count, rows.shape[2]
        )
    dsinks = None
    if spec.sinks is not None:
        sinks = spec.sinks.to(dtype)[:, None] * LOG2_E
        p_sink = torch.exp2(sinks - lse_log2.view(call.lse.shape))
        dsinks = -(p_sink * delta.view(call.lse.shape)).sum((0, 2))
    dk.mul_(ops.scores.slope)
    dq.mul_(ops.scores.slope * ops.scores.before)
    computed = (dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), dsinks, du, dtau)
    fill_gradients(call.gradients, computed)


def _product(weights: torch.Tensor, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    return torch.bmm(weights, x) if visible is None else visible_product(weights, x, visible)
