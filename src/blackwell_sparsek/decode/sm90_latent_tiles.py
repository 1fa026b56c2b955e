# mypy: ignore-errors
"""The arithmetic of decoding over a latent cache on Hopper: scores, weights, and sums of values.

Two consumers process the tiles of a split in pairs. Each computes the scores of every other tile
and sums half of the columns of the values, so they pass weights and row states to each other.
`multiply_in_turns` is the order of programs that work alone. Paired ones take that of
`device/gluon/latent_pairs.py`, with the scores of `masked_tile`; `sm90_latent.py` calls both.

No wait can miss its phase. A barrier tells a phase from the next one only, so nobody may wait for a
half of a stage that can be released, copied again and full again before it looks:

- The consumer that has the scores of a tile waits for both halves. Its own is released by itself
  alone, and the other consumer releases the other one after it got the weights of these scores.
- The consumer without the scores may get the weights late, when the other one has released its half
  and the producer has filled that again. So it waits for its own half alone.

`tests/decode/test_latent_protocol.py` runs `multiply_in_turns` at any speed of the roles.
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
from ..device.gluon.latent import await_half, await_part, release
from ..device.gluon.latent_pairs import NotedScores
from ..device.gluon.partials import columns_of
from ..device.gluon.pipeline import drop_dead_values
from ..device.records import SoftmaxState
from ..device.scores import cap
from ..device.softmax import init_state, weigh
from .sm90 import mask_scores


class Handover(NamedTuple):
    """Memory through which the consumers exchange weights and row states, and its barriers."""

    p: Any
    states: Any
    """fp32 [3, ROWS]: maximum, sum, and the factor that rescales what came before."""
    full: Any
    free: Any
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
