"""BSR times dense on Hopper: out = act(A @ X + bias) + residual, with TMA, WGMMA and warp roles.

A is block-sparse [M, K], X dense [K, N], out [M, N]; X and out may each lie transposed in memory
([N, K], [N, M]), and A may be read through the metadata of its transpose.

One program per SM takes work until none is left. A piece of work is one item of the plan (a block
row, or a slice of a long one) times one panel of columns. Three roles run side by side: the
producer warp takes the work and keeps a ring of A and X tiles full; two consumer warp groups
multiply. The groups split the rows of a 128-row tile, or, where a block row has only 64 rows, the
columns of a panel twice as wide: either way every element of X that is fetched meets as many rows
as the block has. While the consumers store a tile, the ring already fills for the next one.

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

from ...device.gluon.cluster import (
    arrive_at_first,
    arrive_in_cluster,
    cluster_barrier,
    cluster_rank,
    multicast,
    send_in_cluster,
)
from ...device.gluon.pipeline import barriers, publish, take, tiles, work_channel
from ...device.gluon.warps import shared_address
from ...device.schedule import place_in_sections
from ..sm90 import GROUP_ROWS
from .config_sm90 import SLAB_COLUMNS
from .finish_sm90 import finish_values
from .row_groups import FETCH_BIT, GROUP_FIELDS

ROWS = gl.constexpr(GROUP_ROWS)
SLAB = gl.constexpr(SLAB_COLUMNS)
FETCH = gl.constexpr(FETCH_BIT)
FIELDS = gl.constexpr(GROUP_FIELDS)
# What describes a piece of work: K steps, first row and column, slot of a partial sum (-1: none).
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
    if CFG.together:
        # each program of the cluster brings a part of the rows, to all of them
        part = cluster_rank()
        parameter: gl.constexpr = CFG.a_parameter
        first = (stage * CFG.CLUSTER + part) * a_desc.block_type.nbytes
        multicast(
            parameter,
            (a_row + part * (CFG.tile_m // CFG.CLUSTER), a_col),
            shared_address(CFG.bars_offset + 8 * stage),
            shared_address(first),
            (1 << CFG.CLUSTER) - 1,
        )
    for g in gl.static_range(0 if CFG.together else a_copies):
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
def _produce(
    a_desc, x_desc, items_ptr, cols_ptr, perm_ptr, counter_ptr, ring, work, grid, CFG: gl.constexpr
):
    """Take work and keep the ring full."""
    total = grid[0] * grid[1]
    _, _, _, empty = ring
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    turn = 0
    piece = gl.program_id(0)
    next_piece = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
    row_piece, panel, item = _read_piece(items_ptr, piece, grid, CFG)
    while piece < total:
        # What the next round needs is asked for a whole tile ahead of its use.
        after_next = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        next_row_piece, next_panel, next_item = _read_piece(items_ptr, next_piece, grid, CFG)
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
        piece = next_piece
        next_piece = after_next
        row_piece = next_row_piece
        panel = next_panel
        item = next_item
    publish(work, turn, (-1, 0, 0, -1))
    # Each program asked once, and once more for each piece: whoever was last sets the counter back.
    gl.store(counter_ptr, 0, mask=next_piece == total + 2 * gl.num_programs(0) - 1)


@gluon.jit
def _produce_together(
    a_desc, x_desc, items_ptr, cols_ptr, ring, work, mail, grid, CFG: gl.constexpr
):
    """As `_produce`, for a cluster whose programs take neighbouring panels of the same item."""
    cluster_barrier()
    total = grid[0] * grid[1]
    _, _, bars, _ = ring
    rank = cluster_rank()
    clusters = gl.num_programs(0) // CFG.CLUSTER
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    turn = 0
    piece = gl.program_id(0) // CFG.CLUSTER
    next_piece = piece + clusters
    row_piece, panel, item = _read_piece(items_ptr, piece, grid, CFG)
    while piece < total:
        next_row_piece, next_panel, next_item = _read_piece(items_ptr, next_piece, grid, CFG)
        block_row, begin, end, slot = item
        sub_row = (row_piece % CFG.row_tiles) * CFG.tile_m
        col = (panel * CFG.CLUSTER + rank) * CFG.tile_n
        row = block_row * CFG.BLOCK_H + sub_row
        publish(work, turn, ((end - begin) * CFG.k_steps, row, col, slot))
        block_col = gl.load(cols_ptr + begin, mask=begin < end, other=0)
        for entry in range(begin, end):
            next_block_col = gl.load(cols_ptr + entry + 1, mask=entry + 1 < end, other=0)
            a_row = entry * CFG.BLOCK_H + sub_row
            for u in gl.static_range(k_steps):
                stage = step % CFG.STAGES
                mbarrier.wait(bars.index(CFG.STAGES + stage), ((step // CFG.STAGES) & 1) ^ 1)
                k = block_col * CFG.BLOCK_W + u * CFG.TILE_K
                _fetch_step(a_desc, x_desc, ring, stage, a_row, u * CFG.TILE_K, k, col, CFG)
                step += 1
            block_col = next_block_col
        piece = next_piece
        next_piece = _receive(mail, turn, CFG)
        turn += 1
        row_piece = next_row_piece
        panel = next_panel
        item = next_item
    publish(work, turn, (-1, 0, 0, -1))
    cluster_barrier()


@gluon.jit
def _produce_in_cluster(
    a_desc, x_desc, items_ptr, lists, ring, work, mail, grid, CFG: gl.constexpr
):
    if CFG.SHARED:
        _produce_shared(a_desc, x_desc, items_ptr, lists, ring, work, mail, grid, CFG)
    else:
        _produce_together(a_desc, x_desc, items_ptr, lists[0], ring, work, mail, grid, CFG)


@gluon.jit
def _x_place(k, col, g: gl.constexpr, CFG: gl.constexpr):
    """Where the columns of consumer `g` lie in the descriptor of X."""
    first = col + g * CFG.GROUP_N
    if CFG.WIDE:
        return first // SLAB, k, 0 * k
    elif CFG.X_TRANSPOSED:
        return first, k
    else:
        return k, first


@gluon.jit
def _read_group(items_ptr, piece, grid, rank, CFG: gl.constexpr):
    """Panel of a piece of work, and this program's row: (block row, begin, end, most steps)."""
    groups, panels, section = grid
    panel, tile = place_in_sections(piece, panels, groups, section)
    live = piece < groups * panels
    item_ptr = items_ptr + FIELDS * (CFG.CLUSTER * (groups - 1 - tile) + rank)
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
def _produce_shared(a_desc, x_desc, items_ptr, lists, ring, work, mail, grid, CFG: gl.constexpr):
    """As `_produce`, for programs with a row each, which share X where several have a block.

    Such blocks come at the same step in all of them (`row_groups.py`). Stages that only longer rows
    of the group need pass by empty, so that all use the same ones again in the next piece.
    """
    cluster_barrier()
    total = grid[0] * grid[1]
    a_smem, x_smem, bars, _ = ring
    rank = cluster_rank()
    clusters = gl.num_programs(0) // CFG.CLUSTER
    k_steps: gl.constexpr = CFG.k_steps
    a_bytes: gl.constexpr = a_desc.block_type.nbytes
    x_bytes: gl.constexpr = x_desc.block_type.nbytes
    x_tiles: gl.constexpr = CFG.x_tiles
    parameter: gl.constexpr = CFG.x_parameter
    step = 0
    turn = 0
    piece = gl.program_id(0) // CFG.CLUSTER
    next_piece = piece + clusters
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
                stage = step % CFG.STAGES
                mbarrier.wait(bars.index(CFG.STAGES + stage), ((step // CFG.STAGES) & 1) ^ 1)
                bar = bars.index(stage)
                k = block_col * CFG.BLOCK_W + u * CFG.TILE_K
                mbarrier.expect(bar, a_bytes + CFG.x_tiles * x_bytes)
                if share == 0:
                    for g in gl.static_range(x_tiles):
                        tma.async_copy_global_to_shared(
                            *(x_desc, _x_place(k, col, g, CFG), bar),
                            x_smem.index(stage * CFG.x_tiles + g),
                        )
                else:
                    for g in gl.static_range(x_tiles):
                        if (share >> (FETCH + g)) & 1 > 0:
                            first = CFG.x_page * 1024 + (stage * CFG.x_tiles + g) * x_bytes
                            multicast(
                                parameter,
                                _x_place(k, col, g, CFG),
                                shared_address(CFG.bars_offset + 8 * stage),
                                shared_address(first),
                                share & 255,
                            )
                tma.async_copy_global_to_shared(
                    a_desc, [entry * CFG.BLOCK_H, u * CFG.TILE_K], bar, a_smem.index(stage)
                )
                step += 1
            here = there
        here = _read_place(lists, next_item[1], next_item[2])
        for _place in range(end - begin, most):
            for _u in gl.static_range(k_steps):
                stage = step % CFG.STAGES
                mbarrier.wait(bars.index(CFG.STAGES + stage), ((step // CFG.STAGES) & 1) ^ 1)
                mbarrier.arrive(bars.index(stage), count=1)
                step += 1
        piece = next_piece
        next_piece = _receive(mail, turn, CFG)
        turn += 1
        panel = next_panel
        item = next_item
    publish(work, turn, (-1, 0, 0, -1))
    cluster_barrier()


@gluon.jit
def _receive(mail, turn, CFG: gl.constexpr):
    """The piece of work after the next, as `_ask` has sent it to all programs of the cluster."""
    numbers, bars = mail
    filled: gl.constexpr = 2 * CFG.STAGES
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.expect(bars.index(filled), 4)
    mbarrier.wait(bars.index(filled), turn & 1)
    received = gl.max(numbers.index(2 * (filled + 2)).load(lane), 0)
    arrive_at_first(shared_address(CFG.bars_offset + 8 * (filled + 1)))
    return received


@gluon.jit
def _ask(counter_ptr, bars, total, CFG: gl.constexpr):
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
        # whoever was last sets the counter back
        gl.store(counter_ptr, 0, mask=next_piece == total + 2 * clusters - 1)
    cluster_barrier()


@gluon.jit
def _stand_by():
    """What warps without work do: a cluster waits for all of its threads."""
    cluster_barrier()
    cluster_barrier()


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
def _at(memory, page: gl.constexpr, desc, count: gl.constexpr):
    """`count` tiles of a descriptor from a page of `memory` on."""
    shape: gl.constexpr = [count] + desc.block_type.shape  # noqa: RUF005
    return memory.index(page)._reinterpret(desc.dtype, shape, desc.layout)


@gluon.jit
def _release(empty, stage, live, CFG: gl.constexpr):
    """Leave a stage to the producers: of this program, or of all that copy to it."""
    if CFG.together:
        address = shared_address(CFG.bars_offset + 8 * (CFG.STAGES + stage))
        arrive_in_cluster(address, live, CFG.CLUSTER)
    else:
        mbarrier.arrive(empty.index(stage), count=1, pred=live)


@gluon.jit
def _consume(out_desc, ring, out_smem, work, extras, sizes, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Multiply the ring's tiles into an accumulator and store it, piece by piece of work."""
    if CFG.together:
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
        if CFG.SHARED:
            for _i in range(steps, slot):
                stage = step % CFG.STAGES
                mbarrier.wait(full.index(stage), (step // CFG.STAGES) & 1)
                _release(empty, stage, step >= 0, CFG)
                step += 1
            slot = -1

        row += (GROUP % CFG.a_tiles) * ROWS
        col += (GROUP % CFG.x_tiles) * CFG.GROUP_N
        _store_tile(acc, row, col, slot, out_desc, out_smem.index(GROUP), extras, sizes, CFG)
        turn += 1
        steps, row, col, slot = take(work, turn)
    tma.store_wait(0)
    if CFG.together:
        cluster_barrier()


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "row_pieces", "panels", "section"])
def _spmm_sm90_kernel(
    a_desc,
    x_desc,
    out_desc,
    part_ptr,
    bias_ptr,
    residual_ptr,
    residual_strides,
    items_ptr,
    cols_ptr,
    perm_ptr,
    shares_ptr,
    counter_ptr,
    n_rows,
    n_cols,
    row_pieces,
    panels,
    section,
    CFG: gl.constexpr,
):
    """Set up the ring and the three roles; `_produce` and `_consume` do the work."""
    extras = (part_ptr, bias_ptr, residual_ptr, residual_strides)
    sizes = (n_rows, n_cols)
    grid = (row_pieces, panels, section)
    if not CFG.together:
        a_smem = _ring_memory(a_desc, CFG.STAGES * CFG.a_copies)
        x_smem = _ring_memory(x_desc, CFG.STAGES * CFG.x_copies)
        out_smem = tiles(out_desc, 2, out_desc.block_type.shape[0])
        ring = (a_smem, x_smem, barriers(CFG.STAGES, 1), barriers(CFG.STAGES, 2))
        work = work_channel(WORK_FIELDS, 2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consume, (out_desc, ring, out_smem, work, extras, sizes, 0, CFG)),
                (_consume, (out_desc, ring, out_smem, work, extras, sizes, 1, CFG)),
                (
                    _produce,
                    (
                        a_desc,
                        x_desc,
                        items_ptr,
                        cols_ptr,
                        perm_ptr,
                        counter_ptr,
                        ring,
                        work,
                        grid,
                        CFG,
                    ),
                ),
            ],
            [4, 1],
            [CFG.CONSUMER_REGISTERS, CFG.PRODUCER_REGISTERS],
        )
    else:
        # one allocation: others must know where its parts are
        pages: gl.constexpr = CFG.pages
        page_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], a_desc.dtype)
        memory = gl.allocate_shared_memory(a_desc.dtype, [pages, 8, 64], page_layout)
        a_smem = _at(memory, 0, a_desc, CFG.STAGES * CFG.a_copies)
        x_smem = _at(memory, CFG.x_page, x_desc, CFG.STAGES * CFG.x_copies)
        out_smem = _at(memory, CFG.out_page, out_desc, 2)
        words = memory.index(pages - 1)
        stages: gl.constexpr = CFG.STAGES
        bars = words._reinterpret(gl.int64, [2 * stages + 2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(stages):
            mbarrier.init(bars.index(i), count=1)
            mbarrier.init(bars.index(stages + i), count=8 * CFG.CLUSTER)
        mbarrier.init(bars.index(2 * stages), count=1)
        mbarrier.init(bars.index(2 * stages + 1), count=CFG.CLUSTER)
        numbers = words._reinterpret(
            gl.int32, [4 * stages + 5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        ring = (a_smem, x_smem, bars, bars)
        work = work_channel(WORK_FIELDS, 2)
        mail = (numbers, bars)
        lists = (cols_ptr, perm_ptr, shares_ptr)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consume, (out_desc, ring, out_smem, work, extras, sizes, 0, CFG)),
                (_consume, (out_desc, ring, out_smem, work, extras, sizes, 1, CFG)),
                (
                    _produce_in_cluster,
                    (a_desc, x_desc, items_ptr, lists, ring, work, mail, grid, CFG),
                ),
                (_ask, (counter_ptr, bars, row_pieces * panels, CFG)),
                (_stand_by, ()),
            ],
            [4, 1, 1, 2],
            [
                CFG.CONSUMER_REGISTERS,
                CFG.PRODUCER_REGISTERS,
                CFG.PRODUCER_REGISTERS,
                CFG.PRODUCER_REGISTERS,
            ],
        )
