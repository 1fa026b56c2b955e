"""A scout for the Hopper forward: a warp that looks up pieces of work ahead of the producer.

A row of a mask is claimed, found in the order of rows, then its list, then its bounds: four reads,
each of which waits for the one before. That takes longer than the tiles that a producer is ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...device.gluon.packed import plane_place
from ...device.gluon.pipeline import publish, take
from ...device.sequences import batch_and_heads
from ...device.visits import num_masked_units
from .fwd_sm90_producer import claim_piece, copy_queries, copy_tile, tile_starts
from .fwd_sm90_work import count_q_tiles, count_tiles, place_piece, plan_piece


@gluon.jit
def find_work(produce, shared, begun, CFG: gl.constexpr):
    """Publish pieces of work, each when the producer has `begun` with the one before."""
    _, _, _, counter_ptr, schedule = produce
    mask, _, _, _, work, lengths, heads, band, _ = shared
    q_tiles = count_q_tiles(mask, schedule, lengths[0], CFG)
    total = schedule[1] * q_tiles
    turn = 0
    piece = gl.program_id(0)
    while piece < total:
        plane, q_tile = place_piece(mask, schedule, piece, q_tiles, CFG)
        plan = plan_piece(mask, plane, q_tile, lengths, heads, band, CFG)
        fields = (plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plane, q_tile)
        publish(work, turn, fields)
        mbarrier.wait(begun, turn & 1)
        piece = claim_piece(counter_ptr, schedule[3], piece, total)
        turn += 1
    # no plane: the end
    publish(work, turn, (0, 0, 0, 0, 0, 0, -1, 0))


@gluon.jit
def produce_found(produce, shared, begun, CFG: gl.constexpr):
    """Keep the rings full for the pieces of work that a scout publishes."""
    q_desc, k_desc, v_desc, _, _ = produce
    mask, q_ring, k_ring, v_ring, work, lengths, heads, _, cu_seqlens = shared
    step = 0
    turn = 0
    piece = take(work, turn, 1)
    while piece[6] >= 0:
        mbarrier.arrive(begun, count=1)
        plan = (piece[0], piece[1], piece[2], piece[3], piece[4], piece[5])
        batch, q_head, kv_head = batch_and_heads(piece[6], heads[0], heads[1])
        q_place = plane_place(cu_seqlens[0], batch, q_head, 0, lengths[0])
        kv_place = plane_place(cu_seqlens[1], batch, kv_head, 0, lengths[1])
        copy_queries(q_desc, q_ring, turn, piece[7], q_place, CFG)
        visit = (mask[0], plan, num_masked_units(plan), lengths[1])
        end_tile = count_tiles(plan, CFG)[1]
        if end_tile > 0:
            # consumers are done with the keys of a tile before they are with the values before it
            starts = tile_starts(visit, 0, CFG)
            copy_tile(k_desc, k_ring, step, starts, kv_place, CFG)
            for kv_tile in range(1, end_tile):
                after = tile_starts(visit, kv_tile, CFG)
                copy_tile(k_desc, k_ring, step + 1, after, kv_place, CFG)
                copy_tile(v_desc, v_ring, step, starts, kv_place, CFG)
                starts = after
                step += 1
            copy_tile(v_desc, v_ring, step, starts, kv_place, CFG)
            step += 1
        turn += 1
        piece = take(work, turn, 1)
