# mypy: ignore-errors
"""Scores and sums of values over latent keys, with the weights of a consumer's own tile first.

Tiles of keys come in pairs. The first consumer has the scores of the even tile, the second one
those of the odd tile, and each sums half of the columns of the values. Weights of the own tile stay
in registers; only those of the other tile pass through shared memory, while the first product runs:

    first    O = s1 (s0 O + P0 V0) + P1 V1
    second   O = s1 s0 O + P1 V1 + (s1 P0) V0

s0 and s1 are the factors by which the maxima of the two tiles rescale what came before. Each
consumer sums the weights of its own tiles, and they add these sums up once, at the end of a query:
the loop hands over maxima alone, and the reduction of a sum overlaps a product.

Memory order. Every arrival follows a barrier of the consumer's four warps, which Triton puts
between it and any access of shared memory before it. So an arrival says that all warps have read
what they waited for and completed the products that they waited for.

- `even_m` is written again after `odd_state`, at which the second consumer has read it; `odd_m` and
  `p` after `even_state`, at which the first consumer has read `odd_m`, and has completed the
  products with `p`.
- Weights of an even tile overwrite the last columns of its keys, after the arrival at `even_state`:
  the products of all warps that read these columns are complete. The stage is released by the
  second consumer alone, when it has multiplied them.
- Row sums are written again after `queries` of the next query, at which both have read them.
- Weights are read by WGMMA, so a proxy fence precedes their arrivals; maxima and sums need none.

No wait misses its phase. A consumer waits for every phase of the barriers that the other one
arrives at, and the other cannot arrive twice before: `even_state` needs `odd_weights` of the pair
before, or `queries` after a last tile without a partner; `odd_state` needs `even_state`. The halves
of a stage are those of `latent`: who has the scores waits for both, the other for
its own. The first consumer waits for the halves of the next even tile before it releases its half
of the odd one. Copies of the even tile come before that half in the order of the producer, and no
release that they need comes from this consumer, so they arrive.

Decoding over a latent cache and attention to chosen latent keys use this order; they differ in how
they mask scores. `tests/sparse_attention/sm90/test_latent_protocol.py` runs it at any speed of the
roles, and `tests/decode/test_latent_pairs.py` two programs that share their copies.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..records import SoftmaxState
from ..softmax import init_state, raise_maximum, weigh_below
from .compat import EARLY_DESCRIPTORS, placed
from .latent import add_other, add_own, await_half, release, rescaled
from .pipeline import barriers


class PairExchange(NamedTuple):
    """What the consumers pass to each other."""

    p: Any
    """Weights of odd tiles; those of even ones overwrite the last columns of their keys."""
    even_m: Any
    """fp32 [ROWS]: maxima after an even tile, and after an odd one."""
    odd_m: Any
    first_sum: Any
    """fp32 [ROWS]: sums of each consumer's weights, at the end of a query."""
    second_sum: Any
    even_state: Any
    odd_state: Any
    even_weights: Any
    odd_weights: Any
    sums: Any
    queries: Any
    """Barrier: both consumers have written their part of the queries."""


class NotedScores(NamedTuple):
    """Scores of a tile that are capped and masked, and what is added to the sums of its rows."""

    s: Any
    wrong: Any
    """NaN if a number of the tile was out of range, else 0."""


@gluon.jit
def pair_exchange(p_smem, CFG: gl.constexpr):
    """Allocate a `PairExchange` around the place of the weights of odd tiles."""
    rows: gl.constexpr = CFG.ROWS
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return PairExchange(
        p_smem,
        # Triton puts a barrier between two accesses of one allocation, so each has its own
        gl.allocate_shared_memory(gl.float32, [rows], plain),
        gl.allocate_shared_memory(gl.float32, [rows], plain),
        gl.allocate_shared_memory(gl.float32, [rows], plain),
        gl.allocate_shared_memory(gl.float32, [rows], plain),
        *(barriers(1, 1).index(0), barriers(1, 1).index(0)),
        *(barriers(1, 1).index(0), barriers(1, 1).index(0)),
        *(barriers(1, 2).index(0), barriers(1, 2).index(0)),
    )


@gluon.jit
def _no_scores(CFG: gl.constexpr):
    """Zeros in the place of scores."""
    rows: gl.constexpr = CFG.ROWS
    keys: gl.constexpr = CFG.TILE_N
    return gl.zeros([rows, keys], gl.float32, CFG.scores_layout())


@gluon.jit
def _score_part(s, queries, ring, step, PART: gl.constexpr, ADD: gl.constexpr, CFG: gl.constexpr):
    """Wait for a part of the columns of a tile and start its share of the scores."""
    await_half(ring, step, PART, CFG)
    stage = step % CFG.STAGES
    # 0, but unknown to the compiler, see `decode.sm90_latent_tiles._start_scores`
    zero = step >> 30
    pieces: gl.constexpr = 2 if EARLY_DESCRIPTORS else 1
    half: gl.constexpr = CFG.half
    width: gl.constexpr = half // pieces
    for i in gl.static_range(pieces):
        q = queries.front.index(placed(zero)).slice(PART * half + i * width, width, dim=1)
        some = ring.v.index(placed(stage)).slice(PART * half + i * width, width, dim=1)
        s = warpgroup_mma(q, some.permute((1, 0)), s, use_acc=ADD or i > 0, is_async=True)
    # the last part has the columns after the values too
    if PART > 0:
        rest = queries.rest.index(zero)
        s = warpgroup_mma(rest, ring.k.index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _scores(queries, ring, step, FIRST: gl.constexpr, CFG: gl.constexpr):
    """The scores of a tile, beginning with the part FIRST."""
    s = _no_scores(CFG)
    s = _score_part(s, queries, ring, step, FIRST, False, CFG)
    s = _score_part(s, queries, ring, step, 1 - FIRST, True, CFG)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def _weigh(m_log2, top, s, shared, step, seen, CFG: gl.constexpr):
    """New maxima, weights and the factor of older sums, for noted scores whose maxima are `top`."""
    m_log2, p, rescale = weigh_below(m_log2, top, s, seen.factor)
    if CFG.GATE:
        factors = shared.notes.factors.index(step % CFG.STAGES)
        p = p * factors.load(gl.SliceLayout(0, CFG.scores_layout()))[None, :]
    return m_log2, p, rescale


@gluon.jit
def _read_maximum(place, before, CFG: gl.constexpr):
    """Maxima of the other consumer, and the factor of sums from `before` them."""
    m_log2 = place.load(gl.SliceLayout(1, CFG.scores_layout()))
    _, _, rescale = raise_maximum(before, m_log2, 1.0)
    return m_log2, rescale


@gluon.jit
def _give_weights(place, p, bar):
    """Give weights to the other consumer, whose WGMMA reads them."""
    place.store(p.to(place.dtype))
    fence_async_shared()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _start_even(
    s, exchange, shared, score, seen, tile, step, acc, state, NOTED: gl.constexpr, CFG: gl.constexpr
):
    """Weigh an even tile and start its product: product, weights, `SoftmaxState`."""
    s, wrong = NOTED(s, shared, step, tile, score, seen, CFG)
    m_log2, p, rescale = _weigh(state.m_log2, gl.max(s, 1), s, shared, step, seen, CFG)
    exchange.even_m.store(m_log2)
    mbarrier.arrive(exchange.even_state, count=1)
    product = add_own(p, shared.ring, step, rescaled(acc, rescale, CFG), 0, CFG)
    row_sum = state.row_sum * rescale + gl.sum(p, 1) + wrong
    return product, p, SoftmaxState(m_log2, row_sum)


@gluon.jit
def _even_of_pair(
    s, queries, exchange, shared, score, seen, tile, step, odds, acc, state, NOTED: gl.constexpr,
    MORE: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """The first consumer's part of a pair; MORE: also the scores of the next even tile.

    They start behind the last product, so that WGMMA has work while this consumer releases a stage.
    """
    ring = shared.ring
    product, p, state = _start_even(
        s, exchange, shared, score, seen, tile, step, acc, state, NOTED, CFG
    )
    acc = warpgroup_mma_wait(0, deps=(product,))
    release(ring, step, 0, CFG)
    mbarrier.wait(exchange.odd_state, odds & 1)
    m_log2, rescale = _read_maximum(exchange.odd_m, state.m_log2, CFG)
    state = SoftmaxState(m_log2, state.row_sum * rescale)
    # the other adds these weights after those of the odd tile
    _give_weights(ring.k.index(step % CFG.STAGES), p * rescale[:, None], exchange.even_weights)
    acc = rescaled(acc, rescale, CFG)
    await_half(ring, step + 1, 0, CFG)
    mbarrier.wait(exchange.odd_weights, odds & 1)
    product = add_other(exchange.p, ring, step + 1, acc, 0, CFG)
    if MORE:
        # one group of products for each piece
        behind: gl.constexpr = 2 if EARLY_DESCRIPTORS else 1
        s = _score_part(_no_scores(CFG), queries, ring, step + 2, 0, False, CFG)
        acc = warpgroup_mma_wait(behind, deps=(product,))
        release(ring, step + 1, 0, CFG)
        s = _score_part(s, queries, ring, step + 2, 1, True, CFG)
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        acc = warpgroup_mma_wait(0, deps=(product,))
        release(ring, step + 1, 0, CFG)
    return s, acc, state


@gluon.jit
def _odd_of_pair(
    queries, exchange, shared, score, seen, tile, step, pairs, odds, acc, state,
    NOTED: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """The second consumer's part of a pair."""
    ring = shared.ring
    # of an odd tile, the last columns are copied first
    s = _scores(queries, ring, step + 1, 1, CFG)
    s, wrong = NOTED(s, shared, step + 1, tile + 1, score, seen, CFG)
    top = gl.max(s, 1)
    mbarrier.wait(exchange.even_state, pairs & 1)
    even_m, even_rescale = _read_maximum(exchange.even_m, state.m_log2, CFG)
    m_log2, p, rescale = _weigh(even_m, top, s, shared, step + 1, seen, CFG)
    rescale = even_rescale * rescale
    exchange.odd_m.store(m_log2)
    mbarrier.arrive(exchange.odd_state, count=1)
    product = add_own(p, ring, step + 1, rescaled(acc, rescale, CFG), 1, CFG)
    _give_weights(exchange.p, p, exchange.odd_weights)
    row_sum = state.row_sum * rescale + gl.sum(p, 1) + wrong
    await_half(ring, step, 1, CFG)
    mbarrier.wait(exchange.even_weights, pairs & 1)
    product = add_other(ring.k.index(step % CFG.STAGES), ring, step, product, 1, CFG)
    acc = warpgroup_mma_wait(1, deps=(product,))
    release(ring, step + 1, 1, CFG)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(ring, step, 1, CFG)
    return acc, SoftmaxState(m_log2, row_sum)


@gluon.jit
def _last_alone(
    s, exchange, shared, score, seen, tile, step, pairs, acc, state, NOTED: gl.constexpr,
    GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Either consumer's part of an even tile without an odd one."""
    ring = shared.ring
    weights = ring.k.index(step % CFG.STAGES)
    if GROUP == 0:
        product, p, state = _start_even(
            s, exchange, shared, score, seen, tile, step, acc, state, NOTED, CFG
        )
        _give_weights(weights, p, exchange.even_weights)
    else:
        await_half(ring, step, 1, CFG)
        mbarrier.wait(exchange.even_state, pairs & 1)
        m_log2, rescale = _read_maximum(exchange.even_m, state.m_log2, CFG)
        state = SoftmaxState(m_log2, state.row_sum * rescale)
        mbarrier.wait(exchange.even_weights, pairs & 1)
        product = add_other(weights, ring, step, rescaled(acc, rescale, CFG), 1, CFG)
    acc = warpgroup_mma_wait(0, deps=(product,))
    release(ring, step, GROUP, CFG)
    return acc, state


@gluon.jit
def _join_sums(exchange, state, slot, GROUP: gl.constexpr, CFG: gl.constexpr):
    """The `SoftmaxState` with the sums of both consumers, whose maxima are the same."""
    layout: gl.constexpr = gl.SliceLayout(1, CFG.scores_layout())
    own, other = exchange.first_sum, exchange.second_sum
    if GROUP == 1:
        own, other = exchange.second_sum, exchange.first_sum
    own.store(state.row_sum)
    mbarrier.arrive(exchange.sums, count=1)
    mbarrier.wait(exchange.sums, slot & 1)
    return SoftmaxState(state.m_log2, state.row_sum + other.load(layout))


@gluon.jit
def multiply_own_tiles_first(
    queries, exchange, shared, score, seen, tile, tiles, step, pairs, slot, NOTED: gl.constexpr,
    GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Process the `tiles` from `tile` on in pairs: the next step, even tiles so far, sums, state.

    `pairs` counts even tiles so far, so `step - pairs` counts odd ones; `slot` counts calls. NOTED
    is a function (s, shared, step, tile, score, seen, CFG) that makes the `NotedScores` of a tile.
    """
    rows: gl.constexpr = CFG.ROWS
    half: gl.constexpr = CFG.half
    score_rows: gl.constexpr = gl.SliceLayout(1, CFG.scores_layout())
    state = SoftmaxState(*init_state(gl.arange(0, rows, score_rows)))
    acc = gl.zeros([rows, half], gl.float32, CFG.accumulator_layout())
    end = step + tiles
    ahead = tile - step
    s = _no_scores(CFG)
    if GROUP == 0:
        if tiles > 0:
            s = _scores(queries, shared.ring, step, 0, CFG)
        # the last even tile follows, with an odd one or without
        for _pair in range((tiles - 1) // 2):
            s, acc, state = _even_of_pair(
                s, queries, exchange, shared, score, seen, ahead + step, step, step - pairs, acc,
                state, NOTED, True, CFG,
            )  # fmt: skip
            step += 2
            pairs += 1
        if step + 1 < end:
            _, acc, state = _even_of_pair(
                s, queries, exchange, shared, score, seen, ahead + step, step, step - pairs, acc,
                state, NOTED, False, CFG,
            )  # fmt: skip
            step += 2
            pairs += 1
    else:
        for _pair in range(tiles // 2):
            acc, state = _odd_of_pair(
                queries, exchange, shared, score, seen, ahead + step, step, pairs, step - pairs,
                acc, state, NOTED, CFG,
            )  # fmt: skip
            step += 2
            pairs += 1
    if step < end:
        acc, state = _last_alone(
            s, exchange, shared, score, seen, ahead + step, step, pairs, acc, state, NOTED, GROUP,
            CFG,
        )  # fmt: skip
        step += 1
        pairs += 1
    return step, pairs, acc, _join_sums(exchange, state, slot, GROUP, CFG)
