# mypy: ignore-errors
"""The producer of Hopper's product where two programs share what they copy of X.

What limits the product of 64-row blocks is what the L2 gives to shared memory. A copy that two SMs
receive counts once. So the two programs of a cluster take a row each, of a pair with many columns
in common (`row_pairs.py`), and the same panel. Where both have a block, each of them brings half of
the columns of X to both; then they go on with blocks of their own. Both go through their rings in
step: a stage is free once both have done with it, and what only the longer row needs passes by the
other program empty.

One warp of the first program asks for work and tells both producers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...device.gluon.cluster import (
    arrive_at,
    cluster_barrier,
    cluster_rank,
    copy_tile,
    read_shared,
    send_in_cluster,
)
from ...device.gluon.pipeline import claim, publish
from ...device.gluon.warps import shared_address
from ...device.schedule import place_in_sections
from .config import PAIR, SLAB_COLUMNS
from .row_pairs import PAIR_FIELDS

_PAIR = gl.constexpr(PAIR)
_BOTH = gl.constexpr((1 << PAIR) - 1)
_SLAB = gl.constexpr(SLAB_COLUMNS)
_FIELDS = gl.constexpr(PAIR_FIELDS)


@gluon.jit
def ask(counter_ptr, bars, total, CFG: gl.constexpr):
    """In the cluster's first program: ask for work as the producers need it, and tell them.

    Producers know their first piece, and receive another one behind each that they take.
    """
    cluster_barrier()
    filled: gl.constexpr = 2 * CFG.STAGES
    if cluster_rank() == 0:
        piece = gl.program_id(0) // _PAIR
        turn = 0
        while piece < total:
            mbarrier.wait(bars.index(filled + 1), (turn & 1) ^ 1)
            piece = claim(counter_ptr, gl.num_programs(0) // _PAIR, total)
            number = shared_address(CFG.bars_offset + 8 * (filled + 2))
            bar = shared_address(CFG.bars_offset + 8 * filled)
            send_in_cluster(piece, number, bar, _PAIR)
            turn += 1
    cluster_barrier()


@gluon.jit
def stand_by():
    """What warps without work do: a cluster waits for all of its threads."""
    cluster_barrier()
    cluster_barrier()


@gluon.jit
def _receive(bars, turn, CFG: gl.constexpr):
    """The next piece of work, as `ask` has sent it to both programs."""
    filled: gl.constexpr = 2 * CFG.STAGES
    mbarrier.expect(bars.index(filled), 4)
    mbarrier.wait(bars.index(filled), turn & 1)
    received = read_shared(shared_address(CFG.bars_offset + 8 * (filled + 2)))
    arrive_at(shared_address(CFG.bars_offset + 8 * (filled + 1)), 0)
    return received


@gluon.jit
def _copy_x(stage, k, col, g: gl.constexpr, programs, CFG: gl.constexpr):
    """Start the copies of X for consumers `g`, to this program alone (None) or to both."""
    parameter: gl.constexpr = CFG.x_parameter
    slabs: gl.constexpr = CFG.x_slabs
    first = col + g * CFG.GROUP_N
    bar = shared_address(CFG.bars_offset + 8 * stage)
    address = CFG.x_page * 1024 + (stage * CFG.x_tiles + g) * CFG.x_tile_bytes
    if CFG.WIDE:
        place = (first // _SLAB, k, 0 * k)
        copy_tile(parameter, place, bar, shared_address(address), programs)
    elif CFG.X_TRANSPOSED:
        copy_tile(parameter, (first, k), bar, shared_address(address), programs)
    else:
        for i in gl.static_range(slabs):
            slab = shared_address(address + i * (CFG.x_tile_bytes // CFG.x_slabs))
            copy_tile(parameter, (k, first + i * _SLAB), bar, slab, programs)


@gluon.jit
def _copy_a(stage, entry, u: gl.constexpr, CFG: gl.constexpr):
    """Start the copy of A for step `u` of a block."""
    parameter: gl.constexpr = CFG.a_parameter
    bar = shared_address(CFG.bars_offset + 8 * stage)
    address = shared_address(stage * CFG.a_tile_bytes)
    if CFG.A_TRANSPOSED:
        place = (entry * CFG.BLOCK_W + u * CFG.TILE_K, 0 * entry)
        copy_tile(parameter, place, bar, address, None)
    else:
        place = (entry * CFG.BLOCK_H, u * CFG.TILE_K + 0 * entry)
        copy_tile(parameter, place, bar, address, None)


@gluon.jit
def _free_stage(bars, step, CFG: gl.constexpr):
    """The stage of a step, once both programs have done with it."""
    stage = step % CFG.STAGES
    mbarrier.wait(bars.index(CFG.STAGES + stage), ((step // CFG.STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def _read_pair(items_ptr, piece, grid, rank):
    """Panel of a piece of work, and this program's row with the numbers that describe it."""
    pairs, panels, section = grid
    panel, tile = place_in_sections(piece, panels, pairs, section)
    # tiles of a section count down, pairs are sorted longest first
    item_ptr = items_ptr + _FIELDS * (_PAIR * (pairs - 1 - tile) + rank)
    block_row = gl.load(item_ptr)
    begin = gl.load(item_ptr + 1)
    end = gl.load(item_ptr + 2)
    shared = gl.load(item_ptr + 3)
    most = gl.load(item_ptr + 4)
    return panel, (block_row, begin, end, shared, most)


@gluon.jit
def _read_place(lists, place, end):
    """Column and block at a place of the lists."""
    live = place < end
    column = gl.load(lists[0] + place, mask=live, other=0)
    entry = gl.load(lists[1] + place, mask=live, other=0)
    return column, entry


@gluon.jit
def produce_paired(items_ptr, lists, bars, work, grid, CFG: gl.constexpr):
    """Take work and keep the ring full, with what this program fetches and what the other does."""
    cluster_barrier()
    total = grid[0] * grid[1]
    rank = cluster_rank()
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    turn = 0
    piece = gl.program_id(0) // _PAIR
    while piece < total:
        panel, item = _read_pair(items_ptr, piece, grid, rank)
        block_row, begin, end, shared, most = item
        col = panel * CFG.tile_n
        steps = (end - begin) * CFG.k_steps
        publish(work, turn, (steps, block_row * CFG.BLOCK_H, col, most * CFG.k_steps))
        here = _read_place(lists, begin, end)
        for place in range(begin, end):
            there = _read_place(lists, place + 1, end)
            block_col, entry = here
            for u in gl.static_range(k_steps):
                stage = _free_stage(bars, step, CFG)
                mbarrier.expect(bars.index(stage), CFG.stage_bytes)
                k = block_col * CFG.BLOCK_W + u * CFG.TILE_K
                for g in gl.static_range(_PAIR):
                    if place - begin >= shared:
                        _copy_x(stage, k, col, g, None, CFG)
                    elif rank == g:
                        _copy_x(stage, k, col, g, _BOTH, CFG)
                _copy_a(stage, entry, u, CFG)
                step += 1
            here = there
        for _place in range(end - begin, most):
            for _u in gl.static_range(k_steps):
                stage = _free_stage(bars, step, CFG)
                mbarrier.arrive(bars.index(stage), count=1)
                step += 1
        piece = _receive(bars, turn, CFG)
        turn += 1
    publish(work, turn, (-1, 0, 0, -1))
    # nobody may copy to a program that has ended
    cluster_barrier()
