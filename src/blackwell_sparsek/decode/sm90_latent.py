# mypy: ignore-errors
"""Decoding over a latent cache on Hopper (MLA with absorbed weights): values are part of the keys.

q [B, Hq, Sq, 576], one cache [B, 1, S, 576] or pages of it, whose first 512 columns are also the
values; out [B, Hq, Sq, 512]. What a program takes, how splits are combined and who copies tiles is
as in `sm90.py`; only the arithmetic differs. 64 rows of queries meet tiles of 64 keys, so

    S = Q K^T [64 rows, 64 keys]      O = P V [64 rows, 512]

Accumulators of 512 columns are too many for one warp group: each of two consumers has half of them.
A tile of keys lies in shared memory once, for both products. The consumers take turns: one computes
the scores of even tiles and the other those of odd ones, and hands weights and row states to both
through shared memory. The scores of an odd tile run beside the weights of the even one before it.

With SEESAW each consumer multiplies its own weights first, from registers, while those of the other
travel through shared memory (`_multiply_seesaw`). With PAIRED, two programs form a cluster: they
take two head tiles of the same keys, and each copies every other slice of a tile to both, so that
a tile is read from the L2 once. With HALVES the columns of the two consumers are released and
copied separately. All of these copy by address, see `sm90_producer.py`.

`decode` is impl "sm90" of `bsk::attn_decode`: it leaves other caches to `sm90.py`. Limits: fp16 and
bf16, D 576 and Dv 512, values a view of the first columns of the keys, pages and listed blocks of a
multiple of 16 tokens.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..calls.decode import DecodeCall
from ..core.compat import hopper_options
from ..device.gluon.cluster import (
    arrive_at_all,
    cluster_barrier,
    cluster_exit_barrier,
    cluster_rank,
)
from ..device.gluon.partials import columns_of, store_part
from ..device.gluon.pipeline import barriers, drop_dead_values, take, tiles, work_channel
from ..device.gluon.warps import shared_address
from ..device.masks import kv_range, kv_range_of_all
from ..device.partials import is_last, part_slot
from ..device.records import SoftmaxState
from ..device.scores import cap, fold_sign
from ..device.softmax import init_state, raise_maximum, weigh, weigh_below
from ..launch.launcher import cdiv, launch, on_device_of
from ..launch.workspace import scratch, self_resetting_counters
from . import sm90
from .combine import launch_attn_decode_combine
from .sm90 import (
    ConsumerState,
    combine_parts,
    descriptor,
    kernel_arguments,
    mask_scores,
    places_of_rows,
    records_of_softmaxes,
    write_record,
    write_rows,
)
from .sm90_producer import (
    SPLIT_FIELDS,
    KVRing,
    ProducerState,
    SharedState,
    Split,
    StageNotes,
    kv_head_of,
    produce_tiles,
)
from .triton import DecodeResults, DecodeWorkspace, HeadTile, VisitedKeys
from .tuning import LATENT_DIMS, LatentConfig, latent_launch

MAX_REGISTERS = 168


class Handover(NamedTuple):
    """What the consumers hand each other: weights, row states, and barriers around them."""

    p: Any
    states: Any
    """fp32 [3, ROWS]: maximum, sum, and the factor that rescales what came before."""
    full: Any
    free: Any
    queries: Any
    """Barrier: both consumers have written their part of the queries."""


class RowStates(NamedTuple):
    """Where the state of rows is handed over; fp32 [ROWS] each.

    Triton puts a barrier between two accesses of one allocation, so that each has its own.
    """

    m_log2: Any
    row_sum: Any


class Exchange(NamedTuple):
    """What the consumers hand each other with SEESAW.

    Each of the barriers also says that the other consumer has read what it got before, so that
    nothing else has to: one waits for the other's before it writes again.
    """

    p: Any
    """Weights of odd tiles; those of even ones go where the last columns of their keys were."""
    even: Any
    """`RowStates` after an even tile, and after an odd one."""
    odd: Any
    even_state: Any
    odd_weights: Any
    """Barrier: weights and state of an odd tile are there."""
    even_weights: Any
    queries: Any
    """Barrier: both consumers have written their part of the queries."""


class LatentQueries(NamedTuple):
    """Queries in shared memory: the columns that meet values, and the rest."""

    front: Any
    rest: Any


@gluon.jit
def _put_queries(
    consume, shared, q_smem, sequence, head_tile, q_tiles, FIRST: gl.constexpr, CFG: gl.constexpr
):
    """Copy columns of queries, from FIRST on, to shared memory; returns the factor of scores."""
    rows: gl.constexpr = CFG.ROWS
    dim: gl.constexpr = q_smem.shape[1]
    wide: gl.constexpr = 32 if dim >= 256 else dim // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // wide, wide], [4, 1], [1, 0])
    heads = shared.heads
    q_len = shared.keys.q_len
    kv_head = kv_head_of(head_tile, q_tiles)
    num_rows = q_len * heads.group
    row = (head_tile - kv_head * q_tiles) * rows
    row = row + gl.arange(0, rows, gl.SliceLayout(1, layout))
    offs_d = FIRST + gl.arange(0, dim, gl.SliceLayout(0, layout))
    strides = consume.strides.q
    _, _, offset = places_of_rows(row, num_rows, kv_head, heads.group, q_len, strides)
    queries = consume.q_ptr + sequence.to(gl.int64) * strides.batch
    live = (row < num_rows)[:, None]
    q = gl.load(queries + offset[:, None] + offs_d[None, :], live, other=0.0)
    q, factor = fold_sign(q, consume.score.scale_log2)
    q_smem.store(q)
    return factor


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
def _await_part(ring, step, PART: gl.constexpr, CFG: gl.constexpr):
    """Wait for a part of the columns of a tile."""
    index = step % CFG.STAGES * CFG.parts + PART
    mbarrier.wait(ring.full.index(index), (step // CFG.STAGES) & 1)


@gluon.jit
def _release(ring, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Release a tile whose values this consumer has multiplied; HALVES: its half of the columns.

    Scores read all columns, but whoever has the weights of a tile knows that its scores are done.
    PAIRED: both producers copy to this stage, so each warp tells them both. What was written to the
    stage (cleared values, weights) has been fenced and handed over by then, before the arrivals.
    """
    index = step % CFG.STAGES * CFG.parts
    if CFG.HALVES:
        index += GROUP
    if CFG.PAIRED:
        arrive_at_all(shared_address(CFG.bars_offset + 8 * (CFG.first_empty + index)), step >= 0, 2)
    else:
        mbarrier.arrive(ring.empty.index(CFG.first_empty + index), count=1)


@gluon.jit
def _await_tile(shared, step, kv_start, seen, CFG: gl.constexpr):
    """Wait for a tile: whether a page was out of range, and whether some keys are not to be read.

    The first of these is that of all tiles of the split so far.
    """
    stage = step % CFG.STAGES
    parts: gl.constexpr = CFG.parts
    for part in gl.static_range(parts):
        _await_part(shared.ring, step, part, CFG)
    wrong = step - step
    cut = (kv_start < seen.lo) | (kv_start + CFG.TILE_N > seen.hi)
    if CFG.scattered:
        group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        note = gl.max(shared.notes.flags.index(stage).load(group), 0)
        wrong = note % 2
        cut = note >= 2
    return wrong, cut


@gluon.jit
def _start_scores(queries, shared, step, kv_start, seen, CFG: gl.constexpr):
    """Wait for a tile and start its scores; then what `_await_tile` returns."""
    ring = shared.ring
    stage = step % CFG.STAGES
    # 0, which the compiler does not know: else it would keep the addresses of 36 slices in
    # registers through the loop, and spill them
    zero = step >> 30
    front = queries.front.index(zero)
    rest = queries.rest.index(zero)
    rows: gl.constexpr = CFG.ROWS
    keys: gl.constexpr = CFG.TILE_N
    half: gl.constexpr = CFG.half
    nothing = gl.zeros([rows, keys], gl.float32, CFG.scores_layout())
    v = ring.v.index(stage)
    if CFG.HALVES:
        _await_part(ring, step, 0, CFG)
        left = v.slice(0, half, dim=1).permute((1, 0))
        right = v.slice(half, half, dim=1).permute((1, 0))
        s = warpgroup_mma(front.slice(0, half, dim=1), left, nothing, use_acc=False, is_async=True)
        wrong, cut = _await_tile(shared, step, kv_start, seen, CFG)
        s = warpgroup_mma(front.slice(half, half, dim=1), right, s, is_async=True)
    else:
        wrong, cut = _await_tile(shared, step, kv_start, seen, CFG)
        s = warpgroup_mma(front, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
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
    # a few columns at a time, beside the accumulators
    values: gl.constexpr = CFG.TILE_DV
    for first in gl.static_range(0, values, 64):
        drop_dead_values(v.slice(first, 64, dim=1), kv_start, positions, seen.lo, seen.hi)


@gluon.jit
def _hand_over(handover, p, state, rescale, shared, step, kv_start, seen, cut, CFG: gl.constexpr):
    """Give weights and row states to both consumers, and clear values that must not be read."""
    # both have multiplied with the weights before
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
    """Take the weights of a tile, and start adding its values: sums, and the `SoftmaxState`."""
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
    """The sums, once a tile's values are added; its weights and stage are free again."""
    acc = warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(handover.free, count=1)
    _release(ring, step, GROUP, CFG)
    return acc


@gluon.jit
def _multiply_in_turns(
    queries, handover, shared, score, seen, split, step, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Go through the tiles of a split in pairs; the first consumer has the scores of even ones.

    Returns the next step, sums of this consumer's columns, the `SoftmaxState`, and whether a page
    was out of range. Both tiles of a pair are in shared memory at once: the second consumer starts
    its scores before it takes the weights of the even tile, so that tensor cores work on them while
    the first makes these weights, and it makes its own while values are multiplied.
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
                wrong, _ = _await_tile(shared, step, odd_start, seen, CFG)
                product, state = _start_values(handover, ring, step, acc, first_col, CFG)
                acc = _end_values(product, handover, ring, step, GROUP, CFG)
        else:
            wrong, _ = _await_tile(shared, step, kv_start, seen, CFG)
            if even + 1 < kv_tiles:
                s, wrong, cut = _start_scores(queries, shared, step + 1, odd_start, seen, CFG)
                product, state = _start_values(handover, ring, step, acc, first_col, CFG)
                s = warpgroup_mma_wait(1, deps=(s,))
                p, new, rescale = _weigh_tile(
                    s, state, shared, step + 1, odd_start, seen, score, CFG
                )
                acc = _end_values(product, handover, ring, step, GROUP, CFG)
                step += 1
                _hand_over(handover, p, new, rescale, shared, step, odd_start, seen, cut, CFG)
            product, state = _start_values(handover, ring, step, acc, first_col, CFG)
            acc = _end_values(product, handover, ring, step, GROUP, CFG)
        step += 1
    return step, acc, state, wrong


@gluon.jit
def _row_states(CFG: gl.constexpr):
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
def _rescaled(acc, factor, CFG: gl.constexpr):
    """Accumulators times a factor of each row, which is in the layout of scores."""
    rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout())
    return acc * gl.convert_layout(factor, rows)[:, None]


@gluon.jit
def _add_own(p, ring, step, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Start adding the values of a tile with weights that this consumer has in registers."""
    half: gl.constexpr = CFG.half
    operand: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(), 2)
    values = ring.v.index(step % CFG.STAGES).slice(GROUP * half, half, dim=1)
    weights = gl.convert_layout(p.to(values.dtype), operand)
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _add_other(weights, ring, step, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Start adding the values of a tile with weights of the other consumer, in shared memory."""
    half: gl.constexpr = CFG.half
    values = ring.v.index(step % CFG.STAGES).slice(GROUP * half, half, dim=1)
    return warpgroup_mma(weights, values, acc, is_async=True)


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
    product = _add_own(p, ring, step, _rescaled(acc, rescale, CFG), 0, CFG)
    mbarrier.wait(exchange.odd_weights, (step - pairs) & 1)
    state, rescale = _read_state(exchange.odd, state, CFG)
    # the other adds these weights after those of the odd tile
    _give_even_weights(exchange, ring, step, p * rescale[:, None], CFG)
    acc = warpgroup_mma_wait(0, deps=(product,))
    _release(ring, step, 0, CFG)
    wrong, _ = _await_tile(shared, step + 1, (tile + 1) * CFG.TILE_N, seen, CFG)
    product = _add_other(exchange.p, ring, step + 1, _rescaled(acc, rescale, CFG), 0, CFG)
    acc = warpgroup_mma_wait(0, deps=(product,))
    _release(ring, step + 1, 0, CFG)
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
    acc = _rescaled(acc, even_rescale * rescale, CFG)
    product = _add_own(p, ring, step + 1, acc, 1, CFG)
    _await_tile(shared, step, tile * CFG.TILE_N, seen, CFG)
    mbarrier.wait(exchange.even_weights, pairs & 1)
    weights = ring.k.index(step % CFG.STAGES)
    product = _add_other(weights, ring, step, product, 1, CFG)
    acc = warpgroup_mma_wait(1, deps=(product,))
    _release(ring, step + 1, 1, CFG)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    _release(ring, step, 1, CFG)
    return acc, state, wrong


@gluon.jit
def _multiply_seesaw(
    queries, exchange, shared, score, seen, split, step, pairs, GROUP: gl.constexpr,
    CFG: gl.constexpr,
):  # fmt: skip
    """As `_multiply_in_turns`, but each consumer adds the values of its own weights first.

    Both start the scores of a pair at once. The first consumer needs no weights of the other until
    it has added its own, and the second one none of the first until then; the second needs its row
    states. `pairs` counts even tiles so far, so that `step - pairs` counts odd ones.
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
            product = _add_own(p, ring, step, _rescaled(acc, rescale, CFG), 0, CFG)
        else:
            wrong, _ = _await_tile(shared, step, tile * CFG.TILE_N, seen, CFG)
            mbarrier.wait(exchange.even_state, pairs & 1)
            state, rescale = _read_state(exchange.even, state, CFG)
            mbarrier.wait(exchange.even_weights, pairs & 1)
            weights = ring.k.index(step % CFG.STAGES)
            product = _add_other(weights, ring, step, _rescaled(acc, rescale, CFG), 1, CFG)
        acc = warpgroup_mma_wait(0, deps=(product,))
        _release(ring, step, GROUP, CFG)
        step += 1
        pairs += 1
    return step, pairs, acc, state, wrong


@gluon.jit
def _consume(consume, shared, q_smem, handover, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Attend with the queries of each split, for half of the columns of the values."""
    keys = shared.keys
    heads = shared.heads
    num: gl.constexpr = CFG.ROWS
    half: gl.constexpr = CFG.half
    first_col: gl.constexpr = GROUP * CFG.half
    values_dim: gl.constexpr = CFG.TILE_DV
    out_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout())
    num_rows = keys.q_len * heads.group
    q_tiles = (num_rows + num - 1) // num
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    if CFG.PAIRED:
        cluster_barrier()
        # parts of the second head tiles of pairs come behind those of the first ones
        program = program // 2 + cluster_rank() * (programs // 2)
    # each consumer combines its columns by itself
    partials = consume.workspace.partials + (2 * programs).to(gl.int64) * (
        GROUP * num * (CFG.half + 2)
    )
    states = partials + (2 * programs).to(gl.int64) * (num * half)
    counters = consume.workspace.counters + GROUP * programs
    own = ConsumerState(
        DecodeResults(consume.results.out + first_col, consume.results.lse),
        consume.q_ptr, consume.sinks_ptr, consume.score, consume.workspace, consume.strides,
        None, None, consume.num_splits,
    )  # fmt: skip
    step = 0
    pairs = 0
    number = 0
    split = Split(*take(shared.splits, number))
    while split.sequence >= 0:
        # all scores of the split before are done: both consumers have had their weights
        part = q_smem.front.index(0).slice(first_col, half, dim=1)
        place = (split.sequence, split.head_tile, q_tiles)
        factor = _put_queries(consume, shared, part, *place, first_col, CFG)
        if GROUP == 0:
            _put_queries(consume, shared, q_smem.rest.index(0), *place, values_dim, CFG)
        fence_async_shared()
        mbarrier.arrive(handover.queries, count=1)
        begins = split.origin + split.softmax_start // split.range_tiles
        ends = split.origin + (split.softmax_start + split.count - 1) // split.range_tiles
        kv_head = kv_head_of(split.head_tile, q_tiles)
        first_row = (split.head_tile - kv_head * q_tiles) * num
        length = gl.maximum(split.kv_len, 0)
        lo, hi = kv_range(0, keys.q_len, keys.q_len, length, keys.left, keys.right)
        all_lo, all_hi = kv_range_of_all(0, keys.q_len, keys.q_len, length, keys.left, keys.right)
        seen = KeysOfSplit(first_row, length, lo, hi, all_lo, all_hi, factor)
        if CFG.COMBINED and GROUP == 0:
            write_record(consume, split, begins, ends, heads.kv * q_tiles, program)
        mbarrier.wait(handover.queries, number & 1)
        if CFG.SEESAW:
            step, pairs, acc, state, wrong = _multiply_seesaw(
                q_smem, handover, shared, consume.score, seen, split, step, pairs, GROUP, CFG
            )
        else:
            step, acc, state, wrong = _multiply_in_turns(
                q_smem, handover, shared, consume.score, seen, split, step, GROUP, CFG
            )
        sum_out = gl.convert_layout(state.row_sum, out_rows)
        if CFG.scattered:
            sum_out = gl.where(wrong != 0, float("nan"), sum_out)
        m_out = gl.convert_layout(state.m_log2, out_rows)
        work = HeadTile(split.sequence, split.kv_len, kv_head)
        if begins == ends:
            write_rows(own, shared, work, m_out, sum_out, acc, first_row, num_rows)
        else:
            tile_rows = gl.minimum(num_rows - first_row, num)
            slot = part_slot(program, begins)
            store_part(partials, states, slot, m_out, sum_out, acc, tile_rows)
            if not CFG.COMBINED:  # noqa: SIM102
                if is_last(counters + begins, ends - begins + 1):
                    combine_parts(
                        own, shared, work, partials, states, begins, ends, first_row, num_rows,
                        num, half,
                    )  # fmt: skip
        number += 1
        split = Split(*take(shared.splits, number))
    if CFG.PAIRED:
        cluster_exit_barrier()


@gluon.jit
def _idle_warps():
    """What warps without work do: a cluster barrier waits for all threads of the cluster."""
    cluster_barrier()
    cluster_exit_barrier()


@gluon.jit
def _latent_ring(k_desc, v_desc, CFG: gl.constexpr):
    """The `KVRing`; `placed`: with all barriers in one array, whose place CFG knows."""
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    values: gl.constexpr = CFG.TILE_DV
    if CFG.placed:
        dtype: gl.constexpr = k_desc.dtype
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile_n, values], dtype)
        v_smem = gl.allocate_shared_memory(dtype, [stages, tile_n, values], layout)
        k_smem = tiles(k_desc, stages, tile_n)
        room: gl.constexpr = CFG.bars_room
        each: gl.constexpr = CFG.first_empty
        full = gl.allocate_shared_memory(gl.int64, [room, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(each):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(full.index(each + i), count=CFG.releases)
        empty = full
    else:
        v_smem = tiles(v_desc, stages, tile_n)
        k_smem = tiles(k_desc, stages, tile_n)
        full = barriers(stages, 1)
        empty = barriers(stages, 2)
    return KVRing(k_smem, v_smem, full, empty)


@gluon.jit(
    do_not_specialize=[
        "page_row_stride", "list_batch_stride", "list_head_stride", "batch", "q_len", "capacity",
        "num_pages", "num_blocks", "left", "right", "num_splits",
    ]
)  # fmt: skip
def _attn_decode_latent_kernel(
    results,
    q_ptr,
    k_desc,  # of the cache too, in tiles of the columns behind the values
    v_desc,
    seqlens_ptr,
    page_table_ptr,
    list_ptr,
    sinks_ptr,
    score,
    workspace,
    strides,
    page_row_stride,
    list_batch_stride,
    list_head_stride,
    batch,
    q_len,
    capacity,
    num_pages,
    num_blocks,
    left,
    right,
    heads,
    num_splits,
    CFG: gl.constexpr,
):
    """Set up the ring and start the roles: two consumers and the producer of `sm90.py`."""
    first_length = gl.load(seqlens_ptr)
    stages: gl.constexpr = CFG.STAGES
    num: gl.constexpr = CFG.ROWS
    tile_n: gl.constexpr = CFG.TILE_N
    rest: gl.constexpr = CFG.rest
    values: gl.constexpr = CFG.TILE_DV
    dtype: gl.constexpr = k_desc.dtype
    values_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, values], dtype)
    rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, rest], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, tile_n], dtype)
    q_smem = LatentQueries(
        gl.allocate_shared_memory(dtype, [1, num, values], values_layout),
        gl.allocate_shared_memory(dtype, [1, num, rest], rest_layout),
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    p_smem = gl.allocate_shared_memory(dtype, [num, tile_n], p_layout)
    flags = gl.allocate_shared_memory(gl.int32, [stages, 1], plain)
    positions = gl.allocate_shared_memory(gl.int32, [stages, CFG.noted_keys], plain)
    ring = _latent_ring(k_desc, v_desc, CFG)
    if CFG.SEESAW:
        handover = Exchange(
            *(p_smem, _row_states(CFG), _row_states(CFG)),
            *(barriers(1, 1).index(0), barriers(1, 1).index(0), barriers(1, 1).index(0)),
            barriers(1, 2).index(0),
        )
    else:
        states = gl.allocate_shared_memory(gl.float32, [3, num], plain)
        handover = Handover(
            *(p_smem, states, barriers(1, 1).index(0)),
            *(barriers(1, 2).index(0), barriers(1, 2).index(0)),
        )
    splits = work_channel(SPLIT_FIELDS, 2)
    fence_async_shared()
    keys = VisitedKeys(seqlens_ptr, batch, q_len, capacity, left, right, num_blocks)
    produce = ProducerState(
        k_desc, v_desc, page_table_ptr, list_ptr, num_pages, page_row_stride, list_batch_stride,
        list_head_stride, num_splits,
    )  # fmt: skip
    consume = ConsumerState(
        results, q_ptr, sinks_ptr, score, workspace, strides, None, None, num_splits
    )
    shared = SharedState(ring, StageNotes(positions, flags), splits, keys, first_length, heads)
    few: gl.constexpr = CFG.PRODUCER_REGISTERS
    if CFG.PAIRED:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, q_smem, handover, 0, CFG)),
                (_consume, (consume, shared, q_smem, handover, 1, CFG)),
                (produce_tiles, (produce, shared, CFG)),
                (_idle_warps, ()),
                (_idle_warps, ()),
            ],
            [4, 1, 1, 2],
            [CFG.CONSUMER_REGISTERS, few, few, few],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, q_smem, handover, 0, CFG)),
                (_consume, (consume, shared, q_smem, handover, 1, CFG)),
                (produce_tiles, (produce, shared, CFG)),
            ],
            [4, 1],
            [CFG.CONSUMER_REGISTERS, few],
        )


def decode(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, as `empty_results` lays them out, of any call of impl "sm90"."""
    if (call.problem.head_dim, call.problem.head_dim_v) != LATENT_DIMS:
        return sm90.decode(call)
    config, programs = latent_launch(call.problem)
    out, lse = call.empty_results()
    launch_attn_decode_latent(out, lse, call, config, programs)
    return out, lse


def launch_attn_decode_latent(
    out: torch.Tensor, lse: torch.Tensor, call: DecodeCall, config: LatentConfig, programs: int
) -> None:
    """Fill `out` [B, Hq, Sq, 512] and `lse`; as `sm90.launch_attn_decode_sm90`."""
    q, cache = call.q, call.k_cache
    if q.shape[0] * q.shape[1] * q.shape[2] == 0:
        return
    head_tiles = cdiv(call.problem.rows, config.ROWS)
    assert head_tiles % config.pair == programs % config.pair == 0, f"{head_tiles=} {programs=}"
    with on_device_of(q):
        workspace = DecodeWorkspace(
            # two consumers, each with two parts: sums of half the columns, maximum and sum of rows
            scratch((4 * programs, config.ROWS, config.half + 2), torch.float32, q.device),
            self_resetting_counters(2 * programs, q.device),
            records_of_softmaxes(call, config),
        )
        # both are tiles of the same tensor, which a replay finds by its address
        rest = descriptor(cache, call.page_size, config.k_block())
        values = descriptor(cache, call.page_size, config.v_block())
        args = kernel_arguments(out, lse, call, (rest, values), workspace, config, programs)
        options = {"num_warps": 4, "maxnreg": MAX_REGISTERS, **hopper_options()}
        clusters = programs // config.pair
        launch(_attn_decode_latent_kernel, clusters, args, cluster=config.pair, **options)
        if config.COMBINED:
            tile = (config.ROWS, config.half)
            launch_attn_decode_combine(out, lse, call, workspace, tile, programs)
