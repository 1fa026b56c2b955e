# mypy: ignore-errors
"""The arithmetic of decoding over a latent cache on Hopper: scores, weights, and sums of values.

Two consumers process the tiles of a split in pairs. Each computes the scores of every other tile
and sums half of the columns of the values, so they pass weights and row states to each other.
`multiply_in_turns` and `multiply_own_first` differ in how they do that, as does
`multiply_own_tiles_first` of `device/gluon/latent_pairs.py`; `sm90_latent.py` calls them.

No wait can miss its phase. A barrier tells a phase from the next one only, so nobody may wait for a
half of a stage that can be released, copied again and full again before it looks:

- The consumer that has the scores of a tile waits for both halves. Its own is released by itself
  alone, and the other consumer releases the other one after it got the weights of these scores.
- The consumer without the scores may get the weights late, when the other one has released its half
  and the producer has filled that again. So it waits for its own half alone.

`tests/decode/test_latent_protocol.py` runs both orders at any speed of the roles.
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

from ..device.gluon.compat import EARLY_DESCRIPTORS, placed
from ..device.gluon.latent import add_other, add_own, await_half, await_part, release, rescaled
from ..device.gluon.latent_pairs import NotedScores
from ..device.gluon.partials import columns_of
from ..device.gluon.pipeline import drop_dead_values
from ..device.records import SoftmaxState
from ..device.scores import cap
from ..device.softmax import init_state, raise_maximum, weigh, weigh_below
from .sm90 import mask_scores


class Handover(NamedTuple):
    """What the consumers pass to each other: weights, row states, and their barriers."""

    p: Any
    states: Any
    """fp32 [3, ROWS]: maximum, sum, and the factor that rescales what came before."""
    full: Any
    free: Any
    queries: Any
    """Barrier: both consumers have written their part of the queries."""


class RowStates(NamedTuple):
    """Where the state of rows is handed over; fp32 [ROWS] each.

    Triton puts a barrier between two accesses of one allocation, so each field has its own.
    """

    m_log2: Any
    row_sum: Any


class Exchange(NamedTuple):
    """What the consumers pass to each other with PAIRED.

    Each barrier also signals that its consumer has read what it received before, so no further
    barriers are needed: a consumer waits for the other's barrier before it writes again.
    """

    p: Any
    """Weights of odd tiles; those of even ones overwrite the last columns of their keys."""
    even: Any
    """`RowStates` after an even tile, and after an odd one."""
    odd: Any
    even_state: Any
    odd_weights: Any
    """Barrier: weights and state of an odd tile are ready."""
    even_weights: Any
    queries: Any
    """Barrier: both consumers have written their part of the queries."""


class KeysOfSplit(NamedTuple):
    """The keys of a split, as its consumers see them."""

    first_row: Any
    length: Any
    lo: Any
    """The keys `[lo, hi)` that some row sees."""
    hi: Any
    all_lo: Any
    """The keys `[all_lo, all_hi)` that every row sees."""
    all_hi: Any
    factor: Any


@gluon.jit
def _await_tile(shared, step, kv_start, seen, CFG: gl.constexpr):
    """Wait for a tile whose scores this consumer has, and return what `_notes_of` does."""
    parts: gl.constexpr = CFG.parts
    for part in gl.static_range(parts):
        await_part(shared.ring, step, part, CFG)
    return _notes_of(shared, step, kv_start, seen, CFG)


@gluon.jit
def _notes_of(shared, step, kv_start, seen, CFG: gl.constexpr):
    """Whether a page was out of range, and whether some keys of a tile are not to be read.

    The first result covers all tiles of the split so far.
    """
    stage = step % CFG.STAGES
    wrong = step - step
    cut = (kv_start < seen.lo) | (kv_start + CFG.TILE_N > seen.hi)
    if CFG.scattered:
        group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        note = gl.max(shared.notes.flags.index(stage).load(group), 0)
        wrong = note % 2
        cut = note >= 2
    return wrong, cut


@gluon.jit
def _noted_wrong(shared, step, CFG: gl.constexpr):
    """Whether a page of the split so far was out of range, once the weights of a tile are there.

    Whoever made the weights has waited for both halves, hence for the notes, which come with either
    of them. They stay until this consumer releases its half.
    """
    wrong = step - step
    if CFG.scattered:
        group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        wrong = gl.max(shared.notes.flags.index(step % CFG.STAGES).load(group), 0) % 2
    return wrong


@gluon.jit
def _start_scores(queries, shared, step, kv_start, seen, CFG: gl.constexpr):
    """Start the scores of a tile as its halves arrive; also returns what `_await_tile` does."""
    ring = shared.ring
    await_part(ring, step, 0, CFG)
    stage = step % CFG.STAGES
    # 0, but unknown to the compiler, which would otherwise keep the addresses of 36 slices in
    # registers through the loop and spill them
    zero = step >> 30
    rest = queries.rest.index(zero)
    rows: gl.constexpr = CFG.ROWS
    keys: gl.constexpr = CFG.TILE_N
    half: gl.constexpr = CFG.half
    s = gl.zeros([rows, keys], gl.float32, CFG.scores_layout())
    # in fewer pieces, the descriptors of 16 products would all be computed before the first
    pieces: gl.constexpr = 4 if EARLY_DESCRIPTORS else 2
    width: gl.constexpr = 2 * half // pieces
    for i in gl.static_range(pieces):
        if i * width == half:
            wrong, cut = _await_tile(shared, step, kv_start, seen, CFG)
        q = queries.front.index(placed(zero)).slice(i * width, width, dim=1)
        some = ring.v.index(placed(stage)).slice(i * width, width, dim=1).permute((1, 0))
        s = warpgroup_mma(q, some, s, use_acc=i > 0, is_async=True)
    s = warpgroup_mma(rest, ring.k.index(stage).permute((1, 0)), s, is_async=True)
    return s, wrong, cut


@gluon.jit
def _mask_tile(s, shared, step, kv_start, seen, score, CFG: gl.constexpr):
    """The scores of a tile, capped, and -inf where a query does not see a key."""
    s = cap(s, score.inverse_cap)
    kv_pos = kv_start + columns_of(s)
    if CFG.BLOCK_KV is not None:
        positions = shared.notes.positions.index(step % CFG.STAGES)
        kv_pos = positions.load(gl.SliceLayout(0, CFG.scores_layout()))
    inside = (kv_start >= seen.all_lo) & (kv_start + CFG.TILE_N <= seen.all_hi)
    if CFG.BLOCK_KV is not None or inside == 0:
        group = shared.heads.group
        s = mask_scores(s, kv_pos, seen.first_row, seen.length, shared.keys, group)
    return s


@gluon.jit
def _weigh_tile(s, state, shared, step, kv_start, seen, score, CFG: gl.constexpr):
    """The weights of a tile's scores, the new `SoftmaxState`, and the factor of older sums."""
    s = _mask_tile(s, shared, step, kv_start, seen, score, CFG)
    m_log2, p, rescale = weigh(state.m_log2, s, seen.factor)
    row_sum = state.row_sum * rescale + gl.sum(p, 1)
    return p, SoftmaxState(m_log2, row_sum), rescale


@gluon.jit
def _clear_unseen(shared, step, kv_start, seen, CFG: gl.constexpr):
    """Clear the values of a tile that must not be read."""
    stage = step % CFG.STAGES
    v = shared.ring.v.index(stage)
    positions = None
    if CFG.BLOCK_KV is not None:
        positions = shared.notes.positions.index(stage)
    # a few columns at a time: the accumulators leave few registers
    values: gl.constexpr = CFG.TILE_DV
    for first in gl.static_range(0, values, 64):
        drop_dead_values(v.slice(first, 64, dim=1), kv_start, positions, seen.lo, seen.hi)


@gluon.jit
def masked_tile(s, shared, step, tile, score, seen, CFG: gl.constexpr):
    """The `NotedScores` of a tile; values that must not be read are cleared."""
    kv_start = tile * CFG.TILE_N
    wrong, cut = _notes_of(shared, step, kv_start, seen, CFG)
    s = _mask_tile(s, shared, step, kv_start, seen, score, CFG)
    if cut:
        _clear_unseen(shared, step, kv_start, seen, CFG)
    fence_async_shared()
    return NotedScores(s, gl.where(wrong != 0, float("nan"), 0.0))


@gluon.jit
def _hand_over(handover, p, state, rescale, shared, step, kv_start, seen, cut, CFG: gl.constexpr):
    """Pass weights and row states to both consumers, and clear values that must not be read."""
    # both have used the previous weights
    mbarrier.wait(handover.free, (step & 1) ^ 1)
    handover.p.store(p.to(handover.p.dtype))
    handover.states.index(0).store(state.m_log2)
    handover.states.index(1).store(state.row_sum)
    handover.states.index(2).store(rescale)
    if cut:
        _clear_unseen(shared, step, kv_start, seen, CFG)
    fence_async_shared()
    mbarrier.arrive(handover.full, count=1)


@gluon.jit
def _start_values(handover, ring, step, acc, FIRST: gl.constexpr, CFG: gl.constexpr):
    """Take the weights of a tile and start adding its values; return sums and `SoftmaxState`."""
    score_rows: gl.constexpr = gl.SliceLayout(1, CFG.scores_layout())
    half: gl.constexpr = CFG.half
    mbarrier.wait(handover.full, step & 1)
    m_log2 = handover.states.index(0).load(score_rows)
    row_sum = handover.states.index(1).load(score_rows)
    rescale = handover.states.index(2).load(gl.SliceLayout(1, CFG.accumulator_layout()))
    values = ring.v.index(step % CFG.STAGES).slice(FIRST, half, dim=1)
    acc = warpgroup_mma(handover.p, values, acc * rescale[:, None], is_async=True)
    return acc, SoftmaxState(m_log2, row_sum)


@gluon.jit
def _end_values(product, handover, ring, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Wait for the sums with a tile's values, then release its weights and its stage."""
    acc = warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(handover.free, count=1)
    release(ring, step, GROUP, CFG)
    return acc


@gluon.jit
def multiply_in_turns(
    queries, handover, shared, score, seen, split, step, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Process the tiles of a split in pairs; the first consumer has the scores of even ones.

    Returns the next step, sums of this consumer's columns, the `SoftmaxState`, and whether a page
    was out of range. Both tiles of a pair are in shared memory at once. The second consumer starts
    its scores before it takes the weights of the even tile, so that these scores overlap the
    softmax of the first consumer, and its own softmax overlaps the products with values.
    """
    ring = shared.ring
    num: gl.constexpr = CFG.ROWS
    half: gl.constexpr = CFG.half
    first_col: gl.constexpr = GROUP * CFG.half
    tile_n: gl.constexpr = CFG.TILE_N
    score_rows: gl.constexpr = gl.SliceLayout(1, CFG.scores_layout())
    state = SoftmaxState(*init_state(gl.arange(0, num, score_rows)))
    acc = gl.zeros([num, half], gl.float32, CFG.accumulator_layout())
    wrong = step - step
    kv_tiles = split.kv_end - split.kv_tile
    for even in range(0, kv_tiles, 2):
        kv_start = (split.kv_tile + even) * tile_n
        odd_start = kv_start + tile_n
        if GROUP == 0:
            s, wrong, cut = _start_scores(queries, shared, step, kv_start, seen, CFG)
            s = warpgroup_mma_wait(0, deps=(s,))
            p, new, rescale = _weigh_tile(s, state, shared, step, kv_start, seen, score, CFG)
            _hand_over(handover, p, new, rescale, shared, step, kv_start, seen, cut, CFG)
            product, state = _start_values(handover, ring, step, acc, first_col, CFG)
            acc = _end_values(product, handover, ring, step, GROUP, CFG)
            if even + 1 < kv_tiles:
                step += 1
                await_half(ring, step, GROUP, CFG)
                product, state = _start_values(handover, ring, step, acc, first_col, CFG)
                wrong = _noted_wrong(shared, step, CFG)
                acc = _end_values(product, handover, ring, step, GROUP, CFG)
        else:
            await_half(ring, step, GROUP, CFG)
            if even + 1 < kv_tiles:
                s, _, cut = _start_scores(queries, shared, step + 1, odd_start, seen, CFG)
                product, state = _start_values(handover, ring, step, acc, first_col, CFG)
                s = warpgroup_mma_wait(1, deps=(s,))
                p, new, rescale = _weigh_tile(
                    s, state, shared, step + 1, odd_start, seen, score, CFG
                )
                acc = _end_values(product, handover, ring, step, GROUP, CFG)
                step += 1
                _hand_over(handover, p, new, rescale, shared, step, odd_start, seen, cut, CFG)
            product, state = _start_values(handover, ring, step, acc, first_col, CFG)
            wrong = _noted_wrong(shared, step, CFG)
            acc = _end_values(product, handover, ring, step, GROUP, CFG)
        step += 1
    return step, acc, state, wrong


@gluon.jit
def row_states(CFG: gl.constexpr):
    """Allocate `RowStates`."""
    rows: gl.constexpr = CFG.ROWS
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return RowStates(
        gl.allocate_shared_memory(gl.float32, [rows], plain),
        gl.allocate_shared_memory(gl.float32, [rows], plain),
    )


@gluon.jit
def _write_state(states, state):
    """Write a `SoftmaxState` for the other consumer."""
    states.m_log2.store(state.m_log2)
    states.row_sum.store(state.row_sum)


@gluon.jit
def _read_state(states, before, CFG: gl.constexpr):
    """A `SoftmaxState` of the other consumer, and the factor of sums from `before` it."""
    layout: gl.constexpr = gl.SliceLayout(1, CFG.scores_layout())
    state = SoftmaxState(states.m_log2.load(layout), states.row_sum.load(layout))
    # as the other consumer computed it: its maximum is the larger one
    _, _, rescale = raise_maximum(before.m_log2, state.m_log2, 1.0)
    return state, rescale


@gluon.jit
def _give_even_weights(exchange, ring, step, p, CFG: gl.constexpr):
    """Give the weights of an even tile to the other consumer, in place of its last key columns."""
    weights = ring.k.index(step % CFG.STAGES)
    weights.store(p.to(weights.dtype))
    fence_async_shared()
    mbarrier.arrive(exchange.even_weights, count=1)


@gluon.jit
def _weigh_even(queries, exchange, shared, score, seen, tile, step, state, CFG: gl.constexpr):
    """Weights of an even tile, its new `SoftmaxState`, the factor of older sums, and `wrong`."""
    kv_start = tile * CFG.TILE_N
    s, wrong, cut = _start_scores(queries, shared, step, kv_start, seen, CFG)
    s = warpgroup_mma_wait(0, deps=(s,))
    p, state, rescale = _weigh_tile(s, state, shared, step, kv_start, seen, score, CFG)
    _write_state(exchange.even, state)
    if cut:
        _clear_unseen(shared, step, kv_start, seen, CFG)
    fence_async_shared()
    mbarrier.arrive(exchange.even_state, count=1)
    return p, state, rescale, wrong


@gluon.jit
def _even_of_pair(
    queries, exchange, shared, score, seen, tile, step, pairs, acc, state, CFG: gl.constexpr
):
    """The first consumer's part of a pair of tiles: O = s1 (s0 O + P0 V0) + P1 V1."""
    ring = shared.ring
    p, state, rescale, _ = _weigh_even(
        queries, exchange, shared, score, seen, tile, step, state, CFG
    )
    product = add_own(p, ring, step, rescaled(acc, rescale, CFG), 0, CFG)
    mbarrier.wait(exchange.odd_weights, (step - pairs) & 1)
    state, rescale = _read_state(exchange.odd, state, CFG)
    # the other adds these weights after those of the odd tile
    _give_even_weights(exchange, ring, step, p * rescale[:, None], CFG)
    acc = warpgroup_mma_wait(0, deps=(product,))
    release(ring, step, 0, CFG)
    await_half(ring, step + 1, 0, CFG)
    wrong = _noted_wrong(shared, step + 1, CFG)
    product = add_other(exchange.p, ring, step + 1, rescaled(acc, rescale, CFG), 0, CFG)
    acc = warpgroup_mma_wait(0, deps=(product,))
    release(ring, step + 1, 0, CFG)
    return acc, state, wrong


@gluon.jit
def _odd_of_pair(
    queries, exchange, shared, score, seen, tile, step, pairs, acc, state, CFG: gl.constexpr
):
    """The second consumer's part of a pair of tiles: O = s1 s0 O + P1 V1 + (s1 P0) V0."""
    ring = shared.ring
    kv_start = (tile + 1) * CFG.TILE_N
    s, wrong, cut = _start_scores(queries, shared, step + 1, kv_start, seen, CFG)
    s = warpgroup_mma_wait(0, deps=(s,))
    s = _mask_tile(s, shared, step + 1, kv_start, seen, score, CFG)
    top = gl.max(s, 1)
    if cut:
        _clear_unseen(shared, step + 1, kv_start, seen, CFG)
    mbarrier.wait(exchange.even_state, pairs & 1)
    even, even_rescale = _read_state(exchange.even, state, CFG)
    m_log2, p, rescale = weigh_below(even.m_log2, top, s, seen.factor)
    state = SoftmaxState(m_log2, even.row_sum * rescale + gl.sum(p, 1))
    exchange.p.store(p.to(exchange.p.dtype))
    _write_state(exchange.odd, state)
    fence_async_shared()
    mbarrier.arrive(exchange.odd_weights, count=1)
    acc = rescaled(acc, even_rescale * rescale, CFG)
    product = add_own(p, ring, step + 1, acc, 1, CFG)
    await_half(ring, step, 1, CFG)
    mbarrier.wait(exchange.even_weights, pairs & 1)
    weights = ring.k.index(step % CFG.STAGES)
    product = add_other(weights, ring, step, product, 1, CFG)
    acc = warpgroup_mma_wait(1, deps=(product,))
    release(ring, step + 1, 1, CFG)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(ring, step, 1, CFG)
    return acc, state, wrong


@gluon.jit
def multiply_own_first(
    queries, exchange, shared, score, seen, split, step, pairs, GROUP: gl.constexpr,
    CFG: gl.constexpr,
):  # fmt: skip
    """As `multiply_in_turns`, but each consumer first adds the values with its own weights.

    Both start the scores of a pair at the same time. Neither needs the other's weights until it has
    added its own; the second consumer needs the row states of the first, though. `pairs` counts
    even tiles so far, so `step - pairs` counts odd ones.
    """
    ring = shared.ring
    num: gl.constexpr = CFG.ROWS
    half: gl.constexpr = CFG.half
    score_rows: gl.constexpr = gl.SliceLayout(1, CFG.scores_layout())
    state = SoftmaxState(*init_state(gl.arange(0, num, score_rows)))
    acc = gl.zeros([num, half], gl.float32, CFG.accumulator_layout())
    wrong = step - step
    tile = split.kv_tile
    for _pair in range((split.kv_end - split.kv_tile) // 2):
        if GROUP == 0:
            acc, state, wrong = _even_of_pair(
                queries, exchange, shared, score, seen, tile, step, pairs, acc, state, CFG
            )
        else:
            acc, state, wrong = _odd_of_pair(
                queries, exchange, shared, score, seen, tile, step, pairs, acc, state, CFG
            )
        tile += 2
        step += 2
        pairs += 1
    if tile < split.kv_end:
        if GROUP == 0:
            p, state, rescale, wrong = _weigh_even(
                queries, exchange, shared, score, seen, tile, step, state, CFG
            )
            _give_even_weights(exchange, ring, step, p, CFG)
            product = add_own(p, ring, step, rescaled(acc, rescale, CFG), 0, CFG)
        else:
            await_half(ring, step, 1, CFG)
            mbarrier.wait(exchange.even_state, pairs & 1)
            state, rescale = _read_state(exchange.even, state, CFG)
            mbarrier.wait(exchange.even_weights, pairs & 1)
            wrong = _noted_wrong(shared, step, CFG)
            weights = ring.k.index(step % CFG.STAGES)
            product = add_other(weights, ring, step, rescaled(acc, rescale, CFG), 1, CFG)
        acc = warpgroup_mma_wait(0, deps=(product,))
        release(ring, step, GROUP, CFG)
        step += 1
        pairs += 1
    return step, pairs, acc, state, wrong
