# mypy: ignore-errors
"""Attention forward on Hopper: the arithmetic of `fwd.py`, moved by TMA and multiplied by WGMMA.

Shapes are those of `fwd.py`. Programs take pieces of work until none is left; a piece is
CONSUMERS x 64 queries of one head. A producer warp finds out which KV tiles the piece visits,
publishes that, and keeps rings of K and V tiles full; the consumer warp groups each own 64 queries.
A consumer issues the scores of tile i and the product of tile i - 1 with V together; its softmax of
tile i runs while the tensor cores work on that product, and then for the other consumers. Tiles
that need mask code come first.

Called as impl "sm90" of `bsk::attn_fwd`. Limits: fp16 and bf16, D and Dv up to 128, a positive
factor of scores, strides and addresses that TMA takes, and those of `fwd.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device.gluon.partials import columns_of, rows_of, store_part
from ...device.gluon.pipeline import (
    barriers,
    ring_place,
    take,
    tile_at,
    tile_place,
    tiles,
    work_channel,
)
from ...device.gluon.row_parts import (
    add_parts,
    any_raised,
    keep_columns,
    pin_above,
    row_maxima,
    row_parts,
    scale_rows,
    softmax_step_parts,
)
from ...device.gluon.warps import shared_address
from ...device.masks import bit_visible, exists, position, row_bounds, within_bounds
from ...device.partials import is_last, part_slot
from ...device.records import VisitPlan
from ...device.schedule import batch_and_heads, lse_offset
from ...device.scores import cap
from ...device.softmax import (
    add_sink,
    finalise,
    init_state,
    join_state,
    raise_maximum,
    softmax_step,
    weights_of,
)
from ...device.visits import bits_of_tile, keys_of_tile, masked_unit, num_masked_units, tile_ordinal
from ...launch.descriptors import GROUP_ROWS
from .forward_producer import (
    count_tiles,
    dense_tile,
    find_work,
    needs_mask,
    piece_lengths,
    produce_found,
    produce_tiles,
)

# Stages of K and V that the warps of a consumer wait for and free, and the turns of consumers.
#
# Gluon's barriers are those of a whole warp group, which stops twice a tile for them. Here each
# warp waits and arrives for itself. `ARRAY` says at which barriers: full K, free K, full V, free
# V. They lie behind the tiles, `barrier_room` in each array (held by
# `test_attention_sm90_barriers.py`).


@gluon.constexpr_function
def _arriving(offset):
    return (
        "{ .reg .pred p; elect.sync _|p, -1; "
        f"@p mbarrier.arrive.shared::cta.b64 _, [$1+{offset}]; mov.b32 $0, 0; }}"
    )


@gluon.constexpr_function
def _waiting(offset):
    return (
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, "
        f"[$1+{offset}], $2; @!p bra.uni again; mov.b32 $0, 0; }}"
    )


@gluon.jit
def barrier_base(CFG: gl.constexpr):
    """Address of the barriers of K and V."""
    return shared_address(CFG.tile_bytes)


@gluon.jit
def free_stage(rings, stage, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Tell the producer that this warp has read a stage."""
    asm: gl.constexpr = _arriving(CFG.barrier_at(ARRAY))
    address = rings[2] + stage * 8
    gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [address], gl.int32, False, 1)


@gluon.jit
def await_stage(rings, stage, phase, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Wait for the copies into a stage, each warp for itself."""
    asm: gl.constexpr = _waiting(CFG.barrier_at(ARRAY))
    address = rings[2] + stage * 8
    gl.inline_asm_elementwise(asm, "=r,r,r,~{memory}", [address, phase], gl.int32, False, 1)


# the first named barrier that Triton does not use itself
FIRST_TURN = 9


@gluon.constexpr_function
def _turn(what, group):
    return f"bar.{what} {FIRST_TURN + group}, 256; mov.b32 $0, 0;"


@gluon.jit
def await_turn(GROUP: gl.constexpr, CFG: gl.constexpr):
    """Wait until the consumer before has issued its products."""
    if CFG.TURNS:
        asm: gl.constexpr = _turn("sync", GROUP)
        gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [0], gl.int32, False, 1)


@gluon.jit
def pass_turn(GROUP: gl.constexpr, CFG: gl.constexpr):
    """Let the next consumer issue its products."""
    if CFG.TURNS:
        asm: gl.constexpr = _turn("arrive", (GROUP + 1) % CFG.CONSUMERS)
        gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [0], gl.int32, False, 1)


# Masking the scores of a KV tile in the Hopper forward.


@gluon.jit
def mask_band(s, kv_start, bounds):
    """Scores of neighbouring keys from `kv_start` on, -inf outside of the band."""
    first, last, every_first, every_last = bounds
    width: gl.constexpr = s.shape[1]
    # what cuts the queries of other consumers may leave these alone
    if (kv_start + (width - 1) > every_last) | (kv_start < every_first):
        s = keep_columns(s, first - kv_start, last - kv_start)
    return s


@gluon.jit
def visible_keys(visit, kv_tile, q_index, q_start, bounds, CFG: gl.constexpr):
    """Which keys of a tile of mask blocks each query sees."""
    lists, plan, num_masked, kv_len = visit
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    columns: gl.constexpr = gl.SliceLayout(0, CFG.accumulator_layout(CFG.TILE_N))
    offs_n = gl.arange(0, tile_n, columns)
    ordinal, kv_in_unit = tile_ordinal(kv_tile, offs_n, tile_n, unit_size)
    unit = masked_unit(plan, ordinal)
    kv_pos = keys_of_tile(lists, unit, ordinal, num_masked, kv_in_unit, kv_len, tile_n, unit_size)
    visible = within_bounds(kv_pos[None, :], bounds[0][:, None], bounds[1][:, None])
    q_in_block = q_index - q_start // lists[5] * lists[5]
    words = bits_of_tile(
        lists, unit, ordinal, num_masked, q_in_block, kv_in_unit, tile_n, unit_size
    )
    return visible & bit_visible(words, kv_in_unit[None, :])


@gluon.jit
def mask_scores(s, visit, kv_tile, q_index, q_start, bounds, CFG: gl.constexpr):
    """Scores of a tile that needs mask code, -inf where a query does not see a key."""
    if visit[0] is None:
        s = mask_band(s, dense_tile(visit[1], kv_tile) * CFG.TILE_N, bounds)
    else:
        visible = visible_keys(visit, kv_tile, q_index, q_start, bounds, CFG)
        s = gl.where(visible, s, -float("inf"))
    return s


# One KV tile of the Hopper forward: its scores, together with the product of the tile before.

ROWS = gl.constexpr(GROUP_ROWS)
# Weights grow to 2**SLACK before the sums of a row are scaled, which then seldom happens. They keep
# their precision, and fp16 holds them.
SLACK = gl.constexpr(8)


@gluon.jit
def attend_tile(tile, rings, kv_tile, step, state, acc, p, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Take in the tile after the one at `step`, whose weights are `p`; return all of it anew.

    Maxima are found while the product of the tile before runs, the weights after it: exponentials,
    sums and conversions then share one stretch of code, and other consumers have the tensor cores.
    """
    q, visit, masked_tiles, q_index, q_start, bounds, score = tile
    k_smem, v_smem = rings[0], rings[1]
    m_log2, row_sum = state
    tile_n: gl.constexpr = CFG.TILE_N
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    last_stage, last_phase = ring_place(step, CFG.STAGES)
    step += 1
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(rings, stage, phase, 0, CFG)
    await_turn(GROUP, CFG)
    k = k_smem.index(stage).permute((1, 0))
    scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
    await_stage(rings, last_stage, last_phase, 2, CFG)
    product = warpgroup_mma(p, v_smem.index(last_stage), acc, is_async=True)
    pass_turn(GROUP, CFG)
    s = cap(warpgroup_mma_wait(1, deps=(scores,)), score[1])
    free_stage(rings, stage, 1, CFG)
    if needs_mask(visit[0], visit[1], kv_tile, masked_tiles):
        s = mask_scores(s, visit, kv_tile, q_index, q_start, bounds, CFG)
    m_new, shift, rescale = raise_maximum(m_log2, row_maxima(s, m_log2), score[0], SLACK)
    # ptxas would sink all of it below the wait, where it overlaps with nothing
    pin_above(m_new, rings[2], CFG.spare_at)
    raised = gl.convert_layout(any_raised(m_log2, m_new), o_rows)[:, None]
    acc = warpgroup_mma_wait(0, deps=(product,))
    free_stage(rings, last_stage, 3, CFG)
    factor = gl.convert_layout(rescale, o_rows)[:, None]
    acc = scale_rows(acc, factor, raised)
    weights = weights_of(s, score[0], shift)
    row_sum = add_parts(row_sum, rescale, weights)
    p = gl.convert_layout(weights.to(p.dtype), p_layout)
    return step, m_new, row_sum, acc, p


# Tiles at the edges of a band, for consumers of the Hopper forward that see half or nothing.

# Keys of half a tile.
HALF = gl.constexpr(64)


@gluon.jit
def attend_half(
    q,
    rings,
    step,
    state,
    acc,
    kv_start,
    bounds,
    score,
    START: gl.constexpr,
    GROUP: gl.constexpr,
    CFG: gl.constexpr,
):
    """Take in HALF keys from START on of the tile at `step`, which begins at `kv_start`."""
    k_smem, v_smem = rings[0], rings[1]
    s_layout: gl.constexpr = CFG.accumulator_layout(HALF)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    state_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_DV), 2)
    first, last, every_first, every_last = bounds
    first = gl.convert_layout(first, s_rows)
    last = gl.convert_layout(last, s_rows)
    m_log2 = gl.convert_layout(state[0], s_rows)
    row_sum = gl.convert_layout(state[1], s_rows)
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(rings, stage, phase, 0, CFG)
    k = k_smem.index(stage).slice(START, HALF, dim=0).permute((1, 0))
    no_scores = gl.zeros([ROWS, HALF], gl.float32, s_layout)
    await_turn(GROUP, CFG)
    scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
    pass_turn(GROUP, CFG)
    s = cap(warpgroup_mma_wait(0, deps=(scores,)), score[1])
    free_stage(rings, stage, 1, CFG)
    s = mask_band(s, kv_start + START, (first, last, every_first, every_last))
    m_log2, row_sum, weights, rescale = softmax_step(m_log2, row_sum, s, score[0])
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_DV))
    acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
    p = gl.convert_layout(weights.to(q.dtype), p_layout)
    await_stage(rings, stage, phase, 2, CFG)
    v = v_smem.index(stage).slice(START, HALF, dim=0)
    product = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(product,))
    free_stage(rings, stage, 3, CFG)
    m_log2 = gl.convert_layout(m_log2, state_rows)
    return m_log2, gl.convert_layout(row_sum, state_rows), acc


@gluon.jit
def _pass_tile(rings, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Free the tile at `step` unread."""
    stage, phase = ring_place(step, CFG.STAGES)
    await_stage(rings, stage, phase, 0, CFG)
    await_turn(GROUP, CFG)
    pass_turn(GROUP, CFG)
    free_stage(rings, stage, 1, CFG)
    await_stage(rings, stage, phase, 2, CFG)
    free_stage(rings, stage, 3, CFG)


@gluon.jit
def pass_all(rings, count, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Free `count` tiles from `step` on."""
    for i in range(0, count):
        _pass_tile(rings, step + i, GROUP, CFG)


@gluon.jit
def pass_by(
    rings, plan, masked_tiles, any_last, step, taken, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Free the first tiles of a piece, whose keys come after `any_last`; return how many."""
    passed = 0
    while (taken + passed < masked_tiles) & (any_last < dense_tile(plan, passed) * CFG.TILE_N):
        _pass_tile(rings, step + passed, GROUP, CFG)
        passed += 1
    return passed


# Pieces of work of the Hopper forward that several programs share, each of them some of the keys.
#
# The last pieces, when there are too few of them for all programs, are one stretch of KV tiles, of
# which every program has the same share. Slots and counters are those of `device.partials`, one for
# each consumer; the counters come after the one for pieces of work.


@gluon.jit
def meet(tail, share, begins, ends, state, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Leave this program's part of a softmax for the others, or put all parts together.

    `share` is this program's, `begins` and `ends` those of the first and last part. Returns whether
    this was the last one to come, and state and accumulators, which are of all parts if so.
    """
    parts_ptr, counter_ptr = tail
    tile_dv: gl.constexpr = CFG.TILE_DV
    consumers: gl.constexpr = CFG.CONSUMERS
    state_ptr = parts_ptr + gl.num_programs(0).to(gl.int64) * (2 * consumers * ROWS * tile_dv)
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    m_log2 = gl.convert_layout(state[0], rows)
    row_sum = gl.convert_layout(state[1], rows)
    slot = part_slot(share, begins) * consumers + GROUP
    store_part(parts_ptr, state_ptr, slot, m_log2, row_sum, acc, ROWS)
    last = is_last(counter_ptr + (1 + GROUP) + begins * consumers, ends - begins + 1)
    if last:
        offs_m = rows_of(acc)
        offsets = offs_m[:, None] * tile_dv + columns_of(acc)[None, :]
        m_log2, row_sum = init_state(offs_m)
        acc = gl.zeros([ROWS, tile_dv], gl.float32, layout)
        # in their order, whoever is last: the bits do not depend on the race
        for other in range(begins, ends + 1):
            slot = part_slot(other, begins) * consumers + GROUP
            state_at = state_ptr + slot * (2 * ROWS) + offs_m
            # past the L1, which does not see what other SMs write
            m_part = gl.load(state_at, cache_modifier=".cg")
            sum_part = gl.load(state_at + ROWS, cache_modifier=".cg")
            at = parts_ptr + slot.to(gl.int64) * (ROWS * tile_dv) + offsets
            part = gl.load(at, cache_modifier=".cg")
            m_log2, row_sum, rescale, factor = join_state(m_log2, row_sum, m_part, sum_part)
            acc = acc * rescale[:, None] + part * factor[:, None]
    state_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    m_log2 = gl.convert_layout(m_log2, state_rows)
    return last, m_log2, gl.convert_layout(row_sum, state_rows), acc


# What describes a piece of work: the six bounds of a visit plan, plane and query tile; of packed
# sequences also the first query token, queries and keys.
DENSE_FIELDS = gl.constexpr(8)
PACKED_FIELDS = gl.constexpr(11)
# ... of pieces that programs may share also tiles of this part, program, first and last of all.
SHARED_FIELDS = gl.constexpr(13)


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Attend with 64 queries, piece by piece of work."""
    if CFG.OVERLAP:
        gdc_wait()
    out_desc, lse_ptr, lse_head_stride, sinks_ptr, score, out_tiles, tail = consume
    mask, q_ring, k_ring, v_ring, work, lengths, heads, band, cu_seqlens = shared
    q_smem, q_full, q_empty = q_ring
    k_smem, v_smem = k_ring[0], v_ring[0]
    first_row: gl.constexpr = GROUP * ROWS
    tile_n: gl.constexpr = CFG.TILE_N
    tile_dv: gl.constexpr = CFG.TILE_DV
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_DV)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    out_smem = out_tiles.index(GROUP)
    no_scores = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    rings = (k_smem, v_smem, barrier_base(CFG))
    step = 0
    turn = 0
    if GROUP == 0:
        # the first turn is the first consumer's
        pass_turn(CFG.CONSUMERS - 1, CFG)
    piece = take(work, turn)
    while piece[6] >= 0:
        plan = VisitPlan(piece[0], piece[1], piece[2], piece[3], piece[4], piece[5])
        q_first, q_len, kv_len = piece_lengths(piece, lengths)
        batch, q_head, _ = batch_and_heads(piece[6], heads[0], heads[1])
        q_start = piece[7] * CFG.tile_m
        q_index = q_start + first_row + rows
        first, last = row_bounds(position(q_index, q_len, kv_len), kv_len, band[0], band[1])
        first_pos = position(q_start + first_row, q_len, kv_len)
        any_first, every_last = row_bounds(first_pos, kv_len, band[0], band[1])
        every_first, any_last = row_bounds(first_pos + (ROWS - 1), kv_len, band[0], band[1])
        bounds = (first, last, every_first, every_last)
        masked_tiles, kv_tiles = count_tiles(plan, CFG)
        visit = (mask[0], plan, num_masked_units(plan), kv_len)
        m_log2, row_sum = init_state(q_index)
        acc = gl.zeros([ROWS, tile_dv], gl.float32, o_layout)
        q_stage = turn % CFG.Q_STAGES
        q = q_smem.index(q_stage * CFG.CONSUMERS + GROUP)
        mbarrier.wait(q_full.index(q_stage), (turn // CFG.Q_STAGES) & 1)
        if CFG.Q_REGISTERS:
            q = q.load(gl.DotOperandLayout(0, s_layout, 2))
        taken = 0
        if CFG.SHARED_TAIL:
            taken = piece[8]
            kv_tiles = piece[9]
        if CFG.ABSENT:  # noqa: SIM102
            if q_start + first_row >= q_len:
                # none of its queries exists
                pass_all(rings, kv_tiles - taken, step, GROUP, CFG)
                step += kv_tiles - taken
                taken = kv_tiles
        if CFG.HALF_TILES and CFG.CONSUMERS > 2:
            passed = pass_by(rings, plan, masked_tiles, any_last, step, taken, GROUP, CFG)
            step += passed
            taken += passed
        if CFG.HALF_TILES:
            kv_start = dense_tile(plan, taken) * tile_n
            if (masked_tiles > taken) & (any_last < kv_start + HALF):
                # The same queries, so written that ptxas cannot know it. That of CUDA 12.8 would
                # keep their descriptors for after the branch, without them where it is not taken.
                same = q_smem.index(q_stage * CFG.CONSUMERS + GROUP + gl.minimum(q_len, 0))
                m_log2, row_sum, acc = attend_half(
                    same, rings, step, (m_log2, row_sum), acc, kv_start, bounds, score,
                    0, GROUP, CFG,
                )  # fmt: skip
                step += 1
                taken += 1
        # whether half of the last tile is all that is seen of it
        halved = False
        if CFG.HALF_TILES:
            left_start = plan[2] * tile_n
            halved = (plan[2] < plan[3]) & (any_first >= left_start + HALF)
            halved = halved & (kv_tiles > taken + 1)
            kv_tiles = gl.where(halved, kv_tiles - 1, kv_tiles)
        nothing = row_parts(no_scores)
        part_rows: gl.constexpr = gl.SliceLayout(1, nothing.type.layout)
        row_sum = nothing + 0.25 * gl.convert_layout(row_sum, part_rows)[:, None]
        if kv_tiles > taken:
            stage, phase = ring_place(step, CFG.STAGES)
            await_stage(rings, stage, phase, 0, CFG)
            k = k_smem.index(stage).permute((1, 0))
            await_turn(GROUP, CFG)
            scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            pass_turn(GROUP, CFG)
            s = cap(warpgroup_mma_wait(0, deps=(scores,)), score[1])
            free_stage(rings, stage, 1, CFG)
            if needs_mask(mask[0], plan, taken, masked_tiles):
                s = mask_scores(s, visit, taken, q_index, q_start, bounds, CFG)
            m_log2, row_sum, weights, rescale = softmax_step_parts(
                m_log2, row_sum, s, score[0], SLACK
            )
            if CFG.HALF_TILES:
                acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)
            tile = (q, visit, masked_tiles, q_index, q_start, bounds, score)
            for kv_tile in range(taken + 1, kv_tiles):
                step, m_log2, row_sum, acc, p = attend_tile(
                    tile, rings, kv_tile, step, (m_log2, row_sum), acc, p, GROUP, CFG
                )
            stage, phase = ring_place(step, CFG.STAGES)
            # every score of this piece is taken: the next queries may come
            mbarrier.arrive(q_empty.index(q_stage), count=1, pred=not halved)
            await_stage(rings, stage, phase, 2, CFG)
            product = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(product,))
            free_stage(rings, stage, 3, CFG)
            step += 1
        else:
            mbarrier.arrive(q_empty.index(q_stage), count=1)

        row_sum = gl.convert_layout(gl.sum(row_sum, 1), m_log2.type.layout)
        if CFG.HALF_TILES:  # noqa: SIM102
            if halved:
                same = q_smem.index(q_stage * CFG.CONSUMERS + GROUP + gl.minimum(q_len, 0))
                m_log2, row_sum, acc = attend_half(
                    same, rings, step, (m_log2, row_sum), acc, left_start, bounds,
                    score, HALF, GROUP, CFG,
                )  # fmt: skip
                step += 1
                mbarrier.arrive(q_empty.index(q_stage), count=1)
        complete = True
        if CFG.SHARED_TAIL:  # noqa: SIM102
            if piece[11] < piece[12]:
                complete, m_log2, row_sum, acc = meet(
                    tail, piece[10], piece[11], piece[12], (m_log2, row_sum), acc, GROUP, CFG
                )
        if complete:
            if sinks_ptr is not None:
                m_log2, row_sum, rescale = add_sink(m_log2, row_sum, gl.load(sinks_ptr + q_head))
                acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
            inverse, lse = finalise(m_log2, row_sum)
            out = acc * gl.convert_layout(inverse, o_rows)[:, None]
            # the copy of the piece before must have read the buffer
            tma.store_wait(0)
            out_smem.store(out.to(dtype))
            fence_async_shared()
            q_row = q_start + first_row
            out_place = tile_place(cu_seqlens[0], batch, q_head, q_first, q_len)
            tma.async_copy_shared_to_global(out_desc, tile_at(out_place, q_row), out_smem)
            lse_plane = lse_offset(batch, q_head, q_first, heads[0], lse_head_stride, cu_seqlens[0])
            gl.store(lse_ptr + lse_plane + q_index, lse, mask=exists(q_index, q_len))
        turn += 1
        piece = take(work, turn)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "mask_batch_step", "mask_head_step", "q_len", "kv_len", "left", "right",
        "num_planes", "section", "dynamic", "share", "q_heads", "group_size",
    ]
)  # fmt: skip
def _attn_fwd_sm90_kernel(
    out_desc,
    lse_ptr,
    q_desc,
    k_desc,
    v_desc,
    sinks_ptr,
    cu_seqlens,
    workspace,
    block_lists,
    mask_batch_step,
    mask_head_step,
    lse_head_stride,
    q_len,
    kv_len,
    left,
    right,
    num_planes,
    section,
    dynamic,
    share,
    q_heads,
    group_size,
    score,
    CFG: gl.constexpr,
):
    """Set up rings and roles; `produce_tiles` and `_consume` do the work.

    workspace (counters, order of mask rows, parts of softmaxes that programs share)
    """
    if CFG.OVERLAP:
        # the next kernel may start as soon as there is room for it; it waits where it has to
        gdc_launch_dependents()
    consumers: gl.constexpr = CFG.CONSUMERS
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    q_smem = tiles(q_desc, CFG.Q_STAGES * consumers, ROWS)
    out_smem = tiles(out_desc, consumers, ROWS)
    k_smem = tiles(k_desc, stages, tile_n)
    v_smem = tiles(v_desc, stages, tile_n)
    q_ring = (q_smem, barriers(CFG.Q_STAGES, 1), barriers(CFG.Q_STAGES, consumers))
    arrivals: gl.constexpr = CFG.arrivals
    room: gl.constexpr = CFG.barrier_room
    k_ring = (k_smem, barriers(stages, 1, room), barriers(stages, arrivals, room))
    v_ring = (v_smem, barriers(stages, 1, room), barriers(stages, arrivals, room))
    fields: gl.constexpr = DENSE_FIELDS if cu_seqlens[0] is None else PACKED_FIELDS
    takers: gl.constexpr = consumers + 1 if CFG.SCOUT else consumers
    work = work_channel(SHARED_FIELDS if CFG.SHARED_TAIL else fields, takers)
    if CFG.SCOUT:
        begun = barriers(1, 1).index(0)
    fence_async_shared()

    mask = (block_lists, mask_batch_step, mask_head_step)
    heads = (q_heads, group_size)
    schedule = (workspace[1], num_planes, section, dynamic, share)
    produce = (q_desc, k_desc, v_desc, workspace[0], schedule)
    tail = (workspace[2], workspace[0])
    consume = (out_desc, lse_ptr, lse_head_stride, sinks_ptr, score, out_smem, tail)
    lengths = (q_len, kv_len)
    shared = (mask, q_ring, k_ring, v_ring, work, lengths, heads, (left, right), cu_seqlens)
    # the first role runs in the warps of the launch, the others in warps of their own
    if CFG.SCOUT and consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, 0, CFG)),
                (produce_found, (produce, shared, begun, CFG)),
                (find_work, (produce, shared, begun, CFG)),
            ],
            [1, 1],
            [producer_registers, producer_registers],
        )
    elif CFG.SCOUT:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, 0, CFG)),
                (_consume, (consume, shared, 1, CFG)),
                (produce_found, (produce, shared, begun, CFG)),
                (find_work, (produce, shared, begun, CFG)),
            ],
            [4, 1, 1],
            [registers, producer_registers, producer_registers],
        )
    elif consumers == 1:
        gl.warp_specialize(
            [(_consume, (consume, shared, 0, CFG)), (produce_tiles, (produce, shared, CFG))],
            [1],
            [producer_registers],
        )
    elif consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, 0, CFG)),
                (_consume, (consume, shared, 1, CFG)),
                (produce_tiles, (produce, shared, CFG)),
            ],
            [4, 1],
            [registers, producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, 0, CFG)),
                (_consume, (consume, shared, 1, CFG)),
                (_consume, (consume, shared, 2, CFG)),
                (produce_tiles, (produce, shared, CFG)),
            ],
            [4, 4, 1],
            [registers, registers, producer_registers],
        )
