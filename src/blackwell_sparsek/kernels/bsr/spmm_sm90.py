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

from ...device.gluon.pipeline import barriers, publish, take, tiles, work_channel
from ..sm90 import GROUP_ROWS
from .spmm_sm90_parts import read_item, store_tile

ROWS = gl.constexpr(GROUP_ROWS)
# What describes a piece of work: K steps, first row and column, slot of a partial sum (-1: none).
WORK_FIELDS = gl.constexpr(4)


@gluon.jit
def _fetch_step(a_desc, x_desc, ring, stage, a_row, a_col, k, col, CFG: gl.constexpr):
    """Start the copies of one K step into a ring stage."""
    a_smem, x_smem, full, _ = ring
    bar = full.index(stage)
    a_tiles: gl.constexpr = CFG.a_tiles
    x_tiles: gl.constexpr = CFG.x_tiles
    nbytes: gl.constexpr = (
        CFG.a_tiles * a_desc.block_type.nbytes + CFG.x_tiles * x_desc.block_type.nbytes
    )
    mbarrier.expect(bar, nbytes)
    for g in gl.static_range(a_tiles):
        tile = a_smem.index(stage * CFG.a_tiles + g)
        if CFG.A_TRANSPOSED:
            tma.async_copy_global_to_shared(a_desc, [a_col, a_row + g * ROWS], bar, tile)
        else:
            tma.async_copy_global_to_shared(a_desc, [a_row + g * ROWS, a_col], bar, tile)
    for g in gl.static_range(x_tiles):
        tile = x_smem.index(stage * CFG.x_tiles + g)
        if CFG.X_TRANSPOSED:
            tma.async_copy_global_to_shared(x_desc, [col + g * CFG.GROUP_N, k], bar, tile)
        else:
            tma.async_copy_global_to_shared(x_desc, [k, col + g * CFG.GROUP_N], bar, tile)


@gluon.jit
def _produce(
    a_desc, x_desc, items_ptr, cols_ptr, perm_ptr, counter_ptr, ring, work, sizes, CFG: gl.constexpr
):
    """Take work and keep the ring full."""
    pieces_per_panel, total = sizes
    _, _, _, empty = ring
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    turn = 0
    piece = gl.program_id(0)
    next_piece = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
    block_row, begin, end, slot = read_item(items_ptr, piece, pieces_per_panel, total, CFG)
    while piece < total:
        # What the next round needs is asked for a whole tile ahead of its use.
        after_next = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        next_item = read_item(items_ptr, next_piece, pieces_per_panel, total, CFG)
        sub_row = (piece % CFG.row_tiles) * CFG.tile_m
        col = (piece // pieces_per_panel) * CFG.tile_n
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
        block_row, begin, end, slot = next_item
    publish(work, turn, (-1, 0, 0, -1))


@gluon.jit
def _consume(out_desc, ring, out_smem, work, extras, sizes, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Multiply the ring's tiles into an accumulator and store it, piece by piece of work."""
    a_smem, x_smem, full, empty = ring
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
            mbarrier.arrive(empty.index((step + CFG.STAGES - 1) % CFG.STAGES), count=1, pred=i > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + CFG.STAGES - 1) % CFG.STAGES), count=1, pred=steps > 0)

        row += (GROUP % CFG.a_tiles) * ROWS
        col += (GROUP % CFG.x_tiles) * CFG.GROUP_N
        store_tile(acc, row, col, slot, out_desc, out_smem.index(GROUP), extras, sizes, CFG)
        turn += 1
        steps, row, col, slot = take(work, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "pieces_per_panel", "total"])
def _spmm_sm90_kernel(
    out_desc,
    part_ptr,
    a_desc,
    x_desc,
    bias_ptr,
    residual_ptr,
    residual_strides,
    items_ptr,
    cols_ptr,
    perm_ptr,
    counter_ptr,
    n_rows,
    n_cols,
    pieces_per_panel,
    total,
    CFG: gl.constexpr,
):
    """Set up the ring and the three roles; `_produce` and `_consume` do the work."""
    a_smem = tiles(a_desc, CFG.STAGES * CFG.a_tiles, a_desc.block_type.shape[0])
    x_smem = tiles(x_desc, CFG.STAGES * CFG.x_tiles, x_desc.block_type.shape[0])
    out_smem = tiles(out_desc, 2, out_desc.block_type.shape[0])
    ring = (a_smem, x_smem, barriers(CFG.STAGES, 1), barriers(CFG.STAGES, 2))
    work = work_channel(WORK_FIELDS, 2)
    fence_async_shared()

    extras = (part_ptr, bias_ptr, residual_ptr, residual_strides)
    sizes = (n_rows, n_cols)
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
                    (pieces_per_panel, total),
                    CFG,
                ),
            ),
        ],
        [4, 1],
        [CFG.CONSUMER_REGISTERS, 24],
    )
