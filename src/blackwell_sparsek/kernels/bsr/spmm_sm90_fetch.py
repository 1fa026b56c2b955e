"""What the producer of Hopper's product does: take work, and keep a ring of A and X tiles full."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...device.gluon.pipeline import publish
from ...device.schedule import place_in_sections
from ..sm90 import GROUP_ROWS
from .config_sm90 import SLAB_COLUMNS

_ROWS = gl.constexpr(GROUP_ROWS)
_SLAB = gl.constexpr(SLAB_COLUMNS)


@gluon.jit
def read_piece(items_ptr, piece, grid, CFG: gl.constexpr):
    """Row tile and panel of a piece of work, and the plan's item: (block row, begin, end, slot).

    Panels go in sections whose part of X stays in L2, and within a section each item goes through
    all of them before the next: what runs together shares blocks of A as well.
    """
    row_pieces, panels, section = grid
    panel, tile = place_in_sections(piece, panels, row_pieces, section)
    # tiles of a section count down, items are sorted longest first
    row_piece = row_pieces - 1 - tile
    live = piece < row_pieces * panels
    item_ptr = items_ptr + 4 * (row_piece // CFG.row_tiles)
    block_row = gl.load(item_ptr, mask=live, other=0)
    begin = gl.load(item_ptr + 1, mask=live, other=0)
    end = gl.load(item_ptr + 2, mask=live, other=0)
    slot = gl.load(item_ptr + 3, mask=live, other=-1)
    return row_piece, panel, (block_row, begin, end, slot)


@gluon.jit
def _fetch_step(a_desc, x_desc, ring, stage, a_row, a_col, k, col, CFG: gl.constexpr):
    """Start the copies of one K step into a ring stage."""
    a_smem, x_smem, full, _ = ring
    bar = full.index(stage)
    a_copies: gl.constexpr = CFG.a_copies
    x_copies: gl.constexpr = CFG.x_copies
    nbytes: gl.constexpr = (
        CFG.a_copies * a_desc.block_type.nbytes + CFG.x_copies * x_desc.block_type.nbytes
    )
    mbarrier.expect(bar, nbytes)
    for g in gl.static_range(a_copies):
        tile = a_smem.index(stage * CFG.a_copies + g)
        if CFG.A_TRANSPOSED:
            tma.async_copy_global_to_shared(a_desc, [a_col, a_row + g * _ROWS], bar, tile)
        else:
            tma.async_copy_global_to_shared(a_desc, [a_row, a_col], bar, tile)
    for g in gl.static_range(x_copies):
        tile = x_smem.index(stage * CFG.x_copies + g)
        if CFG.WIDE:
            tma.async_copy_global_to_shared(x_desc, [col // _SLAB, k, 0], bar, tile)
        elif CFG.X_TRANSPOSED:
            tma.async_copy_global_to_shared(x_desc, [col + g * CFG.GROUP_N, k], bar, tile)
        else:
            tma.async_copy_global_to_shared(x_desc, [k, col + g * CFG.GROUP_N], bar, tile)


@gluon.jit
def produce(a_desc, x_desc, items_ptr, lists, ring, work, asked, grid, CFG: gl.constexpr):
    """Take work and keep the ring full."""
    cols_ptr, perm_ptr, counter_ptr = lists
    total = grid[0] * grid[1]
    _, _, _, empty = ring
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    turn = 0
    piece = gl.program_id(0)
    if CFG.ASKED:
        next_piece = piece + gl.num_programs(0)
    else:
        next_piece = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
    row_piece, panel, item = read_piece(items_ptr, piece, grid, CFG)
    while piece < total:
        # What the next round needs is asked for a whole tile ahead of its use.
        after_next = 0 * piece
        if not CFG.ASKED:
            after_next = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        next_row_piece, next_panel, next_item = read_piece(items_ptr, next_piece, grid, CFG)
        block_row, begin, end, slot = item
        sub_row = (row_piece % CFG.row_tiles) * CFG.tile_m
        col = panel * CFG.tile_n
        row = block_row * CFG.BLOCK_H + sub_row
        publish(work, turn, ((end - begin) * CFG.k_steps, row, col, slot))
        turn += 1
        block_col = gl.load(cols_ptr + begin, mask=begin < end, other=0)
        for entry in range(begin, end):
            next_block_col = gl.load(cols_ptr + entry + 1, mask=entry + 1 < end, other=0)
            if CFG.A_TRANSPOSED:
                a_row = sub_row
                a_col = gl.load(perm_ptr + entry) * CFG.BLOCK_W
            else:
                a_row = entry * CFG.BLOCK_H + sub_row
                a_col = 0
            for u in gl.static_range(k_steps):
                stage = step % CFG.STAGES
                mbarrier.wait(empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
                k = block_col * CFG.BLOCK_W + u * CFG.TILE_K
                _fetch_step(a_desc, x_desc, ring, stage, a_row, a_col + u * CFG.TILE_K, k, col, CFG)
                step += 1
            block_col = next_block_col
        if CFG.ASKED:
            after_next = _taken(asked, turn - 1)
        piece = next_piece
        next_piece = after_next
        row_piece = next_row_piece
        panel = next_panel
        item = next_item
    publish(work, turn, (-1, 0, 0, -1))
    # Each program asked once, and once more for each piece: whoever was last sets the counter back.
    if not CFG.ASKED:
        gl.store(counter_ptr, 0, mask=next_piece == total + 2 * gl.num_programs(0) - 1)


@gluon.jit
def _taken(asked, turn):
    numbers, filled, free = asked
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    depth = turn % 2
    mbarrier.wait(filled.index(depth), (turn // 2) & 1)
    number = gl.max(numbers.index(depth).load(lane), 0)
    mbarrier.arrive(free.index(depth), count=1)
    return number


@gluon.jit
def ask_alone(counter_ptr, asked, total):
    piece = gl.program_id(0)
    next_piece = piece + gl.num_programs(0)
    turn = 0
    while piece < total:
        piece = next_piece
        next_piece = gl.atomic_add(counter_ptr, 1) + 2 * gl.num_programs(0)
        publish(asked, turn, (next_piece,))
        turn += 1
    gl.store(counter_ptr, 0, mask=next_piece == total + 2 * gl.num_programs(0) - 1)
