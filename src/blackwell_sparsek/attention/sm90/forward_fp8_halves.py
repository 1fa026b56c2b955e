# mypy: ignore-errors
"""The fp8 forward in halves of KV tiles, so that computing weights never waits for a product.

A consumer has the scores of two halves of 64 keys in registers. While it turns the scores of one
half into weights, the tensor cores multiply the weights of the previous half with their values and
compute the scores of the next half:

    for each half h:  start the product of h - 1, and the scores of h + 1; weights of h; wait

Both products finish long before the weights. Nothing is in flight from one iteration to the next,
because ptxas would then make every WGMMA wait for the previous one.

The tensor cores add up the products of PRODUCT_TILES KV tiles, which then join the fp32 sums: at
most 256 keys, since the tensor cores add with fewer bits. Raising a maximum means rescaling both,
so it is kept while no weight exceeds 2**(HEADROOM + SLACK); the key that raised it has the weight
2**HEADROOM. Threads compare their own part of a row with this limit, and exchange maxima only if
some row of the warp exceeds it.
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

# Weights reach 2**8, and e4m3 ends at 448. The key that raised a maximum has a power of two as its
# weight, which is exact; until the maximum is raised again, no weight is more than twice as large.
HEADROOM = gl.constexpr(7)
SLACK = gl.constexpr(1)
# KV tiles whose products the tensor cores add up before these join the sums.
PRODUCT_TILES = gl.constexpr(2)


class TileScales(NamedTuple):
    """The factors of the scale of a KV tile."""

    of_queries: Any
    """The scale of the queries; times the scale of the keys, if all keys share one."""
    k_scales: Any
    k_scale_ptr: Any


class Turn(NamedTuple):
    """The state of a consumer between two halves, when no product is in flight."""

    s: Any
    """Scores of the next half."""
    words: Any
    """`packed_weights` of the previous half, not multiplied with its values yet."""
    products: Any
    """Products that have not been added to `acc` yet."""
    acc: Any
    state: Any


class Weighed(NamedTuple):
    """Weights of a half, and the factor for older sums."""

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
    """The softmax step of the scores of the keys from START on: a `Weighed`."""
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
    """Sums rescaled to the maxima of `weighed`."""
    factor = spread_parts(weighed.rescale, sums)
    return scale_rows(sums, factor, spread_parts(weighed.raised, sums))


@gluon.jit
def start_products(words, stages, stage, products, use_acc, HALF: gl.constexpr, CFG: gl.constexpr):
    """Start adding the product of weights and their half of the values of a stage."""
    v = stages.v.index(stage * 2 + HALF).permute((1, 0))
    operand = weight_operand(words, CFG)
    return warpgroup_mma(operand, v, products, use_acc=use_acc, is_async=True)


@gluon.jit
def next_turn(weighed, s, products, acc, CFG: gl.constexpr):
    """The `Turn` after a half was weighed; the products that ran meanwhile are complete."""
    products = rescale_sums(products, weighed)
    acc = rescale_sums(acc, weighed)
    # before the wait this would overwrite registers that are operands
    words = packed_weights(weighed.weights, CFG)
    return Turn(s, words, products, acc, weighed.state)


@gluon.jit
def start_first_products(stages, place, turn, kv_tile, CFG: gl.constexpr):
    """Start the products of the first half of a tile; return them and the sums."""
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
    """Attend to the second half of the tile at `step` and the first half of the next tile."""
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
    """Attend to all KV tiles of a work tile, at least one; return the next step, state and sums.

    `state` is initial; `acc` is one slice. Arrives at `q_empty` when the queries are no longer
    needed.
    """
    half: gl.constexpr = CFG.score_keys
    of_queries, k_scales, k_scale_ptr = scales
    visit = queries.visit
    scale = tile_scale(of_queries, k_scales, k_scale_ptr, visit, 0, CFG)
    stage, phase = ring_place(step, CFG.STAGES)
    # every thread keeps a maximum for its part of a row, like its partial sum
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
    # all scores of this work tile are computed: the next queries may overwrite its own
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
