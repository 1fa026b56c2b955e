# mypy: ignore-errors
"""The producer of the Hopper backward: which queries a tile of keys visits, and their copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...device.gluon.pipeline import publish
from ...device.masks import kv_range, q_range, q_range_of_all
from ...device.records import MaskLists, VisitPlan
from ...device.schedule import place_in_sections, section_of
from ...device.visits import (
    keys_of_tile,
    masked_unit,
    num_full_units,
    num_masked_units,
    num_tiles,
    plan_blocks,
    plan_dense,
    tile_ordinal,
)
from ...launch.descriptors import GROUP_ROWS
from .config import INFO_DEPTH, ORDERED_TILES, QUERY_PADDING

ROWS = gl.constexpr(GROUP_ROWS)
DEPTH = gl.constexpr(INFO_DEPTH)
# Entries of a mask row read at a time, four by each thread of the producer.
SCAN = gl.constexpr(128)
PADDING = gl.constexpr(QUERY_PADDING)
NEAR_TILES = gl.constexpr(ORDERED_TILES)
# What describes a step: plane of the queries; then of each of two parts the first query, the bits,
# and how many tiles of keys add to its dq before.
INFO_FIELDS = gl.constexpr(7)


@gluon.jit
def step_info():
    """Memory for what describes the steps in flight."""
    return gl.allocate_shared_memory(
        gl.int32, [DEPTH * INFO_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def read_info(info, step, field: gl.constexpr, WARPS: gl.constexpr):
    """One number of what describes a step, read by so many warps."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(info.index(step % DEPTH * INFO_FIELDS + field).load(lanes), 0)


@gluon.jit
def _write_info(info, step, fields):
    """Describe a step; nobody reads any more what described the one `DEPTH` before."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, lane)
    for i in gl.static_range(len(fields)):
        info.index(step % DEPTH * INFO_FIELDS + i).store(zero + fields[i])


@gluon.jit
def _plan_queries(mask, batch, q_head, kv_tile, lengths, band, CFG: gl.constexpr):
    """Which query tiles of a head the keys of a piece visit."""
    lists, batch_step, head_step = mask
    tile_m: gl.constexpr = CFG.TILE_M
    unit_size: gl.constexpr = CFG.UNIT
    q_len, kv_len = lengths
    kv_start = kv_tile * CFG.tile_n
    kv_end = kv_start + CFG.tile_n
    q_lo, q_hi = q_range(kv_start, kv_end, q_len, kv_len, band[0], band[1])
    all_lo, all_hi = q_range_of_all(kv_start, kv_end, q_len, kv_len, band[0], band[1])
    if kv_end > kv_len:
        # keys past the end are zeros and would count: hiding them takes mask code for all queries
        all_hi = 0
    if lists is None:
        plan = plan_dense(q_lo, q_hi, all_lo, all_hi, unit_size)
    else:
        row = batch * batch_step + q_head * head_step + kv_start // CFG.BLOCK_KV
        offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
        plan = plan_blocks(lists, row, q_lo, q_hi, all_lo, all_hi, offs_scan, tile_m, unit_size)
    return plan


@gluon.jit
def padded_queries(q_len):
    """Rows of lse, delta and sums of dq in a plane: the first query of a part without any."""
    return (q_len + PADDING - 1) // PADDING * PADDING


@gluon.jit
def heads_of_visits(lists, lengths, band, group_size, CFG: gl.constexpr):
    """How many visits a tile of keys pays to a group of heads, and to how many of them at a time.

    One by one, or together: query tile by query tile. In order and where later keys are hidden,
    tiles of keys get shorter and shorter: head by head, later ones would catch up with those whose
    sums come first. Else one by one: tiles of keys are a query tile or two apart, and with several
    heads at a time as many times further, more than the L2 holds.
    """
    if CFG.ORDERED and lists is None:
        later_hidden = (band[1] < lengths[1]) & (band[0] >= lengths[1])
        visits = gl.where(later_hidden, 1, group_size)
        heads = group_size // visits
    else:
        visits = group_size
        heads = 1
    return visits, heads


@gluon.jit
def _place_in_group(item, heads, CFG: gl.constexpr):
    """Query tile and head of one of the steps of a visit to so many heads; units stay whole."""
    tiles_of_unit: gl.constexpr = CFG.last_in_unit + 1
    of_unit = item % (heads * tiles_of_unit)
    q_tile = item // (heads * tiles_of_unit) * tiles_of_unit + of_unit % tiles_of_unit
    return q_tile, of_unit // tiles_of_unit


@gluon.jit
def _ascends(plane, num_planes, kv_tiles, section, heads_here, lengths, band):
    """Whether a piece without a mask takes queries from the first to the last, in order.

    Where a band hides later keys, tiles of keys begin at queries of their own: the last tiles,
    which are the shortest, come first, and none meets another. In the last section the longest come
    first, so that they do not end alone, and meet at the last queries. So they do where they are
    long or have several heads at a time, and would be too far apart for the L2 otherwise.
    """
    section = gl.minimum(section, num_planes)
    last = section_of(plane, num_planes, section) == gl.maximum(num_planes // section, 1) - 1
    near = (heads_here == 1) & (kv_tiles <= NEAR_TILES * gl.num_programs(0))
    return (band[1] < lengths[1]) & (last == 0) & near


@gluon.jit
def _part_of_plan(plan, visit, ascending, CFG: gl.constexpr):
    """What of a plan is visited at once: all, or first the later queries and then the earlier, or
    the other way round.

    Tiles with and without mask code have loops of their own. In order, queries go from the last to
    the first or from the first to the last, so that edges before and after what needs no mask code
    are two visits.
    """
    if CFG.ORDERED:
        later = (visit % 2 == 0) != ascending
        middle = gl.where(ascending, plan[4], plan[3])
        plan = VisitPlan(
            plan[0],
            gl.where(later, plan[0], plan[1]),
            gl.where(later, middle, plan[2]),
            gl.where(later, middle, plan[3]),
            gl.where(later, plan[4], middle),
            gl.where(later, plan[5], middle),
        )
    return plan


@gluon.jit
def _turn_of_unit(unit, kv_tile, ascending, lengths, band, CFG: gl.constexpr):
    """How many tiles of keys that see a unit of queries come before this one, without a mask."""
    q_row = unit * CFG.UNIT
    first, end = kv_range(q_row, q_row + CFG.UNIT, lengths[0], lengths[1], band[0], band[1])
    from_last = (end - 1) // CFG.tile_n - kv_tile
    return gl.where(ascending, from_last, kv_tile - first // CFG.tile_n)


@gluon.jit
def _find_part(visit, q_tile, part: gl.constexpr, kv_tile, lengths, band, CFG: gl.constexpr):
    """First query of a part of a query tile, the row of the bit pool that covers it or -1, and its
    turn, where there are turns."""
    lists, plan, num_masked, turns_ptr, visits_ptr, heads, head, ascending = visit
    tile_m: gl.constexpr = CFG.TILE_M
    unit_size: gl.constexpr = CFG.UNIT
    masked_tiles = num_tiles(num_masked, tile_m, unit_size)
    in_kind = q_tile if q_tile < masked_tiles else q_tile - masked_tiles
    if CFG.ORDERED:
        full_tiles = num_tiles(num_full_units(plan), tile_m, unit_size)
        from_end = (masked_tiles if q_tile < masked_tiles else full_tiles) - 1 - in_kind
        # within a unit always from the last tile to the first
        last: gl.constexpr = CFG.last_in_unit
        in_kind = gl.where(ascending, in_kind + last - in_kind % (last + 1) * 2, from_end)
    ordinal, q_in_unit = tile_ordinal(in_kind, part * CFG.part_rows, tile_m, unit_size)
    if q_tile < masked_tiles:
        unit = masked_unit(plan, ordinal)
        units = num_masked
    else:
        unit = plan[3] + ordinal
        units = num_full_units(plan)
    # a part with no unit left is read from past all rows, where nothing counts; not from past the
    # queries: the innermost coordinate of a copy, which is that of lse, must be at 16 bytes
    end = padded_queries(lengths[0])
    visited, listed = lists, unit
    if visits_ptr is not None:
        # heads that share a list visit its blocks in orders of their own
        visited = MaskLists(lists[0], lists[1], visits_ptr, lists[3], lists[4], lists[5])
        listed = unit * heads + head
    q_row = keys_of_tile(visited, listed, ordinal, units, q_in_unit, end, tile_m, unit_size)
    bits_id = -1
    turn = 0
    if lists is not None:
        has_bits = (q_tile < masked_tiles) & (ordinal < units)
        bits_id = gl.load(lists[3] + unit, mask=has_bits, other=-1)
    if CFG.ORDERED:
        if lists is None:
            turn = _turn_of_unit(unit, kv_tile, ascending, lengths, band, CFG)
        else:
            tiles: gl.constexpr = CFG.BLOCK_KV // CFG.tile_n
            turn = gl.load(turns_ptr + listed * tiles + kv_tile % tiles, ordinal < units, other=0)
    return q_row, bits_id, turn


@gluon.jit
def _fetch_step(descs, shared, step, visit, q_tile, place, CFG: gl.constexpr):
    """Start the copies of one query tile: queries, output gradients, lse and delta."""
    q_desc, dout_desc, lse_desc, delta_desc = descs
    q_smem, dout_smem, lse_smem, delta_smem, full, empty, dout_full, dout_empty = shared[2]
    info, lengths, heads, band = shared[3], shared[5], shared[6], shared[7]
    batch, q_head, kv_tile = place
    parts: gl.constexpr = CFG.parts
    rows: gl.constexpr = CFG.part_rows
    plane = batch * heads[0] + q_head
    first, bits, turn = _find_part(visit, q_tile, 0, kv_tile, lengths, band, CFG)
    second, second_bits, second_turn = first + ROWS, bits, turn
    if parts == 2:
        second, second_bits, second_turn = _find_part(visit, q_tile, 1, kv_tile, lengths, band, CFG)
    stage = step % CFG.STAGES
    phase = ((step // CFG.STAGES) & 1) ^ 1
    mbarrier.wait(empty.index(stage), phase)
    _write_info(info, step, (plane, first, second, bits, second_bits, turn, second_turn))
    q_bytes: gl.constexpr = q_desc.block_type.nbytes + lse_desc.block_type.nbytes
    dout_bytes: gl.constexpr = dout_desc.block_type.nbytes + delta_desc.block_type.nbytes
    bar = full.index(stage)
    mbarrier.expect(bar, parts * (q_bytes if CFG.SPLIT_RING else q_bytes + dout_bytes))
    for part in gl.static_range(parts):
        q_row = first if part == 0 else second
        q = q_smem.index(stage).slice(part * rows, rows, dim=0)
        lse = lse_smem.index(stage).slice(part * rows, rows, dim=0)
        tma.async_copy_global_to_shared(q_desc, [batch, q_head, q_row, 0], bar, q)
        tma.async_copy_global_to_shared(lse_desc, [plane, q_row], bar, lse)
    dout_bar = dout_full.index(stage)
    if CFG.SPLIT_RING:
        mbarrier.wait(dout_empty.index(stage), phase)
        mbarrier.expect(dout_bar, parts * dout_bytes)
    for part in gl.static_range(parts):
        q_row = first if part == 0 else second
        dout = dout_smem.index(stage).slice(part * rows, rows, dim=0)
        delta = delta_smem.index(stage).slice(part * rows, rows, dim=0)
        tma.async_copy_global_to_shared(dout_desc, [batch, q_head, q_row, 0], dout_bar, dout)
        tma.async_copy_global_to_shared(delta_desc, [plane, q_row], dout_bar, delta)


@gluon.jit
def _fetch_keys(k_desc, v_desc, kv_ring, pieces, batch, kv_head, kv_tile, CFG: gl.constexpr):
    """Start the copies of the keys and values of a piece, once those before are done with."""
    k_smem, v_smem, full, empty = kv_ring
    consumers: gl.constexpr = CFG.CONSUMERS
    mbarrier.wait(empty, (pieces & 1) ^ 1)
    mbarrier.expect(full, consumers * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for g in gl.static_range(consumers):
        place = [batch, kv_head, kv_tile * CFG.tile_n + g * ROWS, 0]
        tma.async_copy_global_to_shared(k_desc, place, full, k_smem.index(g))
        tma.async_copy_global_to_shared(v_desc, place, full, v_smem.index(g))


@gluon.jit
def produce_steps(produce, shared, CFG: gl.constexpr):
    """Take pieces of work, publish them and keep the rings full."""
    descs, k_desc, v_desc, counter_ptr, schedule = produce
    mask, kv_ring, info, work = shared[0], shared[1], shared[3], shared[4]
    lengths, heads, band = shared[5], shared[6], shared[7]
    order_ptr, turns_ptr, visits_ptr, visit_heads, num_planes, section = schedule
    tile_m: gl.constexpr = CFG.TILE_M
    unit_size: gl.constexpr = CFG.UNIT
    q_heads, group_size = heads
    kv_heads = q_heads // group_size
    visits, heads_here = heads_of_visits(mask[0], lengths, band, group_size, CFG)
    kv_tiles = (lengths[1] + CFG.tile_n - 1) // CFG.tile_n
    total = num_planes * kv_tiles
    step = 0
    turn = 0
    pieces = 0
    piece = gl.program_id(0)
    if visits_ptr is not None:
        # planned: pieces of its own, whose places come before all pieces
        total = gl.load(order_ptr + piece + 1)
        piece = gl.load(order_ptr + piece)
        order_ptr += gl.num_programs(0) + 1
    elif CFG.ORDERED:
        # one that waits for the sums of earlier pieces must find them in running programs
        piece = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    while piece < total:
        ascending = piece < 0
        if order_ptr is None:
            plane, from_end = place_in_sections(piece, num_planes, kv_tiles, section)
            # early keys tend to be seen by most queries
            kv_tile = kv_tiles - 1 - from_end
            if CFG.ORDERED:
                ascending = _ascends(
                    plane, num_planes, kv_tiles, section, heads_here, lengths, band
                )
                kv_tile = gl.where(ascending, from_end, kv_tile)
        else:
            entry = gl.load(order_ptr + piece)
            plane = entry // kv_tiles
            kv_tile = entry % kv_tiles
        batch = plane // kv_heads
        kv_head = plane % kv_heads
        publish(work, turn, (plane, kv_tile))
        turn += 1
        for visit in range(visits * CFG.visits):
            first_head = kv_head * group_size + visit // CFG.visits
            plan = _plan_queries(mask, batch, first_head, kv_tile, lengths, band, CFG)
            plan = _part_of_plan(plan, visit, ascending, CFG)
            num_masked = num_masked_units(plan)
            masked_tiles = num_tiles(num_masked, tile_m, unit_size)
            q_tiles = masked_tiles + num_tiles(num_full_units(plan), tile_m, unit_size)
            publish(work, turn, (q_tiles * heads_here, masked_tiles * heads_here))
            turn += 1
            if visit == 0:
                # planned before, while the consumers still needed the last ones
                _fetch_keys(k_desc, v_desc, kv_ring, pieces, batch, kv_head, kv_tile, CFG)
            head = visit // CFG.visits % visit_heads
            found = (
                mask[0], plan, num_masked, turns_ptr, visits_ptr, visit_heads, head, ascending,
            )  # fmt: skip
            for item in range(q_tiles * heads_here):
                q_tile, head_here = _place_in_group(item, heads_here, CFG)
                place = (batch, first_head + head_here, kv_tile)
                _fetch_step(descs, shared, step, found, q_tile, place, CFG)
                step += 1
        pieces += 1
        # Asked for when the copies of this one are under way, and not before: pieces of many heads
        # are long, and one that waits behind another leaves the last of them to few programs. In
        # order, others would wait for a piece that waits itself.
        if visits_ptr is not None:
            piece += 1
        elif CFG.ORDERED:
            piece = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        elif total > gl.num_programs(0):
            piece = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
        else:
            piece += gl.num_programs(0)
    # no plane: the end, for the writer too
    _write_info(info, step, (-1, 0, 0, 0, 0, 0, 0))
    publish(work, turn, (-1, 0))
