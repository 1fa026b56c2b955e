"""The producer of the Hopper backward: which queries a tile of keys visits, and their copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...device.gluon.pipeline import publish
from ...device.masks import q_range, q_range_of_all
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
# What describes a step: plane of the queries, first query and bits of each of two parts.
INFO_FIELDS = gl.constexpr(5)


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
        plan = plan_dense(q_lo, q_hi, all_lo, all_hi, tile_m)
    else:
        row = batch * batch_step + q_head * head_step + kv_start // CFG.BLOCK_KV
        offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
        plan = plan_blocks(lists, row, q_lo, q_hi, all_lo, all_hi, offs_scan, tile_m, unit_size)
    return plan


@gluon.jit
def _find_part(lists, plan, num_masked, q_tile, part: gl.constexpr, q_len, CFG: gl.constexpr):
    """First query of a part of a query tile, and the row of the bit pool that covers it, or -1."""
    tile_m: gl.constexpr = CFG.TILE_M
    unit_size: gl.constexpr = CFG.UNIT
    masked_tiles = num_tiles(num_masked, tile_m, unit_size)
    in_kind = q_tile if q_tile < masked_tiles else q_tile - masked_tiles
    ordinal, q_in_unit = tile_ordinal(in_kind, part * CFG.part_rows, tile_m, unit_size)
    if q_tile < masked_tiles:
        unit = masked_unit(plan, ordinal)
        units = num_masked
    else:
        unit = plan[3] + ordinal
        units = num_full_units(plan)
    # a part with no unit left is read from past the queries, where nothing counts
    q_row = keys_of_tile(lists, unit, ordinal, units, q_in_unit, q_len, tile_m, unit_size)
    bits_id = -1
    if lists is not None:
        has_bits = (q_tile < masked_tiles) & (ordinal < units)
        bits_id = gl.load(lists[3] + unit, mask=has_bits, other=-1)
    return q_row, bits_id


@gluon.jit
def _fetch_step(descs, shared, step, visit, q_tile, batch, q_head, CFG: gl.constexpr):
    """Start the copies of one query tile: queries, output gradients, lse and delta."""
    q_desc, dout_desc, lse_desc, delta_desc = descs
    q_smem, dout_smem, lse_smem, delta_smem, full, empty = shared[2]
    info, lengths, heads = shared[3], shared[5], shared[6]
    lists, plan, num_masked = visit
    parts: gl.constexpr = CFG.parts
    rows: gl.constexpr = CFG.part_rows
    plane = batch * heads[0] + q_head
    first, first_bits = _find_part(lists, plan, num_masked, q_tile, 0, lengths[0], CFG)
    second, second_bits = first + ROWS, first_bits
    if parts == 2:
        second, second_bits = _find_part(lists, plan, num_masked, q_tile, 1, lengths[0], CFG)
    stage = step % CFG.STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
    _write_info(info, step, (plane, first, second, first_bits, second_bits))
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
    tile_m: gl.constexpr = CFG.TILE_M
    unit_size: gl.constexpr = CFG.UNIT
    q_heads, group_size = heads
    kv_heads = q_heads // group_size
    kv_tiles = (lengths[1] + CFG.tile_n - 1) // CFG.tile_n
    total = num_planes * kv_tiles
    step = 0
    turn = 0
    pieces = 0
    piece = gl.program_id(0)
    while piece < total:
        next_piece = piece + gl.num_programs(0)
        if dynamic != 0:
            # asked for a whole piece ahead of its use
            next_piece = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        if order_ptr is None:
            plane, from_end = place_in_sections(piece, num_planes, kv_tiles, section)
            # early keys tend to be seen by most queries
            kv_tile = kv_tiles - 1 - from_end
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
            num_masked = num_masked_units(plan)
            masked_tiles = num_tiles(num_masked, tile_m, unit_size)
            q_tiles = masked_tiles + num_tiles(num_full_units(plan), tile_m, unit_size)
            publish(work, turn, (q_tiles, masked_tiles))
            turn += 1
            visit = (mask[0], plan, num_masked)
            for q_tile in range(q_tiles):
                _fetch_step(descs, shared, step, visit, q_tile, batch, q_head, CFG)
                step += 1
        pieces += 1
        piece = next_piece
    # no plane: the end, for the writer too
    _write_info(info, step, (-1, 0, 0, 0, 0))
    publish(work, turn, (-1, 0))
