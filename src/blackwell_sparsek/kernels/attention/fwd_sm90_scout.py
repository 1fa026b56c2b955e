"""The scout of the Hopper forward: a warp that looks up the rows of a mask ahead of the producer.

A row is claimed, found in the order of rows, then its list, then its bounds: four reads, each of
which waits for the one before. That takes longer than the tiles that the producer is ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...device.gluon.pipeline import publish
from .fwd_sm90_producer import claim_piece
from .fwd_sm90_work import count_q_tiles, place_piece, plan_piece


@gluon.jit
def find_work(produce, shared, CFG: gl.constexpr):
    """Publish pieces of work, each when the producer begins with the one before."""
    _, _, _, counter_ptr, schedule = produce
    mask, _, _, _, work, lengths, heads, band, _, begun = shared
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
