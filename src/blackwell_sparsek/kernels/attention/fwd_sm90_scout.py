"""The scout of the Hopper forward: a warp that looks up the rows of a mask ahead of the producer.

Claiming a row, finding its place in the order, its list and its bounds are four reads that wait for
one another, longer than consumers take for the tiles that the producer is ahead of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...device.gluon.pipeline import publish
from .fwd_sm90_producer import claim_piece
from .fwd_sm90_work import count_q_tiles, count_tiles, place_piece, plan_piece


@gluon.jit
def _plan(produce, shared, piece, q_tiles, CFG: gl.constexpr):
    """What consumers and producer need to know of a piece of work."""
    mask, _, _, _, _, lengths, heads, band, _, _ = shared
    plane, q_tile = place_piece(mask, produce[4], piece, q_tiles, CFG)
    plan = plan_piece(mask, plane, q_tile, lengths, heads, band, CFG)
    return (plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plane, q_tile)


@gluon.jit
def find_work(produce, shared, CFG: gl.constexpr):
    """Publish pieces of work, the next one as soon as the producer begins with one."""
    _, _, _, counter_ptr, schedule = produce
    mask, _, _, _, work, lengths, _, _, _, asked = shared
    turn = 0
    q_tiles = count_q_tiles(mask, schedule, lengths[0], CFG)
    programs = gl.num_programs(0)
    rows = 0
    if CFG.SHARED_TAIL:
        rows = schedule[4]
    whole = schedule[1] * q_tiles - rows
    total = whole + gl.where(rows > 0, programs, 0)
    piece = gl.program_id(0)
    while piece < total:
        if CFG.SHARED_TAIL:
            # in units of which a row has `programs` and a share `rows`
            begin = 0
            end = programs
            if piece >= whole:
                begin = (piece - whole) * rows
                end = begin + rows
            while begin < end:
                row = begin // programs
                index = piece
                begins = 0
                ends = 0
                if piece >= whole:
                    index = whole + row
                    begins = row * programs // rows
                    ends = ((row + 1) * programs - 1) // rows
                until = gl.minimum(end, (row + 1) * programs)
                fields = _plan(produce, shared, index, q_tiles, CFG)
                plan = (fields[0], fields[1], fields[2], fields[3], fields[4], fields[5])
                tiles = count_tiles(plan, CFG)[1]
                first_tile = (begin - row * programs) * tiles // programs
                end_tile = (until - row * programs) * tiles // programs
                part = (first_tile, end_tile, piece - whole, begins, ends)
                publish(work, turn, fields + part)  # noqa: RUF005
                mbarrier.wait(asked.index(0), turn & 1)
                turn += 1
                begin = until
        else:
            publish(work, turn, _plan(produce, shared, piece, q_tiles, CFG))
            mbarrier.wait(asked.index(0), turn & 1)
            turn += 1
        piece = claim_piece(counter_ptr, schedule[3], piece, total)
    end_mark = (0, 0, 0, 0, 0, 0, -1, 0)
    if CFG.SHARED_TAIL:
        end_mark = end_mark + (0, 0, 0, 0, 0)  # noqa: RUF005
    publish(work, turn, end_mark)
