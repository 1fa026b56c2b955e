"""The producer of the Hopper backward: which queries a tile of keys visits, and their copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...device.gluon.pipeline import publish
from ...device.masks import kv_range, q_range, q_range_of_all
from ...device.schedule import place_in_sections
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
from ..sm90 import GROUP_ROWS
from .bwd_config_sm90 import INFO_DEPTH

ROWS = gl.constexpr(GROUP_ROWS)
DEPTH = gl.constexpr(INFO_DEPTH)
# Entries of a mask row read at a time, four by each thread of the producer.
SCAN = gl.constexpr(128)
# What describes a step: plane of the queries, first query of each of two parts, their bits, whether
# it needs mask code, and how many tiles of keys add to its dq before.
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
    """Describe a step, once nobody reads what described the one `DEPTH` before."""
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
        plan = plan_dense(q_lo, q_hi, all_lo, all_hi, tile_m)
    else:
        row = batch * batch_step + q_head * head_step + kv_start // CFG.BLOCK_KV
        offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
        plan = plan_blocks(lists, row, q_lo, q_hi, all_lo, all_hi, offs_scan, tile_m, unit_size)
    return plan


@gluon.jit
def _count_tiles(lists, plan, CFG: gl.constexpr):
    """Tiles of queries in a plan, and how many of a mask need its code, which come first."""
    tile_m: gl.constexpr = CFG.TILE_M
    unit_size: gl.constexpr = CFG.UNIT
    if lists is None:
        masked_tiles = 0
        q_tiles = plan[5] - plan[2]
    else:
        masked_tiles = num_tiles(num_masked_units(plan), tile_m, unit_size)
        q_tiles = masked_tiles + num_tiles(num_full_units(plan), tile_m, unit_size)
    return q_tiles, masked_tiles


@gluon.jit
def _find_part(visit, q_tile, part: gl.constexpr, q_len, CFG: gl.constexpr):
    """First query of a part of a query tile, and the row of the bit pool that covers it, or -1."""
    lists, plan, masked_tiles = visit
    tile_m: gl.constexpr = CFG.TILE_M
    unit_size: gl.constexpr = CFG.UNIT
    in_kind = q_tile if q_tile < masked_tiles else q_tile - masked_tiles
    ordinal, q_in_unit = tile_ordinal(in_kind, part * CFG.part_rows, tile_m, unit_size)
    if q_tile < masked_tiles:
        unit = masked_unit(plan, ordinal)
        units = num_masked_units(plan)
    else:
        unit = plan[3] + ordinal
        units = num_full_units(plan)
    # a part with no unit left is read from past the queries, where nothing counts
    q_row = keys_of_tile(lists, unit, ordinal, units, q_in_unit, q_len, tile_m, unit_size)
    bits_id = -1
    if q_tile < masked_tiles:
        bits_id = gl.load(lists[3] + unit, mask=ordinal < units, other=-1)
    return q_row, bits_id


@gluon.jit
def _describe_step(visit, q_tile, kv_tile, plane, lengths, band, CFG: gl.constexpr):
    """The numbers of a step: see `INFO_FIELDS`."""
    lists, plan, masked_tiles = visit
    if lists is None:
        # from the first to the last query, as those who add to dq in order want it
        tile = plan[2] + q_tile
        first = tile * CFG.TILE_M
        masked = ((tile < plan[3]) | (tile >= plan[4])).to(gl.int32)
        numbers = (plane, first, first + ROWS, -1, -1, masked, 0)
        if CFG.ORDERED:
            end = first + CFG.TILE_M
            _, kv_hi = kv_range(first, end, lengths[0], lengths[1], band[0], band[1])
            rank = (kv_hi - 1) // CFG.tile_n - kv_tile
            numbers = (plane, first, first + ROWS, -1, -1, masked, rank)
    else:
        masked = (q_tile < masked_tiles).to(gl.int32)
        first, first_bits = _find_part(visit, q_tile, 0, lengths[0], CFG)
        numbers = (plane, first, first + ROWS, first_bits, first_bits, masked, 0)
        if CFG.parts == 2:
            second, second_bits = _find_part(visit, q_tile, 1, lengths[0], CFG)
            numbers = (plane, first, second, first_bits, second_bits, masked, 0)
    return numbers


@gluon.jit
def _fetch_step(descs, shared, step, numbers, batch, q_head, CFG: gl.constexpr):
    """Start the copies of one query tile: queries, output gradients, lse and delta."""
    q_desc, dout_desc, lse_desc, delta_desc = descs
    q_smem, dout_smem, lse_smem, delta_smem, full, empty = shared[2]
    plane, first, second = numbers[0], numbers[1], numbers[2]
    parts: gl.constexpr = CFG.parts
    rows: gl.constexpr = CFG.part_rows
    stage = step % CFG.STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
    _write_info(shared[3], step, numbers)
    row_bytes: gl.constexpr = lse_desc.block_type.nbytes + delta_desc.block_type.nbytes
    tile_bytes: gl.constexpr = q_desc.block_type.nbytes + dout_desc.block_type.nbytes
    mbarrier.expect(bar, parts * (row_bytes + tile_bytes))
    for part in gl.static_range(parts):
        q_row = first if part == 0 else second
        q = q_smem.index(stage).slice(part * rows, rows, dim=0)
        dout = dout_smem.index(stage).slice(part * rows, rows, dim=0)
        lse = lse_smem.index(stage).slice(part * rows, rows, dim=0)
        delta = delta_smem.index(stage).slice(part * rows, rows, dim=0)
        tma.async_copy_global_to_shared(q_desc, [batch, q_head, q_row, 0], bar, q)
        tma.async_copy_global_to_shared(lse_desc, [plane, q_row], bar, lse)
        tma.async_copy_global_to_shared(dout_desc, [batch, q_head, q_row, 0], bar, dout)
        tma.async_copy_global_to_shared(delta_desc, [plane, q_row], bar, delta)


@gluon.jit
def produce_steps(produce, shared, CFG: gl.constexpr):
    """Take pieces of work, publish them and keep the rings full."""
    descs, k_desc, v_desc, counter_ptr, schedule = produce
    mask, kv_ring, info, work = shared[0], shared[1], shared[3], shared[4]
    lengths, heads, band = shared[5], shared[6], shared[7]
    order_ptr, num_planes, section, dynamic = schedule
    k_smem, v_smem, kv_full, kv_empty = kv_ring
    key_groups: gl.constexpr = CFG.key_groups
    q_heads, group_size = heads
    kv_heads = q_heads // group_size
    kv_tiles = (lengths[1] + CFG.tile_n - 1) // CFG.tile_n
    total = num_planes * kv_tiles
    step = 0
    turn = 0
    pieces = 0
    piece = gl.program_id(0)
    if CFG.ORDERED:
        # programs wait for what earlier pieces add: those must be in the hands of running programs
        piece = gl.atomic_add(counter_ptr, 1)
    while piece < total:
        next_piece = piece + gl.num_programs(0)
        # asked for a whole piece ahead of its use, unless others wait for what it adds
        ahead = 0 if CFG.ORDERED else dynamic
        if ahead != 0:
            next_piece = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        if order_ptr is None:
            plane, kv_tile = place_in_sections(piece, num_planes, kv_tiles, section)
            if not CFG.ORDERED:
                # early keys tend to be seen by most queries; in order, the late ones must go first,
                # which often have the first queries they meet to themselves
                kv_tile = kv_tiles - 1 - kv_tile
        else:
            entry = gl.load(order_ptr + piece)
            plane = entry // kv_tiles
            kv_tile = entry % kv_tiles
        batch = plane // kv_heads
        kv_head = plane % kv_heads
        publish(work, turn, (plane, kv_tile))
        turn += 1
        mbarrier.wait(kv_empty, (pieces & 1) ^ 1)
        mbarrier.expect(kv_full, key_groups * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
        for g in gl.static_range(key_groups):
            kv_row = kv_tile * CFG.tile_n + g * ROWS
            place = [batch, kv_head, kv_row, 0]
            tma.async_copy_global_to_shared(k_desc, place, kv_full, k_smem.index(g))
            tma.async_copy_global_to_shared(v_desc, place, kv_full, v_smem.index(g))
        for member in range(group_size):
            q_head = kv_head * group_size + member
            plan = _plan_queries(mask, batch, q_head, kv_tile, lengths, band, CFG)
            q_tiles, masked_tiles = _count_tiles(mask[0], plan, CFG)
            publish(work, turn, (q_tiles, member))
            turn += 1
            visit = (mask[0], plan, masked_tiles)
            q_plane = batch * q_heads + q_head
            for q_tile in range(q_tiles):
                numbers = _describe_step(visit, q_tile, kv_tile, q_plane, lengths, band, CFG)
                _fetch_step(descs, shared, step, numbers, batch, q_head, CFG)
                step += 1
        if CFG.ORDERED:
            next_piece = gl.atomic_add(counter_ptr, 1)
        pieces += 1
        piece = next_piece
    # no plane: the end, for the writer too
    _write_info(info, step, (-1, 0, 0, 0, 0, 0, 0))
    publish(work, turn, (-1, 0))
