"""The producers of Hopper's product where the programs of a cluster share what they copy.

What limits the product is what the L2 gives to shared memory. A copy that several SMs receive
counts once, so programs work in clusters, in one of two ways. *Together* they take neighbouring
panels of the same item of the plan: each brings a part of the rows of A for all. Or they take a row
each, in groups of rows that have many columns in common (`row_groups.py`), and *share* X where
several have a block.

Either way all programs of a cluster go through their rings in step: a stage is free once all of
them have done with it. One warp of the first program asks for work and tells the others.
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
from ...device.gluon.pipeline import publish
from ...device.gluon.warps import shared_address
from ...device.schedule import place_in_sections
from ..sm90 import GROUP_ROWS
from .config_sm90 import SLAB_COLUMNS
from .row_groups import FETCH_BIT, GROUP_FIELDS
from .spmm_sm90_fetch import read_piece

_ROWS = gl.constexpr(GROUP_ROWS)
_SLAB = gl.constexpr(SLAB_COLUMNS)
_FETCH = gl.constexpr(FETCH_BIT)
_FIELDS = gl.constexpr(GROUP_FIELDS)
# Bits of the programs among those of a share.
_PROGRAMS = gl.constexpr((1 << FETCH_BIT) - 1)


@gluon.jit
def produce_in_cluster(items_ptr, lists, bars, work, grid, CFG: gl.constexpr):
    """Keep the ring full with what this program of a cluster fetches, and others for it."""
    cluster_barrier()
    if CFG.SHARED:
        _produce_shared(items_ptr, lists, bars, work, grid, CFG)
    else:
        _produce_together(items_ptr, lists, bars, work, grid, CFG)
    # nobody may copy to a program that has ended
    cluster_barrier()


@gluon.jit
def ask(counter_ptr, bars, total, CFG: gl.constexpr):
    """In the cluster's first program: ask for work as the producers need it, and tell them.

    Producers know their first two pieces, and receive another one behind each that they take.
    """
    cluster_barrier()
    filled: gl.constexpr = 2 * CFG.STAGES
    if cluster_rank() == 0:
        clusters = gl.num_programs(0) // CFG.CLUSTER
        piece = gl.program_id(0) // CFG.CLUSTER
        next_piece = piece + clusters
        turn = 0
        while piece < total:
            mbarrier.wait(bars.index(filled + 1), (turn & 1) ^ 1)
            piece = next_piece
            next_piece = gl.atomic_add(counter_ptr, 1) + 2 * clusters
            number = shared_address(CFG.bars_offset + 8 * (filled + 2))
            bar = shared_address(CFG.bars_offset + 8 * filled)
            send_in_cluster(next_piece, number, bar, CFG.CLUSTER)
            turn += 1
        # Each cluster asked once for each of its pieces: whoever was last sets the counter back.
        gl.store(counter_ptr, 0, mask=next_piece == total + 2 * clusters - 1)
    cluster_barrier()


@gluon.jit
def stand_by():
    """What warps without work do: a cluster waits for all of its threads."""
    cluster_barrier()
    cluster_barrier()


@gluon.jit
def _receive(bars, turn, CFG: gl.constexpr):
    """The piece of work after the next, as `ask` has sent it to all programs of the cluster."""
    filled: gl.constexpr = 2 * CFG.STAGES
    mbarrier.expect(bars.index(filled), 4)
    mbarrier.wait(bars.index(filled), turn & 1)
    received = read_shared(shared_address(CFG.bars_offset + 8 * (filled + 2)))
    arrive_at(shared_address(CFG.bars_offset + 8 * (filled + 1)), 0)
    return received


@gluon.jit
def _copy_x(stage, k, col, g: gl.constexpr, programs, CFG: gl.constexpr):
    """Start part `g` of the copies of X for a step: to this program, or to those with a bit."""
    parameter: gl.constexpr = CFG.x_parameter
    slabs: gl.constexpr = CFG.x_slabs
    first = col + g * CFG.GROUP_N
    bar = shared_address(CFG.bars_offset + 8 * stage)
    address = CFG.x_page * 1024 + (stage * CFG.x_copies + g) * CFG.x_copy_bytes
    if CFG.WIDE:
        for i in gl.static_range(slabs):
            place = (first // _SLAB + i * CFG.COPY_SLABS, k, 0 * k)
            slab = shared_address(address + i * (CFG.x_copy_bytes // CFG.x_slabs))
            copy_tile(parameter, place, bar, slab, programs)
    elif CFG.X_TRANSPOSED:
        copy_tile(parameter, (first, k), bar, shared_address(address), programs)
    else:
        for i in gl.static_range(slabs):
            slab = shared_address(address + i * (CFG.x_copy_bytes // CFG.x_slabs))
            copy_tile(parameter, (k, first + i * _SLAB), bar, slab, programs)


@gluon.jit
def _copy_a(stage, entry, sub_row, u: gl.constexpr, g, programs, CFG: gl.constexpr):
    """Start part `g` of the copies of A for step `u` of a block, from row `sub_row` of it on."""
    parameter: gl.constexpr = CFG.a_parameter
    bar = shared_address(CFG.bars_offset + 8 * stage)
    address = shared_address((stage * CFG.a_copies + g) * CFG.a_copy_bytes)
    if CFG.A_TRANSPOSED:
        place = (entry * CFG.BLOCK_W + u * CFG.TILE_K, sub_row)
        copy_tile(parameter, place, bar, address, programs)
    else:
        place = (entry * CFG.BLOCK_H + sub_row, u * CFG.TILE_K + 0 * entry)
        copy_tile(parameter, place, bar, address, programs)


@gluon.jit
def _free_stage(bars, step, CFG: gl.constexpr):
    """The stage of a step, once all programs of the cluster have done with it."""
    stage = step % CFG.STAGES
    mbarrier.wait(bars.index(CFG.STAGES + stage), ((step // CFG.STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def _produce_together(items_ptr, lists, bars, work, grid, CFG: gl.constexpr):
    """As `produce`, for programs with neighbouring panels of one item."""
    total = grid[0] * grid[1]
    cols_ptr, perm_ptr, _ = lists
    rank = cluster_rank()
    k_steps: gl.constexpr = CFG.k_steps
    x_copies: gl.constexpr = CFG.x_copies
    step = 0
    turn = 0
    piece = gl.program_id(0) // CFG.CLUSTER
    next_piece = piece + gl.num_programs(0) // CFG.CLUSTER
    row_piece, panel, item = read_piece(items_ptr, piece, grid, CFG)
    while piece < total:
        next_row_piece, next_panel, next_item = read_piece(items_ptr, next_piece, grid, CFG)
        block_row, begin, end, slot = item
        sub_row = (row_piece % CFG.row_tiles) * CFG.tile_m
        col = (panel * CFG.CLUSTER + rank) * CFG.tile_n
        row = block_row * CFG.BLOCK_H + sub_row
        publish(work, turn, ((end - begin) * CFG.k_steps, row, col, slot))
        block_col = gl.load(cols_ptr + begin, mask=begin < end, other=0)
        for place in range(begin, end):
            next_block_col = gl.load(cols_ptr + place + 1, mask=place + 1 < end, other=0)
            entry = place
            if CFG.A_TRANSPOSED:
                entry = gl.load(perm_ptr + place)
            for u in gl.static_range(k_steps):
                stage = _free_stage(bars, step, CFG)
                mbarrier.expect(bars.index(stage), CFG.stage_bytes)
                # each program brings a part of the rows of A, to all of them
                part_row = sub_row + rank * (CFG.tile_m // CFG.CLUSTER)
                _copy_a(stage, entry, part_row, u, rank, (1 << CFG.CLUSTER) - 1, CFG)
                k = block_col * CFG.BLOCK_W + u * CFG.TILE_K
                for g in gl.static_range(x_copies):
                    _copy_x(stage, k, col, g, None, CFG)
                step += 1
            block_col = next_block_col
        piece = next_piece
        next_piece = _receive(bars, turn, CFG)
        turn += 1
        row_piece = next_row_piece
        panel = next_panel
        item = next_item
    publish(work, turn, (-1, 0, 0, -1))


@gluon.jit
def _read_group(items_ptr, piece, grid, rank, CFG: gl.constexpr):
    """Panel of a piece of work, and this program's row: (block row, begin, end, most steps)."""
    groups, panels, section = grid
    panel, tile = place_in_sections(piece, panels, groups, section)
    live = piece < groups * panels
    item_ptr = items_ptr + _FIELDS * (CFG.CLUSTER * (groups - 1 - tile) + rank)
    block_row = gl.load(item_ptr, mask=live, other=-1)
    begin = gl.load(item_ptr + 1, mask=live, other=0)
    end = gl.load(item_ptr + 2, mask=live, other=0)
    most = gl.load(item_ptr + 3, mask=live, other=0)
    return panel, (block_row, begin, end, most)


@gluon.jit
def _read_place(lists, place, end):
    """Column, block and sharers at a place of the lists."""
    live = place < end
    column = gl.load(lists[0] + place, mask=live, other=0)
    entry = gl.load(lists[1] + place, mask=live, other=0)
    share = gl.load(lists[2] + place, mask=live, other=0)
    return column, entry, share


@gluon.jit
def _produce_shared(items_ptr, lists, bars, work, grid, CFG: gl.constexpr):
    """As `produce`, for programs with a row each, which share X where several have a block.

    Such blocks come at the same step in all of them. Stages that only longer rows of the group need
    pass by empty, so that all use the same ones again in the next piece.
    """
    total = grid[0] * grid[1]
    rank = cluster_rank()
    k_steps: gl.constexpr = CFG.k_steps
    x_copies: gl.constexpr = CFG.x_copies
    a_copies: gl.constexpr = CFG.a_copies
    step = 0
    turn = 0
    piece = gl.program_id(0) // CFG.CLUSTER
    next_piece = piece + gl.num_programs(0) // CFG.CLUSTER
    panel, item = _read_group(items_ptr, piece, grid, rank, CFG)
    here = _read_place(lists, item[1], item[2])
    while piece < total:
        next_panel, next_item = _read_group(items_ptr, next_piece, grid, rank, CFG)
        block_row, begin, end, most = item
        col = panel * CFG.tile_n
        steps = (end - begin) * CFG.k_steps
        publish(work, turn, (steps, block_row * CFG.BLOCK_H, col, most * CFG.k_steps))
        for place in range(begin, end):
            there = _read_place(lists, place + 1, end)
            block_col, entry, share = here
            for u in gl.static_range(k_steps):
                stage = _free_stage(bars, step, CFG)
                mbarrier.expect(bars.index(stage), CFG.stage_bytes)
                k = block_col * CFG.BLOCK_W + u * CFG.TILE_K
                for g in gl.static_range(x_copies):
                    if share == 0:
                        _copy_x(stage, k, col, g, None, CFG)
                    elif (share >> (_FETCH + g)) & 1 > 0:
                        _copy_x(stage, k, col, g, share & _PROGRAMS, CFG)
                for g in gl.static_range(a_copies):
                    _copy_a(stage, entry, _ROWS * g, u, g, None, CFG)
                step += 1
            here = there
        here = _read_place(lists, next_item[1], next_item[2])
        for _place in range(end - begin, most):
            for _u in gl.static_range(k_steps):
                stage = _free_stage(bars, step, CFG)
                mbarrier.arrive(bars.index(stage), count=1)
                step += 1
        piece = next_piece
        next_piece = _receive(bars, turn, CFG)
        turn += 1
        panel = next_panel
        item = next_item
    publish(work, turn, (-1, 0, 0, -1))
