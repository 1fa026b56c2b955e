"""Gradients of attention in plain PyTorch, from the inputs, the output and lse.

    p  = exp(s - lse)                     delta = sum_d out * dout
    ds = p * (dout v^T - delta + dlse)    dv = p^T dout    dq = scale * ds k    dk = scale * ds^T q

It walks over the same tiles and blocks as the forward pass, so it too never holds more than one
step of scores. Sums run in a fixed order on a CPU; elsewhere the gradients of k and v under a block
mask are scattered, in a fixed order only on request.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ...calls.attention import (
    AttentionCall,
    AttnGradients,
    AttnSpec,
    BackwardCall,
    compute_dtype,
    fill_gradients,
)
from ...masks.block_mask import BlockMask
from .forward import (
    BandEdges,
    as_batch,
    band_tiles,
    block_chunks,
    sequences,
    stack_heads,
    tile_visible,
)
from .operands import (
    KeyBlocks,
    KeyColumns,
    Operands,
    added_to_blocks,
    block_rows,
    from_query_rows,
    may_be_nonfinite,
    operands,
    step_sizes,
    to_query_rows,
)
from .softmax import LOG2_E, hide, lse_for_backward, probabilities, visible_product
from .visits import Extent, key_tiles


class Gradients(NamedTuple):
    """Gradients of q, k, v and sinks in the dtype of computation; `dsinks` is [Hq] or None."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None


class RowTerms(NamedTuple):
    """Terms of the backward pass for each query, [n, G, Sq, *]."""

    dout: torch.Tensor
    """Multiplied, as is delta, by the factor that compensates for the rounding of `lse_log2`."""
    lse_log2: torch.Tensor
    """+inf for rows without a key."""
    delta: torch.Tensor
    """sum_d out * dout - dlse."""


def backward(call: BackwardCall) -> None:
    """Fill the requested gradients."""
    fill_gradients(call.gradients, attention_backward(call))


def attention_backward(call: BackwardCall) -> Gradients:
    """Gradients laid out as q, k and v; those that were not requested are zeros."""
    given = call.forward
    q, k, v, spec = given.q, given.k, given.v, given.spec
    if 0 in q.shape[:-1]:
        dsinks = None if spec.sinks is None else torch.zeros_like(spec.sinks)
        return Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dsinks)
    guarded = may_be_nonfinite(q, k, v, call.dout)
    if not spec.is_varlen:
        return _backward(call, Extent(q.shape[2], k.shape[2]), guarded)
    dtype = compute_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dsinks = None if spec.sinks is None else torch.zeros_like(spec.sinks, dtype=dtype)
    for extent, q_span, k_span in sequences(spec):
        keys = as_batch(k, k_span), as_batch(v, k_span)
        sequence = BackwardCall(
            AttentionCall(as_batch(q, q_span), *keys, spec, given.deterministic),
            as_batch(call.dout, q_span),
            None if call.dlse is None else call.dlse[None, :, q_span],
            as_batch(call.out, q_span),
            call.lse[None, :, q_span],
            call.gradients,
        )
        part = _backward(sequence, extent, guarded)
        as_batch(dq, q_span).copy_(part.dq)
        as_batch(dk, k_span).copy_(part.dk)
        as_batch(dv, k_span).copy_(part.dv)
        if dsinks is not None and part.dsinks is not None:
            dsinks += part.dsinks
    return Gradients(dq, dk, dv, dsinks)


def _backward(call: BackwardCall, extent: Extent, guarded: bool) -> Gradients:
    """Gradients of a dense call."""
    given, wanted = call.forward, call.gradients
    q, k, v, spec = given.q, given.k, given.v, given.spec
    dout, dlse, out, lse = call.dout, call.dlse, call.out, call.lse
    dtype = compute_dtype(q.dtype)
    ops = operands(q, k, v, spec, extent, guarded)
    n, group, sq, _ = ops.q.shape
    lse_log2, factor = (x.reshape(n, group, sq, 1) for x in lse_for_backward(lse, dtype))
    do = dout.to(dtype).reshape(n, group, sq, v.shape[3]) * factor
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    # an empty row has no gradient, whatever gradient arrives for its lse of -inf
    delta = delta.masked_fill(lse == -torch.inf, 0.0).reshape(n, group, sq, 1)
    rows = RowTerms(do, lse_log2, delta * factor)

    dq = torch.zeros_like(ops.q)
    dk = ops.q.new_zeros((n, extent.sk, q.shape[3]))
    dv = torch.zeros_like(ops.v, memory_format=torch.contiguous_format)
    if spec.block_mask is None or q.numel() == 0:
        _backward_band(ops, rows, spec, extent, dq, dk, dv, wanted)
    else:
        dq, dk, dv = _backward_blocks(
            ops, rows, spec, spec.block_mask, extent, k.shape[1], given.deterministic, wanted
        )
    dsinks = None
    if spec.sinks is not None:
        p_sink = torch.exp2(spec.sinks.to(dtype)[:, None] * LOG2_E - lse_log2.view(lse.shape))
        dsinks = -(p_sink * rows.delta.view(lse.shape)).sum((0, 2))
    dk.mul_(ops.scores.slope)
    dq.mul_(ops.scores.slope * ops.scores.before)
    return Gradients(dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), dsinks)


def _score_gradients(
    ops: Operands,
    products: torch.Tensor,
    added: torch.Tensor | None,
    hide_unseen: Callable[[torch.Tensor], None],
    dp: torch.Tensor,
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, and gradients of the products q k^T up to `Scores.slope`; both in place.

    `visible` is given only if hidden elements may be NaN or inf.
    """
    slope = ops.scores.bend(products)
    scores = ops.scores.finish(products)
    if added is not None:
        scores += added
    hide_unseen(scores)
    p = probabilities(scores, lse_log2)
    dscores = dp.sub_(delta).mul_(p)
    if slope is not None:
        dscores.mul_(slope)
    if visible is not None:
        dscores = torch.where(visible, dscores, 0.0)
        p = torch.where(visible, p, 0.0)
    return p, dscores


def _hide_if(scores: torch.Tensor, visible: torch.Tensor | None) -> None:
    if visible is not None:
        hide(scores, visible)


def _product(weights: torch.Tensor, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    return torch.bmm(weights, x) if visible is None else visible_product(weights, x, visible)


def _backward_band(
    ops: Operands,
    rows: RowTerms,
    spec: AttnSpec,
    extent: Extent,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    wanted: AttnGradients,
) -> None:
    group = ops.q.shape[1]
    vt = ops.v.transpose(1, 2).contiguous()
    sizes = step_sizes(ops.q.device)
    edges = BandEdges(spec, extent)
    for tile in band_tiles(ops, sizes, (0, ops.q.shape[2])):
        heads, queries = slice(tile.first, tile.last), slice(tile.start, tile.end)
        n, count = tile.last - tile.first, tile.end - tile.start
        q, do, lse_log2, delta, dq_tile = (
            x[heads, :, queries].reshape(n, group * count, -1) for x in (ops.q, *rows, dq)
        )
        dq_tile = dq_tile.clone()
        for keys in key_tiles(spec.band, tile.start, tile.end, extent, sizes.keys):
            span = slice(keys.lo, keys.hi)
            visible = None
            if ops.guarded:
                visible = tile_visible(tile, keys, spec, extent, group, q.device)
            kt = ops.kt[heads, :, span]
            p, ds = _score_gradients(
                ops,
                torch.bmm(q, kt),
                None if ops.added is None else ops.added.of_tile(heads, queries, span),
                partial(edges.hide, tile=tile, keys=keys),
                torch.bmm(do, vt[heads, :, span]),
                lse_log2,
                delta,
                visible,
            )
            seen_by = None if visible is None else visible.transpose(-1, -2)
            if wanted.dq is not None:
                dq_tile += _product(ds, kt.transpose(1, 2), visible)
            if wanted.dk is not None:
                dk[heads, span] += _product(ds.transpose(1, 2), q, seen_by)
            if wanted.dv is not None:
                dv[heads, span] += _product(p.transpose(1, 2), do, seen_by)
        dq[heads, :, queries] = dq_tile.view(n, group, count, -1)


def _backward_blocks(
    ops: Operands,
    terms: RowTerms,
    spec: AttnSpec,
    mask: BlockMask,
    extent: Extent,
    heads_kv: int,
    deterministic: bool,
    wanted: AttnGradients,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bq, bk = mask.block_size
    layout = block_rows(ops, mask, extent, heads_kv)
    q_rows, do_rows, lse_rows, delta_rows = (to_query_rows(x, layout, bq) for x in (ops.q, *terms))
    k_blocks = KeyBlocks(ops.kt.transpose(1, 2), bk)
    k_columns, v_columns = KeyColumns(ops.kt, bk), KeyColumns(ops.v.transpose(1, 2), bk)
    dq_rows, dk_blocks = torch.zeros_like(q_rows), torch.zeros_like(k_blocks.rows)
    dv_blocks = dk_blocks.new_zeros((*dk_blocks.shape[:2], ops.v.shape[2]))
    for rows, steps in block_chunks(mask, spec, extent, layout):
        n = rows.numel()
        q, do, lse_log2, delta = q_rows[rows], do_rows[rows], lse_rows[rows], delta_rows[rows]
        dq = torch.zeros_like(q)
        for column, visible in steps:
            block = layout.kv_head[rows, None] * layout.k_blocks + column
            if visible is not None:
                visible = stack_heads(visible, layout.heads)
            select = visible if ops.guarded else None
            p, ds = _score_gradients(
                ops,
                torch.bmm(q, k_columns.gather(block)),
                added_to_blocks(ops, layout, rows, column, mask.block_size),
                partial(_hide_if, visible=visible),
                torch.bmm(do, v_columns.gather(block)),
                lse_log2,
                delta,
                select,
            )
            seen_by = None
            if select is not None:
                seen_by = select.transpose(1, 2).expand(n, -1, q.shape[1])
            if wanted.dq is not None:
                dq += _product(ds, k_blocks.gather(block), select)
            if wanted.dk is not None:
                dk = _product(ds.transpose(1, 2), q, seen_by).view(-1, bk, q.shape[2])
                _scatter_add(dk_blocks, block.flatten(), dk, deterministic)
            if wanted.dv is not None:
                dv = _product(p.transpose(1, 2), do, seen_by).view(-1, bk, do.shape[2])
                _scatter_add(dv_blocks, block.flatten(), dv, deterministic)
        dq_rows[rows] = dq
    dq = from_query_rows(dq_rows, layout, bq, ops.q.shape).contiguous()
    n = ops.kt.shape[0]
    return dq, _from_blocks(dk_blocks, n, extent.sk), _from_blocks(dv_blocks, n, extent.sk)


def _from_blocks(x: torch.Tensor, n: int, length: int) -> torch.Tensor:
    """[n * blocks, block, D] as contiguous [n, S, D]."""
    return x.view(n, -1, x.shape[2])[:, :length].contiguous()


def _scatter_add(
    target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, deterministic: bool
) -> None:
    """target[index] += source, in a fixed order on a CPU, and elsewhere if `deterministic`."""
    if deterministic and target.device.type != "cpu":
        target.index_put_((index,), source, accumulate=True)
    else:
        target.index_add_(0, index, source)
