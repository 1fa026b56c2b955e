# mypy: ignore-errors
"""The producer side of the Hopper forward: finding work tiles and keeping the rings full.

In this order: the records that the roles share, what both sides derive from a `WorkTile`, the
lookup of work, the copies, and the roles. The roles are `produce_tiles` alone, or `find_work` and
`produce_scheduled` if a scheduler warp looks up the rows of a mask.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from ...device.gates import gate_row
from ...device.gluon.compat import async_load
from ...device.gluon.memory import copy_to_shared
from ...device.gluon.pipeline import claim, publish, take, tile_at, tile_place
from ...device.gluon.warps import shared_address
from ...device.masks import kv_range, kv_range_of_all
from ...device.records import Span, VisitPlan
from ...device.schedule import (
    batch_and_heads,
    count_packed_tiles,
    place_in_sequence,
    raster_group_size,
    raster_place,
    sequence_of_tile,
    token_span,
)
from ...device.visits import (
    keys_of_tile,
    masked_block,
    num_full_blocks,
    num_masked_blocks,
    num_tiles,
    plan_blocks,
    plan_dense,
    tile_ordinal,
)
from ...launch.descriptors import GROUP_ROWS

ROWS = gl.constexpr(GROUP_ROWS)
# Entries of a mask row, or sequences, read at a time, four by each thread of the producer.
SCAN = gl.constexpr(128)
# Numbers that describe a work tile: the bounds of its plan, (batch, head) and query tile.
DENSE_FIELDS = gl.constexpr(8)
# The same with `TileTokens`, for packed sequences, and with `TailPart`, for a split tail.
PACKED_FIELDS = gl.constexpr(11)
SPLIT_FIELDS = gl.constexpr(13)


class Workspace(NamedTuple):
    """Workspace of a launch."""

    counters: Any
    """Self-resetting: one that hands out work tiles, then one for each part of a split tail."""
    order: Any
    """Rows of the mask in the order in which programs take them, or None."""
    parts: Any
    """Softmax parts of the split tail, or None."""


class Schedule(NamedTuple):
    """Which work tiles there are and who takes them."""

    order: Any
    """As in `Workspace`."""
    num_batch_heads: Any
    raster_group: Any
    """(batch, head) pairs whose tiles run together; an upper bound for packed sequences."""
    dynamic: Any
    """Not 0 if programs claim tiles from the counter instead of taking every n-th."""
    tail_share: Any
    """KV tiles of the split tail that each program takes; 0 if the tail is not split."""


class ProducerArgs(NamedTuple):
    """Arguments of the producer and the scheduler warp."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    counters: Any
    schedule: Any
    gates: Any
    """`KeyGates`, or None."""


class ForwardShared(NamedTuple):
    """Shared by all roles of the forward."""

    mask: Any
    q_ring: Any
    k_ring: Any
    v_ring: Any
    work: Any
    lengths: Any
    heads: Any
    band: Any
    cu_seqlens: Any


class TileTokens(NamedTuple):
    """The packed sequence of a work tile: first query token, number of queries, of keys."""

    q_first: Any
    q_len: Any
    kv_len: Any


class TailPart(NamedTuple):
    """The KV tiles of a work tile that one program takes, and the shares that have the others."""

    first_tile: Any
    end_tile: Any
    share: Any
    """This program's share of the tail."""
    first_share: Any
    """First and last share with tiles of this work tile; equal if it is not split."""
    last_share: Any


class WorkTile(NamedTuple):
    """The next tile_m queries of one head to compute, as the producer publishes them."""

    plan: Any
    batch_head: Any
    """-1 when no work is left."""
    q_tile: Any
    tokens: Any
    """`TileTokens`; empty for dense batches, since functions cannot return None."""
    part: Any
    """`TailPart`; empty without a split tail."""


class Visit(NamedTuple):
    """A plan, with the lists that turn its blocks into positions of keys."""

    lists: Any
    plan: Any
    num_masked: Any
    """Blocks that need mask code."""
    kv_len: Any


# What both sides derive from a work tile.


@gluon.jit
def publish_work_tile(channel, slot, tile):
    """Hand a `WorkTile` to the consumers."""
    place = (tile.batch_head, tile.q_tile)
    publish(channel, slot, tile.plan + place + tile.tokens + tile.part)


@gluon.jit
def take_work_tile(
    channel,
    slot,
    WARPS: gl.constexpr = 4,
    PACKED: gl.constexpr = False,
    SPLIT_TAIL: gl.constexpr = False,
):
    """The `WorkTile` that was published in this slot, to be read by WARPS warps."""
    tokens = ()
    part = ()
    if SPLIT_TAIL:
        (
            partial_begin, partial_end, edge_begin, full_begin, full_end, edge_end,
            batch_head, q_tile, first_tile, end_tile, share, first_share, last_share,
        ) = take(channel, slot, WARPS)  # fmt: skip
        part = TailPart(first_tile, end_tile, share, first_share, last_share)
    elif PACKED:
        (
            partial_begin, partial_end, edge_begin, full_begin, full_end, edge_end,
            batch_head, q_tile, q_first, q_len, kv_len,
        ) = take(channel, slot, WARPS)  # fmt: skip
        tokens = TileTokens(q_first, q_len, kv_len)
    else:
        (
            partial_begin, partial_end, edge_begin, full_begin, full_end, edge_end,
            batch_head, q_tile,
        ) = take(channel, slot, WARPS)  # fmt: skip
    plan = VisitPlan(partial_begin, partial_end, edge_begin, full_begin, full_end, edge_end)
    return WorkTile(plan, batch_head, q_tile, tokens, part)


@gluon.jit
def tile_tokens(tile, lengths):
    """The `TileTokens` of a work tile; in a dense batch all sequences have the same `lengths`."""
    tokens = tile.tokens
    if len(tile.tokens) == 0:
        tokens = TileTokens(0, lengths.q, lengths.kv)
    return tokens


@gluon.jit
def count_tiles(plan, CFG: gl.constexpr):
    """How many KV tiles a work tile visits with mask code, and in all."""
    tile_n: gl.constexpr = CFG.TILE_N
    block_kv: gl.constexpr = CFG.BLOCK_KV
    masked = num_tiles(num_masked_blocks(plan), tile_n, block_kv)
    return masked, masked + num_tiles(num_full_blocks(plan), tile_n, block_kv)


@gluon.jit
def dense_tile(plan, kv_tile):
    """The KV tile that a work tile without a mask visits in place `kv_tile`.

    The right edge of its band comes first, then the inner tiles, then the left edge; both edges run
    from right to left. A consumer that sees nothing of the outermost tiles can then skip them at
    the beginning or the end.
    """
    num_right = plan.edge_end - plan.full_end
    after = kv_tile - num_right
    left = plan.full_begin - 1 - (after - num_full_blocks(plan))
    inner = gl.where(after < num_full_blocks(plan), plan.full_begin + after, left)
    return gl.where(after < 0, plan.edge_end - 1 - kv_tile, inner)


@gluon.jit
def needs_mask(lists, plan, kv_tile, masked_tiles):
    """Whether a KV tile needs mask code; under a mask the first `masked_tiles` do."""
    needs = kv_tile < masked_tiles
    if lists is None:
        after = kv_tile - (plan.edge_end - plan.full_end)
        # a single unsigned comparison, in which negative numbers are large
        needs = after.to(gl.uint32) >= num_full_blocks(plan).to(gl.uint32)
    return needs


# Finding work: the place of a work tile and its plan.


@gluon.jit
def count_q_tiles(mask, schedule, q_len, CFG: gl.constexpr):
    """How many work tiles a (batch, head) of a dense batch has."""
    if schedule.order is None:
        q_tiles = (q_len + CFG.tile_m - 1) // CFG.tile_m
    else:
        # an order lists whole rows of the mask; tiles past the last query are empty
        block_q = mask.lists.row_tokens
        q_tiles = (q_len + block_q - 1) // block_q * (block_q // CFG.tile_m)
    return q_tiles


@gluon.jit
def place_tile(mask, schedule, work_index, q_tiles, CFG: gl.constexpr):
    """(batch, head) and query tile of a work tile: by raster group, or by the given order."""
    if schedule.order is None:
        batch_head, q_tile = raster_place(
            work_index, schedule.num_batch_heads, q_tiles, schedule.raster_group
        )
    else:
        row_tiles = mask.lists.row_tokens // CFG.tile_m
        q_blocks = q_tiles // row_tiles
        entry = gl.load(schedule.order + work_index // row_tiles)
        batch_head = entry // q_blocks
        q_tile = entry % q_blocks * row_tiles + work_index % row_tiles
    return batch_head, q_tile


@gluon.jit
def place_packed_tile(
    cu_seqlens, work_index, sequence, num_sequences, most_heads, lengths, heads, CFG: gl.constexpr
):
    """Sequence, (batch, head), query tile and the spans of queries and keys of a work tile.

    `sequence` is the sequence of an earlier work tile, and `lengths` the maximum lengths. A raster
    group has at most `most_heads` heads.
    """
    offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
    sequence = sequence_of_tile(
        cu_seqlens.q, work_index, sequence, num_sequences, heads.q, offs_scan, CFG.tile_m
    )
    q_span = token_span(cu_seqlens.q, sequence, lengths.q)
    kv_span = token_span(cu_seqlens.kv, sequence, lengths.kv)
    kv_bytes: gl.constexpr = CFG.element_bytes * (CFG.TILE_D + CFG.TILE_DV)
    raster_group = raster_group_size(kv_span.length, heads.group_size, kv_bytes)
    q_head, q_tile = place_in_sequence(
        *(cu_seqlens.q, work_index, sequence, heads.q, gl.minimum(raster_group, most_heads)),
        CFG.tile_m,
    )
    return sequence, sequence * heads.q + q_head, q_tile, q_span, kv_span


@gluon.jit
def plan_tile(mask, batch_head, q_tile, q_len, kv_len, heads, band, CFG: gl.constexpr):
    """Which KV tiles the queries of a work tile visit."""
    tile_n: gl.constexpr = CFG.TILE_N
    block_kv: gl.constexpr = CFG.BLOCK_KV
    q_start = q_tile * CFG.tile_m
    q_end = q_start + CFG.tile_m
    kv_lo, kv_hi = kv_range(q_start, q_end, q_len, kv_len, band.left, band.right)
    all_lo, all_hi = kv_range_of_all(q_start, q_end, q_len, kv_len, band.left, band.right)
    lists = mask.lists
    if lists is None:
        plan = plan_dense(kv_lo, kv_hi, all_lo, all_hi, tile_n)
    else:
        place = batch_and_heads(batch_head, heads.q, heads.group_size)
        row = place.batch * mask.batch_step + place.q_head * mask.head_step
        row = row + q_start // lists.row_tokens
        offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
        plan = plan_blocks(lists, row, kv_lo, kv_hi, all_lo, all_hi, offs_scan, tile_n, block_kv)
    return plan


@gluon.jit
def claim_tile(counter_ptr, dynamic, work_index, total):
    """The next work tile of this program: by a static stride, or claimed from the counter."""
    next_index = work_index + gl.num_programs(0)
    if dynamic != 0:
        next_index = claim(counter_ptr, gl.num_programs(0), total)
    return next_index


# Copies.


@gluon.jit
def tile_starts(visit, kv_tile, CFG: gl.constexpr):
    """First keys of the copies that fill one KV tile of a plan."""
    lists, plan = visit.lists, visit.plan
    tile_n: gl.constexpr = CFG.TILE_N
    block_kv: gl.constexpr = CFG.BLOCK_KV
    parts: gl.constexpr = CFG.parts
    part_rows: gl.constexpr = CFG.part_rows
    masked_tiles, _ = count_tiles(plan, CFG)
    starts = ()
    if lists is None:
        starts = (dense_tile(plan, kv_tile) * tile_n,)
    else:
        for part in gl.static_range(parts):
            in_kind = kv_tile if kv_tile < masked_tiles else kv_tile - masked_tiles
            ordinal, kv_in_block = tile_ordinal(in_kind, part * part_rows, tile_n, block_kv)
            if kv_tile < masked_tiles:
                entry = masked_block(plan, ordinal)
                blocks = visit.num_masked
            else:
                entry = plan.full_begin + ordinal
                blocks = num_full_blocks(plan)
            # a tile with no block left is read from past the keys, where TMA fills zeros
            kv = keys_of_tile(
                lists, entry, ordinal, blocks, kv_in_block, visit.kv_len, tile_n, block_kv
            )
            starts = starts + (kv,)  # noqa: RUF005
    return starts


@gluon.jit
def copy_tile(
    desc,
    ring,
    step,
    starts,
    place,
    SLICES: gl.constexpr,
    CFG: gl.constexpr,
    TURNED: gl.constexpr = False,
    MORE_BYTES: gl.constexpr = 0,
):
    """Start the copies of one KV tile into a ring, once its stage is free.

    TURNED: keys are the columns of a tile, as fp8 WGMMA requires of values. MORE_BYTES is what
    copies started by the caller add to the same barrier.
    """
    parts: gl.constexpr = CFG.parts
    part_rows: gl.constexpr = CFG.part_rows
    width: gl.constexpr = ring.tiles.shape[2]
    channels: gl.constexpr = ring.tiles.shape[1]
    # a turned tile consists of several buffers, each with the keys of one copy
    buffers: gl.constexpr = CFG.TILE_N // ring.tiles.shape[2] if TURNED else 1
    stage = step % CFG.STAGES
    bar = ring.full.index(stage)
    tiles = ()
    for i in gl.static_range(SLICES * buffers):
        tiles = tiles + (ring.tiles.index(stage * (SLICES * buffers) + i),)  # noqa: RUF005
    mbarrier.wait(ring.empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
    mbarrier.expect(bar, SLICES * buffers * parts * desc.block_type.nbytes + MORE_BYTES)
    for i in gl.static_range(SLICES * buffers):
        tile = tiles[i]
        for part in gl.static_range(parts):
            if TURNED:
                key = starts[part] + i % buffers * width
                async_load(desc, tile_at(place, i // buffers * channels, key), bar, tile)
            elif parts == 1:
                async_load(desc, tile_at(place, starts[part], i * width), bar, tile)
            else:
                rows = tile.slice(part * part_rows, part_rows, dim=0)
                async_load(desc, tile_at(place, starts[part], i * width), bar, rows)


@gluon.jit
def copy_keys(produce, shared, step, starts, place, u, CFG: gl.constexpr):
    """Start the copies of a tile of keys, and of their gate scores `u` if there is a gate.

    Gate scores have twice as many stages as keys: a consumer frees the keys of a tile before it
    reads the gate scores of that tile for the last time, but frees no later keys before that.
    """
    bytes_of_gates: gl.constexpr = 4 * CFG.TILE_N if CFG.GATED else 0
    copy_tile(
        *(produce.k_desc, shared.k_ring, step, starts, place),
        *(CFG.d_slices, CFG, False, bytes_of_gates),
    )
    if CFG.GATED:
        parts: gl.constexpr = CFG.parts
        part_bytes: gl.constexpr = 4 * CFG.part_rows
        barrier = shared_address(CFG.tile_bytes) + step % CFG.STAGES * 8
        tile = shared_address(CFG.tile_bytes - CFG.gate_bytes)
        tile += step % CFG.gate_stages * bytes_of_gates
        for part in gl.static_range(parts):
            # a tile without a block begins at the length, which need not be a multiple of 4
            aligned = starts[part] // 4 * 4
            copy_to_shared(tile + part * part_bytes, u + aligned, part_bytes, barrier)


@gluon.jit
def copy_queries(desc, ring, slot, q_tile, place, CFG: gl.constexpr):
    """Start the copies of the queries of a work tile, once their stage is free."""
    consumers: gl.constexpr = CFG.CONSUMERS
    slices: gl.constexpr = CFG.d_slices
    stage = slot % CFG.Q_STAGES
    bar = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), ((slot // CFG.Q_STAGES) & 1) ^ 1)
    mbarrier.expect(bar, consumers * slices * desc.block_type.nbytes)
    for g in gl.static_range(consumers):
        row = q_tile * CFG.tile_m + g * ROWS
        for i in gl.static_range(slices):
            at = tile_at(place, row, i * CFG.SLICE_D)
            async_load(desc, at, bar, ring.tiles.index((stage * consumers + g) * slices + i))


@gluon.jit
def _fetch_tile(
    desc,
    ring,
    step,
    visit,
    kv_tile,
    place,
    SLICES: gl.constexpr,
    CFG: gl.constexpr,
    TURNED: gl.constexpr = False,
):
    """Start the copies of one KV tile of a plan into a ring, once its stage is free."""
    # before waiting for the stage, because reading the lists of a mask takes as long
    starts = tile_starts(visit, kv_tile, CFG)
    copy_tile(desc, ring, step, starts, place, SLICES, CFG, TURNED)


@gluon.jit
def _fetch_tiles(produce, shared, batch_head, plan, kv_span, begin, end, step, CFG: gl.constexpr):
    """Fetch the KV tiles `begin` to `end` of a plan; return the next step."""
    heads = shared.heads
    place = batch_and_heads(batch_head, heads.q, heads.group_size)
    visit = Visit(shared.mask.lists, plan, num_masked_blocks(plan), kv_span.length)
    kv_place = tile_place(
        shared.cu_seqlens.kv, place.batch, place.kv_head, kv_span.first, kv_span.length
    )
    for kv_tile in range(begin, end):
        for_k: gl.constexpr = CFG.d_slices
        for_v: gl.constexpr = CFG.dv_slices
        _fetch_tile(produce.k_desc, shared.k_ring, step, visit, kv_tile, kv_place, for_k, CFG)
        _fetch_tile(
            *(produce.v_desc, shared.v_ring, step, visit, kv_tile, kv_place, for_v, CFG), CFG.FP8
        )
        step += 1
    return step


@gluon.jit
def _announce(produce, shared, batch_head, q_tile, q_span, kv_span, part, slot, CFG: gl.constexpr):
    """Publish a work tile and fetch its queries; return its plan.

    `part` is empty, or the `TailPart` of this program.
    """
    heads = shared.heads
    place = batch_and_heads(batch_head, heads.q, heads.group_size)
    plan = plan_tile(
        *(shared.mask, batch_head, q_tile, q_span.length, kv_span.length, heads, shared.band), CFG
    )
    tokens = ()
    if shared.cu_seqlens.q is not None:
        tokens = TileTokens(q_span.first, q_span.length, kv_span.length)
    publish_work_tile(shared.work, slot, WorkTile(plan, batch_head, q_tile, tokens, part))
    q_place = tile_place(
        shared.cu_seqlens.q, place.batch, place.q_head, q_span.first, q_span.length
    )
    copy_queries(produce.q_desc, shared.q_ring, slot, q_tile, q_place, CFG)
    return plan


# Feeding the consumers one work tile: publish it, fetch its queries and its KV tiles.


@gluon.jit
def _feed(
    produce, shared, batch_head, q_tile, q_span, kv_span, part, step, slot, CFG: gl.constexpr
):
    """Feed a work tile, or a `part` of it; return the next step."""
    plan = _announce(produce, shared, batch_head, q_tile, q_span, kv_span, part, slot, CFG)
    begin = 0
    _, end = count_tiles(plan, CFG)
    if len(part) > 0:
        begin = part.first_tile
        end = part.end_tile
    return _fetch_tiles(produce, shared, batch_head, plan, kv_span, begin, end, step, CFG)


@gluon.jit
def _announce_dense(produce, shared, work_index, q_tiles, slot, CFG: gl.constexpr):
    """`_announce` a whole work tile of a dense batch."""
    batch_head, q_tile = place_tile(shared.mask, produce.schedule, work_index, q_tiles, CFG)
    q_span, kv_span = Span(0, shared.lengths.q), Span(0, shared.lengths.kv)
    _announce(produce, shared, batch_head, q_tile, q_span, kv_span, (), slot, CFG)


@gluon.jit
def _feed_claimed(
    produce, shared, work_index, next_index, total, q_tiles, step, slot, CFG: gl.constexpr
):
    """Fetch the KV tiles of an announced work tile and announce the next; return the next step."""
    lengths = shared.lengths
    batch_head, q_tile = place_tile(shared.mask, produce.schedule, work_index, q_tiles, CFG)
    plan = plan_tile(
        *(shared.mask, batch_head, q_tile, lengths.q, lengths.kv, shared.heads, shared.band), CFG
    )
    _, end = count_tiles(plan, CFG)
    kv_span = Span(0, lengths.kv)
    # once this work tile has filled the ring, the queries of the previous one are no longer needed
    full_ring = gl.minimum(end, CFG.STAGES)
    step = _fetch_tiles(produce, shared, batch_head, plan, kv_span, 0, full_ring, step, CFG)
    if next_index < total:
        _announce_dense(produce, shared, next_index, q_tiles, slot + 1, CFG)
    return _fetch_tiles(produce, shared, batch_head, plan, kv_span, full_ring, end, step, CFG)


@gluon.jit
def _feed_share(
    produce, shared, work_index, whole, q_tiles, kv_tiles, tail_tiles, step, slot, CFG: gl.constexpr
):
    """Feed a whole work tile, or a share of the split tail; return the next step and slot.

    The first `whole` work tiles are not split. The KV tiles of the others, `kv_tiles` each, are
    numbered through from 0 to `tail_tiles`, and every program has an equal share of them.
    """
    schedule = produce.schedule
    share = schedule.tail_share
    begin = 0
    end = kv_tiles
    if work_index >= whole:
        begin = (work_index - whole) * share
        end = gl.minimum(begin + share, tail_tiles)
    while begin < end:
        index = work_index
        first_tile = begin
        end_tile = end
        first_share = 0
        last_share = 0
        if work_index >= whole:
            in_tail = begin // kv_tiles
            index = whole + in_tail
            first_tile = begin - in_tail * kv_tiles
            end_tile = gl.minimum(first_tile + (end - begin), kv_tiles)
            first_share = in_tail * kv_tiles // share
            last_share = ((in_tail + 1) * kv_tiles - 1) // share
        batch_head, q_tile = place_tile(shared.mask, schedule, index, q_tiles, CFG)
        q_span, kv_span = Span(0, shared.lengths.q), Span(0, shared.lengths.kv)
        part = TailPart(first_tile, end_tile, work_index - whole, first_share, last_share)
        step = _feed(produce, shared, batch_head, q_tile, q_span, kv_span, part, step, slot, CFG)
        slot += 1
        begin += end_tile - first_tile
    return step, slot


@gluon.jit
def _publish_end(shared, slot, CFG: gl.constexpr):
    """Tell the consumers that no work is left."""
    tokens = ()
    part = ()
    if shared.cu_seqlens.q is not None:
        tokens = TileTokens(0, 0, 0)
    if CFG.SPLIT_TAIL:
        part = TailPart(0, 0, 0, 0, 0)
    publish_work_tile(shared.work, slot, WorkTile(VisitPlan(0, 0, 0, 0, 0, 0), -1, 0, tokens, part))


@gluon.jit
def produce_tiles(produce, shared, CFG: gl.constexpr):
    """Role of the producer warp: take work tiles, publish them and keep the rings full."""
    if CFG.PDL:
        # until the previous kernels have finished, they may read or write any memory
        gdc_wait()
    schedule = produce.schedule
    lengths, heads, cu_seqlens = shared.lengths, shared.heads, shared.cu_seqlens
    step = 0
    slot = 0
    sequence = 0
    if CFG.SPLIT_TAIL:
        q_tiles = count_q_tiles(shared.mask, schedule, lengths.q, CFG)
        kv_tiles = (lengths.kv + (CFG.TILE_N - 1)) // CFG.TILE_N
        # if the last work tiles are too few for all programs, their KV tiles are shared equally
        left_over = schedule.num_batch_heads * q_tiles % gl.num_programs(0)
        tail_tiles = gl.where(schedule.tail_share > 0, left_over * kv_tiles, 0)
        split = gl.where(schedule.tail_share > 0, left_over, 0)
        whole = schedule.num_batch_heads * q_tiles - split
        total = whole + gl.minimum(tail_tiles, gl.num_programs(0))
    elif cu_seqlens.q is None:
        q_tiles = count_q_tiles(shared.mask, schedule, lengths.q, CFG)
        total = schedule.num_batch_heads * q_tiles
    else:
        num_sequences = schedule.num_batch_heads // heads.q
        total = count_packed_tiles(cu_seqlens.q, num_sequences, heads.q, CFG.tile_m)
    work_index = gl.program_id(0)
    if CFG.CLAIM_AHEAD and work_index < total:
        _announce_dense(produce, shared, work_index, q_tiles, slot, CFG)
    while work_index < total:
        if shared.mask.lists is not None or CFG.CLAIM_AHEAD:
            # claim early: looking up a row of a mask takes long, and short rows come last
            next_index = claim_tile(produce.counters, schedule.dynamic, work_index, total)
        if CFG.SPLIT_TAIL:
            step, slot = _feed_share(
                produce, shared, work_index, whole, q_tiles, kv_tiles, tail_tiles, step, slot, CFG
            )
        elif CFG.CLAIM_AHEAD:
            step = _feed_claimed(
                produce, shared, work_index, next_index, total, q_tiles, step, slot, CFG
            )
            slot += 1
        elif cu_seqlens.q is None:
            batch_head, q_tile = place_tile(shared.mask, schedule, work_index, q_tiles, CFG)
            q_span, kv_span = Span(0, lengths.q), Span(0, lengths.kv)
            step = _feed(produce, shared, batch_head, q_tile, q_span, kv_span, (), step, slot, CFG)
            slot += 1
        else:
            sequence, batch_head, q_tile, q_span, kv_span = place_packed_tile(
                *(cu_seqlens, work_index, sequence, num_sequences, schedule.raster_group),
                *(lengths, heads, CFG),
            )
            if q_tile * CFG.tile_m < q_span.length:
                step = _feed(
                    produce, shared, batch_head, q_tile, q_span, kv_span, (), step, slot, CFG
                )
                slot += 1
        if shared.mask.lists is None and not CFG.CLAIM_AHEAD:
            # claim late, with the last copies of this work tile in flight, so that slow programs
            # claim fewer tiles
            next_index = claim_tile(produce.counters, schedule.dynamic, work_index, total)
        work_index = next_index
    _publish_end(shared, slot, CFG)


# The roles if a scheduler warp looks up work tiles ahead of the producer. Claiming a row of a mask,
# finding it in the order of rows, reading its list and its bounds are four dependent reads. They
# take longer than the tiles that a producer runs ahead last.


@gluon.jit
def find_work(produce, shared, begun, CFG: gl.constexpr):
    """Role of the scheduler warp: publish a work tile once the producer has `begun` the last."""
    schedule = produce.schedule
    lengths = shared.lengths
    q_tiles = count_q_tiles(shared.mask, schedule, lengths.q, CFG)
    total = schedule.num_batch_heads * q_tiles
    slot = 0
    work_index = gl.program_id(0)
    while work_index < total:
        batch_head, q_tile = place_tile(shared.mask, schedule, work_index, q_tiles, CFG)
        plan = plan_tile(
            *(shared.mask, batch_head, q_tile, lengths.q, lengths.kv, shared.heads, shared.band),
            CFG,
        )
        publish_work_tile(shared.work, slot, WorkTile(plan, batch_head, q_tile, (), ()))
        mbarrier.wait(begun, slot & 1)
        work_index = claim_tile(produce.counters, schedule.dynamic, work_index, total)
        slot += 1
    nothing = VisitPlan(0, 0, 0, 0, 0, 0)
    publish_work_tile(shared.work, slot, WorkTile(nothing, -1, 0, (), ()))


@gluon.jit
def produce_scheduled(produce, shared, begun, CFG: gl.constexpr):
    """Role of the producer warp if a scheduler warp publishes the work tiles."""
    v_desc, v_ring = produce.v_desc, shared.v_ring
    lengths, heads, cu_seqlens = shared.lengths, shared.heads, shared.cu_seqlens
    step = 0
    slot = 0
    tile = take_work_tile(shared.work, slot, 1)
    while tile.batch_head >= 0:
        mbarrier.arrive(begun, count=1)
        batch, q_head, kv_head = batch_and_heads(tile.batch_head, heads.q, heads.group_size)
        q_place = tile_place(cu_seqlens.q, batch, q_head, 0, lengths.q)
        kv_place = tile_place(cu_seqlens.kv, batch, kv_head, 0, lengths.kv)
        copy_queries(produce.q_desc, shared.q_ring, slot, tile.q_tile, q_place, CFG)
        visit = Visit(shared.mask.lists, tile.plan, num_masked_blocks(tile.plan), lengths.kv)
        _, end_tile = count_tiles(tile.plan, CFG)
        u = None
        if CFG.GATED:
            u = gate_row(produce.gates, batch, q_head).u
        if end_tile > 0:
            # consumers free the keys of a tile before the values of the tile before it
            starts = tile_starts(visit, 0, CFG)
            copy_keys(produce, shared, step, starts, kv_place, u, CFG)
            for kv_tile in range(1, end_tile):
                after = tile_starts(visit, kv_tile, CFG)
                copy_keys(produce, shared, step + 1, after, kv_place, u, CFG)
                copy_tile(v_desc, v_ring, step, starts, kv_place, CFG.dv_slices, CFG, CFG.FP8)
                starts = after
                step += 1
            copy_tile(v_desc, v_ring, step, starts, kv_place, CFG.dv_slices, CFG, CFG.FP8)
            step += 1
        slot += 1
        tile = take_work_tile(shared.work, slot, 1)
