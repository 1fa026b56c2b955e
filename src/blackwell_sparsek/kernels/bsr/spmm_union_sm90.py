"""BSR times dense on Hopper for block rows of 64: three of them share what is fetched of X.

Shapes and epilogue are those of `spmm_sm90.py`. A low block row lets each fetched element of X meet
only 64 rows, and L2 cannot deliver X fast enough. Here a piece of work is three neighbouring block
rows times one panel of columns: the producer walks the union of their columns, fetches X once for
each, and A for those of the three rows that have a block there. Each of three consumer warp groups
owns one row and steps over the columns where its row has nothing.

Called as impl "sm90" of `bsk::bsr_matmul` where `tuning.bsr_sm90` finds that it moves less. Limits:
those of `spmm_sm90.py`; blocks of 64 rows, as stored or packed by `pack.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.gluon.pipeline import barriers, publish, take, tiles, work_channel
from .config_union_sm90 import MEMBERS, SLIM_N, WIDE_N
from .spmm_sm90_parts import ROWS, read_item, store_chunk, store_tile

ROWS_TOGETHER = gl.constexpr(MEMBERS)
WIDE = gl.constexpr(WIDE_N)
SLIM = gl.constexpr(SLIM_N)
# What describes a piece of work: first and last entry of the union, first row and column, slot of a
# partial sum (-1: none).
WORK_FIELDS = gl.constexpr(5)


@gluon.jit
def _read_entry(entries_ptr, entry, end):
    """Column and three blocks (-1: none) of an entry of the union."""
    live = entry < end
    ptr = entries_ptr + entry.to(gl.int64) * (ROWS_TOGETHER + 1)
    block_col = gl.load(ptr, mask=live, other=0)
    first = gl.load(ptr + 1, mask=live, other=-1)
    second = gl.load(ptr + 2, mask=live, other=-1)
    third = gl.load(ptr + 3, mask=live, other=-1)
    return block_col, (first, second, third)


@gluon.jit
def _fetch_step(a_desc, x_descs, ring, stage, blocks, k, k_in_block, col, CFG: gl.constexpr):
    """Start the copies of one K step into a ring stage."""
    a_smem, wide_smem, slim_smem, full, _ = ring
    wide_desc, slim_desc = x_descs
    bar = full.index(stage)
    wide, slim = wide_smem.index(stage), slim_smem.index(stage)
    mbarrier.expect(bar, wide_desc.block_type.nbytes + slim_desc.block_type.nbytes)
    if CFG.X_TRANSPOSED:
        tma.async_copy_global_to_shared(wide_desc, [col, k], bar, wide)
        tma.async_copy_global_to_shared(slim_desc, [col + WIDE, k], bar, slim)
    else:
        tma.async_copy_global_to_shared(wide_desc, [k, col], bar, wide)
        tma.async_copy_global_to_shared(slim_desc, [k, col + WIDE], bar, slim)
    for g in gl.static_range(ROWS_TOGETHER):
        # the barrier waits for one arrival for each row, with bytes or without
        here = blocks[g] >= 0
        mbarrier.expect(bar, a_desc.block_type.nbytes, pred=here)
        mbarrier.arrive(bar, count=1, pred=blocks[g] < 0)
        tile = a_smem.index(stage * ROWS_TOGETHER + g)
        if CFG.A_TRANSPOSED:
            at = [blocks[g] * CFG.BLOCK_W + k_in_block, 0]
        else:
            at = [blocks[g] * ROWS, k_in_block]
        tma.async_copy_global_to_shared(a_desc, at, bar, tile, pred=here)


@gluon.jit
def _produce(a_desc, x_descs, walk, ring, work, sizes, CFG: gl.constexpr):
    """Take work and keep the ring full."""
    items_ptr, entries_ptr, counter_ptr = walk
    pieces_per_panel, total = sizes
    empty = ring[4]
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    turn = 0
    piece = gl.program_id(0)
    next_piece = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
    union_row, begin, end, slot = read_item(items_ptr, piece, pieces_per_panel, total, CFG)
    while piece < total:
        # What the next round needs is asked for a whole tile ahead of its use.
        after_next = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        next_item = read_item(items_ptr, next_piece, pieces_per_panel, total, CFG)
        col = (piece // pieces_per_panel) * CFG.tile_n
        publish(work, turn, (begin, end, union_row * CFG.BLOCK_H, col, slot))
        turn += 1
        block_col, blocks = _read_entry(entries_ptr, begin, end)
        for entry in range(begin, end):
            next_block_col, next_blocks = _read_entry(entries_ptr, entry + 1, end)
            for u in gl.static_range(k_steps):
                stage = step % CFG.STAGES
                mbarrier.wait(empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
                k_in_block = u * CFG.TILE_K
                k = block_col * CFG.BLOCK_W + k_in_block
                _fetch_step(a_desc, x_descs, ring, stage, blocks, k, k_in_block, col, CFG)
                step += 1
            block_col = next_block_col
            blocks = next_blocks
        piece = next_piece
        next_piece = after_next
        union_row, begin, end, slot = next_item
    publish(work, turn, (-1, 0, 0, 0, -1))


@gluon.jit
def _step_over(ring, step, until, CFG: gl.constexpr):
    """Give back the stages of columns where this row has no block."""
    full, empty = ring[3], ring[4]
    for skipped in range(step, until):
        stage = skipped % CFG.STAGES
        mbarrier.wait(full.index(stage), (skipped // CFG.STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _consume(
    out_desc, ring, out_smem, work, own, extras, sizes, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Multiply the ring's tiles into an accumulator and store it, piece by piece of work."""
    a_smem, wide_smem, slim_smem, full, empty = ring
    own_ptr, ranks_ptr, num_entries = own
    k_steps: gl.constexpr = CFG.k_steps
    wide_layout: gl.constexpr = CFG.accumulator_layout(WIDE)
    slim_layout: gl.constexpr = CFG.accumulator_layout(SLIM)
    ranks_ptr += GROUP * (num_entries + 1)
    step = 0
    turn = 0
    begin, end, row, col, slot = take(work, turn)
    while begin >= 0:
        wide = gl.zeros([ROWS, WIDE], gl.float32, wide_layout)
        slim = gl.zeros([ROWS, SLIM], gl.float32, slim_layout)
        # where the blocks of this row stand in the list of its own entries
        first = gl.load(ranks_ptr + begin)
        last = gl.load(ranks_ptr + end)
        piece_step = step
        entry = gl.load(own_ptr + first, mask=first < last, other=0)
        for i in range(first, last):
            next_entry = gl.load(own_ptr + i + 1, mask=i + 1 < last, other=0)
            block_step = piece_step + (entry - begin) * CFG.k_steps
            _step_over(ring, step, block_step, CFG)
            step = block_step
            for _u in gl.static_range(k_steps):
                stage = step % CFG.STAGES
                mbarrier.wait(full.index(stage), (step // CFG.STAGES) & 1)
                a = a_smem.index(stage * ROWS_TOGETHER + GROUP)
                wide_x, slim_x = wide_smem.index(stage), slim_smem.index(stage)
                if CFG.A_TRANSPOSED:
                    a = a.permute((1, 0))
                if CFG.X_TRANSPOSED:
                    wide_x, slim_x = wide_x.permute((1, 0)), slim_x.permute((1, 0))
                wide = warpgroup_mma(a, wide_x, wide, is_async=True)
                slim = warpgroup_mma(a, slim_x, slim, is_async=True)
                # the other two consumers keep the tensor cores busy while this one waits
                wide, slim = warpgroup_mma_wait(0, deps=(wide, slim))
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
            entry = next_entry
        piece_end = piece_step + (end - begin) * CFG.k_steps
        _step_over(ring, step, piece_end, CFG)
        step = piece_end

        row += GROUP * ROWS
        out_tile = out_smem.index(GROUP)
        store_tile(wide, row, col, slot, out_desc, out_tile, extras, sizes, CFG)
        store_chunk(slim, row, col + WIDE, slot, out_desc, out_tile, extras, sizes, CFG)
        turn += 1
        begin, end, row, col, slot = take(work, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "num_entries", "pieces_per_panel", "total"])
def _spmm_union_sm90_kernel(
    out_desc,
    part_ptr,
    a_desc,
    x_desc,
    slim_x_desc,
    bias_ptr,
    residual_ptr,
    residual_strides,
    items_ptr,
    entries_ptr,
    own_ptr,
    ranks_ptr,
    counter_ptr,
    n_rows,
    n_cols,
    num_entries,
    pieces_per_panel,
    total,
    CFG: gl.constexpr,
):
    """Set up the ring and the four roles; `_produce` and `_consume` do the work."""
    members: gl.constexpr = ROWS_TOGETHER
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    a_smem = tiles(a_desc, CFG.STAGES * ROWS_TOGETHER, a_desc.block_type.shape[0])
    wide_smem = tiles(x_desc, CFG.STAGES, x_desc.block_type.shape[0])
    slim_smem = tiles(slim_x_desc, CFG.STAGES, slim_x_desc.block_type.shape[0])
    out_smem = tiles(out_desc, members, out_desc.block_type.shape[0])
    # full: X, and one arrival for each row's block or its absence
    full, empty = barriers(CFG.STAGES, 1 + members), barriers(CFG.STAGES, members)
    ring = (a_smem, wide_smem, slim_smem, full, empty)
    work = work_channel(WORK_FIELDS, members)
    fence_async_shared()

    extras = (part_ptr, bias_ptr, residual_ptr, residual_strides)
    sizes = (n_rows, n_cols)
    own = (own_ptr, ranks_ptr, num_entries)
    walk = (items_ptr, entries_ptr, counter_ptr)
    work_sizes = (pieces_per_panel, total)
    gl.warp_specialize(
        [
            (_consume, (out_desc, ring, out_smem, work, own, extras, sizes, 0, CFG)),
            (_consume, (out_desc, ring, out_smem, work, own, extras, sizes, 1, CFG)),
            (_consume, (out_desc, ring, out_smem, work, own, extras, sizes, 2, CFG)),
            (_produce, (a_desc, (x_desc, slim_x_desc), walk, ring, work, work_sizes, CFG)),
        ],
        [4, 4, 1],
        [registers, registers, producer_registers],
    )
