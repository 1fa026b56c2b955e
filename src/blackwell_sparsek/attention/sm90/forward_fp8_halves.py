# mypy: ignore-errors
"""KV tiles of the Hopper forward in fp8 taken in halves, so that weights wait for nothing.

A consumer has the scores of two halves of 64 keys in registers. While it turns those of one half
into weights, the tensor cores multiply the weights of the last half with their values and find the
scores of the next half:

    for each half h:  start the product of h - 1, and the scores of h + 1; weights of h; wait

Both are done long before the weights are, and nothing is under way from one turn of the loop to the
next: ptxas would make every WGMMA wait for the one before.

Products of PRODUCT_TILES KV tiles are added up by the tensor cores and then join the fp32 sums: 256
keys at the most, since the tensor cores add with fewer bits. To raise a maximum means to rescale
both, and so it is kept while no weight exceeds 2**(HEADROOM + SLACK); the weight that it was raised
to is 2**HEADROOM. Threads compare what they have of a row with that, and exchange nothing while no
row of the warp exceeds it.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.gluon.pipeline import ring_place
from ...device.gluon.row_parts import (
    maxima_above,
    maxima_parts,
    pin_above,
    row_parts,
    scale_rows,
    spread_parts,
)
from ...device.records import SoftmaxState
from ...device.softmax import raise_maximum, weights_below
from .forward_fp8_parts import (
    cap_scaled,
    exponent_factor,
    packed_weights,
    tile_scale,
    weight_operand,
)
from .forward_producer import needs_mask
from .forward_scores import mask_scores
from .forward_stages import (
    EMPTY_K,
    EMPTY_V,
    FULL_K,
    FULL_V,
    ROWS,
    await_stage,
    free_stage,
    kv_slices,
    start_scores,
    zero_outputs,
)

# Weights reach 2**8, and e4m3 ends at 448. The weight that a maximum was raised to is a power of
# two, and so exact; until it is raised again, none is more than twice as large.
HEADROOM = gl.constexpr(7)
SLACK = gl.constexpr(1)
# KV tiles whose products the tensor cores add up before these join the sums.
PRODUCT_TILES = gl.constexpr(2)


class TileScales(NamedTuple):
    """The factors of the scale of a KV tile."""

    of_queries: Any
    """That of the queries, times that of the keys if these have one for all."""
    k_scales: Any
    k_scale_ptr: Any


class Turn(NamedTuple):
    """What a consumer carries from half to half, with nothing of it under way."""

    s: Any
    """Scores of the half that is next."""
    words: Any
    """`packed_weights` of the half before, which have not been multiplied yet."""
    products: Any
    """Products that have not joined the sums."""
    acc: Any
    state: Any


class Weighed(NamedTuple):
    """Weights of a half, and what the sums before have to be multiplied by."""

    state: Any
    weights: Any
    rescale: Any
    raised: Any
    """Whether any row of the warp has a factor other than 1."""


@gluon.jit
def start_half(queries, stages, stage, START: gl.constexpr, CFG: gl.constexpr):
    """Start the scores of the keys of a stage from START on."""
    keys: gl.constexpr = CFG.score_keys
    nothing = gl.zeros([ROWS, keys], gl.float32, CFG.accumulator_layout(CFG.score_keys))
    k = kv_slices(stages.k, stage, CFG.d_slices, CFG.score_keys, START)
    return start_scores(queries.q, k, nothing)


@gluon.jit
def weigh_half(s, queries, stages, kv_tile, scale, state, START: gl.constexpr, CFG: gl.constexpr):
    """Take the scores of the keys from START on into the softmax."""
    visit, score = queries.visit, queries.score
    s = cap_scaled(s, score, scale)
    if needs_mask(visit.lists, visit.plan, kv_tile, queries.masked_tiles):
        s = mask_scores(s, queries, kv_tile, CFG, START)
    exponents = exponent_factor(score, scale)
    top = maxima_parts(s) * exponents - HEADROOM
    top, raised = maxima_above(top, state.m_log2 + SLACK)
    m_log2, shift, rescale = raise_maximum(state.m_log2, top, 1.0, SLACK)
    weights = weights_below(s, exponents, spread_parts(shift, s))
    row_sum = state.row_sum * rescale + row_parts(weights)
    # ptxas would sink the weights below the next wait, where they overlap with nothing
    pin_above(row_sum, stages.barriers, CFG.spare_at)
    return Weighed(SoftmaxState(m_log2, row_sum), weights, rescale, raised)


@gluon.jit
def rescale_sums(sums, weighed):
    """Sums at the maxima of `weighed`."""
    factor = spread_parts(weighed.rescale, sums)
    return scale_rows(sums, factor, spread_parts(weighed.raised, sums))


@gluon.jit
def start_products(words, stages, stage, products, use_acc, HALF: gl.constexpr, CFG: gl.constexpr):
    """Start adding the product of weights with their half of the values of a stage."""
    v = stages.v.index(stage * 2 + HALF).permute((1, 0))
    operand = weight_operand(words, CFG)
    return warpgroup_mma(operand, v, products, use_acc=use_acc, is_async=True)


@gluon.jit
def next_turn(weighed, s, products, acc, CFG: gl.constexpr):
    """What to carry on with the weights of a half, after the wait for what ran meanwhile."""
    products = rescale_sums(products, weighed)
    acc = rescale_sums(acc, weighed)
    # before the wait they would change registers that are operands
    words = packed_weights(weighed.weights, CFG)
    return Turn(s, words, products, acc, weighed.state)


@gluon.jit
def start_first_products(stages, place, turn, kv_tile, CFG: gl.constexpr):
    """Start the products of the first half of a tile; return these and the sums."""
    stage, phase = place
    acc = turn.acc
    joins = kv_tile % PRODUCT_TILES == 0
    if joins:
        acc += turn.products
    await_stage(stages, stage, phase, FULL_V, CFG)
    products = start_products(turn.words, stages, stage, turn.products, not joins, 0, CFG)
    return products, acc


@gluon.jit
def attend_tile(queries, stages, kv_tile, step, scale, next_scale, turn, CFG: gl.constexpr):
    """Take in the second half of the tile at `step`, and the first half of the one after it."""
    half: gl.constexpr = CFG.score_keys
    stage, phase = ring_place(step, CFG.STAGES)
    next_stage, next_phase = ring_place(step + 1, CFG.STAGES)

    products, acc = start_first_products(stages, (stage, phase), turn, kv_tile, CFG)
    await_stage(stages, next_stage, next_phase, FULL_K, CFG)
    s = start_half(queries, stages, next_stage, 0, CFG)
    weighed = weigh_half(turn.s, queries, stages, kv_tile, scale, turn.state, half, CFG)
    s, products = warpgroup_mma_wait(0, deps=(s, products))
    turn = next_turn(weighed, s, products, acc, CFG)

    products = start_products(turn.words, stages, stage, turn.products, True, 1, CFG)
    s = start_half(queries, stages, next_stage, half, CFG)
    weighed = weigh_half(turn.s, queries, stages, kv_tile + 1, next_scale, turn.state, 0, CFG)
    s, products = warpgroup_mma_wait(0, deps=(s, products))
    turn = next_turn(weighed, s, products, turn.acc, CFG)
    free_stage(stages, stage, EMPTY_V, CFG)
    free_stage(stages, next_stage, EMPTY_K, CFG)
    return turn


@gluon.jit
def attend_halves(queries, stages, kv_tiles, step, scales, state, acc, q_empty, CFG: gl.constexpr):
    """Take in all KV tiles of a work tile, at least one; return the step after, state and sums.

    `state` has seen no key; `acc` is one slice. Arrives at `q_empty` when the queries are read.
    """
    half: gl.constexpr = CFG.score_keys
    of_queries, k_scales, k_scale_ptr = scales
    visit = queries.visit
    scale = tile_scale(of_queries, k_scales, k_scale_ptr, visit, 0, CFG)
    stage, phase = ring_place(step, CFG.STAGES)
    # the maximum of a row beside each of its sums
    parts = SoftmaxState(state.row_sum - float("inf"), state.row_sum)
    await_stage(stages, stage, phase, FULL_K, CFG)
    s = warpgroup_mma_wait(0, deps=(start_half(queries, stages, stage, 0, CFG),))
    second = start_half(queries, stages, stage, half, CFG)
    weighed = weigh_half(s, queries, stages, 0, scale, parts, 0, CFG)
    second = warpgroup_mma_wait(0, deps=(second,))
    turn = next_turn(weighed, second, zero_outputs(CFG)[0], acc[0], CFG)
    free_stage(stages, stage, EMPTY_K, CFG)
    for kv_tile in range(0, kv_tiles - 1):
        next_scale = tile_scale(of_queries, k_scales, k_scale_ptr, visit, kv_tile + 1, CFG)
        turn = attend_tile(queries, stages, kv_tile, step, scale, next_scale, turn, CFG)
        if CFG.K_BLOCKS:
            scale = next_scale
        step += 1
    # every score of this work tile is taken: the next queries may come
    mbarrier.arrive(q_empty, count=1)
    place = ring_place(step, CFG.STAGES)
    products, acc = start_first_products(stages, place, turn, kv_tiles - 1, CFG)
    weighed = weigh_half(turn.s, queries, stages, kv_tiles - 1, scale, turn.state, half, CFG)
    products = warpgroup_mma_wait(0, deps=(products,))
    turn = next_turn(weighed, (), products, acc, CFG)
    products = start_products(turn.words, stages, place[0], turn.products, True, 1, CFG)
    acc = turn.acc + warpgroup_mma_wait(0, deps=(products,))
    free_stage(stages, place[0], EMPTY_V, CFG)
    m_log2 = gl.convert_layout(gl.max(turn.state.m_log2, 1), state.m_log2.type.layout)
    return step + 1, SoftmaxState(m_log2, turn.state.row_sum), (acc,)
