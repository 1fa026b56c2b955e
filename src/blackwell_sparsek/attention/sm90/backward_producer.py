# mypy: ignore-errors
"""The producer of the Hopper backward: which queries a KV tile visits, and their copies."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from ...device.gluon.compat import async_load
from ...device.gluon.pipeline import publish, tile_at, tile_place
from ...device.masks import kv_range, q_range, q_range_of_all
from ...device.records import Lengths, MaskLists, VisitPlan
from ...device.schedule import (
    count_packed_tiles,
    first_slot,
    place_in_sequence,
    raster_group_of,
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
from .backward_shared import (
    PADDING,
    ROWS,
    Shared,
    StepInfo,
    padded_queries,
    write_info,
)
from .config import ORDERED_TILES

# Entries of a mask row read at a time, four by each thread of the producer.
SCAN = gl.constexpr(128)
NEAR_TILES = gl.constexpr(ORDERED_TILES)


class HeadVisit(NamedTuple):
    """One visit of a KV tile to the query blocks of a head (or of several heads in turn)."""

    lists: MaskLists
    plan: VisitPlan
    num_masked: Any
    """Blocks of the plan that need mask code."""
    kv_tile: Any
    head: Any
    """The number of this head among the `visit_heads` orders of visits."""
    ascending: Any
    """From the first queries to the last."""


class Part(NamedTuple):
    """A part of a query tile: first query, row of the bit pool or -1, rank of the KV tile."""

    q_row: Any
    bits_id: Any
    rank: Any


class WorkTile(NamedTuple):
    """A KV tile of a (batch, KV head), and how it visits queries."""

    batch_head: Any
    kv_tile: Any
    ascending: Any
    """As in `HeadVisit`."""
    q_first: Any
    """First token of its sequence among all queries, 0 unless packed."""
    kv_first: Any
    """The same among all keys."""
    first_row: Any
    """Row of the first query of its sequence, see `Shared`; 0 unless packed."""
    visits: Any
    """As `heads_of_visits` returns, for all sequences alike, since consumers count visits too."""
    heads: Any


class Progress(NamedTuple):
    """The progress of a producer."""

    step: Any
    slot: Any
    """Of the work channel."""
    work_tiles: Any


@gluon.jit
def _plan_queries(shared, batch, q_head, kv_tile, CFG: gl.constexpr):
    """Which query blocks of a head a KV tile visits."""
    mask, lengths, band = shared.mask, shared.lengths, shared.band
    tile_m: gl.constexpr = CFG.TILE_M
    block_q: gl.constexpr = CFG.BLOCK_Q
    kv_start = kv_tile * CFG.tile_n
    kv_end = kv_start + CFG.tile_n
    q_lo, q_hi = q_range(kv_start, kv_end, lengths.q, lengths.kv, band.left, band.right)
    all_lo, all_hi = q_range_of_all(kv_start, kv_end, lengths.q, lengths.kv, band.left, band.right)
    if kv_end > lengths.kv:
        # keys past the end are zeros with nonzero weights: mask code must hide them for all queries
        all_hi = 0
    if mask.lists is None:
        plan = plan_dense(q_lo, q_hi, all_lo, all_hi, block_q)
    else:
        row = batch * mask.batch_step + q_head * mask.head_step + kv_start // CFG.BLOCK_KV
        offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
        plan = plan_blocks(mask.lists, row, q_lo, q_hi, all_lo, all_hi, offs_scan, tile_m, block_q)
    return plan


@gluon.jit
def heads_of_visits(shared, CFG: gl.constexpr):
    """How often a KV tile visits the heads of its group, and how many heads each visit covers.

    Either one head per visit, or all heads together, query tile by query tile. With ordered
    accumulation under a band that hides later keys, each KV tile is shorter than the one before: in
    visits of one head, later tiles would catch up with tiles that must add first, so heads go
    together. Otherwise heads go one by one: KV tiles in flight are then a query tile or two apart;
    with several heads they would be that many times further apart, more than fits in the L2.
    """
    group_size = shared.heads.group_size
    if CFG.ORDERED and shared.mask.lists is None:
        band, kv_len = shared.band, shared.lengths.kv
        later_hidden = (band.right < kv_len) & (band.left >= kv_len)
        visits = gl.where(later_hidden, 1, group_size)
        heads = group_size // visits
    else:
        visits = group_size
        heads = 1
    return visits, heads


@gluon.jit
def _place_in_group(item, heads, CFG: gl.constexpr):
    """Query tile and head of a step of a visit to several heads; blocks stay whole."""
    tiles_of_block: gl.constexpr = CFG.last_in_block + 1
    of_block = item % (heads * tiles_of_block)
    q_tile = item // (heads * tiles_of_block) * tiles_of_block + of_block % tiles_of_block
    return q_tile, of_block // tiles_of_block


@gluon.jit
def _ascends(batch_head, order, kv_tiles, heads_here, shared):
    """Whether a KV tile without a mask visits queries from first to last, if dq is ordered.

    Under a band that hides later keys, each KV tile begins at different queries: if the last tiles,
    which are the shortest, run first, no tile waits for another. Not in the last raster group, in
    which the longest tiles run first, so that they do not run alone at the end: these begin at the
    last queries. Nor if KV tiles are many or visit several heads at a time: they would then be too
    far apart for the L2.
    """
    num_batch_heads = order.num_batch_heads
    group = gl.minimum(order.raster_group, num_batch_heads)
    last = (
        raster_group_of(batch_head, num_batch_heads, group)
        == gl.maximum(num_batch_heads // group, 1) - 1
    )
    near = (heads_here == 1) & (kv_tiles <= NEAR_TILES * gl.num_programs(0))
    return (shared.band.right < shared.lengths.kv) & (last == 0) & near


@gluon.jit
def _part_of_plan(plan, visit, ascending, CFG: gl.constexpr):
    """The part of a plan that a visit covers: all of it, or the later or the earlier queries.

    Tiles with and without mask code run in separate loops. Ordered accumulation takes queries from
    last to first or from first to last, so the edges before and after the tiles without mask code
    belong to two visits.
    """
    if CFG.ORDERED:
        later = (visit % 2 == 0) != ascending
        middle = gl.where(ascending, plan.full_end, plan.full_begin)
        plan = VisitPlan(
            plan.partial_begin,
            gl.where(later, plan.partial_begin, plan.partial_end),
            gl.where(later, middle, plan.edge_begin),
            gl.where(later, middle, plan.full_begin),
            gl.where(later, plan.full_end, middle),
            gl.where(later, plan.edge_end, middle),
        )
    return plan


@gluon.jit
def _rank_without_mask(block, visit, shared, CFG: gl.constexpr):
    """How many KV tiles that see a block of queries add to its dq before this one."""
    lengths, band = shared.lengths, shared.band
    q_row = block * CFG.BLOCK_Q
    first, end = kv_range(q_row, q_row + CFG.BLOCK_Q, lengths.q, lengths.kv, band.left, band.right)
    from_last = (end - 1) // CFG.tile_n - visit.kv_tile
    return gl.where(visit.ascending, from_last, visit.kv_tile - first // CFG.tile_n)


@gluon.jit
def _find_part(visit, order, q_tile, part: gl.constexpr, shared, CFG: gl.constexpr):
    """The `Part` of a query tile; its rank only with ordered accumulation."""
    lists, plan, num_masked = visit.lists, visit.plan, visit.num_masked
    tile_m: gl.constexpr = CFG.TILE_M
    block_q: gl.constexpr = CFG.BLOCK_Q
    masked_tiles = num_tiles(num_masked, tile_m, block_q)
    in_kind = q_tile if q_tile < masked_tiles else q_tile - masked_tiles
    if CFG.ORDERED:
        full_tiles = num_tiles(num_full_blocks(plan), tile_m, block_q)
        from_end = (masked_tiles if q_tile < masked_tiles else full_tiles) - 1 - in_kind
        # within a block always from the last tile to the first
        last: gl.constexpr = CFG.last_in_block
        in_kind = gl.where(visit.ascending, in_kind + last - in_kind % (last + 1) * 2, from_end)
    ordinal, q_in_block = tile_ordinal(in_kind, part * CFG.part_rows, tile_m, block_q)
    if q_tile < masked_tiles:
        block = masked_block(plan, ordinal)
        blocks = num_masked
    else:
        block = plan.full_begin + ordinal
        blocks = num_full_blocks(plan)
    # a part without a block is read from past all padded rows, where it has no effect; not from
    # past the queries: the innermost coordinate of the copy of lse must be 16-byte aligned
    end = padded_queries(shared.lengths.q)
    visited, listed = lists, block
    if order.visits is not None:
        # heads that share a list may visit its blocks in different orders
        visited = MaskLists(
            lists.indptr, lists.partial_end, order.visits, lists.bits_id, lists.bits,
            lists.row_tokens,
        )  # fmt: skip
        listed = block * order.visit_heads + visit.head
    q_row = keys_of_tile(visited, listed, ordinal, blocks, q_in_block, end, tile_m, block_q)
    bits_id = -1
    rank = 0
    if lists is not None:
        has_bits = (q_tile < masked_tiles) & (ordinal < blocks)
        bits_id = gl.load(lists.bits_id + block, mask=has_bits, other=-1)
    if CFG.ORDERED:
        if lists is None:
            rank = _rank_without_mask(block, visit, shared, CFG)
        else:
            tiles: gl.constexpr = CFG.BLOCK_KV // CFG.tile_n
            rank_ptr = order.ranks + listed * tiles + visit.kv_tile % tiles
            rank = gl.load(rank_ptr, ordinal < blocks, other=0)
    return Part(q_row, bits_id, rank)


@gluon.jit
def _fetch_step(
    descs, order, shared, step, visit, q_tile, batch, q_head, work_tile, CFG: gl.constexpr
):
    """Start the copies of one query tile of a work tile: queries, dout, lse and delta."""
    ring = shared.queries
    parts: gl.constexpr = CFG.parts
    rows: gl.constexpr = CFG.part_rows
    if shared.cu_seqlens is not None:
        batch_head = q_head
        q_ptr = shared.cu_seqlens.q
        q_place = tile_place(q_ptr, batch, q_head, work_tile.q_first, shared.lengths.q)
    else:
        batch_head = batch * shared.heads.q + q_head
        q_place = tile_place(None, batch, q_head, 0, shared.lengths.q)
    first = _find_part(visit, order, q_tile, 0, shared, CFG)
    second = Part(first.q_row + ROWS, first.bits_id, first.rank)
    if parts == 2:
        second = _find_part(visit, order, q_tile, 1, shared, CFG)
    stage = step % CFG.STAGES
    phase = ((step // CFG.STAGES) & 1) ^ 1
    mbarrier.wait(ring.empty.index(stage), phase)
    info = StepInfo(
        batch_head, first.q_row, second.q_row, first.bits_id, second.bits_id, first.rank,
        second.rank, work_tile.first_row, shared.lengths.q, shared.lengths.kv,
    )  # fmt: skip
    write_info(shared.steps, step, info)
    d_slices: gl.constexpr = CFG.d_slices
    dv_slices: gl.constexpr = CFG.dv_slices
    q_bytes: gl.constexpr = d_slices * descs.q.block_type.nbytes + descs.lse.block_type.nbytes
    dout_bytes: gl.constexpr = (
        dv_slices * descs.dout.block_type.nbytes + descs.delta.block_type.nbytes
    )
    full = ring.full.index(stage)
    mbarrier.expect(full, parts * (q_bytes if CFG.SPLIT_RING else q_bytes + dout_bytes))
    for part in gl.static_range(parts):
        q_row = first.q_row if part == 0 else second.q_row
        q = ()
        for i in gl.static_range(d_slices):
            tile = ring.q_smem.index(stage * d_slices + i)
            q = q + (tile.slice(part * rows, rows, dim=0),)  # noqa: RUF005
        lse = ring.lse_smem.index(stage).slice(part * rows, rows, dim=0)
        for i in gl.static_range(d_slices):
            async_load(descs.q, tile_at(q_place, q_row, i * CFG.slice_d), full, q[i])
        async_load(descs.lse, [batch_head, work_tile.first_row + q_row], full, lse)
    dout_stage = step % CFG.DOUT_STAGES
    dout_full = ring.dout_full.index(dout_stage)
    if CFG.SPLIT_RING:
        mbarrier.wait(ring.dout_empty.index(dout_stage), ((step // CFG.DOUT_STAGES) & 1) ^ 1)
        mbarrier.expect(dout_full, parts * dout_bytes)
    for part in gl.static_range(parts):
        q_row = first.q_row if part == 0 else second.q_row
        dout = ()
        for i in gl.static_range(dv_slices):
            tile = ring.dout_smem.index(dout_stage * dv_slices + i)
            dout = dout + (tile.slice(part * rows, rows, dim=0),)  # noqa: RUF005
        delta = ring.delta_smem.index(dout_stage).slice(part * rows, rows, dim=0)
        for i in gl.static_range(dv_slices):
            async_load(descs.dout, tile_at(q_place, q_row, i * CFG.slice_dv), dout_full, dout[i])
        async_load(descs.delta, [batch_head, work_tile.first_row + q_row], dout_full, delta)


@gluon.jit
def _fetch_keys(descs, keys, work_tiles, kv_place, kv_tile, CFG: gl.constexpr):
    """Start the copies of the keys and values of a work tile, once the last ones are free."""
    row_tiles: gl.constexpr = CFG.tile_n // ROWS
    d_slices: gl.constexpr = CFG.d_slices
    dv_slices: gl.constexpr = CFG.dv_slices
    k_bytes: gl.constexpr = d_slices * descs.k.block_type.nbytes
    v_bytes: gl.constexpr = dv_slices * descs.v.block_type.nbytes
    full = keys.full
    mbarrier.wait(keys.empty, (work_tiles & 1) ^ 1)
    mbarrier.expect(full, row_tiles * (k_bytes + v_bytes))
    for g in gl.static_range(row_tiles):
        row = kv_tile * CFG.tile_n + g * ROWS
        for i in gl.static_range(d_slices):
            place = tile_at(kv_place, row, i * CFG.slice_d)
            async_load(descs.k, place, full, keys.k_smem.index(g * d_slices + i))
        for i in gl.static_range(dv_slices):
            place = tile_at(kv_place, row, i * CFG.slice_dv)
            async_load(descs.v, place, full, keys.v_smem.index(g * dv_slices + i))


@gluon.jit
def _produce_tile(descs, order, shared, tile, done, CFG: gl.constexpr):
    """Publish a work tile, copy its keys and its queries; `shared` has its lengths."""
    work, heads = shared.work, shared.heads
    tile_m: gl.constexpr = CFG.TILE_M
    block_q: gl.constexpr = CFG.BLOCK_Q
    batch_head, kv_tile, ascending = tile.batch_head, tile.kv_tile, tile.ascending
    heads_here = tile.heads
    step, slot, work_tiles = done
    kv_heads = heads.q // heads.group_size
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    publish(work, slot, (batch_head, kv_tile))
    slot += 1
    if shared.cu_seqlens is not None:
        kv_ptr = shared.cu_seqlens.kv
        kv_place = tile_place(kv_ptr, batch, kv_head, tile.kv_first, shared.lengths.kv)
    else:
        key_head = kv_head // order.head_splits if CFG.SPLIT_HEADS else kv_head
        kv_place = tile_place(None, batch, key_head, 0, shared.lengths.kv)
    for visit in range(tile.visits * CFG.visits_per_head):
        first_head = kv_head * heads.group_size + visit // CFG.visits_per_head
        plan = _plan_queries(shared, batch, first_head, kv_tile, CFG)
        plan = _part_of_plan(plan, visit, ascending, CFG)
        num_masked = num_masked_blocks(plan)
        masked_tiles = num_tiles(num_masked, tile_m, block_q)
        q_tiles = masked_tiles + num_tiles(num_full_blocks(plan), tile_m, block_q)
        publish(work, slot, (q_tiles * heads_here, masked_tiles * heads_here))
        slot += 1
        if visit == 0:
            # after planning, during which the consumers may still need the last ones
            _fetch_keys(descs, shared.keys, work_tiles, kv_place, kv_tile, CFG)
        head = visit // CFG.visits_per_head % order.visit_heads
        found = HeadVisit(shared.mask.lists, plan, num_masked, kv_tile, head, ascending)
        for item in range(q_tiles * heads_here):
            q_tile, head_here = _place_in_group(item, heads_here, CFG)
            q_head = first_head + head_here
            _fetch_step(descs, order, shared, step, found, q_tile, batch, q_head, tile, CFG)
            step += 1
    return Progress(step, slot, work_tiles + 1)


@gluon.jit
def produce_steps(descs, order, shared, CFG: gl.constexpr):
    """Role of the producer warp: take work tiles, publish them and keep the rings full."""
    # PDL: preprocess writes lse and delta and zeroes the sums. The other warps touch the sums only
    # after the first copies have arrived.
    gdc_wait()
    heads = shared.heads
    order_ptr, num_batch_heads = order.order, order.num_batch_heads
    kv_heads = heads.q // heads.group_size
    visits, heads_here = heads_of_visits(shared, CFG)
    kv_tiles = (shared.lengths.kv + CFG.tile_n - 1) // CFG.tile_n
    total = num_batch_heads * kv_tiles
    sequence = 0
    if shared.cu_seqlens is not None:
        cu_seqlens = shared.cu_seqlens
        num_sequences = num_batch_heads // kv_heads
        total = count_packed_tiles(cu_seqlens.kv, num_sequences, kv_heads, CFG.tile_n)
    step = 0
    slot = 0
    work_tiles = 0
    work_tile = gl.program_id(0)
    if order.visits is not None:
        # planned: this program's own tiles, whose bounds are at the beginning of the list
        total = gl.load(order_ptr + work_tile + 1)
        work_tile = gl.load(order_ptr + work_tile)
        order_ptr += gl.num_programs(0) + 1
    elif CFG.ORDERED:
        # earlier work tiles, whose sums a tile waits for, must already run in some program
        work_tile = gl.atomic_add(order.counter, 1, sem="relaxed")
    while work_tile < total:
        ascending = work_tile < 0
        if shared.cu_seqlens is not None:
            offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
            sequence = sequence_of_tile(
                cu_seqlens.kv, work_tile, sequence, num_sequences, kv_heads, offs_scan, CFG.tile_n
            )
            in_sequence, from_end = place_in_sequence(
                cu_seqlens.kv, work_tile, sequence, kv_heads, order.raster_group, CFG.tile_n
            )
            slots = first_slot(cu_seqlens.kv, sequence + 1, CFG.tile_n) - first_slot(
                cu_seqlens.kv, sequence, CFG.tile_n
            )
            batch_head = sequence * kv_heads + in_sequence
            kv_tile = slots - 1 - from_end
        elif order_ptr is None:
            batch_head, from_end = raster_place(
                work_tile, num_batch_heads, kv_tiles, order.raster_group
            )
            # early keys tend to be seen by most queries
            kv_tile = kv_tiles - 1 - from_end
            if CFG.ORDERED:
                ascending = _ascends(batch_head, order, kv_tiles, heads_here, shared)
                kv_tile = gl.where(ascending, from_end, kv_tile)
        else:
            entry = gl.load(order_ptr + work_tile)
            batch_head = entry // kv_tiles
            kv_tile = entry % kv_tiles
        if shared.cu_seqlens is not None:
            q_span = token_span(cu_seqlens.q, sequence, 0)
            kv_span = token_span(cu_seqlens.kv, sequence, 0)
            here = Shared(
                shared.mask, shared.keys, shared.queries, shared.steps, shared.work,
                Lengths(q_span.length, kv_span.length), heads, shared.band, shared.cu_seqlens,
            )  # fmt: skip
            first_row = first_slot(cu_seqlens.q, sequence, PADDING) * PADDING
            tile = WorkTile(
                batch_head, kv_tile, ascending, q_span.first, kv_span.first, first_row, visits,
                heads_here,
            )  # fmt: skip
            # the last slot of a sequence may have no keys, and so no gradients
            if kv_tile * CFG.tile_n < kv_span.length:
                step, slot, work_tiles = _produce_tile(
                    descs, order, here, tile, Progress(step, slot, work_tiles), CFG
                )
        else:
            tile = WorkTile(batch_head, kv_tile, ascending, 0, 0, 0, visits, heads_here)
            step, slot, work_tiles = _produce_tile(
                descs, order, shared, tile, Progress(step, slot, work_tiles), CFG
            )
        # Claim late, when the copies of this tile are in flight: work tiles of many heads are long,
        # and claiming early would leave the last ones to few programs. With ordered accumulation,
        # other tiles would wait for one that has not begun.
        if order.visits is not None:
            work_tile += 1
        elif CFG.ORDERED:
            work_tile = gl.atomic_add(order.counter, 1, sem="relaxed")
        elif total > gl.num_programs(0):
            work_tile = gl.atomic_add(order.counter, 1, sem="relaxed") + gl.num_programs(0)
        else:
            work_tile += gl.num_programs(0)
    # the end, for consumers and the writer
    write_info(shared.steps, step, StepInfo(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    publish(shared.work, slot, (-1, 0))
