# mypy: ignore-errors
"""One KV tile in the consumers of both forwards, and the end of a softmax.

Shared by the kernel that walks entries of 64 and 128 keys (`forward.py`) and the one that gathers
smaller ones (`gathered.py`). What a consumer does with a KV tile begins and ends with functions of
this file. Between them its kernel hides the keys that a row does not see, which each finds out in
its own way:

    started = start_tile(...)       scores, and the product of the tile before
    s = await_scores(started, ...)
    ...                             -inf for keys that a row does not see
    attend(s, started, ...)         softmax, while that product runs
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ...attention.sm90.forward_stages import (
    EMPTY_V,
    FULL_V,
    SLACK,
    await_outputs,
    await_stage,
    free_stage,
    kv_slices,
    scale_slices,
    start_outputs,
    start_scores,
)
from ...device.gluon.pipeline import ring_place, show_copies
from ...device.gluon.row_parts import add_parts, any_raised, pin_above, row_maxima, scale_rows
from ...device.scores import cap
from ...device.softmax import add_sink, finalise, raise_maximum, weights_of
from ..triton.walk import row_offsets
from .producer import ROWS


class RowPointers(NamedTuple):
    """Pointers to outputs, lse and queries."""

    out: Any
    lse: Any
    q: Any


class ForwardConsumer(NamedTuple):
    """Arguments of the consumers alone."""

    pointers: Any
    """`RowPointers`."""
    sinks: Any
    strides: Any
    """Of `out` and `q` among others."""
    lse_head_stride: Any
    score: Any
    q_tiles: Any
    """Queries in shared memory."""


class Started(NamedTuple):
    """Products under way: scores of a tile, and accumulators with the values of the one before.

    The first tile of a run has none before it: these are then the accumulators as they are.
    """

    scores: Any
    products: Any


@gluon.jit
def await_copies(stages, step, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Wait for the keys or values of a step; return their stage."""
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(stages, stage, phase, ARRAY, CFG)
    show_copies(CFG)
    return stage


@gluon.jit
def start_tile(q, stages, stage, held, acc, p, CFG: gl.constexpr):
    """Start the scores of the keys in a stage, which have come.

    `p` are the weights of the tile at step `held`, whose product with its values is started too;
    None where there is none.
    """
    tile_n: gl.constexpr = CFG.TILE_N
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, CFG.accumulator_layout(CFG.TILE_N))
    k = kv_slices(stages.k, stage, CFG.d_slices, CFG.TILE_N, 0)
    scores = start_scores(q, k, no_scores)
    products = acc
    if p is not None:
        held_stage = await_copies(stages, held, FULL_V, CFG)
        v = kv_slices(stages.v, held_stage, CFG.dv_slices, CFG.TILE_N, 0)
        products = start_outputs(p, v, acc)
    return Started(scores, products)


@gluon.jit
def await_scores(started, p, score, CFG: gl.constexpr):
    """The scores of a tile, capped, while products with the weights `p` go on."""
    pending: gl.constexpr = 0 if p is None else CFG.dv_slices
    return cap(warpgroup_mma_wait(pending, deps=(started.scores,)), score.inverse_cap)


@gluon.jit
def attend(s, gates, started, stages, held, state, p, score, CFG: gl.constexpr):
    """Take in scores, -inf where a row does not see a key; return state, accumulators and weights.

    `state` are maxima and sums of rows; `held` and `p` are those of `start_tile`; `gates` are
    factors of the weights of rows, or None.
    """
    m_log2, row_sum = state
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.SLICE_DV)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    # gates may be large, and fp16 ends at 65504
    slack: gl.constexpr = SLACK if gates is None else 0
    m_new, shift, rescale = raise_maximum(m_log2, row_maxima(s, m_log2), score.factor, slack)
    factor = gl.convert_layout(rescale, o_rows)[:, None]
    if p is None:
        acc = scale_slices(started.products, factor)
    else:
        # ptxas would sink all of it below the wait, where it overlaps with nothing
        pin_above(m_new, stages.barriers, CFG.spare_at)
        raised = gl.convert_layout(any_raised(m_log2, m_new), o_rows)[:, None]
        products = await_outputs(started.products)
        held_stage, _ = ring_place(held, CFG.STAGES)
        free_stage(stages, held_stage, EMPTY_V, CFG)
        acc = ()
        for i in gl.static_range(len(products)):
            acc = acc + (scale_rows(products[i], factor, raised),)  # noqa: RUF005
    shares = weights_of(s, score.factor, shift)
    if gates is not None:
        shares = shares * gates[:, None]
    row_sum = add_parts(row_sum, rescale, shares)
    p = gl.convert_layout(shares.to(stages.k.dtype), p_layout)
    return m_new, row_sum, acc, p


@gluon.jit
def attend_last_values(stages, step, acc, p, CFG: gl.constexpr):
    """Add the product of the tile at `step`, whose weights are `p`; return the accumulators."""
    stage = await_copies(stages, step, FULL_V, CFG)
    v = kv_slices(stages.v, stage, CFG.dv_slices, CFG.TILE_N, 0)
    acc = await_outputs(start_outputs(p, v, acc))
    free_stage(stages, stage, EMPTY_V, CFG)
    return acc


@gluon.jit
def end_softmax(consume, shared, tile, own, m_log2, row_sum, acc):
    """Add the sinks to the rows `own`, and store lse; return accumulators and their factors."""
    if consume.sinks is not None:
        sink = gl.load(consume.sinks + own.head)
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, sink)
        acc = scale_slices(acc, rescale[:, None])
    inverse, lse = finalise(m_log2, row_sum)
    stride, packed = consume.lse_head_stride, shared.cu_seqlens.q
    token = tile.q_first + own.token
    at = row_offsets(own.head, token, tile.batch, shared.heads.q, stride, packed)
    gl.store(consume.pointers.lse + at, lse, own.real)
    return acc, inverse[:, None]
