# mypy: ignore-errors
"""BSR times dense on Hopper: out = act(A @ X + bias) + residual, with TMA, WGMMA and warp roles.

A is block-sparse [M, K], X dense [K, N], out [M, N]; X and out may each lie transposed in memory
([N, K], [N, M]), and A may be read through the metadata of its transpose.

One program per SM takes work until none is left. A piece of work is one item of the plan (a block
row, or a slice of a long one) times one panel of columns. Three roles run side by side: the
producer warp takes the work and keeps a ring of A and X tiles full; two consumer warp groups
multiply. The groups split the rows of a 128-row tile, or, where a block row has only 64 rows, the
columns of a panel twice as wide: either way every element of X that is fetched meets as many rows
as the block has. While the consumers store a tile, the ring already fills for the next one. Where
rows are paired, two programs share copies of X (`spmm_sm90_pairs.py`).

Called as impl "sm90" of `bsk::bsr_matmul`. Limits: fp16 and bf16, block heights that are multiples
of 64 (`pack.py` makes them so), pointers and strides that TMA takes.
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

from ...device.epilogue import activate
from ...device.gluon.cluster import arrive_at_all, cluster_barrier
from ...device.gluon.pipeline import barriers, claim, publish, take, tiles, work_channel
from ...device.gluon.warps import shared_address
from ...device.schedule import place_in_sections
from ...launch.descriptors import GROUP_ROWS
from .config import PAIR, SLAB_COLUMNS
from .pairs_producer import ask, produce_paired, stand_by

# What Hopper's products do to their sums before they store them.


@gluon.jit
def finish_values(acc, rows, cols, extras, sizes, ACTIVATION: gl.constexpr):
    """activation(acc + bias) + residual, for `rows` and `cols` that broadcast to `acc`.

    Rows and columns outside of `sizes` may come; what they get is not to be stored.
    """
    bias_ptr, residual_ptr, residual_strides = extras
    present = (rows >= 0) & (rows < sizes[0])
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + rows, mask=present, other=0.0).to(gl.float32)
    acc = activate(acc, ACTIVATION)
    if residual_ptr is not None:
        offsets = rows.to(gl.int64) * residual_strides[0] + cols.to(gl.int64) * residual_strides[1]
        inside = present & (cols < sizes[1])
        acc += gl.load(residual_ptr + offsets, mask=inside, other=0.0).to(gl.float32)
    return acc


ROWS = gl.constexpr(GROUP_ROWS)
SLAB = gl.constexpr(SLAB_COLUMNS)
PROGRAMS = gl.constexpr(PAIR)
# What describes a piece of work: K steps, first row and column, slot of a partial sum (-1: none);
# of paired rows the steps of the longer one in place of the slot.
WORK_FIELDS = gl.constexpr(4)


@gluon.jit
def _read_piece(items_ptr, piece, grid, CFG: gl.constexpr):
    """Row tile and panel of a piece of work, and the plan's item: (block row, begin, end, slot).

    Panels go in sections whose part of X stays in L2, and within a section each item goes through
    all of them before the next: what runs together shares blocks of A as well.
    """
    row_pieces, panels, section = grid
    panel, tile = place_in_sections(piece, panels, row_pieces, section)
    # tiles of a section count down, items are sorted longest first
    row_piece = row_pieces - 1 - tile
    item_ptr = items_ptr + 4 * (row_piece // CFG.row_tiles)
    block_row = gl.load(item_ptr)
    begin = gl.load(item_ptr + 1)
    end = gl.load(item_ptr + 2)
    slot = gl.load(item_ptr + 3)
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
            tma.async_copy_global_to_shared(a_desc, [a_col, a_row + g * ROWS], bar, tile)
        else:
            tma.async_copy_global_to_shared(a_desc, [a_row, a_col], bar, tile)
    for g in gl.static_range(x_copies):
        tile = x_smem.index(stage * CFG.x_copies + g)
        if CFG.WIDE:
            tma.async_copy_global_to_shared(x_desc, [col // SLAB, k, 0], bar, tile)
        elif CFG.X_TRANSPOSED:
            tma.async_copy_global_to_shared(x_desc, [col + g * CFG.GROUP_N, k], bar, tile)
        else:
            tma.async_copy_global_to_shared(x_desc, [k, col + g * CFG.GROUP_N], bar, tile)


@gluon.jit
def _produce(a_desc, x_desc, items_ptr, lists, ring, work, grid, CFG: gl.constexpr):
    """Take work and keep the ring full."""
    cols_ptr, perm_ptr, counter_ptr = lists
    total = grid[0] * grid[1]
    _, _, _, empty = ring
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    turn = 0
    piece = gl.program_id(0)
    while piece < total:
        row_piece, panel, item = _read_piece(items_ptr, piece, grid, CFG)
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
        # only now, with the last copies of this piece under way: who is late takes less
        piece = claim(counter_ptr, gl.num_programs(0), total)
    publish(work, turn, (-1, 0, 0, -1))


@gluon.jit
def _halves(x):
    """Split [M, N] into its left and right half."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _store_chunk(acc, row, col, slot, out_desc, out_smem, extras, sizes, CFG: gl.constexpr):
    """Finish and store a [ROWS, chunk] piece of a tile; a partial sum goes to its slot as it is."""
    part_ptr, bias_ptr, residual_ptr, residual_strides = extras
    n_cols = sizes[1]
    chunk: gl.constexpr = CFG.out_chunk
    layout: gl.constexpr = CFG.accumulator_layout(chunk)
    activation: gl.constexpr = CFG.ACTIVATION
    acc = gl.convert_layout(acc, layout)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, chunk, gl.SliceLayout(0, layout))
    if part_ptr is not None and slot >= 0:
        # a slot holds a whole block row
        part_rows = (slot * CFG.BLOCK_H + rows % CFG.BLOCK_H).to(gl.int64)
        offsets = part_rows[:, None] * n_cols + cols[None, :]
        gl.store(part_ptr + offsets, acc, mask=(cols < n_cols)[None, :])
    else:
        addends = (bias_ptr, residual_ptr, residual_strides)
        acc = finish_values(acc, rows[:, None], cols[None, :], addends, sizes, activation)
        tile = acc.to(out_smem.dtype)
        # The copy that was started one chunk ago must have read the buffer.
        tma.store_wait(0)
        if CFG.OUT_TRANSPOSED:
            out_smem.permute((1, 0)).store(tile)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [col, row], out_smem)
        else:
            out_smem.store(tile)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [row, col], out_smem)


@gluon.jit
def _store_tile(acc, row, col, slot, out_desc, out_smem, extras, sizes, CFG: gl.constexpr):
    """Store an accumulator in OUT_CHUNKS column chunks through one buffer."""
    chunk: gl.constexpr = CFG.out_chunk
    gl.static_assert(CFG.OUT_CHUNKS == 2 or CFG.OUT_CHUNKS == 4)
    for half in gl.static_range(2):
        part = _halves(acc)[half]
        if CFG.OUT_CHUNKS == 2:
            _store_chunk(
                part, row, col + half * chunk, slot, out_desc, out_smem, extras, sizes, CFG
            )
        else:
            for quarter in gl.static_range(2):
                first = col + (2 * half + quarter) * chunk
                _store_chunk(
                    _halves(part)[quarter], row, first, slot, out_desc, out_smem, extras, sizes, CFG
                )


@gluon.jit
def _as_tiles(smem, count: gl.constexpr, shape: gl.constexpr):
    """The same shared memory as tiles that one consumer multiplies."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, smem.dtype)
    return smem._reinterpret(smem.dtype, [count, shape[0], shape[1]], layout)


@gluon.jit
def _ring_memory(desc, count: gl.constexpr):
    """Shared memory for `count` copies through a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [count] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def _part(memory, page: gl.constexpr, desc, count: gl.constexpr):
    """`count` tiles of a descriptor, from a page of `memory` on."""
    shape: gl.constexpr = [count] + desc.block_type.shape  # noqa: RUF005
    return memory.index(page)._reinterpret(desc.dtype, shape, desc.layout)


@gluon.jit
def _paired_memory(a_desc, x_desc, out_desc, CFG: gl.constexpr):
    """Ring and output buffers of a program with a partner.

    One allocation, since addresses in the other program follow from the places of its parts.
    Barriers are one array: STAGES full, STAGES empty, two for the number of the next piece, which
    lies behind them.
    """
    pages: gl.constexpr = CFG.bars_page + 1
    stages: gl.constexpr = CFG.STAGES
    page: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], a_desc.dtype)
    memory = gl.allocate_shared_memory(a_desc.dtype, [pages, 8, 64], page)
    a_smem = _part(memory, 0, a_desc, CFG.STAGES * CFG.a_copies)
    x_smem = _part(memory, CFG.x_page, x_desc, CFG.STAGES * CFG.x_copies)
    out_smem = _part(memory, CFG.out_page, out_desc, 2)
    bars = memory.index(CFG.bars_page)
    bars = bars._reinterpret(gl.int64, [2 * stages + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(bars.index(i), count=1)
        # each warp of the two consumers of each program
        mbarrier.init(bars.index(stages + i), count=8 * PROGRAMS)
    mbarrier.init(bars.index(2 * stages), count=1)
    mbarrier.init(bars.index(2 * stages + 1), count=PROGRAMS)
    return (a_smem, x_smem, bars, bars), out_smem


@gluon.jit
def _release(empty, stage, live, CFG: gl.constexpr):
    """Leave a stage to the producer, or to both that copy to it."""
    if CFG.PAIRED:
        # each warp for itself: a barrier of the group would only delay the arrivals
        address = shared_address(CFG.bars_offset + 8 * (CFG.STAGES + stage))
        arrive_at_all(address, live, PROGRAMS)
    else:
        mbarrier.arrive(empty.index(stage), count=1, pred=live)


@gluon.jit
def _consume(out_desc, ring, out_smem, work, extras, sizes, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Multiply the ring's tiles into an accumulator and store it, piece by piece of work."""
    if CFG.PAIRED:
        cluster_barrier()
    a_smem, x_smem, full, empty = ring
    a_smem = _as_tiles(a_smem, CFG.STAGES * CFG.a_tiles, CFG.a_tile())
    x_smem = _as_tiles(x_smem, CFG.STAGES * CFG.x_tiles, CFG.x_tile())
    group_n: gl.constexpr = CFG.GROUP_N
    layout: gl.constexpr = CFG.accumulator_layout(CFG.GROUP_N)
    step = 0
    turn = 0
    steps, row, col, slot = take(work, turn)
    while steps >= 0:
        acc = gl.zeros([ROWS, group_n], gl.float32, layout)
        for i in range(steps):
            stage = step % CFG.STAGES
            mbarrier.wait(full.index(stage), (step // CFG.STAGES) & 1)
            a = a_smem.index(stage * CFG.a_tiles + GROUP % CFG.a_tiles)
            x = x_smem.index(stage * CFG.x_tiles + GROUP % CFG.x_tiles)
            if CFG.A_TRANSPOSED:
                a = a.permute((1, 0))
            if CFG.X_TRANSPOSED:
                x = x.permute((1, 0))
            pending = warpgroup_mma(a, x, acc, is_async=True)
            # One product stays in flight; the one before it is done, so its stage is free.
            acc = warpgroup_mma_wait(1, deps=(pending,))
            _release(empty, (step + CFG.STAGES - 1) % CFG.STAGES, i > 0, CFG)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release(empty, (step + CFG.STAGES - 1) % CFG.STAGES, steps > 0, CFG)
        if CFG.PAIRED:
            # stages that only the other row needs
            for _i in range(steps, slot):
                stage = step % CFG.STAGES
                mbarrier.wait(full.index(stage), (step // CFG.STAGES) & 1)
                _release(empty, stage, step >= 0, CFG)
                step += 1
            slot = -1

        row += (GROUP % CFG.a_tiles) * ROWS
        col += (GROUP % CFG.x_tiles) * CFG.GROUP_N
        # TMA refuses to store in front of a tensor, where rows lie that stand for none
        if row >= 0:
            _store_tile(acc, row, col, slot, out_desc, out_smem.index(GROUP), extras, sizes, CFG)
        turn += 1
        steps, row, col, slot = take(work, turn)
    tma.store_wait(0)
    if CFG.PAIRED:
        cluster_barrier()


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "row_pieces", "panels", "section"])
def _spmm_sm90_kernel(
    a_desc,  # first, as is `x_desc` behind it: assembly knows them by their place
    x_desc,
    out_desc,
    part_ptr,
    bias_ptr,
    residual_ptr,
    residual_strides,
    items_ptr,
    cols_ptr,
    perm_ptr,
    counter_ptr,
    n_rows,
    n_cols,
    row_pieces,
    panels,
    section,
    CFG: gl.constexpr,
):
    """Set up the ring and the three roles; `_produce` and `_consume` do the work."""
    grid = (row_pieces, panels, section)
    extras = (part_ptr, bias_ptr, residual_ptr, residual_strides)
    sizes = (n_rows, n_cols)
    if CFG.PAIRED:
        ring, out_smem = _paired_memory(a_desc, x_desc, out_desc, CFG)
        work = work_channel(WORK_FIELDS, 2)
        fence_async_shared()
        lists = (cols_ptr, perm_ptr)
        few: gl.constexpr = CFG.PRODUCER_REGISTERS
        gl.warp_specialize(
            [
                (_consume, (out_desc, ring, out_smem, work, extras, sizes, 0, CFG)),
                (_consume, (out_desc, ring, out_smem, work, extras, sizes, 1, CFG)),
                (produce_paired, (items_ptr, lists, ring[2], work, grid, CFG)),
                (ask, (counter_ptr, ring[2], row_pieces * panels, CFG)),
                (stand_by, ()),
            ],
            [4, 1, 1, 2],
            [CFG.CONSUMER_REGISTERS, few, few, few],
        )
    else:
        a_smem = _ring_memory(a_desc, CFG.STAGES * CFG.a_copies)
        x_smem = _ring_memory(x_desc, CFG.STAGES * CFG.x_copies)
        out_smem = tiles(out_desc, 2, out_desc.block_type.shape[0])
        ring = (a_smem, x_smem, barriers(CFG.STAGES, 1), barriers(CFG.STAGES, 2))
        work = work_channel(WORK_FIELDS, 2)
        fence_async_shared()
        lists = (cols_ptr, perm_ptr, counter_ptr)
        gl.warp_specialize(
            [
                (_consume, (out_desc, ring, out_smem, work, extras, sizes, 0, CFG)),
                (_consume, (out_desc, ring, out_smem, work, extras, sizes, 1, CFG)),
                (_produce, (a_desc, x_desc, items_ptr, lists, ring, work, grid, CFG)),
            ],
            [4, 1],
            [CFG.CONSUMER_REGISTERS, CFG.PRODUCER_REGISTERS],
        )
